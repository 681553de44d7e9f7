"""Many short documents among the long ones, and more training (docs/memory.md)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _passkey
from famjax.reproduce.measures import PasskeyMeasure

_OCTAVES, _UNIFORM, _LONGER = "octaves", "uniform", "octaves for 2200 steps"

MEMORY_LENGTHS = Experiment(
    id="memory-lengths",
    title="Lengths of documents in training",
    source="famjax",
    config="passkey",
    variants=(
        Variant(_UNIFORM, ("data.passkey.lengths=uniform",)),
        Variant(_OCTAVES),
        Variant(_LONGER, ("train.steps=2200",)),
    ),
    measure=PasskeyMeasure((128, 512, 2048, 8192, 32_768, 262_144), examples=100),
    orderings=(
        Ordering(_OCTAVES, _UNIFORM),
        Ordering(_LONGER, _OCTAVES),
    ),
    overrides=(*_passkey.KEY_FIRST, *_passkey.GATES),
    axis="tokens of the document",
    unequal="one of them is trained twice as long",
    note="FAM without a segment; the key is first in the document, questions are anywhere in a "
    "block. Lengths are to 4,096 tokens in training: uniform, or with a density of 1 / L^2, which "
    "gives every octave as many tokens. 1,100 steps of 8,192 tokens unless stated.",
    minutes=17.5,
)

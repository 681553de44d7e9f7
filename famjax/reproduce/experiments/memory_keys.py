"""Four keys with names, of which the question asks for one: the delta rule, its depth, and FAM."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _passkey
from famjax.reproduce.measures import PasskeyMeasure

# FAM has no use for a write penalty: with it, its gates never open (docs/memory.md)
_FAM = ("model.mixer=fam", "train.write_loss=0.0", *_passkey.GATES)

MEMORY_KEYS = Experiment(
    id="memory-keys",
    title="One of four named keys",
    source="famjax",
    config="passkey_named",
    variants=(
        Variant("DELTA"),
        Variant("DELTA of two layers", ("model.layers=2",)),
        Variant("FAM", _FAM),
    ),
    measure=PasskeyMeasure((256, 1024, 4096, 16_384, 65_536), examples=32),
    orderings=(
        Ordering("DELTA", "DELTA of two layers"),
        Ordering("DELTA", "FAM"),
    ),
    axis="tokens of the document",
    note="A document has up to four keys with names, anywhere in its first 4,096 tokens; the "
    "question is anywhere in a block. Models have three layers unless stated, one segment and "
    "smeared keys; 3,000 steps of 8,192 tokens in documents of at most 4,096.",
    unequal_parameters="The third layer has 33,040 parameters.",
    minutes=55.0,
)

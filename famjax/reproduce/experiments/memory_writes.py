"""What FAM and a delta-rule memory keep with and without a write penalty (`train.write_loss`)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _passkey
from famjax.reproduce.measures import PasskeyMeasure

_LENGTHS = (128, 512, 2048, 8192, 32_768, 262_144)
_LONGEST = f"{_LENGTHS[-1]:,}"
_WRITE_LOSS = ("train.write_loss=0.1",)
_DELTA = ("model.mixer=delta",)

MEMORY_WRITES = Experiment(
    id="memory-writes",
    title="A write penalty",
    source="famjax",
    config="passkey",
    variants=(
        Variant("FAM", _passkey.GATES),
        Variant("FAM with write loss", (*_passkey.GATES, *_WRITE_LOSS)),
        Variant("DELTA", _DELTA),
        Variant("DELTA with write loss", (*_DELTA, *_WRITE_LOSS)),
    ),
    measure=PasskeyMeasure(_LENGTHS, examples=32),
    orderings=(
        Ordering("DELTA", "FAM", _LONGEST),
        # all keys with and without it, where nothing is finetuned
        Ordering("DELTA with write loss", "DELTA", _LONGEST, margin=0.05, may_be_better=True),
        # as in finetuning (docs/memory.md)
        Ordering("FAM", "FAM with write loss", _LONGEST),
    ),
    overrides=("train.steps=1000", "model.short_conv=0", "train.write_loss=0.0"),
    axis="tokens of the document",
    note="Key and question are anywhere, documents of at most 4,096 tokens in training; FAM has "
    "the gated update, both memories one segment and smeared keys. `make demo` trains FAM twice "
    "as long.",
    minutes=9.0,
)

"""Documents that grow during training, on text (not in a paper)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _text

_PARTS = ("data.part_bytes=8000",)
# the rate falls only in the second half
_FIRST = ("train.steps=200", "optimizer.warmup_steps=20", "optimizer.schedule=constant")
_SECOND = ("train.steps=200", "optimizer.warmup_steps=20")


def _variant(name: str, first: str | None, *overrides: str) -> Variant:
    stage = _FIRST if first is None else _SECOND
    own = (*stage, *_text.FAM, "model.fam_len=8", *overrides)
    return Variant(name, own, continues=first or "")


MEMORY_GROWING = Experiment(
    id="memory-growing",
    title="Documents that grow during training",
    source="famjax",
    config="text_bswa",
    variants=(
        _variant("whole", None),
        _variant("parts", None, *_PARTS),
        _variant("whole then whole", "whole"),
        _variant("parts then whole", "parts"),
        _variant("parts then parts", "parts", *_PARTS),
    ),
    measure=_text.CODE,
    orderings=(
        Ordering("parts then whole", "whole then whole"),
        Ordering("parts then whole", "parts then parts"),
    ),
    overrides=_text.SHAPE,
    base=_text.BASE,
    unequal="the first two are the first halves of the others",
    note=_text.NOTE + " The memory is a gated FAM of 8 tokens without a segment. Lanes read whole "
    "documents, or parts of 8 kB in random order. Each half has 200 steps, the first one at a "
    "constant learning rate.",
    minutes=2.5,
)

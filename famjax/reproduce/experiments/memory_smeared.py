"""What smeared keys (`model.smeared_keys`) are worth to small windows of code."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _text

_OWN, _SMEARED = ("model.smeared_keys=false",), ("model.smeared_keys=true",)


def _segments(number: int) -> tuple[str, ...]:
    return (f"model.memory_segments={number}",)


MEMORY_SMEARED = Experiment(
    id="memory-smeared",
    title="Smeared keys",
    source="famjax",
    config="text_bswa",
    variants=(
        Variant("M0", (*_segments(0), *_OWN)),
        Variant("M0 with smeared keys", (*_segments(0), *_SMEARED)),
        Variant("M1", (*_segments(1), *_OWN)),
        Variant("M1 with smeared keys", (*_segments(1), *_SMEARED)),
    ),
    measure=_text.CODE,
    orderings=(
        Ordering("M0 with smeared keys", "M0"),
        Ordering("M1 with smeared keys", "M1"),
        # a window that can copy has more of a segment
        Ordering("M1 with smeared keys", "M1", wider_than=("M0 with smeared keys", "M0")),
    ),
    overrides=(*_text.SIZE, "train.steps=1000"),
    note="Python's standard library; two layers of 128 with blocks of 64 tokens, 1,000 steps of "
    "4,096 tokens from scratch. M0 sees its block, M1 also the one before.",
    minutes=8.5,
)

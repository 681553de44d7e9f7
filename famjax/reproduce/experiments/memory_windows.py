"""What the n-gram and delta memories add to longer windows; not in a paper."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _text

_SEGMENTS = (1, 4, 8)


def _variant(name: str, segments: int, *overrides: str) -> Variant:
    return Variant(
        f"{name} M{segments}",
        (*_text.CONTINUED, f"model.memory_segments={segments}", *overrides),
    )


MEMORY_WINDOWS = Experiment(
    id="memory-windows",
    title="Memories beside longer windows",
    source="famjax",
    config="text_bswa",
    variants=tuple(
        variant
        for segments in _SEGMENTS
        for variant in (
            _variant("window", segments),
            _variant("BSWA+DELTA", segments, *_text.DELTA),
            _variant("n-grams", segments, "model.ngram_memory=8"),
        )
    ),
    measure=_text.CODE,
    orderings=(
        *(Ordering(f"n-grams M{n}", f"window M{n}") for n in _SEGMENTS),
        *(Ordering(f"BSWA+DELTA M{n}", f"window M{n}") for n in _SEGMENTS),
        # a memory of the past beside a short window, or a longer window
        *(Ordering("n-grams M1", f"window M{n}") for n in _SEGMENTS[1:]),
    ),
    overrides=_text.SHAPE,
    base=_text.BASE,
    note=_text.NOTE
    + " M1, M4 and M8 have one, four and eight memory segments of 64 tokens before the block of "
    "64. Models with n-grams are windows with an n-gram memory of contexts of 1, 2, 3, 4, 6, 8, 12 "
    "and 16 tokens.",
    unequal_parameters="The n-gram memory has 132,096 parameters.",
    minutes=9.0,
)

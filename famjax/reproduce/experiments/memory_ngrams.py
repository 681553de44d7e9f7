"""Contexts and slots of the n-gram memory, beside the delta memory; not in a paper."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _text

_LONGEST = 4


def _variant(name: str, *overrides: str) -> Variant:
    return Variant(name, (*_text.CONTINUED, "model.memory_segments=1", *overrides))


def _ngrams(longest: int, slots: int = 4096) -> tuple[str, ...]:
    return f"model.ngram_memory={longest}", f"model.ngram_slots={slots}"


MEMORY_NGRAMS = Experiment(
    id="memory-ngrams",
    title="Contexts and slots of the n-gram memory",
    source="famjax",
    config="text_bswa",
    variants=(
        _variant("window"),
        *(_variant(f"n-grams of {n}", *_ngrams(n)) for n in range(1, _LONGEST + 1)),
        _variant("n-grams of 3 in 256 slots", *_ngrams(3, 256)),
        _variant("BSWA+DELTA", *_text.DELTA),
        _variant("BSWA+DELTA and n-grams of 3", *_text.DELTA, *_ngrams(3)),
    ),
    measure=_text.CODE,
    orderings=(
        Ordering("n-grams of 3", "window"),
        Ordering("n-grams of 3", "BSWA+DELTA"),
        Ordering("n-grams of 3", "n-grams of 3 in 256 slots"),
        Ordering("BSWA+DELTA and n-grams of 3", "n-grams of 3"),
        *(Ordering(f"n-grams of {n + 1}", f"n-grams of {n}") for n in range(1, _LONGEST)),
    ),
    overrides=_text.SHAPE,
    base=_text.BASE,
    note=_text.NOTE
    + " Models have one memory segment. Those with n-grams are windows with an n-gram memory of "
    "contexts of 1 to so many tokens, with 4,096 slots for each length unless the name says fewer.",
    minutes=4.0,
)

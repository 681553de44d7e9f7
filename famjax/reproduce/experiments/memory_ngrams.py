"""Contexts and slots of the n-gram memory, beside the delta memory; not in a paper."""

from __future__ import annotations

from itertools import pairwise

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _text

_CONTEXTS = (1, 3, 5, 8, 10)
_CHOSEN = "n-grams of 8 contexts"
# as many parameters, but nothing is remembered for longer than a token
_CONTROL = "n-grams of 8 contexts in 1 slot"


def _variant(name: str, *overrides: str) -> Variant:
    return Variant(name, (*_text.CONTINUED, "model.memory_segments=1", *overrides))


def _ngrams(contexts: int, slots: int = 16384) -> tuple[str, ...]:
    return f"model.ngram_memory={contexts}", f"model.ngram_slots={slots}"


MEMORY_NGRAMS = Experiment(
    id="memory-ngrams",
    title="Contexts and slots of the n-gram memory",
    source="famjax",
    config="text_bswa",
    variants=(
        _variant("window"),
        *(_variant(f"n-grams of {n} contexts", *_ngrams(n)) for n in _CONTEXTS),
        _variant("n-grams of 8 contexts in 1024 slots", *_ngrams(8, 1024)),
        _variant(_CONTROL, *_ngrams(8, 1)),
        _variant("BSWA+DELTA", *_text.DELTA),
        _variant("BSWA+DELTA and n-grams of 8 contexts", *_text.DELTA, *_ngrams(8)),
    ),
    measure=_text.CODE,
    orderings=(
        Ordering(_CHOSEN, "window"),
        Ordering(_CONTROL, "window", margin=0.02),
        Ordering("n-grams of 1 contexts", "window"),
        Ordering(_CHOSEN, "BSWA+DELTA"),
        Ordering(_CHOSEN, "n-grams of 8 contexts in 1024 slots"),
        Ordering("BSWA+DELTA and n-grams of 8 contexts", _CHOSEN),
        *(
            Ordering(f"n-grams of {more} contexts", f"n-grams of {fewer} contexts")
            for fewer, more in pairwise(_CONTEXTS)
        ),
    ),
    overrides=_text.SHAPE,
    base=_text.BASE,
    note=_text.NOTE
    + " Models have one memory segment. Those with n-grams are windows with an n-gram memory: of "
    "the lengths of contexts 1, 2, 3, 4, 6, 8, 12, 16, 24 and 32 the first 1, 3, 5, 8 or 10, each "
    "with 16,384 slots unless the name says fewer.",
    unequal_parameters="Each length of contexts adds 16,512 parameters.",
    minutes=4.5,
)

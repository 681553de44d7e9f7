"""What a short convolution of the embeddings gives windows and memories; not in a paper."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _text

_CONV = " and convolution"
_MODELS: dict[str, tuple[str, ...]] = {
    "window": (),
    "FAM": ("model.mixer=fam", "model.fam_update=gated"),
    "BSWA+DELTA": _text.DELTA,
    "n-grams": ("model.ngram_memory=8",),
}


def _variant(name: str, tokens: int, *overrides: str) -> Variant:
    conv = f"model.short_conv={tokens}"
    return Variant(name, (*_text.CONTINUED, "model.memory_segments=1", conv, *overrides))


MEMORY_CONV = Experiment(
    id="memory-conv",
    title="A short convolution of the embeddings",
    source="famjax",
    config="text_bswa",
    variants=(
        *(_variant(name, 0, *model) for name, model in _MODELS.items()),
        *(_variant(name + _CONV, 4, *model) for name, model in _MODELS.items()),
        _variant(f"window{_CONV} of 2", 2),
    ),
    measure=_text.CODE,
    orderings=(
        *(Ordering(name + _CONV, name) for name in _MODELS),
        Ordering(f"window{_CONV}", f"window{_CONV} of 2"),
        # does a memory still pay beside it?
        *(Ordering(name + _CONV, f"window{_CONV}") for name in list(_MODELS)[1:]),
    ),
    overrides=_text.SHAPE,
    base=_text.BASE,
    note=_text.NOTE + " Each model has one memory segment. Those with a convolution are given it "
    "after the base: it adds to each embedding products of those of the 3 tokens before it, or of "
    "the last one (`of 2`), with weights that start as 0.",
    unequal_parameters="The convolution has 49,152 parameters, 16,384 if of 2 tokens.",
    minutes=6.0,
)

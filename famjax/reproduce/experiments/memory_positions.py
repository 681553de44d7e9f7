"""What a FAM gains on code far from the beginning of a document, and remedies; not in a paper."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _text
from famjax.reproduce.measures import CodeByPosition

_WINDOW, _FAM = "window", "FAM"
_REMEDIES = {
    "64 tokens": ("model.fam_len=64",),
    "4 previous": ("model.fam_previous=4",),
    "slower gates": ("model.fam_gate_threshold=0.001", "model.fam_max_timescale=512"),
    "diversity loss": ("train.diversity_loss=1",),
    "longer rows": ("data.batch=2", "data.length=2048"),
}


def _variant(name: str, *overrides: str) -> Variant:
    return Variant(name, (*_text.CONTINUED, "model.memory_segments=0", *overrides))


MEMORY_POSITIONS = Experiment(
    id="memory-positions",
    title="Nats per token of code by position",
    source="famjax",
    config="text_bswa",
    variants=(
        _variant(_WINDOW),
        _variant(_FAM, *_text.FAM),
        *(_variant(f"FAM {name}", *_text.FAM, *remedy) for name, remedy in _REMEDIES.items()),
        _variant("BSWA+DELTA", *_text.DELTA),
    ),
    measure=CodeByPosition(),
    orderings=(
        Ordering(_FAM, _WINDOW),
        *(Ordering(f"FAM {name}", _FAM) for name in _REMEDIES),
        Ordering("BSWA+DELTA", _FAM),
    ),
    overrides=_text.SHAPE,
    base=_text.BASE,
    axis="position in the document, tokens",
    note="Nats per token of held-out modules of Python's standard library, by position: `to 2,048` "
    "is of the tokens from 1,024 on. Two layers of 128 with blocks of 64 tokens, without memory "
    "segments. All models of a seed continue a training of 1,000 steps of a window by 400 of 4,096 "
    "tokens. FAM has 16 memory tokens with the gated update and attends to the previous block's. "
    "Slower gates have c = 0.001 and T to 512 blocks; longer rows are two of 2,048 tokens instead "
    "of eight of 512; BSWA+DELTA has a delta memory in the second layer.",
    minutes=7.0,
)

"""Initial timescales of the gated update, compared with the paper's sum (docs/memory.md)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _passkey
from famjax.reproduce.measures import PasskeyMeasure

_LENGTHS = (128, 512, 2048, 8192, 32_768, 262_144)
_LONGEST = f"{_LENGTHS[-1]:,}"


def _gated(first: float, last: float) -> Variant:
    """Return the gated update with timescales T from `first` to `last` blocks."""
    timescales = (f"model.fam_min_timescale={first}", f"model.fam_max_timescale={last}")
    return Variant(f"T {first:g} to {last:g}", (*_passkey.GATES, *timescales))


MEMORY_TIMESCALES = Experiment(
    id="memory-timescales",
    title="Initial timescales of the gates",
    source="famjax",
    config="passkey",
    variants=(
        Variant("sum", ("model.fam_update=sum",)),
        *(_gated(1.5, last) for last in (4, 16, 64, 99)),
        _gated(16, 64),
    ),
    measure=PasskeyMeasure(_LENGTHS, examples=32),
    orderings=(
        Ordering("T 1.5 to 64", "sum", _LONGEST),
        Ordering("T 1.5 to 64", "T 1.5 to 4", _LONGEST),
    ),
    overrides=_passkey.KEY_FIRST,
    axis="tokens of the document",
    note="The key is first in the document, questions are anywhere in a block; 0.14 million "
    "parameters, documents of at most 4,096 tokens in training.",
    minutes=6.0,
)

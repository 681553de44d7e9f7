"""The threshold below which gates are closed (docs/memory.md)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _passkey
from famjax.reproduce.measures import PasskeyMeasure

_LENGTHS = (128, 512, 2048, 8192, 32_768, 262_144)
_LONGEST = f"{_LENGTHS[-1]:,}"


# with c = 0.01 the slowest gate starts at 1/176
_SLOW = "c 0 and T to 176"


def _threshold(c: float) -> Variant:
    return Variant(f"c {c:g}", (*_passkey.GATES, f"model.fam_gate_threshold={c}"))


MEMORY_THRESHOLD = Experiment(
    id="memory-threshold",
    title="Gates that can close, and gates that cannot",
    source="famjax",
    config="passkey",
    variants=(
        *map(_threshold, (0.0, 0.001, 0.01)),
        Variant(_SLOW, ("model.fam_gate_threshold=0.0", "model.fam_max_timescale=176.0")),
    ),
    measure=PasskeyMeasure(_LENGTHS, examples=32),
    orderings=(
        Ordering("c 0.01", "c 0", _LONGEST),
        Ordering("c 0.01", _SLOW, _LONGEST),
        Ordering("c 0.01", "c 0.001", _LONGEST, margin=0.05, may_be_better=True),
    ),
    overrides=_passkey.KEY_FIRST,
    axis="tokens of the document",
    note="FAM without a segment, with initial timescales of 1.5 to 64 blocks unless stated. The "
    "key is first in the document, questions are anywhere in a block; 0.14 million parameters, "
    "documents of at most 4,096 tokens in training. With c = 0 gates are sigmoids, which never "
    "close; c is subtracted, so that with 0.01 the slowest gate starts at 1/176 instead of 1/64.",
    minutes=6.0,
)

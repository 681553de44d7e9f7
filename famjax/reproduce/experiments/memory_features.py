"""How many heads with a memory, and how many features of a key, code needs; not in a paper."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _text

# steps of the window in the time of 400 steps of one head with 512 features: 1.26 times as many, on
# one core
_STEPS_IN_TIME = 504


def _variant(name: str, *overrides: str, segments: int = 1) -> Variant:
    return Variant(name, (*_text.CONTINUED, f"model.memory_segments={segments}", *overrides))


def _delta(heads: int, order: int) -> Variant:
    # 2 e delta_order features of a key of e = 32 elements
    return _variant(
        f"{heads} x {64 * order} features",
        "model.mixer=bswa,delta",
        f"model.delta_heads={heads}",
        f"model.delta_order={order}",
    )


MEMORY_FEATURES = Experiment(
    id="memory-features",
    title="Heads and features of the delta memory",
    source="famjax",
    config="text_bswa",
    variants=(
        _variant("window"),
        _variant("window of equal time", f"train.steps={_STEPS_IN_TIME}"),
        _variant("window of two segments", segments=2),
        *(_delta(4, order) for order in (2, 8)),
        *(_delta(1, order) for order in (2, 8, 31)),
    ),
    measure=_text.CODE,
    orderings=(
        Ordering("1 x 512 features", "window of equal time"),
        # whose state is larger
        Ordering("1 x 512 features", "window of two segments"),
        Ordering("1 x 512 features", "4 x 512 features", margin=0.01, may_be_better=True),
        Ordering("1 x 512 features", "1 x 128 features"),
        Ordering("1 x 1984 features", "1 x 512 features"),
    ),
    overrides=_text.SHAPE,
    base=_text.BASE,
    note=_text.NOTE
    + " Models have one memory segment unless the name says two; those with features also have a "
    "delta memory in the upper layer, in one or all of its four key heads. In the time of one head "
    "with 512 features the window trains for 504 steps.",
    unequal="a window is trained in equal time, too",
    minutes=4.7,
)

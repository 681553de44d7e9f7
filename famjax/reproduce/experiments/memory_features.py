"""How many features of a key the delta memory needs on code; not in a paper."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _text

# steps of the window in the time of 400 steps of order 8: 1.95 times as many, on one core
_STEPS_IN_TIME = 780


def _variant(name: str, segments: int = 1, overrides: tuple[str, ...] = ()) -> Variant:
    return Variant(name, (*_text.CONTINUED, f"model.memory_segments={segments}", *overrides))


def _delta(order: int) -> Variant:
    # 2 e delta_order features of a key of e = 32 elements
    overrides = ("model.mixer=bswa,delta", f"model.delta_order={order}")
    return _variant(f"{64 * order} features", overrides=overrides)


MEMORY_FEATURES = Experiment(
    id="memory-features",
    title="Features of a key in the delta memory",
    source="famjax",
    config="text_bswa",
    variants=(
        _variant("window"),
        _variant("window of equal time", overrides=(f"train.steps={_STEPS_IN_TIME}",)),
        _variant("window of equal state", segments=3),
        *map(_delta, (2, 8)),
    ),
    measure=_text.CODE,
    orderings=(
        Ordering("512 features", "128 features"),
        Ordering("128 features", "window"),
        Ordering("512 features", "window of equal time"),
        Ordering("512 features", "window of equal state"),
    ),
    overrides=_text.SHAPE,
    base=_text.BASE,
    note=_text.NOTE
    + " Windows have one memory segment; models with features have a delta memory in the upper "
    "layer as well. In the time of that with 512 features the window trains for 780 steps; with "
    "three segments its state has the same size.",
    unequal="a window is trained in equal time, too",
    minutes=4.0,
)

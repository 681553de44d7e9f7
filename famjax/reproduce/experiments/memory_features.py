"""How many features of a key the delta memory needs on code (`model.delta_order`; not in a paper)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _text

# steps of the window in the time of 400 steps of order 8: 1.95 times as many, on one core
_STEPS_IN_TIME = 780


def _variant(name: str, *overrides: str) -> Variant:
    return Variant(name, (*_text.CONTINUED, "model.memory_segments=1", *overrides))


def _delta(order: int) -> Variant:
    # 2 e delta_order features of a key of e = 32 elements
    return _variant(
        f"{64 * order} features", "model.mixer=bswa,delta", f"model.delta_order={order}"
    )


MEMORY_FEATURES = Experiment(
    id="memory-features",
    title="Features of a key in the delta memory",
    source="famjax",
    config="text_bswa",
    variants=(
        _variant("window"),
        _variant("window, equal time", f"train.steps={_STEPS_IN_TIME}"),
        *map(_delta, (2, 8)),
    ),
    measure=_text.CODE,
    orderings=(
        Ordering("512 features", "128 features"),
        Ordering("128 features", "window"),
        Ordering("512 features", "window, equal time"),
    ),
    overrides=_text.SHAPE,
    base=_text.BASE,
    note=_text.NOTE
    + " Windows have one memory segment; the upper layer has a delta memory as well. "
    "In the time of the model with 512 features, the window trains for 780 steps.",
    minutes=4.0,
)

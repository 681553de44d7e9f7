"""Feedback Transformer v3, Figure 9: depth at equal parameters."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _bytes

_DEPTHS = (1, 2, 4)


def _variant(line: str, layers: int) -> Variant:
    own = _bytes.TRANSFORMER if line == "Transformer" else ()
    return Variant(f"{line} {layers}", (*own, *_bytes.at_depth(layers)), x=layers, line=line)


FT_FIGURE_9 = Experiment(
    id="ft-figure-9",
    title="Depth at equal parameters",
    source="Feedback Transformer v3, Figure 9",
    config="char_ptb_feedback",
    variants=tuple(
        _variant(line, layers) for layers in _DEPTHS for line in ("Transformer", "Feedback")
    ),
    measure=_bytes.BYTES,
    orderings=(
        Ordering("Transformer 4", "Transformer 1"),
        Ordering("Feedback 1", "Transformer 1"),
        Ordering("Feedback 2", "Transformer 2"),
        Ordering("Feedback 2", "Feedback 4"),
        # "much more robust to reduced depth"
        Ordering("Feedback 1", "Transformer 1", wider_than=("Feedback 4", "Transformer 4")),
    ),
    overrides=_bytes.SHAPE,
    axis="layers",
    note=_bytes.DEPTHS_NOTE + " Fewer layers have wider heads and feed-forwards.",
    minutes=_bytes.MINUTES,
)

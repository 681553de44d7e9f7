"""What experiments of T2R share: a small Transformer over bytes of code that becomes an RNN."""

from __future__ import annotations

from famjax.reproduce.experiment import Variant
from famjax.reproduce.measures import CodeMeasure

# the last half of each window is scored (T2R 3.2.1)
WINDOWS = CodeMeasure(vocabulary=0, modules=6, window=256)
CONFIG, TEACHER = "t2r_finetune", "t2r_teacher"
SHAPE = ("model.layers=4", "model.width=64", "model.heads=4", "model.mlp_width=256")
TEACHING = (*SHAPE, "train.steps=800")
FINETUNED = ("train.steps=400",)
LINEAR = ("model.mixer=linear",)
NOTE = (
    "Bytes of Python's standard library, the last 128 of windows of 256, six held-out modules; "
    "four layers of width 64, where the paper has WikiText-103 and 16 layers of 1,024. "
    "800 steps from scratch, 400 from the teacher, of 16 rows of 256 bytes."
)
MINUTES = 4.0
FEATURES = (8, 32, 128)


def linear(features: int) -> tuple[str, ...]:
    """Return overrides of an RNN with so many features."""
    return (*LINEAR, f"model.linear.features={features}")


def by_features() -> tuple[Variant, ...]:
    """Return the lines of Figures 4 and 6: finetuned from the teacher, and from scratch."""

    def variant(line: str, features: int, is_pretrained: bool) -> Variant:
        own = (*(FINETUNED if is_pretrained else ()), *linear(features))
        return Variant(f"{line} {features}", own, x=features, line=line, continues=is_pretrained)

    return tuple(
        variant(line, features, line == "pretrained")
        for line in ("pretrained", "from scratch")
        for features in FEATURES
    )

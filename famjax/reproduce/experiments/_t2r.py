"""Shared settings of T2R experiments: a small Transformer over code bytes that becomes an RNN."""

from __future__ import annotations

from famjax.reproduce.experiment import Variant
from famjax.reproduce.measures import CodeMeasure

# the configs of a finetuning and of a training from scratch at the paper's size
PAPER_CONFIG, PAPER_TEACHER = "t2r_finetune_paper", "t2r_lm_paper"
# of heads of 128 (Figures 4 to 6)
PAPER_FEATURES = tuple(2**n for n in range(3, 10))

# the last half of each window is scored (T2R 3.2.1)
WINDOWS = CodeMeasure(vocabulary=0, whole=False, window=256)
CONFIG, TEACHER = "t2r_finetune", "t2r_teacher"
# one head, so that the learned features can be a quarter of its size, like the paper's 32 of 128
SHAPE = ("model.layers=4", "model.width=64", "model.heads=1", "model.mlp_width=256")
# from scratch models are trained as long as the teacher, as in the paper (Table 4)
TEACHING, FROM_SCRATCH = (*SHAPE, "train.steps=2400"), ("train.steps=2400",)
FINETUNED = ("train.steps=800",)
LINEAR = ("model.mixer=linear",)
_SIZES = (
    "four layers of width 64 with one head, where the paper has WikiText-103, 32 layers of 1,024 "
    "and heads of 128. 2,400 steps of the teacher and 800 from it"
)
_ROWS = "of 16 rows of 256 bytes."
# of attention weights
WEIGHTS_NOTE = f"Bytes of Python's standard library; {_SIZES}, {_ROWS}"
_SCORED = (
    "Bytes of Python's standard library, the last 128 of windows of 256, 16 kB of each held-out "
    "module; "
)
# of models that all continue the teacher, and of others
FINETUNED_NOTE = f"{_SCORED}{_SIZES}, {_ROWS}"
NOTE = f"{_SCORED}{_SIZES}, 2,400 from scratch, {_ROWS}"
UNEQUAL_PARAMETERS = "The maps of 4, 16 and 64 features add 0.5, 2 and 8% to the parameters."
UNEQUAL = "what continues the teacher has its tokens, too, as in the paper"
# of a training that continues the teacher, and of one from scratch
MINUTES, MINUTES_FROM_SCRATCH = 4.0, 12.0
# the base itself, so that its training is shared
TRANSFORMER = Variant("Transformer", (), continues=None)
# a sixteenth, a quarter and all of a head's size; the paper's tables have a quarter
FEATURES = (4, 16, 64)


def linear(features: int) -> tuple[str, ...]:
    """Return overrides for an RNN with `features` features."""
    return (*LINEAR, f"model.linear.features={features}")


def by_features(sizes: tuple[int, ...] = FEATURES) -> tuple[Variant, ...]:
    """Return the variants of Figures 4 and 6: finetuned from the teacher, and from scratch."""

    def variant(line: str, features: int, is_pretrained: bool) -> Variant:
        own = linear(features)
        return Variant(
            f"{line} {features}",
            (*(FINETUNED if is_pretrained else FROM_SCRATCH), *own),
            x=features,
            line=line,
            continues="" if is_pretrained else None,
            at_paper=own,
        )

    return tuple(
        variant(line, features, line == "pretrained")
        for line in ("pretrained", "from scratch")
        for features in sizes
    )

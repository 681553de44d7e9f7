"""What experiments on text share: a window without memory that all variants continue."""

from __future__ import annotations

from famjax.reproduce.measures import CodeMeasure

CODE = CodeMeasure()
# two layers of 128, rows of many documents (`make demo-text` tells why)
PLAIN_SHAPE = (
    "model.layers=2",
    "model.mlp_width=512",
    "data.batch=8",
    "data.length=512",
    "train.log_every=20",
    "train.checkpoint_every=250",
)
# without which models of this size do not even copy from their own window
SHAPE = (*PLAIN_SHAPE, "model.smeared_keys=true")
# a memory is of use only to a model that predicts from its block already
BASE = (
    "model.mixer=bswa",
    "model.memory_segments=0",
    "train.steps=1000",
    "optimizer.schedule=constant",
)
CONTINUED = ("train.steps=400", "optimizer.warmup_steps=20")
FAM = ("model.mixer=fam", "model.fam_update=gated", "model.memory_segments=0")
# bits per byte: a quarter of what a FAM is worth without memory segments (docs/results.md)
MARGIN = 0.005
# rows with a memory of their own at each step, as in the paper
PACKED = ("data.layout=packed",)


def passed(probability: float) -> tuple[str, ...]:
    """Return overrides of random state passing (B.2.3)."""
    return (f"train.rsp={probability}", "train.rsp_ramp=100") if probability else ("train.rsp=0.0",)


NOTE = (
    "Python's standard library instead of the paper's sets; two layers of 128 with blocks of 64 "
    "tokens, where the paper has a pretrained Flan-PaLM 1B with blocks of 1,024. All models of a "
    "seed continue a training of 1,000 steps of a window without memory by 400 of 4,096 tokens."
)

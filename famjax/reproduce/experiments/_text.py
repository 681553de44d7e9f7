"""Shared settings of text experiments, whose variants all continue a window without memory."""

from __future__ import annotations

from famjax.reproduce.measures import CodeMeasure

CODE = CodeMeasure()
# two layers of width 128, rows of many documents (`make demo-text` explains why)
SIZE = (
    "model.layers=2",
    "model.mlp_width=512",
    "data.batch=8",
    "data.length=512",
    "train.log_every=20",
    "train.checkpoint_every=250",
)
PLAIN_SHAPE = (*SIZE, "model.smeared_keys=false")
# without smeared keys, models of this size do not even copy from their own window
SHAPE = (*SIZE, "model.smeared_keys=true")
# a memory is only of use to a model that has learned to predict from its own block
BASE = (
    "model.mixer=bswa",
    "model.memory_segments=0",
    "train.steps=1000",
    "optimizer.schedule=constant",
)
CONTINUED = ("train.steps=400", "optimizer.warmup_steps=20")
FAM = ("model.mixer=fam", "model.fam_update=gated", "model.memory_segments=0")
# `configs/text_delta.py`
DELTA = ("model.mixer=bswa,delta", "model.delta_order=8", "model.delta_heads=1")
# the paper's model (3.1, Table 6), which a folder given as `init` need not have
BLOCK_AT_PAPER = ("model.block_len=1024",)
SHAPE_AT_PAPER = (*BLOCK_AT_PAPER, "model.memory_segments=3")
FAM_AT_PAPER = (
    *SHAPE_AT_PAPER,
    "model.mixer=fam",
    "model.fam_update=sum",
    "model.fam_len=64",
)
# token accuracy: the paper calls 46.4% and 45.7% equal (Table 11, M1 and M8)
PAPER_MARGIN = 0.01
# bits per byte: a quarter of the gain of a FAM without memory segments (docs/results.md)
MARGIN = 0.005
# rows that start each step with a memory of their own, as in the paper
PACKED = ("data.layout=packed",)


def passed(probability: float) -> tuple[str, ...]:
    """Return overrides for random state passing (B.2.3) with a probability."""
    return (f"train.rsp={probability}", "train.rsp_ramp=100") if probability else ("train.rsp=0.0",)


NOTE = (
    "Python's standard library instead of TransformerFAM's sets; two layers of 128 with blocks of "
    "64 tokens, where that paper has a pretrained Flan-PaLM 1B with blocks of 1,024. All models of "
    "a seed continue a training of 1,000 steps of a window without memory by 400 of 4,096 tokens."
)
FAM_NOTE = (
    NOTE + " The FAM is famjax's, with the gated update and smeared keys, and without memory "
    "segments; the paper's adds its update, and has three segments. With the added update a FAM "
    "without segments is worse by 0.009 bits per byte (`memory-updates`)."
)

"""Shared settings of Feedback Transformers on WikiText-103 at the paper's size (v3 7.6)."""

from __future__ import annotations

CONFIG = "wikitext103_large_paper"
# the models of v1, with as many parameters as the Transformer
OWN_KEYS = ("model.feedback.shared_kv=false",)
# "most of the models have a fixed attention span of 512"; the config has the best one
FIXED_SPAN = (
    "model.feedback.span=512",
    "model.feedback.adaptive_span=false",
    "model.feedback.span_loss=0",
)
# back-propagation through all tokens of a row from the first step; the config's grows
WHOLE_ROWS = ("train.bptt_start=0", "train.bptt_double_every=0")

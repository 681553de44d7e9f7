"""Feedback Transformer v3, Table 4, and v1, Table 3: enwik8 with adaptive spans (v3 4.3.3)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _bytes, _finetuned
from famjax.reproduce.paper_measures import ENWIK8

_TRANSFORMER, _FEEDBACK = "Transformer", "Feedback"
# spans are a 32nd of the paper's, so that a token of a span costs 32 times as much
_ADAPTIVE = (
    "model.feedback.span=256",
    "model.feedback.adaptive_span=true",
    "model.feedback.span_loss=1.6e-5",
)

_VARIANTS = (
    Variant(_TRANSFORMER, _bytes.TRANSFORMER),
    Variant(_FEEDBACK, (), {"bits per byte": 0.96}),
)

FT_TABLE_4 = Experiment(
    id="ft-table-4",
    title="Bytes with adaptive spans",
    source="Feedback Transformer v3, Table 4",
    config="char_ptb_feedback",
    variants=_VARIANTS,
    measure=_bytes.BYTES,
    orderings=(Ordering(_FEEDBACK, _TRANSFORMER, ours=True),),
    overrides=(*_bytes.SHAPE, *_ADAPTIVE),
    at_paper=PaperSize(
        config="enwik8_paper",
        measure=ENWIK8,
        variants=_finetuned.finetuned(_VARIANTS, 1.5e-4),
        note="The Transformer of equal size is not in the paper.",
    ),
    note="Bytes of Python's standard library, 16 kB of each held-out module, where the paper has "
    "enwik8; two layers instead of twelve, a width of 128, spans of at most 256 instead of 8,192, "
    "0.8 million parameters, 1,400 steps of 1,024 bytes. The paper compares with larger "
    "Transformers of others (Transformer-XL of 277 million parameters: 0.99).",
    minutes=8.5,
)

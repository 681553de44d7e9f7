"""Feedback Transformer v3, Table 6: norms, spans and growing back-propagation (6.4; v1 A.2)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _bytes

# the paper raises the learning rate with pre-norm
_POST_NORM = ("model.arch.pre_norm=false", "optimizer.learning_rate=1e-3")
_SPAN = (
    "model.feedback.span=256",
    "model.feedback.adaptive_span=true",
    "model.feedback.span_start=0.25",
    "model.feedback.span_loss=1e-5",
)
_MARGIN = 0.02


def _variant(line: str, name: str, own: tuple[str, ...], perplexity: float) -> Variant:
    stack = _bytes.TRANSFORMER if line == "Transformer" else ()
    return Variant(f"{line}: {name}", (*stack, *own), {"perplexity": perplexity})


FT_TABLE_6 = Experiment(
    id="ft-table-6",
    title="Norms, spans and growing back-propagation",
    source="Feedback Transformer v3, Table 6",
    config="char_ptb_feedback",
    variants=(
        _variant("Transformer", "post-norm", _POST_NORM, 22.9),
        _variant("Transformer", "post-norm and BPTT", (*_POST_NORM, *_bytes.GROWING), 22.9),
        _variant("Transformer", "pre-norm and BPTT", _bytes.GROWING, 21.0),
        _variant("Transformer", "pre-norm and span", _SPAN, 20.6),
        _variant("Feedback", "post-norm", _POST_NORM, 19.7),
        _variant("Feedback", "post-norm and BPTT", (*_POST_NORM, *_bytes.GROWING), 19.9),
        _variant("Feedback", "pre-norm and BPTT", _bytes.GROWING, 19.6),
        _variant("Feedback", "pre-norm and BPTT and span", (*_bytes.GROWING, *_SPAN), 19.0),
    ),
    measure=_bytes.BYTES,
    orderings=(
        # "helps the performance, particularly for the standard Transformer"
        Ordering("Transformer: pre-norm and BPTT", "Transformer: post-norm and BPTT"),
        Ordering("Feedback: pre-norm and BPTT", "Feedback: post-norm and BPTT"),
        Ordering(
            "Transformer: pre-norm and BPTT",
            "Transformer: post-norm and BPTT",
            wider_than=("Feedback: pre-norm and BPTT", "Feedback: post-norm and BPTT"),
        ),
        # "further improves the performance for both models"
        Ordering("Transformer: pre-norm and span", "Transformer: pre-norm and BPTT"),
        Ordering("Feedback: pre-norm and BPTT and span", "Feedback: pre-norm and BPTT"),
        # "does not affect the final performance"
        *(
            Ordering(f"{line}: post-norm", f"{line}: post-norm and BPTT", margin=_MARGIN)
            for line in ("Transformer", "Feedback")
        ),
        # "the gap between two models is consistent"
        Ordering("Feedback: post-norm", "Transformer: post-norm"),
        Ordering("Feedback: post-norm and BPTT", "Transformer: post-norm and BPTT"),
        Ordering("Feedback: pre-norm and BPTT", "Transformer: pre-norm and BPTT"),
    ),
    overrides=_bytes.SHAPE,
    note=_bytes.NOTE + " The paper's table has the words of WikiText-103. Pre-norm has twice the "
    "learning rate of post-norm; adaptive spans reach 256 bytes; with BPTT, back-propagation grows "
    "from 8 to 64 bytes while it trains, as the paper's from 32 to 256 words, at equally many "
    "bytes a step.",
    minutes=_bytes.MINUTES,
)

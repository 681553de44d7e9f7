"""Feedback Transformer v3, Table 6: norms, spans and lengths of back-propagation (6.5)."""

from __future__ import annotations

from famjax.reproduce import _bytes
from famjax.reproduce.experiment import Experiment, Ordering, Variant

# the paper raises the learning rate with it
_POST_NORM = ("model.arch.pre_norm=false", "optimizer.learning_rate=1e-3")
# a step has as many tokens, in fewer rows
_LONGER_BPTT = ("data.length=128", "data.batch=8")
_SPAN = (
    "model.feedback.span=256",
    "model.feedback.adaptive_span=true",
    "model.feedback.span_start=0.25",
    "model.feedback.span_loss=1e-5",
)


def _variant(line: str, name: str, own: tuple[str, ...], perplexity: float) -> Variant:
    stack = _bytes.TRANSFORMER if line == "Transformer" else ()
    return Variant(f"{line}: {name}", (*stack, *own), {"perplexity": perplexity})


FT_TABLE_6 = Experiment(
    id="ft-table-6",
    title="Norms, spans and lengths of back-propagation",
    source="Feedback Transformer v3, Table 6",
    config="char_ptb_feedback",
    variants=(
        _variant("Transformer", "post-norm", _POST_NORM, 22.9),
        _variant("Transformer", "post-norm and BPTT", (*_POST_NORM, *_LONGER_BPTT), 22.9),
        _variant("Transformer", "pre-norm and BPTT", _LONGER_BPTT, 21.0),
        _variant("Transformer", "pre-norm and span", _SPAN, 20.6),
        _variant("Feedback", "post-norm", _POST_NORM, 19.7),
        _variant("Feedback", "post-norm and BPTT", (*_POST_NORM, *_LONGER_BPTT), 19.9),
        _variant("Feedback", "pre-norm and BPTT", _LONGER_BPTT, 19.6),
        _variant("Feedback", "pre-norm and BPTT and span", (*_LONGER_BPTT, *_SPAN), 19.0),
    ),
    measure=_bytes.BYTES,
    orderings=(
        Ordering("Transformer: pre-norm and BPTT", "Transformer: post-norm and BPTT"),
        Ordering("Feedback: pre-norm and BPTT and span", "Feedback: pre-norm and BPTT"),
        Ordering("Feedback: post-norm", "Transformer: post-norm"),
        Ordering("Feedback: pre-norm and BPTT", "Transformer: pre-norm and BPTT"),
    ),
    note=_bytes.NOTE + " Pre-norm has twice the learning rate of post-norm; adaptive spans reach "
    "256 bytes; longer back-propagation is through 128 bytes instead of 64.",
    minutes=_bytes.MINUTES,
)

"""Feedback Transformer v1, Table 6: what makes the training shorter (5.2)."""

from __future__ import annotations

from famjax.reproduce import _bytes
from famjax.reproduce.experiment import Experiment, Ordering, Variant

_FEEDBACK, _GROWING, _INITIALISED = "Feedback", "growing BPTT", "initialised from Transformer"
_MARGIN = 0.02
# from scratch, not of the base's shape and steps
_WHOLE = ("train.steps=1200",)
_FROM_SCRATCH = ("model.stack=feedback", *_WHOLE)

FT_V1_TABLE_6 = Experiment(
    id="ft-v1-table-6",
    title="Shorter trainings of the Feedback Transformer",
    source="Feedback Transformer v1, Table 6",
    config="char_ptb_feedback",
    variants=(
        Variant("Transformer", _WHOLE, {"perplexity": 21.2}, continues=False),
        Variant(_FEEDBACK, _FROM_SCRATCH, {"perplexity": 19.7}, continues=False),
        Variant(
            _GROWING,
            (*_FROM_SCRATCH, "train.bptt_start=16", "train.bptt_double_every=400"),
            {"perplexity": 19.9},
            continues=False,
        ),
        Variant(_INITIALISED, ("train.steps=600",), {"perplexity": 19.8}),
    ),
    measure=_bytes.BYTES,
    orderings=(
        Ordering(_FEEDBACK, "Transformer"),
        Ordering(_GROWING, _FEEDBACK, margin=_MARGIN),
        Ordering(_INITIALISED, _FEEDBACK, margin=_MARGIN),
    ),
    base=(*_bytes.TRANSFORMER, "train.steps=600"),
    note=_bytes.NOTE + " Back-propagation grows from 16 to 64 bytes; the last model is a "
    "Transformer for 600 steps, and a Feedback Transformer for 600 more.",
    minutes=_bytes.MINUTES,
)

"""Feedback Transformer v1, Table 6: what makes the training shorter (5.2)."""

from __future__ import annotations

from famjax.reproduce.experiment import ALL_SECONDS, Experiment, Ordering, Variant
from famjax.reproduce.experiments import _bytes

_FEEDBACK, _GROWING, _INITIALISED = "Feedback", "growing BPTT", "initialised from Transformer"
_MARGIN = 0.02
_HALF = f"train.steps={_bytes.STEPS // 2}"
_STACK = ("model.stack=feedback",)
# trained from scratch for all steps, whereas the base has half of them
_WHOLE = (f"train.steps={_bytes.STEPS}",)
# "further" (5.2): with growing back-propagation
_FURTHER = (_HALF, "train.bptt_start=8", f"train.bptt_double_every={_bytes.STEPS // 8}")

FT_V1_TABLE_6 = Experiment(
    id="ft-v1-table-6",
    title="Shorter trainings of the Feedback Transformer",
    source="Feedback Transformer v1, Table 6",
    config="char_ptb_feedback",
    variants=(
        Variant("Transformer", _WHOLE, {"perplexity": 21.2, "days": 1.2}, continues=False),
        Variant(_FEEDBACK, (*_STACK, *_WHOLE), {"perplexity": 19.7, "days": 17}, continues=False),
        Variant(
            _GROWING,
            (*_STACK, *_WHOLE, *_bytes.GROWING),
            {"perplexity": 19.9, "days": 10},
            continues=False,
        ),
        Variant(_INITIALISED, (*_STACK, *_FURTHER), {"perplexity": 19.8, "days": 5.5}),
    ),
    measure=_bytes.BYTES,
    orderings=(
        Ordering(_FEEDBACK, "Transformer"),
        Ordering(_GROWING, _FEEDBACK, margin=_MARGIN, may_be_better=True),
        Ordering(_INITIALISED, _FEEDBACK, margin=_MARGIN, may_be_better=True),
        Ordering(_GROWING, _FEEDBACK, ALL_SECONDS),
        Ordering(_INITIALISED, _GROWING, ALL_SECONDS),
    ),
    overrides=_bytes.SHAPE,
    base=(*_bytes.TRANSFORMER, _HALF),
    timed=True,
    note=_bytes.NOTE + " The paper's table has the words of WikiText-103. Back-propagation grows "
    "from 8 to 64 bytes; the last model is a Transformer for 700 steps, and a Feedback Transformer "
    "with growing back-propagation for 700 more. Seconds are those of training on one process's "
    "part of the cores, with the compilation; in all, with the Transformer's.",
    minutes=_bytes.MINUTES,
)

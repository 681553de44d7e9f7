"""Feedback Transformer v3, Table 3: language models of words (4.3.3)."""

from __future__ import annotations

from famjax.reproduce import _bytes
from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.measures import CodeMeasure

_TRANSFORMER, _FEEDBACK = "Transformer", "Feedback"
_SMALL = "Feedback of 3 layers"

FT_TABLE_3 = Experiment(
    id="ft-table-3",
    title="Language models of words",
    source="Feedback Transformer v3, Table 3",
    config="char_ptb_feedback",
    variants=(
        Variant(_TRANSFORMER, _bytes.TRANSFORMER, {"perplexity": 19.9}),
        Variant(_FEEDBACK, (), {"perplexity": 18.3}),
        Variant(_SMALL, ("model.layers=3",)),
    ),
    measure=CodeMeasure(modules=6),
    orderings=(Ordering(_FEEDBACK, _TRANSFORMER), Ordering(_SMALL, _TRANSFORMER)),
    paper_config="wikitext103_large_paper",
    note="1,024 SentencePiece tokens of Python's standard library, six held-out modules, "
    "where the paper has the words of WikiText-103; four layers of width 128 and a span of 64, "
    "1,200 steps of 1,024 tokens. The paper's Feedback Transformer has 126 million parameters, its "
    "Transformer 140.",
    minutes=_bytes.MINUTES,
)

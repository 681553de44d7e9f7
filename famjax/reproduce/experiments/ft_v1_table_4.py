"""Feedback Transformer v1, Table 4: small language models of words (4.3)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _bytes, _finetuned
from famjax.reproduce.measures import CodeMeasure
from famjax.reproduce.paper_measures import WIKITEXT

_TRANSFORMER, _FEEDBACK = "Transformer", "Feedback"

_VARIANTS = (
    Variant(_TRANSFORMER, _bytes.TRANSFORMER, {"perplexity": 25.2}),
    Variant(_FEEDBACK, (), {"perplexity": 22.4}),
)

FT_V1_TABLE_4 = Experiment(
    id="ft-v1-table-4",
    title="Small language models of words",
    source="Feedback Transformer v1, Table 4",
    config="char_ptb_feedback",
    variants=_VARIANTS,
    measure=CodeMeasure(whole=False, has_perplexity=True),
    orderings=(Ordering(_FEEDBACK, _TRANSFORMER),),
    # half as wide as the models of ft-table-3
    overrides=(*_bytes.SHAPE, "model.width=64"),
    at_paper=PaperSize(
        config="wikitext103_small_paper",
        measure=WIKITEXT,
        variants=_finetuned.finetuned(_VARIANTS, 7e-5),
    ),
    note="Perplexity of 1,024 SentencePiece tokens of Python's standard library, 16 kB of each "
    "held-out module, where the paper has the words of WikiText-103; two layers, a width of 64 "
    "and a span of 64, 1,400 steps of 1,024 tokens. The paper's small models have four layers, a "
    "width of 512 and a span of 512. Its large ones are in v3's Table 3 (`ft-table-3`).",
    minutes=5.5,
)

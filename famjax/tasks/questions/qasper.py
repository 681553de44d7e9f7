"""Qasper: questions about scientific papers (arXiv 2105.03011)."""

from __future__ import annotations

from typing import Any

from famjax.tasks.questions.question_set import QuestionSet
from famjax.tasks.questions.records import (
    AskedDocument,
    parse_leval,
    parse_longbench,
    parse_scrolls,
)


def _parse(record: dict[str, Any]) -> AskedDocument:
    """Parse a record of L-Eval, LongBench or SCROLLS."""
    if "instructions" in record:
        return parse_leval(record)
    return parse_longbench(record) if "answers" in record else parse_scrolls(record)


# ROUGE-L in TransformerFAM (D.2, Table 10), token F1 in SCROLLS
QASPER = QuestionSet("qasper", "arXiv 2105.03011", _parse, ("rouge_l", "f1"), answer_tokens=128)

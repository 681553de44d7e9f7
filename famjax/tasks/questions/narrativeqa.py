"""NarrativeQA: questions about whole books and film scripts (arXiv 1712.07040)."""

from __future__ import annotations

from typing import Any

from famjax.tasks.questions.question_set import QuestionSet
from famjax.tasks.questions.records import (
    Asked,
    AskedDocument,
    parse_longbench,
    parse_scrolls,
    question_prompt,
    strings,
)


def _parse(record: dict[str, Any]) -> AskedDocument:
    """Parse {passage, question, answer}, or a record of SCROLLS or LongBench."""
    if "context" in record:
        return parse_longbench(record)
    if "output" in record:
        return parse_scrolls(record)
    answers = strings(record["answer"])
    return AskedDocument(record["passage"], (Asked(question_prompt(record["question"]), answers),))


NARRATIVE_QA = QuestionSet(
    "narrativeqa", "arXiv 1712.07040", _parse, ("rouge_l", "f1"), answer_tokens=64
)

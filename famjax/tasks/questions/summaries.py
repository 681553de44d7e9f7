"""Summaries: SQuALITY (arXiv 2205.11465) and XLSum (arXiv 2106.13822)."""

from __future__ import annotations

from typing import Any

from famjax.tasks.questions.question_set import QuestionSet
from famjax.tasks.questions.records import Asked, AskedDocument, question_prompt


def _parse_squality(record: dict[str, Any]) -> AskedDocument:
    """Parse {document, questions: [{question_text, responses: [{response_text}]}]}."""
    questions = [
        Asked(
            question_prompt(asked["question_text"]),
            tuple(response["response_text"] for response in asked["responses"]),
        )
        for asked in record["questions"]
    ]
    return AskedDocument(record["document"], tuple(questions))


def _parse_xlsum(record: dict[str, Any]) -> AskedDocument:
    """Parse {text, summary}."""
    asked = Asked("\n\nSummary:", (record["summary"],))
    return AskedDocument(record["text"], (asked,))


SQUALITY = QuestionSet(
    "squality",
    "arXiv 2205.11465",
    _parse_squality,
    ("rouge_l", "rouge_1", "rouge_2"),
    answer_tokens=512,
    stop="",
)
XLSUM = QuestionSet(
    "xlsum", "arXiv 2106.13822", _parse_xlsum, ("rouge_l_unicode",), answer_tokens=128
)

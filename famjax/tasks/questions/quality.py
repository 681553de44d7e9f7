"""QuALITY: questions with four options about stories (arXiv 2112.08608)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from famjax.core.errors import UserError
from famjax.tasks.questions.html_text import html_text
from famjax.tasks.questions.question_set import QuestionSet
from famjax.tasks.questions.records import (
    Asked,
    AskedDocument,
    parse_leval,
    parse_scrolls,
    question_prompt,
    strings,
    with_options,
)


def _parse(record: dict[str, Any]) -> AskedDocument:
    """Parse a record of QuALITY, L-Eval or SCROLLS.

    Records of QuALITY are {article, questions: [{question, options, gold_label}]}. Those of TFDS
    are {article, questions: [question], options: [options], gold_labels: [label]}. The example of
    QuALITY's early format is {article: lines of HTML, question1, question1option1 to 4,
    question1_gold_label, question2, ...}.
    """
    if "instructions" in record:
        return with_options(parse_leval(record))
    if "output" in record:
        return with_options(parse_scrolls(record))
    questions = []
    for asked in _listed(record):
        options = strings(asked["options"])
        label = asked["gold_label"]
        if not isinstance(label, int) or not 1 <= label <= len(options):
            raise UserError(f"gold_label {label!r} is none of 1 to {len(options)}")
        right = options[label - 1]
        listed = "".join(f"\n ({chr(65 + i)}) {text}" for i, text in enumerate(options))
        prompt = question_prompt(asked["question"], f"\n{listed}".rstrip())
        questions.append(Asked(prompt, (right,), options))
    return AskedDocument(_article(record), tuple(questions))


def _article(record: dict[str, Any]) -> str:
    article = record["article"]
    if isinstance(article, list):
        article = "".join(article)
    is_html = isinstance(article, str) and article.lstrip().startswith("<")
    return html_text(article) if is_html else article


def _listed(record: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if "gold_labels" in record:
        return _from_columns(record)
    return _from_numbers(record) if "question1" in record else record["questions"]


def _from_numbers(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in (f"question{i}" for i in itertools.count(1)):
        if name not in record:
            return
        yield {
            "question": record[name],
            "options": [record[f"{name}option{i}"].strip() for i in range(1, 5)],
            "gold_label": record[f"{name}_gold_label"],
        }


def _from_columns(record: dict[str, Any]) -> list[dict[str, Any]]:
    columns = [record[name] for name in ("questions", "options", "gold_labels")]
    if len({*map(len, columns)}) != 1:
        raise UserError(
            f"{len(columns[0])} questions have {len(columns[2])} gold_labels; take another split"
        )
    names = ("question", "options", "gold_label")
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


QUALITY = QuestionSet(
    "quality", "arXiv 2112.08608", _parse, ("accuracy", "accuracy_per_byte"), answer_tokens=0
)

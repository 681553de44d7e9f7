"""QuALITY: questions with four options about stories (arXiv 2112.08608)."""

from __future__ import annotations

from typing import Any

from famjax.core.errors import UserError
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
    """Parse QuALITY's {article, questions: [{question, options, gold_label}]}, or as Qasper's.

    TFDS has {article, questions: [question], options: [options], gold_labels: [label]}.
    """
    if "instructions" in record:
        return with_options(parse_leval(record))
    if "output" in record:
        return with_options(parse_scrolls(record))
    questions = []
    for asked in _from_columns(record) if "gold_labels" in record else record["questions"]:
        options = strings(asked["options"])
        label = asked["gold_label"]
        if not isinstance(label, int) or not 1 <= label <= len(options):
            raise UserError(f"gold_label {label!r} is none of 1 to {len(options)}")
        right = options[label - 1]
        listed = "".join(f"\n ({chr(65 + i)}) {text}" for i, text in enumerate(options))
        prompt = question_prompt(f"{asked['question'].strip()}\n{listed}")
        questions.append(Asked(prompt, (right,), options))
    return AskedDocument(record["article"], tuple(questions))


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

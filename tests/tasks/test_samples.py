"""docs/samples.md shows what the tasks ask, of every task on long documents."""

from __future__ import annotations

from pathlib import Path

from samples import render

from famjax.tasks import TASKS
from famjax.tasks.long.document import LongTask
from famjax.tasks.questions.question_set import QuestionSet

PAGE = Path(__file__).parents[2] / "docs/samples.md"


def test_the_page_is_what_the_tasks_generate() -> None:
    assert PAGE.read_text() == render()


def test_every_task_on_long_documents_has_an_example() -> None:
    shown = {line.removeprefix("### ") for line in PAGE.read_text().splitlines()}
    tasks = [name for name, task in TASKS.items() if isinstance(task, LongTask | QuestionSet)]
    assert {"passkey", *tasks} <= shown

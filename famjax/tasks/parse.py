"""Parsing of lists of tasks and lengths, as given to `famjax eval` and in `eval.tasks`."""

from __future__ import annotations

from famjax.core.errors import UserError, did_you_mean
from famjax.tasks import TASKS

HOLDOUT = "holdout"


def parse_tasks(text: str, option: str = "--tasks") -> list[tuple[str, str]]:
    """Parse "passkey,text:a.txt,b.txt" into (name, files) pairs.

    A part that is not the name of a task is another file of the task before it.

    Args:
      text: tasks, separated by commas.
      option: option or key that the text was given to, for errors.

    Raises:
      UserError: a task is unknown, or there are only commas.
    """
    tasks: list[tuple[str, str]] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, colon, files = part.partition(":")
        task = TASKS.get(name)
        if task and (not colon or task.files):
            if not files and (colon or task.needs_files):
                what = "tasks" if name == "lm_eval" else "files"
                raise UserError(f"{name}: names no {what}; write {name}:{task.files}")
            tasks.append((name, files or (HOLDOUT if name == "text" else "")))
        elif tasks and tasks[-1][1] not in ("", HOLDOUT):
            tasks[-1] = (tasks[-1][0], f"{tasks[-1][1]},{part}")
        else:
            raise UserError(
                f"unknown task {part!r}{did_you_mean(name, TASKS)} (known: text:FILES, "
                f"text:holdout, {', '.join(name for name in TASKS if name != 'text')})"
            )
    if text and not tasks:
        raise UserError(f"{option} {text}: names no task; leave it out for what was trained on")
    return tasks


def parse_lengths(text: str, option: str = "--lengths") -> list[int]:
    """Parse "256,1024" into sorted lengths."""
    try:
        lengths = [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{option} {text}: write whole numbers, 256,1024") from None
    if min(lengths) < 1:
        raise UserError(f"{option} {text}: must be at least 1")
    return sorted(set(lengths))

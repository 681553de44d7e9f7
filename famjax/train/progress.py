"""How far a run is: a live line on a terminal, plain lines in a log.

Everything goes to standard error, so that standard output stays a program's own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import rich.progress
from rich.console import Console

# Seconds between plain lines: a log of a day's run stays below 10,000 lines.
PLAIN_INTERVAL = 10.0

_FORMATS: dict[str, Callable[[Any], str]] = {
    "loss": lambda x: f"loss {x:.4f}",
    "accuracy": lambda x: f"accuracy {x:.1%}",
    "length": lambda x: f"rows of {x:,} tokens",
    "tokens_per_second": lambda x: f"{_short(x)} tokens/s",
    "data_wait": lambda x: f"data {x:.0%} step {1 - x:.0%}",
}


class Progress:
    """Shows the steps of a run while they are made.

    Args:
      total: steps of the whole run.
      start: steps done before this process, 0 unless resumed.
      quiet: show no progress; notes are still shown.
      silent: show nothing at all.
    """

    def __init__(
        self, total: int, start: int = 0, quiet: bool = False, silent: bool = False
    ) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=silent)
        live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._view: _Silent | _Live | _Plain
        if quiet:
            self._view = _Silent()
        elif live:
            self._view = _Live(self._console, total, start)
        else:
            self._view = _Plain(self._console, total)
        self._clock = _Clock(total)

    def update(self, step: int, **fields: float) -> None:
        """Show that `step` steps are done.

        Args:
          step: steps done in the whole run.
          **fields: what is known about the last of them. `loss`, `accuracy` (a fraction),
            `length` (tokens of a row), `tokens_per_second`, `data_wait` (fraction of the time the
            loop waited for data) have formats of their own, others are shown as name and number.
        """
        left = self._clock.left(step)
        parts = [_text(name, value) for name, value in fields.items()]
        self._view.update(step, ", ".join([*parts, f"{_duration(left)} left"]))

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False)

    def __enter__(self) -> Progress:
        self._view.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._view.stop()


class _Silent:
    def start(self) -> None: ...

    def update(self, step: int, text: str) -> None: ...

    def stop(self) -> None: ...


class _Live:
    def __init__(self, console: Console, total: int, start: int) -> None:
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.completed}/{task.total}"),
            rich.progress.BarColumn(bar_width=20),
            rich.progress.TextColumn("{task.description}", markup=False),
            console=console,
        )
        self._task = self._bar.add_task("compiling", total=total, completed=start)

    def start(self) -> None:
        self._bar.start()

    def update(self, step: int, text: str) -> None:
        self._bar.update(self._task, completed=step, description=text, refresh=True)

    def stop(self) -> None:
        self._bar.stop()


class _Plain:
    """The first line and the last always; between them at most one every PLAIN_INTERVAL."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._due = -math.inf
        self._pending = ""

    def start(self) -> None: ...

    def update(self, step: int, text: str) -> None:
        self._pending = f"{step}/{self._total} {text}"
        if time.monotonic() >= self._due or step >= self._total:
            self.stop()
            self._due = time.monotonic() + PLAIN_INTERVAL

    def stop(self) -> None:
        if self._pending:
            self._console.print(self._pending, markup=False)
            self._pending = ""


class _Clock:
    """Time left at the mean speed since the first update, which is the one that compiled."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._first: tuple[int, float] | None = None

    def left(self, step: int) -> float | None:
        """Seconds; None before the speed is known."""
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        done = step - self._first[0]
        if step >= self._total:
            return 0.0
        return (now - self._first[1]) / done * (self._total - step) if done > 0 else None


def _text(name: str, value: float) -> str:
    return _FORMATS[name](value) if name in _FORMATS else f"{name} {value:.4g}"


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "? time"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

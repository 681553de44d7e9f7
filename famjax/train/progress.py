"""Progress of a run: a live line on a terminal, plain lines in a log.

Everything is written to standard error and leaves standard output to the program.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import rich.progress
from rich.console import Console
from rich.spinner import Spinner
from rich.text import Text

from famjax.core.ticker import format_seconds

# Seconds between plain lines, so that the log of a run of a day has fewer than 10,000 lines.
PLAIN_INTERVAL = 10.0

_FORMATS: dict[str, Callable[[Any], str]] = {
    "loss": lambda x: f"loss {x:.4f}",
    "accuracy": lambda x: f"accuracy {x:.1%}",
    "length": lambda x: f"rows of {x:,} tokens",
    "tokens_per_second": lambda x: f"{_short(x)} tokens/s",
    "data_wait": lambda x: f"data {x:.0%} step {1 - x:.0%}",
}


class Progress:
    """Shows the progress of a run.

    Args:
      total: number of steps of the whole run.
      start: number of steps done before this process; 0 unless the run is resumed.
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
        self._clock, self._quiet = _TimeLeft(total), quiet

    @contextmanager
    def compiling(self, what: str, step: int) -> Iterator[None]:
        """Show that `what` is being compiled after `step` steps, and then how long it took.

        This time is excluded from the estimate of the remaining time.
        """
        begin = time.monotonic()
        self._view.compiling(what)
        yield
        took = time.monotonic() - begin
        self._clock.skip(step, took)
        self._view.compiled(what, format_seconds(took))

    def update(self, step: int, **fields: float) -> None:
        """Show that `step` steps are done.

        Args:
          step: steps done in the whole run.
          **fields: metrics of the last step. `loss`, `accuracy` (a fraction), `length` (tokens of a
            row), `tokens_per_second` and `data_wait` (fraction of the time that the loop waited for
            data) have formats of their own; others are shown as name and number.
        """
        seconds = self._clock.estimate(step)
        parts = [_format_field(name, value) for name, value in fields.items()]
        parts += [] if seconds is None else [f"{_duration(seconds)} left"]
        self._view.update(step, ", ".join(parts))

    def note_unless_quiet(self, text: str) -> None:
        """Print a permanent line, unless progress is off (`quiet`)."""
        if not self._quiet:
            self.note(text)

    def note(self, text: str) -> None:
        """Print a permanent line."""
        self._console.print(text, markup=False)

    def __enter__(self) -> Progress:
        self._view.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._view.stop()


class _Silent:
    def start(self) -> None: ...

    def compiling(self, what: str) -> None: ...

    def compiled(self, what: str, took: str) -> None: ...

    def update(self, step: int, text: str) -> None: ...

    def stop(self) -> None: ...


class _Live:
    def __init__(self, console: Console, total: int, start: int) -> None:
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.completed}/{task.total}"),
            rich.progress.BarColumn(bar_width=20),
            _StatusColumn(),
            console=console,
        )
        self._console = console
        self._task = self._bar.add_task("", total=total, completed=start, since=None)

    def start(self) -> None:
        self._bar.start()

    def compiling(self, what: str) -> None:
        self._bar.update(self._task, description=f"compiling {what}", since=time.monotonic())

    def compiled(self, what: str, took: str) -> None:
        self._bar.update(self._task, description="", since=None)
        self._console.print(f"compiled {what} in {took}", markup=False)

    def update(self, step: int, text: str) -> None:
        self._bar.update(self._task, completed=step, description=text, refresh=True)

    def stop(self) -> None:
        self._bar.stop()


class _StatusColumn(rich.progress.ProgressColumn):
    """The metrics of the last step, or the current compilation with a spinner and its duration."""

    def __init__(self) -> None:
        super().__init__()
        self._spinner = Spinner("dots")

    def render(self, task: rich.progress.Task) -> Text:
        since = task.fields["since"]
        if since is None:
            return Text(task.description)
        frame = self._spinner.render(task.get_time())
        return Text(f"{frame} {task.description}, {format_seconds(time.monotonic() - since)}")


class _Plain:
    """Prints the first and the last line, and in between at most one line every PLAIN_INTERVAL."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._due = -math.inf
        self._pending = ""

    def start(self) -> None: ...

    def compiling(self, what: str) -> None:
        self._console.print(f"compiling {what}", markup=False)

    def compiled(self, what: str, took: str) -> None:
        self._console.print(f"compiled in {took}", markup=False)

    def update(self, step: int, text: str) -> None:
        self._pending = f"{step}/{self._total} {text}"
        if time.monotonic() >= self._due or step >= self._total:
            self.stop()
            self._due = time.monotonic() + PLAIN_INTERVAL

    def stop(self) -> None:
        if self._pending:
            self._console.print(self._pending, markup=False)
            self._pending = ""


class _TimeLeft:
    """Estimates the remaining time from the mean speed since the first update or compilation.

    The time of compilations is excluded.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._first: tuple[int, float] | None = None

    def skip(self, step: int, took: float) -> None:
        """Exclude the last `took` seconds, in which a program was compiled after `step` steps."""
        if self._first is None:
            self._first = (step, time.monotonic())
        else:
            self._first = (self._first[0], self._first[1] + took)

    def estimate(self, step: int) -> float | None:
        """Return the remaining seconds; None before the speed is known."""
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        done = step - self._first[0]
        if step >= self._total:
            return 0.0
        return (now - self._first[1]) / done * (self._total - step) if done > 0 else None


def _format_field(name: str, value: float) -> str:
    return _FORMATS[name](value) if name in _FORMATS else f"{name} {value:.4g}"


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

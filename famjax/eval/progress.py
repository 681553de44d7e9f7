"""Progress of streaming on standard error, shown after five seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from famjax.core.ticker import format_seconds, ticker

# seconds between updates of a live line, and between lines of a log
_LIVE_INTERVAL, _PLAIN_INTERVAL = 0.2, 10.0


class TokenProgress:
    """Shows tokens, tokens/s, and the remaining time if the total is known.

    Args:
      what: label at the start of each line.
      total: total work, in the units of `part` in `advance`; None if unknown.
      quiet: whether to show nothing.
      patience: seconds before the first output.
      answers: total number of answers, if there are any.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        quiet: bool = False,
        patience: float = 5.0,
        answers: int = 0,
    ):
        self._what, self._total, self._quiet, self._patience = what, total, quiet, patience
        self._total_answers = answers
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._console = console
        live = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, auto_refresh=False, transient=True) if live else None
        self._tokens = self._part = self._answers = 0
        self._due = time.monotonic() + patience
        # tokens and part at the first advance; rates start there, to exclude compilation
        self._first: tuple[int, int] | None = None
        # time of the last event, and the seconds of reading and of answering before it
        self._last = self._reading = self._answering = 0.0

    def advance(self, tokens: int, part: int | None = None) -> None:
        """Count tokens, and the `part` of the total that they are, by default the same number."""
        self._tokens += tokens
        self._part += tokens if part is None else part
        now = time.monotonic()
        if self._first is None:
            self._first = self._tokens, self._part
        else:
            self._reading += now - self._last
        self._last = now
        self._show(now)

    def answer(self, count: int) -> None:
        """Count answers; the time that they take goes into the estimate of what is left.

        With 0, only the time is shown anew, for an answer that takes long.
        """
        self._answers += count
        now = time.monotonic()
        if self._first is not None:
            self._answering += now - self._last
            self._last = now
            self._show(now)

    def _show(self, now: float) -> None:
        if self._quiet or now < self._due:
            return
        if self._live is None:
            self._due = now + _PLAIN_INTERVAL
            self._console.print(self._line(), markup=False)
        else:
            self._due = now + _LIVE_INTERVAL
            self._live.start()
            self._live.update(Text(self._line()), refresh=True)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Show that the body of the `with` compiles, and then how long it took, if it takes long.

        The body should be the first call of a jitted function.
        """
        with self._show_compiling():
            yield
        # rates exclude it after the first advance, too
        self._last = time.monotonic()

    @contextmanager
    def _show_compiling(self) -> Iterator[None]:
        if self._quiet:
            yield
            return
        label = f"{self._what}: compiling"
        spinner = Spinner("dots", label)
        shown: list[float] = []

        def show(took: float) -> None:
            if self._live is not None:
                spinner.update(text=f"{label}, {format_seconds(took)}")
                self._live.start()
                self._live.update(spinner, refresh=True)
            elif not shown:
                self._console.print(label, markup=False)
            shown.append(took)

        begin = time.perf_counter()
        with ticker(show, self._patience, _LIVE_INTERVAL):
            yield
        if shown:
            took = format_seconds(time.perf_counter() - begin)
            self._console.print(f"{self._what}: compiled in {took}", markup=False)
            if self._live is not None:
                self._live.update(Text(""), refresh=True)

    def _line(self) -> str:
        line = f"{self._what}: {self._tokens:,} tokens"
        tokens, part = self._first or (0, 0)
        if self._reading:
            line += f", {(self._tokens - tokens) / self._reading:,.0f} tokens/s"
        if self._total and self._part > part:
            rest = max(self._total - self._part, 0)
            line += f", {1 - rest / self._total:.0%}"
            seconds = self._reading * rest / (self._part - part)
            if self._answers:
                rest = max(self._total_answers - self._answers, 0)
                seconds += self._answering * rest / self._answers
            # without an answer so far, nobody knows how long they take
            what = "left" if self._answers or not self._total_answers else "left to read"
            line += f", {timedelta(seconds=round(seconds))} {what}"
        if self._total_answers:
            line += f", {self._answers:,} of {self._total_answers:,} answers"
        return line

    def __enter__(self) -> TokenProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

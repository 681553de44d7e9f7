"""The rows of metrics.jsonl: means of metrics over the steps since the last row."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from famjax.core.types import Array
from famjax.optimizers import make_schedule
from famjax.tasks.parse import parse_tasks
from famjax.train.hooks import Hook
from famjax.train.saving import check_finite
from famjax.train.session import Session
from famjax.train.state import MetricSums

# field of a row: seconds of training since the run started, over all calls
TRAIN_SECONDS = "train_seconds"
# fields of a row that the progress line shows
_SHOWN = (
    "loss",
    "accuracy",
    "longest",
    "length",
    "heldout_bits_per_byte",
    "tokens_per_second",
    "data_wait",
)


class Log(Hook):
    """Writes rows of metrics, and counts the valid tokens and the seconds since the run started.

    The seconds are those of all calls that led to the current step, without the time between them.
    """

    def __init__(self) -> None:
        self._tokens, self._seconds_before = 0.0, 0.0
        self._begin = time.perf_counter()

    def measure(
        self, session: Session, inspected: dict[str, Array]
    ) -> tuple[dict[str, float], float]:
        """Wait for the device; return a row without timing, and the number of tokens in a step."""
        config = session.config
        with session.clock.waiting("device"):
            sums, inspected = jax.device_get((session.state.totals, inspected))
        self._tokens += float(sums.tokens)
        row = {
            **summarize(sums, config.train.match),
            **{name: float(value) for name, value in inspected.items()},
        }
        schedule = make_schedule(config.optimizer, config.train.steps)
        row["learning_rate"] = float(schedule(session.step - 1))
        row["tokens"] = self._tokens
        if config.train.bptt_double_every:
            row["length"] = session.length
        return row, float(sums.tokens / sums.steps)

    def write(self, session: Session, writer: Any, row: dict[str, float], tokens: float) -> None:
        """Write a row with its timing, show it, and reset the sums to zero.

        Args:
          writer: the writer from `hosts.make_metrics_writer`.
          tokens: number of tokens in a step.
        """
        row = {**row, **session.clock.lap(tokens, session.config), TRAIN_SECONDS: self._seconds}
        writer.write(session.step, row)
        shown = {*_SHOWN, *(name for name, _ in parse_tasks(session.config.eval.tasks))}
        session.progress.update(session.step, **{k: v for k, v in row.items() if k in shown})
        if line := session.source.epoch_report():
            session.progress.note(line)
        check_finite(session)
        zeros = _make_zeros(session.program.shardings.totals)
        session.state = session.state._replace(totals=zeros())

    @property
    def _seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._begin

    def state_dict(self, session: Session) -> dict[str, Any]:
        return {"tokens": self._tokens, TRAIN_SECONDS: self._seconds}

    def load_state_dict(self, session: Session, saved: dict[str, Any]) -> None:
        self._tokens = float(saved["tokens"])
        # checkpoints of older versions do not have it
        self._seconds_before = saved.get(TRAIN_SECONDS, 0.0)


@functools.lru_cache(maxsize=1)
def _make_zeros(shardings: MetricSums) -> Callable[[], MetricSums]:
    """Return a compiled function, which each log calls: a new one would be compiled each time."""
    return jax.jit(MetricSums.zeros, out_shardings=shardings)


def summarize(sums: MetricSums, match: bool = False) -> dict[str, float]:
    """Return an interval's metrics: loss in nats, accuracy, bits per byte, and gradient norm.

    Args:
      match: `train.match`; the loss is then a matching error, and nothing is predicted, so only the
        loss and the gradient norm are returned.
    """

    def mean(total: Any, of: Any) -> float:
        return float(total / of) if of else 0.0

    means = {
        "loss": mean(sums.loss, sums.weight),
        "accuracy": mean(sums.right, sums.answers),
        "bits_per_byte": mean(sums.nats, sums.bytes) / float(np.log(2)),
        "grad_norm": mean(sums.grad_norm, sums.steps),
    }
    return {k: v for k, v in means.items() if not match or k in ("loss", "grad_norm")}

"""Where the time of the training loop goes, and the rates that follow from it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from famjax.config.resolved import ResolvedConfig
from famjax.train import flops


class Clock:
    """Where the loop's time goes: it waits for data, it waits for the device, or it works itself.

    What is waited for runs at the same time, and so does the device while the host works: of a
    loop that keeps its device busy nearly all time is waiting for it.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.begin, self.steps = time.perf_counter(), 0
        self.waited = {"data": 0.0, "device": 0.0}

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Count the time inside as waiting for "data" or for the "device"."""
        begin = time.perf_counter()
        yield
        self.waited[what] += time.perf_counter() - begin

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Do not count the time inside."""
        begin = time.perf_counter()
        yield
        self.begin += time.perf_counter() - begin

    def lap(self, tokens: float, config: ResolvedConfig) -> dict[str, float]:
        """Return rates since the last lap, and the seconds of a step, the sum of its three parts.

        {} if no step was made in it but the one that compiled.

        Args:
          tokens: of a step.
          config: what is trained.
        """
        if not self.steps:
            return {}
        seconds = time.perf_counter() - self.begin
        rate = tokens * self.steps / seconds
        data, device = (self.waited[what] / self.steps for what in ("data", "device"))
        # measured at the first lap only, and before the next one begins
        peak = flops.peak_flops(jax.devices()[0]) or flops.measure_peak_flops(config.model.dtype)
        shares = {
            "tokens_per_second": rate,
            "model_flops_utilisation": rate
            * flops.step_flops(config)
            / (peak * jax.device_count()),
            "data_wait": data * self.steps / seconds,
            "step_seconds": seconds / self.steps,
            "data_seconds": data,
            "host_seconds": seconds / self.steps - data - device,
            "device_seconds": device,
        }
        self.start()
        return shares

"""How the training loop spends its time, and rates such as tokens per second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from famjax.config.resolved import ResolvedConfig
from famjax.train import flops


class Clock:
    """Measures how long the loop waits for data, waits for the device, or works on the host itself.

    Data loading and the device also run while the loop does something else. So a loop that keeps
    its device busy spends nearly all of its time waiting for the device.
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
        """Exclude the time inside from all counts."""
        begin = time.perf_counter()
        yield
        self.begin += time.perf_counter() - begin

    def lap(self, tokens: float, config: ResolvedConfig) -> dict[str, float]:
        """Return rates since the last lap, and the seconds of a step in total and for each part.

        The parts are waiting for data, waiting for the device, and work on the host. The result is
        {} if the lap has no step except the one that was compiled.

        Args:
          tokens: number of tokens in a step.
          config: the config that is trained.
        """
        if not self.steps:
            return {}
        seconds = time.perf_counter() - self.begin
        rate = tokens * self.steps / seconds
        data, device = (self.waited[what] / self.steps for what in ("data", "device"))
        # the peak is measured at the first lap only, and outside the time of any lap
        peak = flops.all_devices_peak_flops(config.model.dtype)
        shares = {
            "tokens_per_second": rate,
            "model_flops_utilization": rate * flops.step_flops(config) / peak,
            "data_wait": data * self.steps / seconds,
            "step_seconds": seconds / self.steps,
            "data_seconds": data,
            "host_seconds": seconds / self.steps - data - device,
            "device_seconds": device,
        }
        self.start()
        return shares

"""Profiles of chosen steps: a trace of device and host, and a profile of device memory.

    RUN/profile/plugins/profile/*/*.xplane.pb       for XProf and TensorBoard
    RUN/profile/plugins/profile/*/*.trace.json.gz   the same for ui.perfetto.dev
    RUN/profile/memory_000012.prof                  for pprof

Profiling does not change the results of the run: the loop only waits for the device before and
after the profiled steps. With several processes only process 0 is profiled.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from famjax.config.schema import Config
from famjax.core.errors import UserError

PROFILE = "profile"


class Profiler:
    """Profiles the steps of a run that `config.profile` names, and reports where the files are.

    Used as a context manager, it stops a running trace on exit, also after an exception.

    Args:
      config: config of the run.
      folder: folder of the run.
      report: called with a line for each profile written.
    """

    def __init__(self, config: Config, folder: Path, report: Callable[[str], None]) -> None:
        self.folder, self.report = folder / PROFILE, report
        self.first, self.last = trace_steps(config)
        self.memory = config.profile.memory
        self.step = 0  # steps done
        self.trace_start: int | None = None  # steps done when the running trace started

    def wants(self, step: int) -> bool:
        """Return whether a profile starts or ends after this many steps."""
        if jax.process_index() > 0:
            return False
        return step == self.memory > 0 or step == self.last > 0 or self.should_start(step)

    def should_start(self, step: int) -> bool:
        """Return whether a trace starts after a step.

        A run that resumes within the traced steps traces the rest of them, including the
        compilation of the step.
        """
        return self.first <= step < self.last and self.trace_start is None

    def tick(self, step: int) -> None:
        """Start or end profiles after this many steps, which the device must have finished."""
        self.step = step
        if not self.wants(step):
            return
        if step == self.last:
            self.stop()
        if step == self.memory > 0:
            self.write_memory()
        if self.should_start(step):
            self.folder.mkdir(exist_ok=True)
            jax.profiler.start_trace(self.folder)
            self.trace_start = step

    def stop(self) -> None:
        """Stop the running trace, if any, and report where it is."""
        if self.trace_start is None:
            return
        trace_start, self.trace_start = self.trace_start, None
        jax.profiler.stop_trace()
        self.report(
            f"trace of steps {trace_start}:{self.step}: pip install xprof && xprof --logdir "
            f"{self.folder}; or open the newest .trace.json.gz in it at ui.perfetto.dev"
        )

    def write_memory(self) -> None:
        """Write a profile of the arrays on the devices, and the source lines that created them."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"memory_{self.step:06d}.prof"
        jax.profiler.save_device_memory_profile(path)
        self.report(f"device memory after step {self.step}: pprof -top {path}")

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def trace_steps(config: Config) -> tuple[int, int]:
    """Return the numbers of steps after which the trace starts and ends; (0, 0) for no trace."""
    first, _, last = (config.profile.steps or "0:0").partition(":")
    return int(first), int(last)


def check_profile_steps(before: Config, config: Config, step: int) -> None:
    """Raise a `UserError` if a resumed run is asked to profile steps that it has already done.

    If `config.profile` is unchanged, this is no error: the resumed run traces the remaining steps.

    Args:
      before: the config with which the previous steps were run.
      step: number of steps done.
    """
    if config.profile == before.profile:
        return
    hint = f"before step {step}, where the run resumes; choose later steps, or leave it out"
    if config.profile.steps and trace_steps(config)[0] < step:
        raise UserError(f"profile.steps={config.profile.steps}: begins {hint}")
    if 0 < config.profile.memory < step:
        raise UserError(f"profile.memory={config.profile.memory}: is {hint}")

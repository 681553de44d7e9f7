"""What is to be seen of chosen steps: a trace of what device and host did, and what lies in memory.

    RUN/profile/plugins/profile/*/*.xplane.pb       for XProf and TensorBoard
    RUN/profile/plugins/profile/*/*.trace.json.gz   the same for ui.perfetto.dev
    RUN/profile/memory_000012.prof                  for pprof

The numbers of the run stay as they are: around what is looked at the loop waits for the device,
and nothing else. Of several processes the first is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from famjax.core.config import Config
from famjax.core.errors import UserError

PROFILE = "profile"


class Profiler:
    """Looks at the steps of a run that `config.profile` names, and says where to look.

    Leaving it as a context ends a trace that has begun, whatever the loop ended by.

    Args:
      config: the experiment.
      folder: of the run.
      report: takes a line for each thing written.
    """

    def __init__(self, config: Config, folder: Path, report: Callable[[str], None]) -> None:
        self.folder, self.report = folder / PROFILE, report
        self.first, self.last = trace_steps(config)
        self.memory = config.profile.memory
        self.step = 0  # steps that are done
        self.trace_start: int | None = None  # of these, when the trace that is under way began

    def wants(self, step: int) -> bool:
        """Return whether something begins or ends when so many steps are done."""
        if jax.process_index() > 0:
            return False
        return step == self.memory > 0 or step == self.last > 0 or self.should_start(step)

    def should_start(self, step: int) -> bool:
        """Return whether a trace begins behind a step: also behind one that a resumed run goes on
        from, of whose trace a part is left; there it has the step's compilation too."""
        return self.first <= step < self.last and self.trace_start is None

    def tick(self, step: int) -> None:
        """Begin or end what is to begin or end when so many steps are done, by the device too."""
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
        """End the trace that has begun, if any, and say where it lies."""
        if self.trace_start is None:
            return
        trace_start, self.trace_start = self.trace_start, None
        jax.profiler.stop_trace()
        self.report(
            f"trace of steps {trace_start}:{self.step}: pip install xprof && xprof --logdir "
            f"{self.folder}; or open the newest .trace.json.gz in it at ui.perfetto.dev"
        )

    def write_memory(self) -> None:
        """Write which arrays the devices hold, and by which lines they were made."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"memory_{self.step:06d}.prof"
        jax.profiler.save_device_memory_profile(path)
        self.report(f"device memory after step {self.step}: pprof -top {path}")

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def trace_steps(config: Config) -> tuple[int, int]:
    """Return the steps that are done when the trace begins and when it ends; (0, 0) for none."""
    first, _, last = (config.profile.steps or "0:0").partition(":")
    return int(first), int(last)


def check_profile_steps(before: Config, config: Config, step: int) -> None:
    """Raise a `UserError` if steps are to be looked at that a resumed run has done already.

    The command that ran before is not refused: it goes on where it was, and traces what is left.

    Args:
      before: the config with which these steps were done.
      step: how many they are.
    """
    if config.profile == before.profile:
        return
    hint = f"before step {step}, where the run goes on; take later steps, or leave it out"
    if config.profile.steps and trace_steps(config)[0] < step:
        raise UserError(f"profile.steps={config.profile.steps}: begins {hint}")
    if 0 < config.profile.memory < step:
        raise UserError(f"profile.memory={config.profile.memory}: is {hint}")

"""One training of an experiment, and its measurement."""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import famjax
from famjax.config.schema import Config
from famjax.core.json_files import write_json
from famjax.reproduce.experiment import Experiment, Size

# of the data that experiments share, and of trainings that several continue
DATA, BASES = "data", "bases"
RESULT = "result.json"
# variants continue a training with other documents than it had
_CONTINUED = 1000


@dataclass(frozen=True)
class Cell:
    """A training.

    Attributes:
      root: folder of all experiments.
      experiment: id.
      variant: name; "" is the base that the variants of this seed continue.
      seed: of the training.
      size: whose.
      given: the user's overrides.
    """

    root: str
    experiment: str
    variant: str
    seed: int
    size: Size = "here"
    given: tuple[str, ...] = ()

    def folder(self, experiment: Experiment) -> Path:
        """Return its folder; that of a base is shared by experiments with an equal one."""
        root = Path(self.root)
        if not self.variant:
            name = experiment.base_config_name(self.size)
            return root / BASES / f"{name}-{_digest(self.config(experiment))}-{self.seed}"
        name = "-".join(re.findall("[a-z0-9]+", self.variant.lower()))
        parts = [self.experiment, *(["paper"] if self.size == "paper" else [])]
        if self.given:
            # apart: results with the user's overrides are not the experiment's
            parts.append("with-" + _digest(sorted(self.given)))
        return root.joinpath(*parts, name, f"seed-{self.seed}")

    def config(self, experiment: Experiment) -> Config:
        """Return its training config; the data is prepared."""
        base, seed = self.base(experiment), self.seed
        if base is None:
            return self._config(experiment, seed)
        return self._config(experiment, seed + _CONTINUED, (f"init={base.folder(experiment)}",))

    def check(self, experiment: Experiment) -> None:
        """Raise a `UserError` for what cannot work, before anything is trained."""
        # without what it continues, which need not be there yet
        experiment.measure.check(self._config(experiment, self.seed))

    def _config(self, experiment: Experiment, seed: int, own: tuple[str, ...] = ()) -> Config:
        data = experiment.measure.prepare(Path(self.root) / DATA) if self.size == "here" else ()
        given = (*own, *data, *self.given)
        if not self.variant:
            return experiment.make_base_config(seed, self.size, given)
        return experiment.make_config(experiment.variant(self.variant), seed, self.size, given)

    def base(self, experiment: Experiment) -> Cell | None:
        """Return the training that this one continues, if any."""
        if not self.variant or not experiment.has_base(self.size):
            return None
        if not experiment.variant(self.variant).continues:
            return None
        return replace(self, variant="")


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def run_cell(cell: Cell, experiment: Experiment) -> None:
    """Train, or continue, and measure; write the result into the cell's folder."""
    import jax
    from flax import nnx

    from famjax.train.average import open_average
    from famjax.train.recipe import train_and_time

    folder, config = cell.folder(experiment), cell.config(experiment)
    run, seconds = train_and_time(config, folder, quiet=False)
    result: dict[str, Any] = {
        "experiment": cell.experiment,
        "variant": cell.variant,
        "seed": cell.seed,
        "train_seconds": seconds,
        "steps": run.step,
        "tokens": run.step * config.data.batch * config.data.length,
        "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(run.model, nnx.Param))),
        "device": jax.devices()[0].device_kind,
        "code": code_version(),
    }
    if cell.variant:
        begin = time.perf_counter()
        if experiment.averaged:
            run = open_average(folder, experiment.averaged)
        measured = experiment.measure.measure(run, Path(cell.root) / DATA, quiet=False)
        result["scores"] = dict(measured.scores)
        result["baselines"] = {name: dict(row) for name, row in measured.baselines.items()}
        result["evaluation_seconds"] = time.perf_counter() - begin
    write_json(folder / RESULT, result)


@functools.cache
def code_version() -> str:
    """Return the commit of the checkout that this is, "+" if its code was changed, else the
    version."""
    home = Path(famjax.__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(home), *arguments]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return said.stdout.strip()

    try:
        # not of the pages, which experiments write
        changed = git("status", "--porcelain", "--", "famjax", "configs")
        return git("describe", "--always", "--exclude=*") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return famjax.__version__

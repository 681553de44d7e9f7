"""One training of an experiment, and its measurement."""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import famjax
from famjax.config.keys import key_values
from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.core.json_files import RUN_AGAIN, read_json, write_json
from famjax.reproduce.experiment import ALL_SECONDS, OWN_SECONDS, Experiment, Size
from famjax.tasks import TASKS

# folders of the data and of the trainings, which experiments share
DATA, TRAININGS = "data", "trainings"
RESULT = "result.json"
# added to the seed, so that variants continue the base with other documents than the base had
_CONTINUED = 1000


@functools.cache
def code_version() -> str:
    """Return the version of the code: the last commit that changed it, or famjax's version.

    "+" and a digest follow if the checkout's code has changes that are not committed. What no
    training of an experiment uses does not count, nor do experiments: their configs have digests of
    their own (`Cell.settings`).
    """
    home = Path(famjax.__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(home), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return result.stdout.strip()

    try:
        # experiments write pages of docs/, by cli
        own = "reproduce/experiments", "reproduce/papers.py"
        unused = ("bench", "cli", "demo*.py", "export", *own)
        code = ("--", "famjax", "configs", *(f":(exclude)famjax/{one}" for one in unused))
        commit = git("log", "-1", "--format=%h", "--abbrev=10", *code)
        new = git("ls-files", "--others", "--exclude-standard", "--full-name", *code).splitlines()
        changed = git("diff", "HEAD", *code), [(name, (home / name).read_bytes()) for name in new]
        if not commit:  # installed within a repository of something else
            return famjax.__version__
        return commit + (f"+{_digest(changed)}" if any(changed) else "")
    except (OSError, subprocess.SubprocessError):
        return famjax.__version__


@dataclass(frozen=True)
class Cell:
    """One training of an experiment: of a variant, or of the base, with one seed.

    Attributes:
      root: folder of all experiments.
      experiment: id of the experiment.
      variant: name of the variant; "" is the base that variants of this seed continue.
      seed: seed of the training.
      size: size of the training: that of this repository ("here") or the paper's.
      given: the user's overrides.
      test: the user's test files, for a measure that takes some.
      code: version of the code that trains it.
    """

    root: str
    experiment: str
    variant: str
    seed: int
    size: Size = "here"
    given: tuple[str, ...] = ()
    test: str = ""
    code: str = field(default_factory=code_version)

    def training_folder(self, experiment: Experiment) -> Path:
        """Return the folder of the training, which all cells with equal configs share."""
        base, config = self.base(experiment), self._config(experiment, self.seed)
        continued = base and base.training_folder(experiment).name
        name = f"{config.name}-{_digest((config, continued, self.code))}-{self.seed}"
        return Path(self.root) / TRAININGS / name

    def folder(self, experiment: Experiment) -> Path:
        """Return the folder of the cell's result and log."""
        root = Path(self.root)
        if not self.variant:
            return self.training_folder(experiment)
        name = "-".join(re.findall("[a-z0-9]+", self.variant.lower()))
        parts = [self.experiment, *(["paper"] if self.size == "paper" else [])]
        if self.given:
            # in a folder of their own: results with the user's overrides are not the experiment's
            parts.append("with-" + _digest(sorted(self.given)))
        return root.joinpath(*parts, name, f"seed-{self.seed}")

    def config(self, experiment: Experiment) -> Config:
        """Prepare the data, and return the training config."""
        bases = self.bases(experiment)
        init = tuple(f"init={base.training_folder(experiment)}" for base in bases[:1])
        return self._config(experiment, self.seed + _CONTINUED * len(bases), init)

    def settings(self, experiment: Experiment) -> str:
        """Return a digest of everything that the result depends on, except for data and code.

        Keys at their defaults do not count, so that a new key changes no digest; their values
        belong to the code.
        """
        cells = (self, *self.bases(experiment))
        configs = [cell._make_config(experiment, self.seed, self.given) for cell in cells]
        defaults = key_values(Config())
        changed = [
            {key: value for key, value in key_values(config).items() if value != defaults[key]}
            for config in configs
        ]
        return _digest((changed, experiment.measure, experiment.averaged))

    def check(self, experiment: Experiment) -> None:
        """Raise a `UserError` before training if the cell cannot work."""
        # the config without its base, which need not be trained yet
        config = self._config(experiment, self.seed)
        experiment.measure.check(config)
        if not config.init and self.base(experiment) is None:
            _check_tokenizer(config)

    def _config(self, experiment: Experiment, seed: int, own: tuple[str, ...] = ()) -> Config:
        data = experiment.measure.prepare(Path(self.root) / DATA)
        return self._make_config(experiment, seed, (*own, *data, *self.given))

    def _make_config(self, experiment: Experiment, seed: int, given: tuple[str, ...]) -> Config:
        if not self.variant:
            return experiment.make_base_config(seed, self.size, given)
        return experiment.make_config(experiment.variant(self.variant), seed, self.size, given)

    def base(self, experiment: Experiment) -> Cell | None:
        """Return the cell that this training continues; None if there is none."""
        continued = experiment.variant(self.variant).continues if self.variant else None
        if continued is None or not (continued or experiment.has_base(self.size)):
            return None
        return replace(self, variant=continued)

    def bases(self, experiment: Experiment) -> list[Cell]:
        """Return the cell that this training continues, the one that that continues, and so on."""
        base = self.base(experiment)
        return [] if base is None else [base, *base.bases(experiment)]


def _check_tokenizer(config: Config) -> None:
    try:
        TASKS[config.data.task].make_tokenizer(config.data)
    except UserError as error:
        raise UserError(f"{error}; init=FOLDER takes a trained model with its own") from None


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def run_cell(cell: Cell, experiment: Experiment) -> None:
    """Train a cell, or continue its training, and measure it; write the result into its folder.

    A training that another cell with an equal config has finished is not repeated.
    """
    import jax
    from flax import nnx

    from famjax.reproduce.cost import run_flops
    from famjax.train.average import open_average
    from famjax.train.recipe import train_and_time

    if (code := code_version()) != cell.code:
        raise UserError(
            f"{cell.experiment}: the code was {cell.code} when this began, and is {code} now; run "
            "famjax reproduce again, from a checkout that stays as it is"
        )
    folder, config = cell.training_folder(experiment), cell.config(experiment)
    run, seconds = train_and_time(config, folder, quiet=False)
    result: dict[str, Any] = {
        "experiment": cell.experiment,
        "variant": cell.variant,
        "seed": cell.seed,
        "training": str(folder),
        "train_seconds": seconds,
        "steps": run.step,
        "tokens": run.step * config.data.batch * config.data.length,
        "flops": run_flops(run.config),
        "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(run.model, nnx.Param))),
        "device": jax.devices()[0].device_kind,
        "code": code,
        **_base_result(cell, experiment),
    }
    # of the training alone, for what continues it
    write_json(folder / RESULT, result)
    if cell.variant:
        begin = time.perf_counter()
        if experiment.averaged:
            run = open_average(folder, experiment.averaged)
        measured = experiment.measure.measure(run, Path(cell.root) / DATA, quiet=False)
        result["settings"] = cell.settings(experiment)
        result["scores"] = dict(measured.scores)
        if experiment.timed:
            whole = seconds + result.get("base_seconds", 0)
            result["scores"] |= {OWN_SECONDS: seconds, ALL_SECONDS: whole}
        result["baselines"] = {name: dict(row) for name, row in measured.baselines.items()}
        result["evaluation_seconds"] = time.perf_counter() - begin
        cell.folder(experiment).mkdir(parents=True, exist_ok=True)
        write_json(cell.folder(experiment) / RESULT, result)


def _base_result(cell: Cell, experiment: Experiment) -> dict[str, Any]:
    """Return the tokens, FLOPs, seconds and code version of the base that a cell continues."""
    base = cell.base(experiment)
    if base is None:
        return {}
    found = dict(read_json(base.training_folder(experiment) / RESULT, RUN_AGAIN))
    keys = {"base_tokens": "tokens", "base_seconds": "train_seconds"}
    # results from before 2026-11-29 have no FLOPs
    keys |= {"base_flops": "flops"} if "flops" in found else {}
    # a base may continue another one
    sums = {name: found[key] + found.get(name, 0) for name, key in keys.items()}
    return {**sums, "base_code": found["code"]}

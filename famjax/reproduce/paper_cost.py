"""What the trainings of an experiment cost at the paper's size."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from famjax.config.schema import Config, MeshConfig
from famjax.experiment.load import to_json
from famjax.plan.chips import CHIPS
from famjax.reproduce.experiment import Experiment
from famjax.tasks import TASKS
from famjax.train.flops import step_flops
from famjax.train.resolve import resolve

CHIP = CHIPS["h100"]
# sizes of the papers' vocabularies whose files come from the user, by `data.tokenizer`
VOCABULARIES = {"wikitext103.txt": 267_735, "joint.model": 32_000}


def paper_flops(experiment: Experiment, seeds: int, given: tuple[str, ...] = ()) -> float:
    """Return the model FLOPs of all trainings of an experiment at the paper's size.

    A training that several models share is counted once.

    Args:
      seeds: number of trainings of each model.
      given: the user's overrides.
    """
    if experiment.has_base("paper"):
        base = _with_vocab_size(experiment.make_base_config(0, "paper", given))
        with tempfile.TemporaryDirectory() as folder:
            # variants take their model from the base's folder; its vocabulary is not needed
            known = replace(base, data=replace(base.data, tokenizer="bytes"))
            (Path(folder) / "config.json").write_text(to_json(known), encoding="utf-8")
            configs = [base, *_variants(experiment, given, (f"init={folder}",))]
    else:
        configs = _variants(experiment, given)
    return seeds * sum(map(_training_flops, dict.fromkeys(configs)))


def _variants(
    experiment: Experiment, given: tuple[str, ...], init: tuple[str, ...] = ()
) -> list[Config]:
    """Return the variants' configs; `init` is given to those that continue the base."""
    configs = [
        experiment.make_config(variant, 0, "paper", (*given, *(init if variant.continues else ())))
        for variant in experiment.variants_at("paper")
    ]
    return [_with_vocab_size(config) for config in configs]


def chip_seconds(flops: float) -> float:
    """Return the seconds that one `CHIP` takes at its peak, a lower bound."""
    return flops / CHIP.flops


def _training_flops(config: Config) -> float:
    tokens = config.train.steps * config.data.batch * config.data.length
    return tokens * step_flops(resolve(replace(config, mesh=MeshConfig()), None, devices=1))


def _with_vocab_size(config: Config) -> Config:
    """Return the config with `model.vocab_size`, that of the paper if the file is the user's."""
    size = config.model.vocab_size or VOCABULARIES.get(config.data.tokenizer)
    if not size:
        size = TASKS[config.data.task].make_tokenizer(config.data).vocab_size
    return replace(config, model=replace(config.model, vocab_size=size))

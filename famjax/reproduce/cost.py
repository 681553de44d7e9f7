"""The model FLOPs of the trainings of experiments, and what they cost at the paper's size."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from famjax.config.schema import Config, MeshConfig
from famjax.experiment.load import to_json
from famjax.plan.chips import CHIPS
from famjax.reproduce.experiment import Experiment, Variant
from famjax.tasks import TASKS
from famjax.train.flops import step_flops
from famjax.train.resolve import resolve

CHIP = CHIPS["h100"]
# sizes of the papers' vocabularies whose files come from the user, by `data.tokenizer`
VOCABULARIES = {"wikitext103.txt": 267_735, "joint.model": 32_000}


def paper_flops(
    experiments: Sequence[Experiment],
    seeds: int,
    only: Collection[str] = (),
    given: tuple[str, ...] = (),
) -> float:
    """Return the model FLOPs of all trainings of experiments at the paper's size.

    A training that several models or experiments share is counted once.

    Args:
      seeds: number of trainings of each model.
      only: names of the models; () takes all.
      given: the user's overrides.
    """
    configs = dict.fromkeys(c for e in experiments for c in _trainings(e, only, given))
    return seeds * sum(map(run_flops, configs))


def _trainings(
    experiment: Experiment, only: Collection[str], given: tuple[str, ...]
) -> list[Config]:
    """Return the configs of an experiment's trainings, with the sizes of their vocabularies."""
    variants = _with_continued(experiment.variants_at("paper"), only)
    base = None
    if experiment.has_base("paper"):
        base = _with_vocab_size(experiment.make_base_config(0, "paper", given))

    def make(variant: Variant, *init: str) -> Config:
        config = experiment.make_config(variant, 0, "paper", (*given, *init))
        # folders differ although the trainings are the same, if their bases are
        return replace(_with_vocab_size(config), init=repr(base) if init else config.init)

    if base is None or all(v.continues is None for v in variants):
        return [make(variant) for variant in variants]
    with tempfile.TemporaryDirectory() as folder:
        # variants take their model from the base's folder; its vocabulary is not needed
        known = replace(base, data=replace(base.data, tokenizer="bytes"))
        (Path(folder) / "config.json").write_text(to_json(known), encoding="utf-8")
        init = f"init={folder}"
        return [base, *(make(v) if v.continues is None else make(v, init) for v in variants)]


def _with_continued(variants: Sequence[Variant], only: Collection[str]) -> list[Variant]:
    """Return the variants that `only` names, or all, and those whose trainings they continue."""
    by_name = {variant.name: variant for variant in variants}
    chosen = [name for name in by_name if not only or name in only]
    for name in chosen:  # which grows
        if (continued := by_name[name].continues) and continued not in chosen:
            chosen.append(continued)
    return [by_name[name] for name in chosen]


def chip_seconds(flops: float) -> float:
    """Return the seconds that one `CHIP` takes at its peak."""
    return flops / CHIP.flops


def trained_tokens(config: Config) -> int:
    """Return the number of tokens that a training reads."""
    return config.train.steps * config.data.batch * config.data.length


def run_flops(config: Config) -> float:
    """Return the model FLOPs of a training; the config has the size of its vocabulary."""
    return trained_tokens(config) * step_flops(
        resolve(replace(config, mesh=MeshConfig()), None, devices=1)
    )


def _with_vocab_size(config: Config) -> Config:
    """Return the config with `model.vocab_size`, that of the paper if the file is the user's."""
    size = config.model.vocab_size or VOCABULARIES.get(config.data.tokenizer)
    if not size:
        size = TASKS[config.data.task].make_tokenizer(config.data).vocab_size
    return replace(config, model=replace(config.model, vocab_size=size))

"""Trainings at the paper's size that end with 10,000 steps at a tenth of the rate (v3 7.6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from famjax.reproduce.experiment import Variant

# with back-propagation through whole rows, to which it has grown before
_STEPS = (
    "optimizer.warmup_steps=0",
    "train.steps=10000",
    "train.bptt_start=0",
    "train.bptt_double_every=0",
)


def finetuned(variants: Sequence[Variant], rate: float) -> tuple[Variant, ...]:
    """Return the models before they are finetuned, and the finetuned ones, which have the numbers.

    Args:
      variants: models that are trained from scratch at the paper's size.
      rate: learning rate of the finetuning.
    """
    models: list[Variant] = []
    for variant in variants:
        own = variant.overrides if variant.at_paper is None else variant.at_paper
        before = Variant(f"{variant.name} before finetuning", own, continues=None)
        last = (*own, f"optimizer.learning_rate={rate:g}", *_STEPS)
        models += [before, replace(variant, at_paper=last, continues=before.name)]
    return tuple(models)

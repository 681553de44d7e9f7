"""What experiments cost at the papers' sizes."""

from dataclasses import replace

import pytest

from famjax.experiment.size import count_params
from famjax.reproduce.cost import VOCABULARIES, chip_seconds, paper_flops
from famjax.reproduce.experiments import EXPERIMENTS


def test_the_cost_is_six_flops_per_weight_and_token_and_attention():
    experiment = EXPERIMENTS["fam-table-8"]
    flops, products = paper_flops([experiment], 1), 0
    for variant in experiment.variants:
        config = experiment.make_config(variant, 0, "paper")
        tokens = config.train.steps * config.data.batch * config.data.length
        # frozen weights have no gradient: two products in place of three
        each = 4 if config.model.lora.rank else 6
        products += each * count_params(config.model).weights * tokens
    # attention to a window and the adapters are the rest
    assert products < flops < 1.35 * products


def test_seeds_multiply_and_equal_trainings_are_counted_once():
    experiment = EXPERIMENTS["ft-table-1-copy"]
    one = paper_flops([experiment], 1)
    assert paper_flops([experiment], 3) == pytest.approx(3 * one)
    twice = (*experiment.variants, replace(experiment.variants[0], name="the same"))
    assert paper_flops([replace(experiment, variants=twice)], 1) == one
    more = paper_flops([experiment], 1, given=("train.steps=40000",))
    assert more == pytest.approx(2 * one)
    each = [paper_flops([experiment], 1, [variant.name]) for variant in experiment.variants]
    assert min(each) > 0
    assert sum(each) == pytest.approx(one)
    # Figures 4 and 6 train the same models
    figures = [EXPERIMENTS[f"t2r-figure-{n}"] for n in (4, 6)]
    assert paper_flops(figures, 1) == paper_flops(figures[:1], 1)


def test_a_base_counts_and_lends_its_vocabulary(monkeypatch):
    experiment = EXPERIMENTS["t2r-activations"]
    variants = experiment.variants
    configs = (
        experiment.make_base_config(0, "paper"),
        experiment.make_config(variants[0], 0, "paper"),
    )
    # bytes stands for the base's vocabulary
    assert [config.data.tokenizer for config in configs] == ["wikitext103.txt", "bytes"]
    steps = [config.train.steps * config.data.batch for config in configs]

    def costs():
        one, two = (paper_flops([replace(experiment, variants=variants[:n])], 1) for n in (1, 2))
        return 2 * one - two, two - one  # of the base, of a variant

    whole = costs()
    monkeypatch.setitem(VOCABULARIES, "wikitext103.txt", 100_000)
    saved = [before - after for before, after in zip(whole, costs(), strict=True)]
    assert min(saved) > 0
    assert saved[0] / saved[1] == pytest.approx(steps[0] / steps[1])


def test_seconds_are_those_at_the_peak():
    assert chip_seconds(989e12) == pytest.approx(1)

"""Verdicts on orderings, against intervals worked out by hand."""

import math

import numpy as np
import pytest

from famjax.cli.reproduce_figures import _error_bars
from famjax.cli.reproduce_tables import _paper_numbers
from famjax.reproduce.experiment import Variant
from famjax.reproduce.experiments import EXPERIMENTS
from famjax.reproduce.judge import judge, mean_and_interval


def test_the_interval_is_students():
    mean, half = mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2
    # t(0.975, 2) = 4.30265, the standard error is 1 / sqrt(3)
    assert half == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert math.isnan(mean_and_interval([1.0])[1])


@pytest.mark.parametrize(
    ("better", "worse", "higher", "margin", "verdict"),
    [
        ([0.9, 0.8, 0.85], [0.5, 0.4, 0.46], True, 0, "holds"),
        ([0.5, 0.4, 0.46], [0.9, 0.8, 0.85], True, 0, "does not hold"),
        # bits per byte: lower is better
        ([0.5, 0.4, 0.46], [0.9, 0.8, 0.85], False, 0, "holds"),
        ([0.9, 0.1, 0.5], [0.5, 0.4, 0.46], True, 0, "inconclusive"),
        # one seed tells nothing, however large the difference
        ([0.9], [0.1], True, 0, "inconclusive"),
        ([0.5, 0.401, 0.46], [0.501, 0.4, 0.46], True, 0.01, "holds"),
        ([0.9, 0.8, 0.85], [0.5, 0.4, 0.46], True, 0.01, "does not hold"),
        ([0.9, 0.1, 0.5], [0.5, 0.4, 0.46], True, 0.01, "inconclusive"),
    ],
)
def test_verdicts(better, worse, higher, margin, verdict):
    assert judge(better, worse, higher, margin).verdict == verdict


@pytest.mark.parametrize(
    ("better", "verdict"),
    [
        ([0.9, 0.8, 0.85], "holds"),
        ([0.51, 0.41, 0.47], "holds"),
        ([0.3, 0.2, 0.25], "does not hold"),
    ],
)
def test_a_model_that_may_be_better(better, verdict):
    worse = [0.5, 0.401, 0.46]
    assert judge(better, worse, True, 0.02, may_be_better=True).verdict == verdict


def test_seeds_are_paired():
    """The seeds differ by more than the models do, but each seed's difference has one sign."""
    found = judge([0.11, 0.52, 0.93], [0.10, 0.51, 0.92], True)
    assert found.verdict == "holds"
    assert found.difference == pytest.approx(0.01)


def test_error_bars_of_shares_end_at_0_and_100():
    mean, half = np.array([59.4, 0.0, 50.0]), np.array([110.1, np.nan, 10.0])
    below, above = _error_bars(mean, half, "%")
    np.testing.assert_allclose(below, [59.4, 0, 10])
    np.testing.assert_allclose(above, [40.6, 0, 10])
    below, above = _error_bars(mean, half, "")
    np.testing.assert_allclose(below, [110.1, 0, 10])
    np.testing.assert_allclose(above, below)


def test_the_papers_numbers_have_the_units_of_their_scores():
    def shown(name, **paper):
        figures = {key.replace("_", " "): value for key, value in paper.items()}
        return _paper_numbers(EXPERIMENTS[name], Variant("", paper=figures))

    assert shown("ft-v1-table-2", test=0.96) == "test 0.96"
    assert shown("ft-figure-5", bits_per_byte=0.96) == "bits per byte 0.96"
    assert shown("ft-figure-5", bits_per_character=0.96) == "bits per character 0.96"
    assert shown("ft-v1-table-6", perplexity=21.2, days=0.9) == "perplexity 21.2, days 0.9"
    assert shown("ft-table-1-copy", Char=0.591, answers=1.0) == "Char 59.1%, answers 100.0%"


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda e: e.id)
def test_shares_of_the_papers_are_from_0_to_1(experiment):
    for variant in experiment.variants:
        for name, value in variant.paper.items():
            assert experiment.paper_unit(name) == "" or 0 <= value <= 1

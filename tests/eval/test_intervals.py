"""Paired intervals: coverage, and what cancels."""

from __future__ import annotations

import numpy as np
import pytest

from famjax.cli.eval_labels import ends_of
from famjax.eval.intervals import mean_interval, mean_of_ratios, paired_interval, ratio_interval


def test_what_makes_a_document_hard_cancels() -> None:
    rng = np.random.default_rng(1)
    size, hard = rng.uniform(1e3, 1e5, 20), rng.uniform(0.5, 3, 20)
    difference, low, high = paired_interval((hard + 0.1) * size, hard * size, size)
    for value in (difference, low, high):
        assert value == pytest.approx(0.1 / np.log(2))


def test_the_interval_covers_the_true_difference_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    size = np.full(40, 1000.0)
    covered = 0
    for _ in range(200):
        noise = rng.normal(0.02, 0.05, 40) * size * np.log(2)
        difference, low, high = paired_interval(noise, 0 * noise, size, samples=1000)
        assert low < difference < high
        covered += low < 0.02 < high
    assert 0.88 < covered / 200 < 0.99


def test_sets_count_alike_however_many_documents_they_have() -> None:
    one, many = (np.array([1.0, 0.0]), np.ones(2)), (np.zeros(50), np.ones(50))
    mean, low, high = mean_of_ratios([one, many])
    assert mean == 0.25
    assert (low, high) == (0, 0.5)
    assert mean_of_ratios([one]) == ratio_interval(*one)


def test_equal_scores_of_sets_have_the_interval_of_as_many_documents() -> None:
    sets = [(np.zeros(8), np.ones(8)), (np.zeros(12), np.full(12, 2.0))]
    assert mean_of_ratios(sets)[1:] == mean_interval(np.zeros(20))[1:]


def test_empty_documents_are_not_drawn() -> None:
    """A sample of empty documents only would have no bytes."""
    nats, size = np.array([1.0, 70.0, 2.0, 3.0]), np.array([0, 100, 0, 0])
    assert paired_interval(nats, 0 * nats, size)[1:] == (None, None)
    nats, size = np.append(nats, 80.0), np.append(size, 100)
    found = paired_interval(nats, 0 * nats, size)
    assert found[0] == pytest.approx(156 / 200 / np.log(2))
    assert found[1:] == pytest.approx((0.7 / np.log(2), 0.8 / np.log(2)))


def test_one_document_has_no_interval() -> None:
    nats, size = np.array([3.0]), np.array([10.0])
    assert paired_interval(nats, 0 * nats, size) == (0.3 / np.log(2), None, None)
    assert ends_of([None, None]) == ""
    assert ends_of([-0.5, 0.25]) == "-0.5000 to +0.2500"

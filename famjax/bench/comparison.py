"""A ratio measured here, beside the paper's."""

from __future__ import annotations

from typing import NamedTuple


class Comparison(NamedTuple):
    """One quantity, relative to a baseline that was measured on the same hardware.

    Attributes:
      quantity: what is measured, and relative to what.
      ours: the ratio here.
      paper: the paper's ratio.
      source: where the paper states it, and its numbers or words.
    """

    quantity: str
    ours: float
    paper: float
    source: str


def compare(
    quantity: str, ours: float, paper: tuple[float, float], unit: str, source: str
) -> Comparison:
    """Compare a ratio with that of two numbers of a paper, which `source` names."""
    value, baseline = paper
    numbers = f"{source}: {value:,} and {baseline:,} {unit}"
    return Comparison(quantity, ours, value / baseline, numbers)

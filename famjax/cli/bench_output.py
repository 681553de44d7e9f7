"""What the benches' verbs print with: medians, aims met or missed, JSON, where a plot goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from famjax.bench.timing import Pair
from famjax.core.optional import install_command


@dataclass(frozen=True)
class Sizes:
    """What is asked for: rows, tokens of a row, turns; where the plot goes, "" for none."""

    batch: int
    length: int
    turns: int
    plot: str


def plain(row: Any) -> dict[str, Any]:
    """Return a named tuple as a dict, its pairs too."""
    return {k: v._asdict() if isinstance(v, Pair) else v for k, v in row._asdict().items()}


def median(pair: Pair) -> str:
    return f"{pair.typical:.2f} ± {pair.spread:.2f}"


def aim(what: str, value: float, aim: float, least: bool = False) -> str:
    met = value >= aim if least else value <= aim
    bound = "least" if least else "most"
    return f"aim {'met' if met else 'missed'}: {what} {value:.2f}, at {bound} {aim}"


def absent_peers(name: str, needed: Sequence[str]) -> str:
    """Return a line that says what a comparison needs which was not made."""
    return f"{name} beside it needs {', '.join(needed)}; {install_command(needed)}"

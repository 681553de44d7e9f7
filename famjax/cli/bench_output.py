"""What the benches' verbs print with: medians, aims met or missed, JSON, where a plot goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from famjax.bench.timing import Pair
from famjax.core.optional import install


@dataclass(frozen=True)
class BenchSizes:
    """What is asked for: rows, tokens of a row, turns; where the plot goes, "" for none."""

    batch: int
    length: int
    repetitions: int
    plot: str


def to_dict(row: Any) -> dict[str, Any]:
    """Return a named tuple as a dict, its pairs too."""
    return {k: v._asdict() if isinstance(v, Pair) else v for k, v in row._asdict().items()}


def format_median(pair: Pair) -> str:
    return f"{pair.typical:.2f} ± {pair.spread:.2f}"


def format_aim(what: str, value: float, target: float, least: bool = False) -> str:
    met = value >= target if least else value <= target
    bound = "least" if least else "most"
    return f"aim {'met' if met else 'missed'}: {what} {value:.2f}, at {bound} {target}"


def missing_peers(name: str, needed: Sequence[str]) -> str:
    """Return a line that says what a comparison needs which was not made."""
    return f"{name} beside it needs {', '.join(needed)}; {install(needed)}"

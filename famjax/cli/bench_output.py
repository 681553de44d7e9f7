"""Shared output of the `famjax bench` verbs: sizes, medians, aims, the papers' numbers, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from famjax.bench.comparison import Comparison
from famjax.bench.timing import PairedTimes
from famjax.cli.tables import PAPER_NUMBERS, Table
from famjax.core.optional import install_command


@dataclass(frozen=True)
class BenchSizes:
    """Rows, tokens of a row, repetitions, and the plot file ("" for none).

    `lengths` are several tokens of a row, of which `length` is the largest.
    """

    batch: int
    length: int
    repetitions: int
    plot: str
    lengths: tuple[int, ...] = ()


def to_dict(row: Any) -> dict[str, Any]:
    """Return a named tuple as a dict, nested pairs included."""
    return {k: v._asdict() if isinstance(v, PairedTimes) else v for k, v in row._asdict().items()}


def format_median(pair: PairedTimes) -> str:
    return f"{pair.typical:.2f} ± {pair.spread:.2f}"


def format_aim(what: str, value: float, target: float, is_minimum: bool = False) -> str:
    met = value >= target if is_minimum else value <= target
    bound = "least" if is_minimum else "most"
    return f"aim {'met' if met else 'missed'}: {what} {value:.2f}, at {bound} {target}"


def paper_table(paper: str, rows: Sequence[Comparison]) -> Table:
    """Return a table of ratios, ours and the paper's."""
    table = Table(
        f"Ratios here and in {paper}, whose hardware, sizes and lengths are others",
        ("", "here", PAPER_NUMBERS, "where"),
        words=(0, 3),
    )
    for row in rows:
        table.add_row(row.quantity, f"{row.ours:.4g}", f"{row.paper:.4g}", row.source)
    return table


def missing_peers(name: str, needed: Sequence[str]) -> str:
    """Return a line on the packages that a skipped comparison needs."""
    return f"comparing with {name} needs {', '.join(needed)}; {install_command(needed)}"

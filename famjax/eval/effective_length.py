"""Effective lengths, by the rules of RULER and NoLiMa."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# RULER's bar, the score of Llama 2 7B at 4,096 tokens; NoLiMa's share of the base score
RULER_BAR, NOLIMA_SHARE = 0.856, 0.85


def effective_lengths(rows: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Return for each rule the longest length up to which all scores reach the rule's bar.

    The bar of RULER is 85.6%, that of NoLiMa 85% of the score at the shortest length. The result is
    None if not even the shortest length reaches it.

    Args:
      rows: rows with length and score, in ascending order of lengths.
    """
    bars = {"ruler": RULER_BAR, "nolima": NOLIMA_SHARE * rows[0]["score"]}
    lengths: dict[str, int | None] = {}
    for rule, bar in bars.items():
        lengths[rule] = None
        for row in rows:
            if row["score"] < bar or not row["score"]:
                break
            lengths[rule] = row["length"]
    return lengths

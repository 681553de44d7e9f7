"""Words and numbers that the tables of `famjax eval` share."""

from __future__ import annotations

from collections.abc import Sequence

from famjax.core.units import counted

# a bootstrap over fewer documents gives intervals that are far too narrow
_FEW = 5
# for each ablation, a description of what the run is compared with
ABLATED = {
    "reset": "a reset at every block",
    "memory": "the memory at its initial value",
    "segments": "no memory segments",
}


def percent_range(interval: Sequence[float]) -> str:
    """Return the ends of an interval in percent, such as "93-100"."""
    return "{:.0f}-{:.0f}".format(*(100 * end for end in interval))


def depth_labels(count: int) -> list[str]:
    """Return the labels of `count` equal parts of a document, such as "0-20%"."""
    return [f"{100 * i // count}-{100 * (i + 1) // count}%" for i in range(count)]


def few_documents(count: int) -> list[str]:
    """Return a line if intervals over that many documents are not to be relied on."""
    if count >= _FEW:
        return []
    return [f"{counted(count, 'document')}: too few for a reliable interval"]


def ends_of(interval: Sequence[float | None]) -> str:
    """Return the ends of an interval in bits per byte; "" if it has none, for one document."""
    low, high = interval
    return "" if low is None or high is None else f"{low:+.4f} to {high:+.4f}"

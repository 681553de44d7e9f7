"""Sizes in the unit that suits, for people."""

from __future__ import annotations


def byte_size(count: float) -> str:
    """Return a number of bytes with its unit, "671 bytes" or "12.3 MB" (10^6), never "0.0 MB"."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        # what would be rounded to a thousand of a unit is one of the next
        if count >= 0.99995 * 10**power:
            return f"{count / 10**power:,.1f} {unit}"
    return f"{count:.0f} byte{'s' * (round(count) != 1)}"

"""Human-readable byte sizes, and words that agree with a count."""

from __future__ import annotations

_UNITS = ((18, "EB"), (15, "PB"), (12, "TB"), (9, "GB"), (6, "MB"), (3, "kB"))


def byte_size(count: float) -> str:
    """Return a number of bytes with its unit, "671 bytes" or "12.3 MB" (10^6), never "0.0 MB"."""
    if count >= 10**24:  # an int may exceed the largest float
        return f"10^{_count_digits(int(count)) - 1} bytes"
    for power, unit in _UNITS:
        # a size that would round to a thousand of a unit is shown as one of the next unit
        if count >= 0.99995 * 10**power:
            return f"{count / 10**power:,.1f} {unit}"
    return f"{count:.0f} {inflect(round(count), 'byte', 'bytes')}"


def counted(count: int, noun: str) -> str:
    """Return "1 document", or "1,200 documents"."""
    return f"{count:,} {inflect(count, noun, f'{noun}s')}"


def inflect(count: int, one: str, many: str) -> str:
    """Return the word that agrees with a count: `one` of 1, `many` of others."""
    return one if count == 1 else many


def _count_digits(count: int) -> int:
    """Return the number of decimal digits, accurate to within one."""
    return count.bit_length() * 30103 // 100000 + 1

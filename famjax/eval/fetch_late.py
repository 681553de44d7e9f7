"""Fetching of results from the device while the host prepares the next ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

import jax

T = TypeVar("T")


def fetch_late(results: Iterable[T]) -> Iterator[T]:
    """Yield each result from the device, one late, so that the host prepares the next meanwhile."""
    waiting: deque[T] = deque()
    for result in results:
        waiting.append(result)
        if len(waiting) > 1:
            yield jax.device_get(waiting.popleft())
    yield from (jax.device_get(result) for result in waiting)

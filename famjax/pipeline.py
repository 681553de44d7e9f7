"""From a config to batches: the source of documents, their layout, and a prefetching thread."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np

from famjax.config.schema import Config, DataConfig
from famjax.core.errors import UserError
from famjax.core.types import Batch
from famjax.data.lanes import Lanes, halve_batch
from famjax.data.packing import PackedRows
from famjax.data.pair_rows import PairSource
from famjax.data.reassign import ReassignedSource
from famjax.data.sources import Source, Split
from famjax.data.text_rows import TextRows
from famjax.tasks import TASKS
from famjax.tokenizers.tokenizer import Tokenizer

# number of batches that are prepared while the device computes
_PREFETCH = 2


def make_tokenizer(data: DataConfig) -> Tokenizer:
    """Return the tokenizer that `data` names."""
    return TASKS[data.task].make_tokenizer(data)


def make_source(
    config: Config, tokenizer: Tokenizer, split: Split = "train", checked: Path | None = None
) -> Source:
    """Return the source of documents that `config.data` describes.

    Args:
      checked: see `TextSource`.
    """
    data = config.data
    source = TASKS[data.task].make_source(config, tokenizer, split, checked)
    if not data.text_rows:
        return source
    text = TASKS["text"].make_source(config, tokenizer, split, checked)
    return TextRows(source, text, data.text_rows, data.text_weight)


def make_batches(
    config: Config,
    source: Source,
    tokenizer: Tokenizer,
    block_len: int,
    local_rows: Sequence[int] | None = None,
) -> Batches:
    """Return the iterator over batches of `source`, in the layout of `config.data`.

    Args:
      local_rows: indices of the rows that this process generates; None means all rows.
    """
    data = config.data
    pairs, source = source, ReassignedSource(source)
    for name in ("batch", "length"):
        if getattr(data, name) <= 0:
            raise UserError(f"data.{name}={getattr(data, name)}: must be positive")
    if data.length % block_len:
        raise UserError(
            f"data.length={data.length}: must be a multiple of the model's block_len, {block_len}"
        )
    if isinstance(pairs, PairSource):
        dataset: grain.IterDataset = pairs.make_rows(data.batch, local_rows)
    elif data.layout == "packed":
        dataset = _make_packed_rows(config, source, tokenizer, local_rows)
    else:
        dataset = _make_lanes(config, source, block_len, local_rows)
    ahead = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=_PREFETCH)
    return Batches(iter(ahead), source)


def _make_lanes(
    config: Config, source: Source, block_len: int, local_rows: Sequence[int] | None
) -> Lanes:
    if config.data.repeat_len:
        raise UserError(
            "data.repeat_len: repeats in packed rows; set data.layout=packed, or 0 here"
        )
    data, train = config.data, config.train
    streams = data.length // train.bptt_start if train.bptt_double_every else 1
    return Lanes(source, data.batch, data.length, block_len, data.keep_whole, streams, local_rows)


def _make_packed_rows(
    config: Config, source: Source, tokenizer: Tokenizer, local_rows: Sequence[int] | None
) -> PackedRows:
    data = config.data
    if data.repeat_len < 0 or data.repeat_weight < 0:
        raise UserError("data.repeat_len and data.repeat_weight: must not be negative")
    return PackedRows(
        source,
        tokenizer,
        data.batch,
        data.length,
        config.seed,
        data.repeat_len,
        data.repeat_weight,
        local_rows,
    )


def halve_lanes(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of `Batches` from which half as many lanes of twice the length continue."""
    return {**state, "batches": halve_batch(state["batches"])}


class Batches(grain.DatasetIterator[Batch[np.ndarray]]):
    """Iterator over batches that a thread prefetches.

    The iterator's state is the state after the last batch that was returned, not after prefetched
    ones. It includes the current state of the source, so that updates of a curriculum since that
    batch are not lost.
    """

    def __init__(self, ahead: grain.DatasetIterator[Batch[np.ndarray]], source: ReassignedSource):
        super().__init__(ahead)
        self._source = source
        atexit.register(_release_at_exit, weakref.ref(self))

    def __next__(self) -> Batch[np.ndarray]:
        return next(self._parent)

    def get_state(self) -> dict[str, Any]:
        return {
            "batches": self._parent.get_state(),
            "source": self._source.get_state(),
            **self._source.get_assignments(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        # This stops the thread first, so that it makes no key from a half restored state.
        self._parent.set_state(state["batches"])
        self._source.set_state(state["source"])
        self._source.set_assignments(state)

    def release(self) -> None:
        """Stop the prefetching thread and drop the reference to it."""
        self.close()
        self._parents = ()


def _release_at_exit(reference: weakref.ref[Batches]) -> None:
    """Release an iterator that is still alive at interpreter exit.

    Otherwise grain would close it after modules are torn down, and that prints a traceback.
    """
    if (batches := reference()) is not None:
        batches.release()

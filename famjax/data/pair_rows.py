"""Rows that hold several pairs of a source and a target, none of them cut.

Pairs are read in an order that depends on the seed only, a window of them at a time. A window's
pairs are packed, longest first, each into the first row with room for its source and its target,
and the rows are shuffled. So rows have little padding, and all batches one shape: one program.

A document of the decoder is bos and the target, predicting the target and eos; the source ends with
eos. Each begins with a reset, on a block boundary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from famjax.core.errors import UserError
from famjax.core.types import Batch
from famjax.data.lanes import RowsIterator
from famjax.data.pairs import Pairs
from famjax.data.shuffle import permuted_index
from famjax.data.sources import Key, Piece, Source
from famjax.tokenizers.tokenizer import Tokenizer

# pairs that are packed together: the rows of a smaller window have more padding
WINDOW = 8192
# pairs of files in the report
_NAMED_FILES = 4


class Pair(NamedTuple):
    """Tokens of a source, with eos, and of a target without bos or eos: [s] and [t - 1] int32."""

    source: np.ndarray
    target: np.ndarray


class Lengths(NamedTuple):
    """Tokens of a row's sources, those of its targets, and the block at whose start each begins."""

    source: int
    target: int
    block: int


class PairSource(Source):
    """Pairs as the source of a run; there are no documents of a single text.

    Args:
      pairs: the texts.
      tokenizer: of sources and targets.
      lengths: of a row.
      seed: of the order.
      window: pairs that are packed together.
    """

    def __init__(
        self,
        pairs: Pairs,
        tokenizer: Tokenizer,
        lengths: Lengths,
        seed: int,
        window: int = WINDOW,
    ):
        self.pairs, self.lengths = pairs, lengths
        self._tokenizer, self._seed = tokenizer, seed
        self._window = min(window, len(pairs))
        self._per_epoch = -(-len(pairs) // self._window)
        # pairs that are left out, by window, until they are told
        self._too_long: dict[int, int] = {}
        self._is_told = self._per_epoch == 1
        # rows of the same window are asked for one after the other, those of the next one last
        self.rows = functools.lru_cache(maxsize=2)(self._pack_window)
        # each row of a batch passes the windows before its own again, all that a batch reads
        self.count_rows = functools.cache(lambda number: len(self.rows(number)))

    def make_rows(self, batch: int, local_rows: Sequence[int] | None) -> PairRows:
        """Return the batches of b rows."""
        return PairRows(self, batch, local_rows)

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        raise ValueError("pairs are not documents; see make_rows")

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        raise ValueError("pairs are not documents; see make_rows")

    @functools.cached_property
    def _digest(self) -> str:
        # cached, for each checkpoint has it and it reads all texts
        return self.pairs.digest()

    def get_state(self) -> dict[str, Any]:
        """Return a fingerprint of the pairs, for which the rows' numbers are valid."""
        return {"pairs": len(self.pairs), "digest": self._digest}

    def set_state(self, state: dict[str, Any]) -> None:
        if state != self.get_state():
            raise UserError(
                f"{self.pairs.name}: the pairs changed since the run was saved "
                f"({state.get('pairs')} then, {len(self.pairs)} now, or other texts); restore "
                "them, or start another run"
            )

    def _read_window(self, number: int) -> list[tuple[str, str]]:
        """Return the sources and targets of a window."""
        count = len(self.pairs)
        epoch, part = divmod(number, self._per_epoch)
        seed = int(np.random.SeedSequence((self._seed, epoch)).generate_state(1)[0])
        places = range(part * self._window, min((part + 1) * self._window, count))
        return [self.pairs[permuted_index(place, count, seed)] for place in places]

    def _pack_window(self, number: int) -> list[Batch[np.ndarray]]:
        """Return the rows of a window."""
        texts = self._read_window(number)
        pairs = (encode_pair(self._tokenizer, *both) for both in texts)
        fitting = [pair for pair in pairs if fits(pair, self.lengths)]
        self._too_long[number] = len(texts) - len(fitting)
        packed = pack(fitting, self.lengths)
        rows = [write_row(row, self._tokenizer, self.lengths) for row in packed]
        if not rows:
            self._check_some_fit(number)
        order = np.random.Generator(np.random.Philox([self._seed, number])).permutation(len(rows))
        return [rows[i] for i in order]

    def _check_some_fit(self, number: int) -> None:
        """Raise a `UserError` if no window of an epoch, up to an empty one, has a row.

        The last window of an epoch is what is left over, which may be a few pairs only.
        """
        before = range(number - number % self._per_epoch, number)
        if not any(self.count_rows(other) for other in before):
            checked = min((len(before) + 1) * self._window, len(self.pairs))
            raise UserError(
                f"{self.pairs.name}: none of {checked:,} pairs fits data.source_length="
                f"{self.lengths.source}, data.length={self.lengths.target}; raise them"
            )

    def epoch_report(self) -> str:
        """Return once, after an epoch, how many of all pairs are left out, the same in each."""
        counts = dict(self._too_long)
        if self._is_told or not counts:
            return ""
        # the first window is read for the report, too, where a run continues
        epochs = {number // self._per_epoch for number in counts}
        wholes = (range(e * self._per_epoch, (e + 1) * self._per_epoch) for e in sorted(epochs))
        windows = next((whole for whole in wholes if all(n in counts for n in whole)), None)
        if windows is None:
            return ""
        self._is_told = True
        total = sum(counts[number] for number in windows)
        return f"{total:,} of {len(self.pairs):,} pairs {self._why_left_out()}" if total else ""

    def _why_left_out(self) -> str:
        return (
            f"are longer than data.source_length={self.lengths.source} or "
            f"data.length={self.lengths.target} and left out"
        )

    def report(self) -> str:
        """Return a line on the pairs; on padding, pairs left out, and targets that the tokenizer
        cannot write in the first window."""
        sides = zip(self.pairs.empty(), ("source", "target"), strict=True)
        notes = [f"{count:,} have an empty {side}" for count, side in sides if count]
        rows, texts = self.rows(0), self._read_window(0)
        of = f" of the first {len(texts):,}" if len(texts) < len(self.pairs) else ""
        if too_long := self._too_long[0]:
            notes.append(f"{too_long:,}{of} {self._why_left_out()}")
        if lost := sum(not _can_write(self._tokenizer, text) for _, text in texts):
            notes.append(
                f"{lost:,}{of} targets have text that tokenizer {self._tokenizer.name} cannot write"
            )
        positions = len(rows) * (self.lengths.source + self.lengths.target)
        tokens = sum(int(row["valid"].sum() + (row["source_segment"] > 0).sum()) for row in rows)
        notes.append(f"rows are {1 - tokens / positions:.1%} padding")
        return f"{len(self.pairs):,} pairs{self._name_files()}; " + "; ".join(notes)

    def _name_files(self) -> str:
        """Return which files are paired if there are several: globs are paired by their order."""
        files = [both for both in self.pairs.files if both[0] != both[1]]
        if len(files) < 2:
            return ""
        named = [f"{source} with {target}" for source, target in files[:_NAMED_FILES]]
        more = f" and {len(files) - len(named):,} more" if len(files) > len(named) else ""
        return f" of {', '.join(named)}{more}"


class PairRows(grain.IterDataset[Batch[np.ndarray]]):
    """Batches of rows of pairs.

    Args:
      source: of the rows.
      batch: b.
      local_rows: see `RowsIterator`.
    """

    def __init__(self, source: PairSource, batch: int, local_rows: Sequence[int] | None = None):
        super().__init__()
        self._source, self._batch, self._local_rows = source, batch, local_rows

    def __iter__(self) -> RowsIterator:
        return RowsIterator(
            lambda i: _PairRow(self._source, i, self._batch), self._batch, self._local_rows
        )


def encode_pair(tokenizer: Tokenizer, source: str, target: str) -> Pair:
    """Return the tokens of a pair of texts."""
    ended = np.append(tokenizer.encode(source), np.int32(tokenizer.eos_id))
    return Pair(ended, tokenizer.encode(target))


def _can_write(tokenizer: Tokenizer, text: str) -> bool:
    """Return whether the tokens of a text decode to it, but for white space."""
    return tokenizer.decode(tokenizer.encode(text)).split() == text.split()


def target_size(pair: Pair, block: int) -> int:
    """Return the positions that a target takes in a row, whole blocks: bos and its tokens."""
    return -(-(len(pair.target) + 1) // block) * block


def fits(pair: Pair, lengths: Lengths) -> bool:
    """Return whether a pair fits an empty row."""
    return len(pair.source) <= lengths.source and target_size(pair, lengths.block) <= lengths.target


def pack(pairs: list[Pair], lengths: Lengths) -> list[list[Pair]]:
    """Divide pairs over rows: longest first, each into the first row with room for it."""
    sizes = np.array([(len(p.source), target_size(p, lengths.block)) for p in pairs]).reshape(-1, 2)
    order = np.argsort(-sizes.max(1, initial=0), kind="stable")
    room = np.zeros((len(pairs), 2), np.int64)
    rows: list[list[Pair]] = []
    for i in order:
        open_rows = (room[: len(rows)] >= sizes[i]).all(1)
        row = int(open_rows.argmax()) if open_rows.any() else len(rows)
        if row == len(rows):
            rows.append([])
            room[row] = lengths.source, lengths.target
        rows[row].append(pairs[i])
        room[row] -= sizes[i]
    return rows


def empty_pair_row(source: int, target: int) -> Batch[np.ndarray]:
    """Return a row of padding, [s] of sources and [t] of targets."""
    return {
        "tokens": np.zeros(target, np.int32),
        "targets": np.zeros(target, np.int32),
        "weights": np.zeros(target, np.float32),
        "valid": np.zeros(target, bool),
        "reset": np.zeros(target, bool),
        "segment": np.zeros(target, np.int32),
        "source": np.zeros(source, np.int32),
        "source_segment": np.zeros(source, np.int32),
    }


def write_row(pairs: list[Pair], tokenizer: Tokenizer, lengths: Lengths) -> Batch[np.ndarray]:
    """Return a row of pairs, [s] of sources and [t] of targets."""
    row = empty_pair_row(lengths.source, lengths.target)
    at = at_source = 0
    for number, pair in enumerate(pairs, start=1):
        n = len(pair.target) + 1
        row["tokens"][at : at + n] = [tokenizer.bos_id, *pair.target]
        row["targets"][at : at + n] = [*pair.target, tokenizer.eos_id]
        row["weights"][at : at + n] = 1
        row["valid"][at : at + n] = True
        row["reset"][at] = True
        row["segment"][at : at + n] = number
        at += target_size(pair, lengths.block)
        end = at_source + len(pair.source)
        row["source"][at_source:end] = pair.source
        row["source_segment"][at_source:end] = number
        at_source = end
    return row


class _PairRow:
    """Row i of every batch: of all windows' rows, one after the other, every b-th from the i-th."""

    def __init__(self, source: PairSource, row: int, rows: int):
        self._source, self._rows = source, rows
        self._window, self._row = 0, row

    def get_state(self) -> dict[str, Any]:
        return {"window": self._window, "row": self._row}

    def set_state(self, state: dict[str, Any]) -> None:
        self._window, self._row = state["window"], state["row"]

    def next_row(self) -> Batch[np.ndarray]:
        while self._row >= (count := self._source.count_rows(self._window)):
            self._window, self._row = self._window + 1, self._row - count
        row = self._source.rows(self._window)[self._row]
        self._row += self._rows
        return row

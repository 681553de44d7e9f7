"""Rows that hold several whole pairs of a source and a target.

Pairs are read in an order that depends on the seed only, in windows of a fixed number of pairs. The
pairs of a window are packed, longest first, each into the first row with room for its source and
its target, and the rows are shuffled. So rows have little padding, and all batches have the same
shape and need one compiled program.

A document of the decoder consists of the tokenizer's start id and the target, and predicts the
target and eos. Each document begins with a reset, on a block boundary.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from famjax.core.errors import UserError
from famjax.core.types import Batch
from famjax.core.units import counted, inflect
from famjax.data.lanes import RowsIterator
from famjax.data.pairs import Pairs
from famjax.data.shuffle import permuted_index
from famjax.data.sources import Key, Piece, Source
from famjax.tokenizers.tokenizer import Tokenizer

# number of pairs that are packed together; rows of a smaller window have more padding
WINDOW = 8192
# share of padding from which on the report says where it comes from
_MUCH_PADDING = 0.1
# maximum number of file pairs named in the report
_NAMED_FILES = 4


class Pair(NamedTuple):
    """Tokens [s] and [t - 1] of `Tokenizer.encode_source` and `encode_target`, int32."""

    source: np.ndarray
    target: np.ndarray


class Lengths(NamedTuple):
    """Sizes of a row.

    Attributes:
      source: number of tokens for sources.
      target: number of tokens for targets.
      block: tokens in a block; each target begins at the start of a block.
    """

    source: int
    target: int
    block: int


class PairSource(Source):
    """Pairs as the source of a run; it has no documents, only rows of pairs (`make_rows`).

    Args:
      pairs: the texts.
      tokenizer: encodes sources and targets.
      lengths: sizes of a row.
      seed: seed of the order of pairs and rows.
      window: number of pairs that are packed together.
      ignores_blocks: whether targets begin anywhere although the model's blocks are longer than
        one token. Runs from before this was possible have other rows.
    """

    def __init__(
        self,
        pairs: Pairs,
        tokenizer: Tokenizer,
        lengths: Lengths,
        seed: int,
        window: int = WINDOW,
        ignores_blocks: bool = False,
    ):
        self.pairs, self.lengths, self._ignores_blocks = pairs, lengths, ignores_blocks
        self._tokenizer, self._seed = tokenizer, seed
        self._window = min(window, len(pairs))
        self._per_epoch = -(-len(pairs) // self._window)
        # number of pairs left out in each window, of targets that the tokenizer cannot write, and
        # of sources that it cannot read, until they have been reported
        self._too_long: dict[int, int] = {}
        self._lost: dict[int, int] = {}
        self._unread: dict[int, int] = {}
        self._is_reported = self._per_epoch == 1
        # all rows of a window are requested before those of the next window
        self.rows = functools.lru_cache(maxsize=2)(self._pack_window)
        # each row of a batch counts the rows of the windows before its own again
        self.count_rows = functools.cache(lambda number: len(self.rows(number)))

    def make_rows(self, batch: int, local_rows: Sequence[int] | None) -> PairRows:
        """Return the batches, each of `batch` rows."""
        return PairRows(self, batch, local_rows)

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        raise ValueError("pairs are not documents; see make_rows")

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        raise ValueError("pairs are not documents; see make_rows")

    @functools.cached_property
    def _digest(self) -> str:
        # cached, since it reads all texts and each checkpoint contains it
        return self.pairs.digest()

    def get_state(self) -> dict[str, Any]:
        """Return a fingerprint of the pairs; row numbers are valid only for these pairs."""
        state = {"pairs": len(self.pairs), "digest": self._digest}
        # tokens around every text change what fits in a row
        if self._tokenizer.first_id is not None:
            state["first_id"] = self._tokenizer.first_id
        if self._ignores_blocks:
            state["block"] = self.lengths.block
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        if state.get("block") != self.get_state().get("block"):
            raise UserError(
                f"{self.pairs.name}: this run was saved by an older famjax, whose rows of pairs "
                "differ; start another run from its weights with init"
            )
        if state != self.get_state():
            raise UserError(
                f"{self.pairs.name}: the pairs changed since the run was saved "
                f"({state.get('pairs')} then, {len(self.pairs)} now, other texts, or other special "
                "tokens around them); restore them, or start another run"
            )

    def _read_window(self, number: int) -> list[tuple[str, str]]:
        """Return the sources and targets of a window."""
        count = len(self.pairs)
        epoch, part = divmod(number, self._per_epoch)
        seed = int(np.random.SeedSequence((self._seed, epoch)).generate_state(1)[0])
        positions = range(part * self._window, min((part + 1) * self._window, count))
        return [self.pairs[permuted_index(position, count, seed)] for position in positions]

    def _pack_window(self, number: int) -> list[Batch[np.ndarray]]:
        """Return the rows of a window."""
        texts = self._read_window(number)
        pairs = list(itertools.starmap(Pair, self._tokenizer.encode_pairs(texts)))
        fitting = [pair for pair in pairs if fits(pair, self.lengths)]
        self._too_long[number] = len(texts) - len(fitting)
        if not self._is_reported or not number:
            tokenizer = self._tokenizer
            self._lost[number] = sum(
                not tokenizer.writes(pair.target, text)
                for pair, (_, text) in zip(pairs, texts, strict=True)
            )
            self._unread[number] = sum(not tokenizer.reads(pair.source) for pair in pairs)
        packed = pack(fitting, self.lengths)
        rows = [write_row(row, self._tokenizer, self.lengths) for row in packed]
        if not rows:
            self._check_some_fit(number)
        order = np.random.Generator(np.random.Philox([self._seed, number])).permutation(len(rows))
        return [rows[i] for i in order]

    def _check_some_fit(self, number: int) -> None:
        """Raise a `UserError` if this window and all windows before it in the epoch have no row.

        A single window without a row is no error: the last window of an epoch may have a few pairs
        only.
        """
        before = range(number - number % self._per_epoch, number)
        if not any(self.count_rows(other) for other in before):
            checked = min((len(before) + 1) * self._window, len(self.pairs))
            raise UserError(
                f"{self.pairs.name}: none of {checked:,} pairs fits data.source_length="
                f"{self.lengths.source}, data.length={self.lengths.target}; raise them"
            )

    def epoch_report(self) -> str:
        """Return, once, what an epoch leaves out; it is the same in all epochs.

        These are pairs that are too long, and text that the tokenizer cannot write or read.
        """
        counts = dict(self._too_long)
        if self._is_reported or not counts:
            return ""
        # when a run continues, the first window is in `counts` too: `report` has read it
        epochs = {number // self._per_epoch for number in counts}
        wholes = (range(e * self._per_epoch, (e + 1) * self._per_epoch) for e in sorted(epochs))
        windows = next((whole for whole in wholes if all(n in counts for n in whole)), None)
        if windows is None:
            return ""
        self._is_reported = True
        too_long, lost, unread = (
            sum(numbers.get(number, 0) for number in windows)
            for numbers in (counts, self._lost, self._unread)
        )
        total = counted(len(self.pairs), "pair")
        notes = [f"{too_long:,} of {total} {self._why_left_out(too_long)}"] * bool(too_long)
        if lost:
            notes.append(f"{lost:,} of the targets {self._why_lost(lost)}")
        if unread:
            notes.append(f"{unread:,} of the sources {self._why_lost(unread, 'read')}")
        return "; ".join(notes)

    def _why_left_out(self, count: int) -> str:
        return (
            f"{inflect(count, 'is', 'are')} longer than data.source_length={self.lengths.source} "
            f"or data.length={self.lengths.target} and left out"
        )

    def report(self) -> str:
        """Return a line that describes the pairs.

        For the first window, the line also gives the padding, the pairs left out, and the targets
        and sources that the tokenizer cannot write or read.
        """
        sides = zip(self.pairs.empty(), ("source", "target"), strict=True)
        notes = [
            f"{count:,} {inflect(count, 'has', 'have')} an empty {side}"
            for count, side in sides
            if count
        ]
        if cut := self.pairs.cut_sources():
            are = inflect(cut, "source is", "sources are")
            notes.append(f"{cut:,} {are} cut to data.source_words={self.pairs.source_words}")
        rows, texts = self.rows(0), self._read_window(0)
        window = f" of the first {len(texts):,}" if len(texts) < len(self.pairs) else ""
        if too_long := self._too_long[0]:
            notes.append(f"{too_long:,}{window} {self._why_left_out(too_long)}")
        if lost := self._lost[0]:
            targets = "targets" if window else inflect(lost, "target", "targets")
            notes.append(f"{lost:,}{window} {targets} {self._why_lost(lost)}")
        if unread := self._unread[0]:
            sources = "sources" if window else inflect(unread, "source", "sources")
            notes.append(f"{unread:,}{window} {sources} {self._why_lost(unread, 'read')}")
        notes.append(self._describe_padding(rows))
        return f"{counted(len(self.pairs), 'pair')}{self._name_files()}; " + "; ".join(notes)

    def _why_lost(self, count: int, verb: str = "write") -> str:
        has = inflect(count, "has", "have")
        return f"{has} text that tokenizer {self._tokenizer.name} cannot {verb}"

    def _describe_padding(self, rows: Sequence[Batch[np.ndarray]]) -> str:
        """Return the share of padding in rows, and above a tenth where it comes from."""
        c = self.lengths
        sources = sum(int((row["source_segment"] > 0).sum()) for row in rows)
        targets = sum(int(row["valid"].sum()) for row in rows)
        blocks = c.block * sum(
            len(np.unique(np.flatnonzero(row["valid"]) // c.block)) for row in rows
        )
        n = len(rows)
        padding = 1 - (sources + targets) / (n * (c.source + c.target))
        note = f"rows are {padding:.1%} padding"
        if padding <= _MUCH_PADDING:
            return note
        shares = f"{1 - sources / (n * c.source):.0%} of sources"
        note += f" ({shares}, {1 - targets / (n * c.target):.0%} of targets)"
        if blocks - targets > (1 - padding) * _MUCH_PADDING * n * c.target:
            return f"{note}; targets begin on blocks of model.block_len={c.block}"
        # with both lengths in this ratio, a row is full of sources and of targets at once
        wanted = round(c.target * sources / blocks)
        if abs(wanted - c.source) <= _MUCH_PADDING * c.source:
            return note  # the padding is due to the small number of pairs
        return f"{note}; data.source_length={wanted} would suit data.length={c.target}"

    def _name_files(self) -> str:
        """Return which files are paired, if there are several: globs are paired in sorted order."""
        files = [both for both in self.pairs.files if both[0] != both[1]]
        if len(files) < 2:
            return ""
        named = [f"{source} with {target}" for source, target in files[:_NAMED_FILES]]
        more = f" and {len(files) - len(named):,} more" if len(files) > len(named) else ""
        return f" of {', '.join(named)}{more}"


class PairRows(grain.IterDataset[Batch[np.ndarray]]):
    """Batches of rows of pairs.

    Args:
      source: source of the rows.
      batch: b, number of rows.
      local_rows: see `RowsIterator`.
    """

    def __init__(self, source: PairSource, batch: int, local_rows: Sequence[int] | None = None):
        super().__init__()
        self._source, self._batch, self._local_rows = source, batch, local_rows

    def __iter__(self) -> RowsIterator:
        return RowsIterator(
            lambda i: _PairRow(self._source, i, self._batch), self._batch, self._local_rows
        )


def target_size(pair: Pair, block: int) -> int:
    """Return how many positions the start id and a target take in a row, in whole blocks."""
    return -(-(len(pair.target) + 1) // block) * block


def fits(pair: Pair, lengths: Lengths) -> bool:
    """Return whether a pair fits in an empty row."""
    return len(pair.source) <= lengths.source and target_size(pair, lengths.block) <= lengths.target


def pack(pairs: list[Pair], lengths: Lengths) -> list[list[Pair]]:
    """Pack pairs into rows: longest first, each into the first row with room for it."""
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
    """Return a row of padding: arrays [s] for sources and [t] for targets."""
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
    """Return a row of pairs: arrays [s] for sources and [t] for targets."""
    row = empty_pair_row(lengths.source, lengths.target)
    at = at_source = 0
    for number, pair in enumerate(pairs, start=1):
        n = len(pair.target) + 1
        row["tokens"][at : at + n] = [tokenizer.start_id, *pair.target]
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
    """Row i of every batch: every b-th row of the rows of all windows, from the i-th on."""

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

"""Sources of documents for lanes and packing, and the source that reads text files.

A document is [bos] tokens [eos]. It is read in pieces of about 64 KiB of text, and each piece is
tokenized on its own. So memory is constant, and the tokens do not depend on where reading was
resumed. eos has weight 1 at the end of a text, and 0 where the text is cut and continues.
"""

from __future__ import annotations

import abc
import bisect
import io
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from famjax.core.errors import UserError
from famjax.core.json_files import shorten
from famjax.core.units import byte_size, counted
from famjax.data.files import (
    PIECE_BYTES,
    SPACE,
    TextFile,
    decode_text,
    decode_utf8,
    is_compressed,
    is_jsonl,
    iter_pieces,
    open_text,
    seek_text,
    wrap_read_errors,
)
from famjax.data.find_files import describe_skipped, find_files
from famjax.data.hashes import choose_holdout, fingerprint_contents, fingerprint_files
from famjax.data.json_lines import Line, read_json_line
from famjax.data.scan import CheckedFiles
from famjax.data.shuffle import permuted_index
from famjax.tokenizers.tokenizer import Tokenizer

# JSON values that stay equal in a round trip through JSON
Key = list[Any]
Split = Literal["train", "holdout"]
# maximum number of documents from which `TextSource.epoch_tokens` estimates
_SAMPLE = 64


class Piece(NamedTuple):
    """Consecutive tokens of a document.

    Attributes:
      tokens: [t] int32.
      weights: [t] float32, the loss weight of predicting each token.
      pass_state: set in the first piece of a document that begins with the memory of the lane's
        previous document instead of the prompt.
      targets: [t] int32, the target at each token, with its weight in `weights`; None means that
        the next token is the target. Either all pieces of a document have targets, or none. Lanes
        never read the last token of a document.
    """

    tokens: np.ndarray
    weights: np.ndarray
    pass_state: bool = False
    targets: np.ndarray | None = None


class Source(abc.ABC):
    """An infinite sequence of documents for each lane.

    A document starts with bos, unless it begins with the memory of the previous one, and ends with
    eos.
    """

    @abc.abstractmethod
    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        """Return the JSON-serializable key of the k-th document of `lane`.

        Args:
          lane: index of the lane.
          lanes: number of lanes.
          k: number of the document in its lane, from 0.
          before: key of the previous document; None if there is none or its memory is lost.
        """

    @abc.abstractmethod
    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        """Yield the pieces of the document with this key, from number `piece` on."""

    def get_state(self) -> dict[str, Any]:
        """Return what `key` depends on besides its arguments, JSON-serializable."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:  # noqa: B027, most have no state
        """Restore a state that `get_state` returned."""

    def advance(self, state: dict[str, Any], accuracy: float) -> dict[str, Any]:
        """Return the next state of a curriculum, after a logging interval with this accuracy."""
        return state

    def document_count(self) -> int | None:
        """Return the number of documents in an epoch of all lanes; None if there are no epochs."""
        return None

    def epoch_size(self, lane: int, lanes: int) -> int:
        """Return the number of documents of one lane in an epoch; at least 1."""
        raise ValueError("an infinite source has no epochs")

    def report(self) -> str:
        """Return a line that describes the documents to the user, or ""."""
        return ""

    def epoch_report(self) -> str:
        """Return a line on a finished epoch that could not be in `report`, or ""."""
        return ""

    def of_task(self) -> Source:
        """Return the source of `data.task`'s own documents."""
        return self

    def save_checked(self) -> None:  # noqa: B027, most check nothing
        """Record which files need no further check when the run continues."""


class TextPiece(NamedTuple):
    """Consecutive text of a document.

    Attributes:
      text: input of `Tokenizer.encode`, or of `Tokenizer.encode_rendered` if `rendered`.
      weight: loss weight of the text's tokens.
      rendered: whether a chat template rendered the text.
    """

    text: str
    weight: float
    rendered: bool = False


def _tokenize_document(
    texts: Iterator[TextPiece], tokenizer: Tokenizer, piece: int, eos_weight: float
) -> Iterator[Piece]:
    """Yield bos (piece 0), the tokens of each text, and eos; `texts` starts at number `piece`."""
    if piece == 0:
        yield Piece(np.array([tokenizer.bos_id], np.int32), np.zeros(1, np.float32))
    for text, weight, rendered in texts:
        tokens = tokenizer.encode_rendered(text) if rendered else tokenizer.encode(text)
        yield Piece(tokens, np.full(len(tokens), weight, np.float32))
    yield Piece(np.array([tokenizer.eos_id], np.int32), np.full(1, eos_weight, np.float32))


class TextSource(Source):
    """Documents from text files, in an order that depends on the seed only.

    Each file is a document, except that in a .jsonl file each line is one: {"text": ...}, or
    {"inputs": ..., "targets": ...} with weight 0 for the inputs and 1 for the targets (3.1.1: "0
    for instruction, 1 for answer"). {"prompt": ..., "response": ...} has the same weights, and
    {"messages": ...} is a conversation whose assistant messages are the targets. If the tokenizer
    has a chat template, it renders these two (`ChatTemplate.render_document`).

    Each epoch has a new permutation of the documents, of which lane i reads positions i, i + lanes,
    and so on. With fewer documents than lanes, each lane reads all documents in its own order;
    lanes that would read the same document at the same time start their first document at different
    places.

    One document in `holdout`, chosen by a hash of its name, is excluded from "train"; "holdout"
    reads only these. If there is a single document, the last 1/holdout of its bytes is held out.

    Args:
      files: paths, folders or globs, separated by commas; "" is Python's standard library.
      tokenizer: encodes the text.
      seed: seed of the order.
      holdout: one document in this many is held out; 0 holds out none.
      split: which documents to read.
      checked: where `save_checked` records the files that need no further check; None keeps no
        record.
      probe_only: whether texts are only probed, and not read to their end, before they are used.

    Attributes:
      holds_out: whether the split "holdout" has any text.
      paths: the files.
    """

    # number of parts into which each document is cut
    _counts: np.ndarray = np.array(1)

    def __init__(
        self,
        files: str,
        tokenizer: Tokenizer,
        seed: int,
        holdout: int,
        split: Split = "train",
        checked: Path | None = None,
        probe_only: bool = False,
    ):
        if holdout < 0 or holdout == 1:
            raise UserError(f"data.holdout={holdout}: must be 0 (none) or 2 and more")
        self._tokenizer = tokenizer
        self._seed = seed
        self._checked = CheckedFiles(checked, tokenizer.chat_template)
        text_files, self._skipped = find_files(
            files, tokenizer.chat_template, self._checked, probe_only=probe_only
        )
        self._files = {file.path: file for file in text_files}
        sizes = [os.path.getsize(file.path) for file in text_files]
        self._spec, self._sizes, self._bytes = files, sizes, sum(sizes)
        self._digest = fingerprint_files(text_files, sizes)
        # number of the first document of each file, and at the end the number of all documents
        self._starts = np.cumsum([0, *(len(file) for file in text_files)])
        self.paths = [file.path for file in text_files]
        self._begin = 0
        self._end: int | None = None
        # share of its only document that the split has
        self._share = 1.0
        documents = int(self._starts[-1])
        if documents == 0:
            raise UserError(
                f"data.files={files}: no documents found{describe_skipped(self._skipped)}"
            )
        self._documents = np.arange(documents)
        self._holdout_note, self.holds_out = "none held out", False
        if holdout and documents > 1:
            held = choose_holdout(text_files, holdout)
            self._documents = np.flatnonzero(held if split == "holdout" else ~held)
            self._holdout_note, self.holds_out = f"{int(held.sum()):,} held out", bool(held.any())
        elif holdout:
            self._hold_out_tail(holdout, split)
        elif split == "holdout":
            raise UserError(
                "data.holdout=0: nothing was held out to evaluate on; give --tasks text:FILES"
            )

    def _hold_out_tail(self, holdout: int, split: Split) -> None:
        key = self._make_key(0)
        size = self._text_size(key)
        cut = self._find_boundary(key, size - size // holdout)
        if split == "train":
            self._end = cut if cut < size else None
        elif cut == size:
            raise UserError(f"{key[0]}: too short to hold out a part of it; give more text")
        else:
            self._begin = cut
        self._share = cut / max(size, 1) if split == "train" else 1 - cut / max(size, 1)
        self.holds_out = cut < size
        self._holdout_note = f"its last {(size - cut) / size:.1%} held out" if size else "empty"

    def document_count(self) -> int:
        return len(self._documents)

    def __len__(self) -> int:
        """Return the number of whole documents."""
        return len(self._documents)

    @property
    def file_count(self) -> int:
        return len(self.paths)

    @property
    def text_bytes(self) -> int | None:
        """Number of bytes of all documents; None if they would have to be read to know."""
        whole = len(self) == self._starts[-1] and self._begin == 0 and self._end is None
        unknown = any(is_compressed(path) or is_jsonl(path) for path in self.paths)
        return self._bytes if whole and not unknown else None

    def epoch_tokens(self, multiple: int = 1) -> int | None:
        """Return an estimate of the tokens in an epoch, which encodes about 64 KiB of text.

        Args:
          multiple: documents are padded to a multiple of that many tokens.

        Returns:
          The number of tokens; None if the size of a compressed text is not known.
        """
        if (sizes := self.document_sizes()) is None:
            return None
        tokens = sizes * self._tokens_per_byte(sizes) / self._counts + 2  # bos and eos
        if multiple > 1:
            tokens = np.ceil(tokens / multiple) * multiple
        return round(float((tokens * self._counts).sum()))

    def document_sizes(self) -> np.ndarray | None:
        """Return the bytes of the whole documents in their files, [documents], if known."""
        sizes: list[np.ndarray] = []
        for path, size in zip(self.paths, self._sizes, strict=True):
            file = self._files[path]
            if file.rows is None and is_compressed(path):
                return None
            if file.rows is None:
                sizes.append(np.array([size * self._share]))
            else:
                end = os.path.getsize(file.plain.path) if file.plain else size
                sizes.append(np.diff(file.rows, append=end) * self._share)
        return np.concatenate(sizes)[self._documents]

    def _tokens_per_byte(self, sizes: np.ndarray) -> float:
        """Return the tokens of random documents, for each of their bytes in the files."""
        tokens, total, encode = 0, 0.0, self._tokenizer.encode
        for k in range(min(len(sizes), _SAMPLE)):
            i = permuted_index(k, len(sizes), self._seed)
            read = 0
            for text, _, rendered in self._iter_text(self._make_key(int(self._documents[i])), 0):
                tokens += len(self._tokenizer.encode_rendered(text) if rendered else encode(text))
                read += len(text.encode("utf-8"))
                if read >= PIECE_BYTES:
                    total += read
                    break
            else:
                total += float(sizes[i])
            if total >= PIECE_BYTES:
                break
        return tokens / max(total, 1)

    def report(self) -> str:
        """Return a line for the user: size, what is held out, and which files were skipped."""
        return (
            f"{counted(int(self._starts[-1]), 'document')}, {byte_size(self._bytes)}, "
            f"{self._holdout_note}{describe_skipped(self._skipped)}"
        )

    def save_checked(self) -> None:
        """Record which files passed the opening scan, for the next scan."""
        self._checked.save()

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        count = self.document_count()
        if count >= lanes:
            epoch, position = divmod(k, len(range(lane, count, lanes)))
            return self._permuted_key(lane + position * lanes, epoch, 0)
        # each group of `count` lanes has its own permutations, in which a lane is one document
        # ahead of the previous lane
        group, ahead = divmod(lane, count)
        epoch, position = divmod(k, count)
        key = self._permuted_key((position + ahead) % count, epoch, group)
        if k == 0 and group and len(key) == 3:  # a part of a document begins elsewhere anyway
            groups = -(-lanes // count)
            first, last = key[2], self._text_size(key) if self._end is None else self._end
            key[2] = self._find_boundary(key, first + (last - first) * group // groups)
        return key

    def epoch_size(self, lane: int, lanes: int) -> int:
        """Return the number of documents of one lane in an epoch."""
        count = self.document_count()
        return len(range(lane, count, lanes)) if count >= lanes else count

    def _permuted_key(self, position: int, epoch: int, group: int) -> Key:
        """Return the key of the document at a position of a permutation."""
        seed = np.random.SeedSequence((self._seed, epoch, group)).generate_state(1)[0]
        index = permuted_index(position, self.document_count(), int(seed))
        return self._indexed_key(index, epoch, group)

    def _indexed_key(self, index: int, epoch: int, group: int) -> Key:
        """Return the key of one of `document_count()` documents."""
        return self.whole_key(index)

    def whole_key(self, index: int) -> Key:
        """Return the key of a whole document, by its index in `document_sizes`."""
        return self._make_key(int(self._documents[index]))

    def _make_key(self, document: int) -> Key:
        """Return a document's key: path, row in the file, first byte; for a part also its end.

        The end of the last part is None if it is that of the document.
        """
        file = bisect.bisect_right(self._starts, document) - 1
        return [self.paths[file], document - int(self._starts[file]), self._begin]

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        texts = self._iter_text(key, skip=max(piece - 1, 0))
        # where a text is cut, eos as a target would teach the model to end anywhere
        is_cut = (key[3:] or [self._end]) != [None]
        return _tokenize_document(texts, self._tokenizer, piece, 0.0 if is_cut else 1.0)

    def texts(self) -> Iterator[str]:
        """Yield the text of all documents once, in the order of the first epoch."""
        for k in range(len(self)):
            yield from self.document_texts(k)

    def texts_by_file(self) -> Iterator[tuple[str, Iterator[str]]]:
        """Yield the path of each file and the texts of its documents, both in random order."""
        seed = int(np.random.SeedSequence(self._seed).generate_state(1)[0])
        count = len(self.paths)
        for file in (permuted_index(i, count, seed) for i in range(count)):
            yield self.paths[file], self._file_texts(file, seed)

    def _file_texts(self, file: int, seed: int) -> Iterator[str]:
        first, end = np.searchsorted(self._documents, self._starts[file : file + 2])
        for i in range(end - first):
            index = int(first) + permuted_index(i, int(end - first), seed)
            for text, *_ in self._iter_text(self._indexed_key(index, 0, 0), skip=0):
                yield text

    def document_texts(self, k: int, skip_share: float = 0.0) -> Iterator[str]:
        """Yield the text of the k-th document, in the order of the epochs.

        Args:
          k: number of the document.
          skip_share: share of the split's part of the document to leave out at its beginning; the
            text then starts at a space.
        """
        key = self.key(0, 1, k)
        if skip_share:
            first, last = key[2], self._text_size(key) if self._end is None else self._end
            key[2] = self._find_boundary(key, first + int(skip_share * (last - first)))
        for text, *_ in self._iter_text(key, skip=0):
            yield text

    def name(self, key: Key) -> str:
        """Return the file of a document, and its line if the file has several."""
        path, row, *_ = key
        file = self._find_file(path)
        return path if file is not None and len(file) == 1 else f"{path}:{row + 1}"

    def _find_file(self, path: str) -> TextFile | None:
        """Return the file of a key, also if the folder was elsewhere when the key was saved."""
        if (file := self._files.get(path)) or not isinstance(path, str):
            return file

        def folder(path: str, file: TextFile) -> str:
            return os.path.basename(path.removesuffix(file.name).rstrip("/"))

        ends = [file for file in self._files.values() if path.endswith(f"/{file.name}")]
        found = [file for file in ends if folder(path, file) == folder(file.path, file)]
        return found[0] if len(found) == 1 else None

    def scored_texts(self, key: Key) -> Iterator[str]:
        """Yield the parts of a document's text that are predicted: all except inputs."""
        return (text for text, weight, *_ in self._iter_text(key, skip=0) if weight)

    def get_state(self) -> dict[str, Any]:
        """Return a fingerprint of the documents; keys and cursors are valid only for these."""
        return {"documents": int(self._starts[-1]), "bytes": self._bytes, "names": self._digest}

    def content_version(self) -> str:
        """Return a hash of the files' contents (`fingerprint_contents`)."""
        return fingerprint_contents(self.paths)

    def set_state(self, state: dict[str, Any]) -> None:
        now = self.get_state()
        if state != now:
            saved = (f"{state[key]:,} {key}" for key in ("documents", "bytes"))
            here = (f"{now[key]:,} {key}" for key in ("documents", "bytes"))
            raise UserError(
                f"data.files={self._spec}: the documents changed since the run was saved "
                f"({' of '.join(saved)} then, {' of '.join(here)} now, by name and size); "
                "restore them, or start another run"
            )

    def _iter_text(self, key: Key, skip: int) -> Iterator[TextPiece]:
        """Yield the pieces of a document's text, without the first `skip` pieces."""
        path, _, begin, *end = key
        stream, line = self._open_text_stream(key)
        with stream:
            cuts = (
                (offset, data, weight)
                for first, end, weight in _weighted_ranges(line, begin, *end or [self._end])
                for offset, data in _iter_range(stream, path, first, end, line)
            )
            for offset, data, weight in islice(cuts, skip, None):
                decode = decode_utf8 if line else decode_text
                yield TextPiece(
                    decode(data, path, offset), weight, line is not None and line.rendered
                )

    def _open_text_stream(self, key: Key) -> tuple[BinaryIO, Line | None]:
        """Return a stream of a document's text, and its `Line` if the file is a .jsonl file."""
        file = None
        with suppress(TypeError, ValueError):  # a key that famjax has not made
            path, row, *_ = key
            file = self._find_file(path)
        if file is None or not isinstance(row, int) or not 0 <= row < len(file):
            label = shorten(key[0] if isinstance(key, list) and key else key)
            raise UserError(
                f"{label}: changed since the run was saved; restore it, or start another run"
            )
        if file.rows is None:
            return self._open_file(file.path), None
        line = read_json_line(file, row, self._tokenizer.chat_template)
        return io.BytesIO(b"".join(data for data, _ in line.parts)), line

    def _open_file(self, path: str) -> BinaryIO:
        """Open a file that is one document."""
        return open_text(path)

    def _text_size(self, key: Key) -> int:
        """Return the size of a document's text, in bytes."""
        with self._open_text_stream(key)[0] as stream:
            return seek_text(stream, key[0], None)

    def _find_boundary(self, key: Key, offset: int) -> int:
        """Return the byte at which to cut a document, at or soon after an offset."""
        with self._open_text_stream(key)[0] as stream:
            seek_text(stream, key[0], offset)
            with wrap_read_errors(key[0]):
                window = stream.read(PIECE_BYTES)
        if space := SPACE.search(window):
            return offset + space.start()
        ends = (i for i, byte in enumerate(window) if byte & 0xC0 != 0x80)
        return offset + next(ends, len(window))  # after the last character, if inside it


def _weighted_ranges(
    line: Line | None, begin: int, end: int | None
) -> Iterator[tuple[int, int | None, float]]:
    """Yield (first byte, end, weight) of the parts of a document; ends are exclusive."""
    if line is None:
        yield begin, end, 1.0
        return
    at = 0
    for data, weight in line.parts:
        first, at = at, at + len(data)
        first, last = max(first, begin), at if end is None else min(at, end)
        if first < last:
            yield first, last, weight


def _iter_range(
    stream: BinaryIO, path: str, first: int, end: int | None, line: Line | None
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of the pieces of a range, never cutting inside a control token."""
    if line is None or not line.rendered:
        yield from iter_pieces(stream, path, first, end)
        return
    stream.seek(first)
    yield first, stream.read(-1 if end is None else end - first)

"""Pairs of a source and a target, from lines of parallel text files or of JSON lines."""

from __future__ import annotations

import array
import functools
import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from famjax.core.errors import UserError
from famjax.core.units import counted
from famjax.data.files import decode_text, is_jsonl, open_text, wrap_read_errors
from famjax.data.find_files import list_files
from famjax.data.json_lines import iter_lines, parse_pair, wrap_line_errors
from famjax.data.other_json import check_not_json
from famjax.data.tables import check_not_table

# prefixes of the name of a data set
_TFDS, _SEQIO = "tfds:", "seqio:"
_SETS = (_TFDS, _SEQIO)
_FORM = '{"inputs": ..., "targets": ...}'


class Column:
    """Texts in memory: all texts as one byte string, and the offset at which each ends.

    Args:
      texts: the texts, in UTF-8, without white space at their ends.
      words: maximum number of words of a text, the first ones; 0 is any number.

    Attributes:
      cut: numbers of the texts that had more words.
    """

    def __init__(self, texts: Iterable[bytes] = (), words: int = 0):
        # never all texts as objects of their own, which would take several times as much memory
        self.data, self.ends = bytearray(), array.array("q")
        self._words, self.cut = words, array.array("q")
        for text in texts:
            self.append(text)

    def append(self, text: bytes) -> None:
        if self._words:
            kept = cut_source(text.decode("utf-8"), self._words).encode("utf-8")
            if len(kept) < len(text):
                self.cut.append(len(self.ends))
            text = kept
        self.data += text
        self.ends.append(len(self.data))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> str:
        begin = self.ends[i - 1] if i else 0
        return self.data[begin : self.ends[i]].decode("utf-8")

    def empty(self) -> int:
        """Return the number of empty texts."""
        return int((np.diff(np.asarray(self.ends), prepend=0) == 0).sum())


def cut_source(text: str, words: int) -> str:
    """Return a text's first words, and the white space between them; 0 is all of its words."""
    parts = text.split(None, words) if words else []
    if len(parts) > words:
        # the last part is the rest of the text, up to its end
        text = text.rstrip()[: -len(parts[words].rstrip())]
    return text.strip()


class Pairs:
    """Pairs of texts, indexed by number.

    Line i of a source file and line i of its target file are a pair. Several files are paired in
    the order in which they are named; the files of a glob are sorted. Without target files the
    source is a file of JSON lines, `{"inputs": ..., "targets": ...}` or `{"prompt": ...,
    "response": ...}`. Instead of files, both may be a feature of a TFDS data set,
    "tfds:wmt14_translate/de-en:train:de", or of a seqio task, "seqio:TASK:train:inputs".

    Args:
      source, target: files or globs, separated by commas; compressed ones are decompressed.
      source_words: maximum number of words of a source, the first ones; 0 is any number.

    Attributes:
      name: the names of both, as given.
      files: the paired files, (sources, targets) of each pair.
      source_words: as given.

    Raises:
      UserError: there are not as many target files as source files, or paired files do not have
        the same number of lines, or a line cannot be read.
    """

    def __init__(self, source: str, target: str = "", source_words: int = 0):
        self.name = f"{source} and {target}" if target else source
        self.source_words = source_words
        if not source:
            raise UserError("data.source='': give the file of the sources, one on each line")
        sources = _list_columns(source, "data.source")
        if target:
            targets = _list_columns(target, "data.target")
            for path in filter(is_jsonl, sources):
                raise UserError(
                    f"data.target={target}: {path} is JSON lines, which have targets of their own; "
                    "set data.target="
                )
            for path in filter(is_jsonl, targets):
                raise UserError(
                    f"data.target={target}: {path} is JSON lines, not lines of text; if they have "
                    "the inputs as well, give them as data.source, without data.target"
                )
            for path in (*sources, *targets):
                check_plain_lines(path)
            if len(sources) != len(targets):
                raise UserError(
                    f"data.source={source} names {len(sources)} files and data.target={target} "
                    f"{len(targets)}; give one target file for each source file"
                )
            self.files = list(zip(sources, targets, strict=True))
            columns = [_read_columns(*both, source_words) for both in self.files]
        else:
            self.files = [(path, path) for path in sources]
            columns = [_read_json_columns(path, source_words) for path in sources]
        self._columns = columns
        self._starts = np.cumsum([0, *(len(one) for one, _ in columns)])
        if not len(self):
            raise UserError(f"{self.name}: no pairs found")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, i: int) -> tuple[str, str]:
        """Return the source and the target of the i-th pair."""
        file = int(np.searchsorted(self._starts, i, side="right")) - 1
        row = i - int(self._starts[file])
        source, target = self._columns[file]
        return source[row], target[row]

    def cut_sources(self, count: int | None = None) -> int:
        """Return how many of the first `count` sources had more words; None counts all."""
        end = len(self) if count is None else count
        starts = zip(self._columns, self._starts[:-1].tolist(), strict=True)
        return sum(start + i < end for (source, _), start in starts for i in source.cut)

    def digest(self) -> str:
        """Return a hash of all texts."""
        digest = hashlib.sha256()
        for column in (one for both in self._columns for one in both):
            digest.update(np.asarray(column.ends, np.int64).tobytes())
            digest.update(column.data)
        return digest.hexdigest()[:16]

    def empty(self) -> tuple[int, int]:
        """Return how many sources and how many targets are empty."""
        sources, targets = zip(*self._columns, strict=True)
        return sum(one.empty() for one in sources), sum(one.empty() for one in targets)


def _read_columns(source: str, target: str, source_words: int) -> tuple[Column, Column]:
    """Return the lines of a source file and of its target file."""
    columns = Column(read_lines(source), source_words), Column(read_lines(target))
    counts = [len(one) for one in columns]
    if counts[0] != counts[1]:
        longer, last = (source, counts[1]) if counts[0] > counts[1] else (target, counts[0])
        lines = counted(counts[0], "line")
        raise UserError(
            f"{source} has {lines} and {target} {counts[1]:,}: line {last + 1:,} of "
            f"{longer} has no pair; give files of equally many lines"
        )
    return columns


def check_plain_lines(path: str) -> None:
    """Raise a `UserError` if the name of a file of texts is that of JSON or of a table."""
    check_not_json(path)
    check_not_table(path)


def _list_columns(names: str, option: str) -> list[str]:
    """Return the named files, or the name of a data set's feature."""
    if "," in names and any(name.startswith(_SETS) for name in names.split(",")):
        raise UserError(f"{option}={names}: a data set cannot be part of a list; give it alone")
    return [names] if names.startswith(_SETS) else list_files(names, option, repeated=True)


def read_lines(path: str) -> Iterator[bytes]:
    """Yield the lines of a file, stripped of line ends and white space, after a check for UTF-8."""
    if path.startswith(_SETS):
        texts = _read_seqio(path) if path.startswith(_SEQIO) else _read_feature(path)
        yield from (text.strip().encode("utf-8") for text in texts)
        return
    at = 0
    with open_text(path) as stream, wrap_read_errors(path):
        # only \n ends a line: files of other programs count them so
        for line in stream:
            text = decode_text(line, path, at)
            # a byte order mark is not part of the text
            yield (text if at else text.removeprefix("\ufeff")).strip().encode("utf-8")
            at += len(line)


def _strip(text: bytes) -> bytes:
    """Return UTF-8 text without white space at its ends, which ASCII's is only a part of."""
    return text.decode("utf-8").strip().encode("utf-8")


def _read_seqio(name: str) -> Iterator[str]:
    from famjax.data.seqio_tasks import read_texts  # TensorFlow, an optional library

    return read_texts(name)


def _read_feature(name: str) -> Iterator[str]:
    """Yield the texts of a feature of a TFDS data set, named "tfds:SET:SPLIT:FEATURE"."""
    from famjax.data.seqio_tasks import read_records  # TensorFlow, an optional library

    records, _, feature = name.rpartition(":")
    if ":" not in records:
        raise UserError(
            f"{name}: write tfds:SET:SPLIT:FEATURE, tfds:wmt14_translate/de-en:train:de"
        )
    for record in read_records(records):
        if not isinstance(text := record.get(feature), str):
            known = ", ".join(key for key, value in record.items() if isinstance(value, str))
            raise UserError(
                f"{name}: the set has no text {feature!r}; write {records}:FEATURE, one of {known}"
            )
        yield text


def _read_json_columns(path: str, source_words: int) -> tuple[Column, Column]:
    """Return the inputs and the targets in a file of JSON lines."""
    if not is_jsonl(path):
        raise UserError(
            f"data.source={path}: is not JSON lines (.jsonl) with inputs and targets; give "
            "data.target, the file of the targets"
        )
    sources, targets = Column(words=source_words), Column()
    with open_text(path) as stream, wrap_read_errors(path):
        for number, line in enumerate(iter_lines(stream), start=1):
            if not line.strip():
                continue
            with wrap_line_errors(path, functools.partial(int, number), _FORM):
                source, target = parse_pair(line)
            sources.append(_strip(source))
            targets.append(_strip(target))
    return sources, targets

"""Trains tokenizers on text files: a SentencePiece model, or a list of words."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from famjax.core.errors import UserError
from famjax.core.units import byte_size
from famjax.data.files import PIECE_BYTES
from famjax.data.sources import TextSource
from famjax.tokenizers.sentence_piece import SENTENCE_CHARS, SentencePieceTokenizer, train_model
from famjax.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from famjax.tokenizers.words import SPECIALS, WordTokenizer

# maximum bytes of training text, since SentencePiece's trainer keeps it in memory
_TRAINING_BYTES = 256 << 20
# maximum number of files that are read in round robin at a time
_OPEN_FILES = 64
# maximum number of files named in the line on how much was read
_NAMED_FILES = 4


def train_sentencepiece(files: str, vocab_size: int, out: str | Path) -> Tokenizer:
    """Train a lossless BPE model on text files, write it to `out` and return it.

    It reports on stderr how much of the files was read.

    Args:
      files: files, in the form of `data.files`. At most 256 MiB are read, about equally many bytes
        of each file.
      vocab_size: the requested size; a small text can yield fewer tokens (see the returned
        tokenizer's `vocab_size`).
      out: output path of the model.
    """
    if vocab_size <= 0:
        raise UserError(f"vocab size {vocab_size}: must be positive")
    source = TextSource(files, ByteTokenizer(), seed=0, holdout=0, probe_only=True)
    _check_output_path(source, out)
    read: Counter[str] = Counter()
    texts = share_texts(source.texts_by_file(), source.file_count, _TRAINING_BYTES, read)
    content = train_model(_iter_sentences(texts), vocab_size)
    print(f"famjax: {describe_read(read, _TRAINING_BYTES)}", file=sys.stderr)
    try:
        Path(out).write_bytes(content)
    except OSError as error:
        raise UserError(
            f"{out}: {error.strerror}; the model could not be written, give another --out"
        ) from None
    return SentencePieceTokenizer(str(out), content)


def _check_output_path(source: TextSource, path: str | Path) -> None:
    """Raise a `UserError` if an output path is a folder, a text, or in no existing folder."""
    if os.path.isdir(path) or not str(path):
        raise UserError(f"--out {path}: is a folder; give a file in it")
    if os.path.realpath(path) in map(os.path.realpath, source.paths):
        raise UserError(f"--out {path}: is one of the texts; give another file")
    if not os.path.isdir(os.path.dirname(path) or "."):
        folder = os.path.dirname(path)
        raise UserError(f"--out {path}: there is no folder {folder}; make it first")


def share_texts(
    files: Iterator[tuple[str, Iterator[str]]], count: int, limit: int, read: Counter[str]
) -> Iterator[str]:
    """Yield texts of files piece by piece, round robin, until about `limit` bytes are read.

    `_OPEN_FILES` files are read at a time; what is left of `limit` is divided evenly over the
    remaining groups of files.

    Args:
      files: the path and the texts of each file.
      count: number of files.
      limit: approximate maximum number of bytes in total.
      read: counter to which the bytes read of each path are added.
    """
    groups = -(-count // _OPEN_FILES)
    for left in range(groups, 0, -1):
        end = read.total() + (limit - read.total()) / left
        queue = deque(islice(files, _OPEN_FILES))
        while queue and read.total() < end:
            path, texts = queue.popleft()
            piece = _take_piece(texts)
            yield from piece
            read[path] += sum(len(text.encode()) for text in piece)
            if piece:  # otherwise the file has ended
                queue.append((path, texts))


def _take_piece(texts: Iterator[str]) -> list[str]:
    """Return the next texts, about as many characters as there are bytes in a piece of a file."""
    piece, size = [], 0
    for text in texts:
        piece.append(text)
        size += len(text)
        if size >= PIECE_BYTES:
            break
    return piece


def describe_read(read: Counter[str], limit: int) -> str:
    """Return a line on how much of each file was read."""
    limited = " (the limit; about as much of each file)" if read.total() >= limit else ""
    named = [f"{byte_size(size)} of {path}" for path, size in read.most_common(_NAMED_FILES)]
    if others := len(read) - len(named):
        named.append(f"at most that much of each of {others:,} more files")
    return f"read {byte_size(read.total())} of text{limited}: {', '.join(named)}"


def _iter_sentences(texts: Iterable[str]) -> Iterator[str]:
    """Yield short parts of texts."""
    for text in texts:
        # Cut at tabs, since the trainer drops sentences with a tab; tabs become byte tokens.
        yield from re.findall(rf"[^\t]{{1,{SENTENCE_CHARS}}}", text)


def build_word_list(
    files: str, out: str | Path, min_count: int = 1, max_size: int | None = None
) -> WordTokenizer:
    """Build a tokenizer of the words in text files, most common first, and write it to `out`.

    Args:
      files: files, in the form of `data.files`.
      out: path of the list, which must end in .txt.
      min_count: minimum count of a word; rarer words become unknown words.
      max_size: maximum number of words, including special tokens; None means no limit.
    """
    if Path(out).suffix != ".txt":
        raise UserError(f"{out}: a word list is a .txt file; give --out words.txt")
    source = TextSource(files, ByteTokenizer(), seed=0, holdout=0, probe_only=True)
    _check_output_path(source, out)
    max_words = None if max_size is None else max(max_size - len(SPECIALS), 0)
    if max_words == 0:
        raise UserError(
            f"--vocab-size {max_size}: holds no word beside the {len(SPECIALS)} special tokens; "
            f"take {len(SPECIALS) + 1} or more"
        )
    common = list(islice(_most_common_words(source.texts(), min_count), max_words))
    if not common:
        raise UserError(
            f"--min-count {min_count}: no word of the texts is found as often; take a smaller one"
        )
    words = WordTokenizer(str(out), common)
    try:
        Path(out).write_text(words.text(), encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(
            f"{out}: {error.strerror}; the list could not be written, give another --out"
        ) from None
    return words


def _most_common_words(texts: Iterable[str], min_count: int) -> Iterable[str]:
    """Yield words by decreasing count, and words of equal count alphabetically."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return (word for word, count in ordered if count >= min_count and word not in SPECIALS)

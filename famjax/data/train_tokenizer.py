"""Tokenizers made from text files: a SentencePiece model, or a list of words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from famjax.core.errors import UserError
from famjax.data.sources import TextSource
from famjax.tokenizers.sentence_piece import SENTENCE_CHARS, SentencePieceTokenizer, train_model
from famjax.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from famjax.tokenizers.words import SPECIALS, WordTokenizer

# SentencePiece's trainer keeps its text in memory.
_TRAINING_BYTES = 256 << 20


def train_sentencepiece(files: str, vocab_size: int, out: str | Path) -> Tokenizer:
    """Train a lossless BPE model on text files, write it to `out` and return it.

    Args:
      files: as `data.files`; of a larger corpus, 256 MiB of randomly chosen documents are read.
      vocab_size: the requested size; a small text can yield fewer tokens (see the result's).
      out: output path of the model.
    """
    if vocab_size <= 0:
        raise UserError(f"vocab size {vocab_size}: must be positive")
    source = TextSource(files, ByteTokenizer(), seed=0, holdout=0)
    source.check_output_path(out)
    content = train_model(_iter_sentences(source.texts(), _TRAINING_BYTES), vocab_size)
    try:
        Path(out).write_bytes(content)
    except OSError as error:
        raise UserError(
            f"{out}: {error.strerror}; the model could not be written, give another --out"
        ) from None
    return SentencePieceTokenizer(str(out), content)


def _iter_sentences(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Yield short parts of `texts` up to about `limit` characters."""
    total = 0
    for text in texts:
        # The trainer drops sentences with a tab; tabs are left to the byte fallback.
        yield from re.findall(rf"[^\t]{{1,{SENTENCE_CHARS}}}", text)
        total += len(text)
        if total >= limit:
            return


def build_word_list(
    files: str, out: str | Path, min_count: int = 1, max_size: int | None = None
) -> WordTokenizer:
    """Build a tokenizer of the words in text files, most common first, and write it to `out`.

    Args:
      files: as `data.files`.
      out: path of the list, which must end in .txt.
      min_count: rarer words are unknown.
      max_size: maximum number of words, including the specials; None is no limit.
    """
    if Path(out).suffix != ".txt":
        raise UserError(f"{out}: a word list is a .txt file; give --out words.txt")
    source = TextSource(files, ByteTokenizer(), seed=0, holdout=0)
    source.check_output_path(out)
    most = None if max_size is None else max(max_size - len(SPECIALS), 0)
    if most == 0:
        raise UserError(
            f"--vocab-size {max_size}: holds no word beside the {len(SPECIALS)} special tokens; "
            f"take {len(SPECIALS) + 1} or more"
        )
    common = list(islice(_most_common_words(source.texts(), min_count), most))
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
    """Yield words by decreasing count, then alphabetically."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return (word for word, count in ordered if count >= min_count and word not in SPECIALS)

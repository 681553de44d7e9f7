"""Word-level tokenizer as for WikiText: tokens are words between white space, and line ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np

from famjax.core.errors import UserError
from famjax.data.tokenizers import ByteTokenizer, Tokenizer

# document boundary, word outside the vocabulary, end of line
SPECIALS = ("<s>", "<unk>", "<eos>")
BEGIN, UNKNOWN, LINE_END = range(3)


class WordTokenizer(Tokenizer):
    """A word list that begins with `SPECIALS`.

    A word decodes to itself and a space, "<eos>" to a line break; other white space is lost. If a
    text contains the string of the first or the third special, it is an unknown word.

    Args:
      name: the argument of `load_tokenizer`.
      words: those after the specials.

    Attributes:
      words: all of them, by id.
    """

    def __init__(self, name: str, words: Sequence[str]):
        self.words = (*SPECIALS, *words)
        pieces = [f"{word} ".encode() for word in self.words[UNKNOWN:]]
        pieces[LINE_END - UNKNOWN] = b"\n"
        super().__init__(name, [b"", *pieces], BEGIN, BEGIN, self.text().encode())
        self._ids = {word: i for i, word in enumerate(self.words) if i not in (BEGIN, LINE_END)}

    def encode(self, text: str) -> np.ndarray:
        lines = (
            [self._ids.get(word, UNKNOWN) for word in line.split()] for line in text.split("\n")
        )
        ids = chain.from_iterable(chain(line, [LINE_END]) for line in lines)
        # text after the last line break is a line without an end
        return np.fromiter(ids, np.int32)[:-1]

    def unknown_words(self, text: str) -> list[str]:
        """Return the words of a text that are not in the vocabulary, without duplicates."""
        return [word for word in dict.fromkeys(text.split()) if word not in self._ids]

    def text(self) -> str:
        """Return the contents of a file for `read_words`: a word on each line."""
        return "\n".join(self.words) + "\n"


def read_words(name: str, path: Path) -> WordTokenizer:
    """Return the tokenizer of a file with a word on each line.

    Raises:
      UserError: the file is not a word list.
    """
    try:
        words = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"data.tokenizer={name}: not a text file; give a word list") from None
    if words[-1] == "":
        words.pop()
    if tuple(words[: len(SPECIALS)]) != SPECIALS:
        raise UserError(
            f"data.tokenizer={name}: does not begin with the lines {', '.join(SPECIALS)}; make one "
            "with famjax tokenizer train FILES --kind words --out words.txt"
        )
    for number, word in enumerate(words, 1):
        if word.split() != [word]:
            raise UserError(f"data.tokenizer={name}: line {number} is not one word: {word!r}")
    if len(set(words)) < len(words):
        twice = Counter(words).most_common(1)[0][0]
        raise UserError(f"data.tokenizer={name}: {twice!r} is in it twice; remove one of them")
    return WordTokenizer(name, words[len(SPECIALS) :])


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
    # circular import
    from famjax.data.sources import TextSource

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

"""Word-level tokenizer as for WikiText: tokens are line ends and words between white space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from famjax.core.errors import UserError
from famjax.core.json_files import read_whole
from famjax.tokenizers.tokenizer import Tokenizer

# special tokens: document boundary, word outside the vocabulary, end of line
SPECIALS = ("<s>", "<unk>", "<eos>")
BEGIN, UNKNOWN, LINE_END = range(3)


class WordTokenizer(Tokenizer):
    """A word list that begins with `SPECIALS`.

    A word decodes to itself and a space, and "<eos>" to a line break; other white space is lost. If
    a text contains the string of the first or the third special token, that is an unknown word.

    Args:
      name: the argument of `load_tokenizer`.
      words: the words after the special tokens.

    Attributes:
      words: all words including special tokens, by id.
    """

    is_lossless = False

    def __init__(self, name: str, words: Sequence[str]):
        self.words = (*SPECIALS, *words)
        pieces = [f"{word} ".encode() for word in self.words[UNKNOWN:]]
        pieces[LINE_END - UNKNOWN] = b"\n"
        super().__init__(name, [b"", *pieces], BEGIN, BEGIN, self.text().encode())
        self.unknown_id = UNKNOWN
        self._ids = {word: i for i, word in enumerate(self.words) if i not in (BEGIN, LINE_END)}

    def encode(self, text: str) -> np.ndarray:
        lines = (
            [self._ids.get(word, UNKNOWN) for word in line.split()] for line in text.split("\n")
        )
        ids = chain.from_iterable(chain(line, [LINE_END]) for line in lines)
        # text after the last line break is a line without an end, so the last line end is dropped
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
    content = read_whole(path, "give a word list")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError(f"data.tokenizer={name}: not a text file; give a word list")
    # line ends of Windows are accepted
    words = text.replace("\r\n", "\n").split("\n")
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
        raise UserError(f"data.tokenizer={name}: lists the word {twice!r} twice; remove one")
    return WordTokenizer(name, words[len(SPECIALS) :])

"""Splitting of texts in any script into words, for ROUGE."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

# scripts that are written without spaces: Thai and Lao, Burmese, Khmer, Kana, Han
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff"
    "\uff66-\uff9f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f]"
)
_LATIN = re.compile("[a-z0-9]+")


def is_mostly_latin(text: str) -> bool:
    """Return whether rouge-score knows at least half of the letters of a text."""
    letters = [char for char in text.lower() if char.isalpha()]
    return 2 * sum("a" <= char <= "z" for char in letters) >= len(letters)


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case: runs of letters, marks and numbers of any script.

    In scripts that are written without spaces, each character with its marks is a word.
    """
    words: list[str] = []
    # whether the next letter, or the next mark, belongs to the last word
    joins = marks = False
    for char in text.lower():
        kind = unicodedata.category(char)[0]
        if kind == "C" and not char.isspace():
            continue  # such as the joiners of Persian
        if kind not in "LMN":
            joins = marks = False
            continue
        if joins or (marks and kind == "M"):
            words[-1] += char
            continue
        words.append(char)
        joins, marks = UNSPACED.match(char) is None, True
    return words


class UnicodeTokenizer:
    """A tokenizer for rouge-score that splits texts in any script.

    Args:
      latin: rouge-score's own tokenizer, which stems words of Latin letters without marks.
    """

    def __init__(self, latin: Any):
        self._latin = latin

    def tokenize(self, text: str) -> list[str]:
        return [
            token
            for word in split_words(text)
            for token in (self._latin.tokenize(word) if _LATIN.fullmatch(word) else [word])
        ]

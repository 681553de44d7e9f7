"""LongBench's scores for answers (arXiv 2308.14508), as its `metrics.py` computes them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence


def numbers(output: str, reference: str) -> float:
    """Return the share of the numbers in an output that equal the reference's number."""
    found = re.findall(r"\d+", output)
    (right, *_) = re.findall(r"\d+", reference)
    return found.count(right) / len(found) if found else 0.0


def code(output: str, reference: str) -> float:
    """Return the similarity of the reference and the output's first line, rounded to percents.

    The similarity is difflib's ratio, which the library that LongBench uses falls back to. Empty
    lines at the beginning, and lines with a comment or a backquote, are skipped.
    """
    lines = output.lstrip("\n").split("\n")
    first = next((line for line in lines if not re.search("`|#|//", line)), "")
    return round(100 * difflib.SequenceMatcher(None, first, reference).ratio()) / 100


def classes(output: str, reference: str, options: Sequence[str]) -> float:
    """Return 1 / n if the right class is among the n classes that an output names, else 0.

    Classes whose name is a part of the right class's name do not count.
    """
    found = [name for name in options if name in output]
    found = [name for name in found if name == reference or name not in reference]
    return 1 / len(found) if reference in found else 0.0


def rouge_l_unique(output: str, reference: str) -> float:
    """Return ROUGE-L of summaries as the package rouge computes it, which counts each word once.

    R and O are the sets of words of the reference and the output. C is the set of words in the
    longest common subsequences of any sentence of the reference with any of the output. The score
    is the F1 of the precision |C| / |O| and the recall |C| / |R|. Sentences end at a period, words
    at white space.
    """
    written, right = list(_sentences(output)), list(_sentences(reference))
    if not written or not right:
        return 0.0
    common = {word for r in right for o in written for word in _common_words(r, o)}
    precision = len(common) / len({word for o in written for word in o})
    recall = len(common) / len({word for r in right for word in r})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> Iterator[list[str]]:
    # the package rouge takes white space between periods for a sentence of one empty word
    yield from (sentence.split() or [""] for sentence in text.split(".") if sentence)


def _common_words(first: Sequence[str], second: Sequence[str]) -> Iterator[str]:
    """Yield the words of the longest common subsequence that the package rouge finds."""
    # lengths[i][j]: length of the longest common subsequence of the first i and the first j words
    lengths = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, word in enumerate(first, 1):
        for j, other in enumerate(second, 1):
            longer = max(lengths[i - 1][j], lengths[i][j - 1])
            lengths[i][j] = lengths[i - 1][j - 1] + 1 if word == other else longer
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            yield first[i - 1]
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1

"""Scores of generated answers against references, from 0 to 1: the best over the references."""

from __future__ import annotations

import difflib
import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from famjax.core.errors import UserError
from famjax.core.optional import missing_message, missing_modules

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Return a text in lower case without punctuation, articles and extra spaces (SQuAD's rule)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(output: str, reference: str) -> float:
    """Return 1 if both are equal once normalized.

    A reference of which nothing is left then, such as the letter A, is compared as it is.
    """
    right = normalize(reference)
    return float(normalize(output) == right) if right else _same(output, reference)


def _same(output: str, reference: str) -> float:
    return float(output.strip().lower().rstrip(".") == reference.strip().lower().rstrip("."))


def f1(output: str, reference: str) -> float:
    """Return the F1 of the words of both, normalized (SQuAD, SCROLLS)."""
    words, right = normalize(output).split(), normalize(reference).split()
    if not right:
        return _same(output, reference)
    shared = (Counter(words) & Counter(right)).total()
    return 2 * shared / (len(words) + len(right))


def rouge(kind: str, output: str, reference: str) -> float:
    """Return the F1 of rouge-score, with its stemmer, of "rouge1", "rouge2" or "rougeL"."""
    return float(_rouge_scorer(kind).score(reference, output)[kind].fmeasure)


@functools.cache
def _rouge_scorer(kind: str) -> Any:
    if missing := missing_modules(["rouge_score"]):
        raise UserError(f"rouge: {missing_message(missing)}")
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([kind], use_stemmer=True)


def numbers(output: str, reference: str) -> float:
    """Return the share of the numbers in an output that are the reference's (LongBench)."""
    found = re.findall(r"\d+", output)
    right = re.search(r"\d+", reference)
    if right is None:
        raise UserError(f"the reference {reference!r} has no number")
    return found.count(right[0]) / len(found) if found else 0.0


def letters(output: str, reference: str) -> float:
    """Return 1 if an output chooses the letters that a reference begins with (L-Eval's exams).

    Of one letter the first of A to D in the output counts; of several all words of such letters.
    """
    right = set(re.findall("[A-D]", reference.split()[0]))
    if len(right) == 1:
        return float(set(re.findall("[A-D]", output)[:1]) == right)
    return float(set("".join(re.findall(r"\b[A-D]+\b", output))) == right)


def code(output: str, reference: str) -> float:
    """Return the similarity of a reference and the first line of code in an output (LongBench).

    That is difflib's ratio, in whole percent. A line with a comment or a backquote is none.
    """
    lines = (line for line in output.split("\n") if line.strip())
    first = next((line for line in lines if not re.search("`|#|//", line)), "")
    return round(100 * difflib.SequenceMatcher(None, first, reference).ratio()) / 100


def classes(output: str, reference: str, options: Sequence[str]) -> float:
    """Return 1 / n if the right class is among the n classes in an output (LongBench's trec).

    Classes that are a part of the right one's name do not count.
    """
    found = [name for name in options if name in output]
    found = [name for name in found if name == reference or name not in reference]
    return 1 / len(found) if reference in found else 0.0


_METRICS: dict[str, Callable[[str, str], float]] = {
    "exact": exact,
    "f1": f1,
    "rouge_1": functools.partial(rouge, "rouge1"),
    "rouge_2": functools.partial(rouge, "rouge2"),
    "rouge_l": functools.partial(rouge, "rougeL"),
    "numbers": numbers,
    "letters": letters,
    "code": code,
}
# of which leading spaces are a part
_UNSTRIPPED = ("code",)


def score_answer(
    metric: str, output: str, references: Sequence[str], options: Sequence[str] = ()
) -> float:
    """Return the score of an output by a metric: the best over the references."""
    if metric == "classes":
        return max(classes(output, reference, options) for reference in references)
    output = output if metric in _UNSTRIPPED else output.strip()
    return max(_METRICS[metric](output, reference) for reference in references)


def check_metrics(metrics: Sequence[str]) -> None:
    """Raise a `UserError` if a metric needs a library that is not installed."""
    if any(metric.startswith("rouge") for metric in metrics):
        _rouge_scorer("rougeL")

"""Scores of generated answers against references, from 0 to 1: the best over the references."""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from famjax.core.errors import UserError
from famjax.core.optional import missing_message, missing_modules
from famjax.eval import leval_scores, longbench_scores
from famjax.eval.unicode_words import UnicodeTokenizer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+")
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


def rouge(kind: str, output: str, reference: str, stemmed: bool = True) -> float:
    """Return the F1 of rouge-score of "rouge1", "rouge2" or "rougeL", with its stemmer or not."""
    return float(_rouge_scorer(kind, stemmed).score(reference, output)[kind].fmeasure)


def rouge_unicode(kind: str, output: str, reference: str) -> float:
    """Return the F1 of "rouge1", "rouge2" or "rougeL" of the words of any script.

    rouge-score's own words have Latin letters without marks, and digits. As XLSum's multilingual
    ROUGE, but scripts without spaces are compared by characters, not by a segmenter's words, and
    only words of such Latin letters are stemmed.
    """
    return float(_unicode_scorer(kind).score(reference, output)[kind].fmeasure)


def rouge_lsum(output: str, reference: str) -> float:
    """Return ROUGE-L of whole summaries, as published of CNN-Dailymail (Lin, 2004, 3.2).

    Sentences are lines, or in a text of one line what ends with a period, a question mark or an
    exclamation mark before white space.
    """
    return rouge("rougeLsum", _by_sentence(output), _by_sentence(reference))


def _by_sentence(text: str) -> str:
    return text if "\n" in text.strip() else _SENTENCE_END.sub("\n", text)


@functools.cache
def _rouge_scorer(kind: str, stemmed: bool) -> Any:
    return _scorer_class()([kind], use_stemmer=stemmed)


@functools.cache
def _unicode_scorer(kind: str) -> Any:
    make = _scorer_class()
    from rouge_score.tokenizers import DefaultTokenizer

    return make([kind], tokenizer=UnicodeTokenizer(DefaultTokenizer(use_stemmer=True)))


def _scorer_class() -> Any:
    if missing := missing_modules(["rouge_score"]):
        raise UserError(f"rouge: {missing_message(missing)}")
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer


_METRICS: dict[str, Callable[[str, str], float]] = {
    "exact": exact,
    "f1": f1,
    "rouge_1": functools.partial(rouge, "rouge1"),
    "rouge_2": functools.partial(rouge, "rouge2"),
    "rouge_l": functools.partial(rouge, "rougeL"),
    "rouge_l_unicode": functools.partial(rouge_unicode, "rougeL"),
    "rouge_lsum": rouge_lsum,
    # of LongBench
    "numbers": longbench_scores.numbers,
    "code": longbench_scores.code,
    "rouge_l_unique": longbench_scores.rouge_l_unique,
    # of L-Eval
    "rouge_l_unstemmed": functools.partial(rouge, "rougeL", stemmed=False),
    "letter": functools.partial(leval_scores.letters, False),
    "letters": functools.partial(leval_scores.letters, True),
    "contains": leval_scores.contains,
    "final_number": leval_scores.final_number,
    "truth": leval_scores.truth,
    "printed": leval_scores.printed,
}
# of the output as it is, with white space at both ends
_UNSTRIPPED = ("code", "rouge_l_unique")
# of rouge-score
_ROUGE = (
    *("rouge_1", "rouge_2", "rouge_l", "rouge_lsum"),
    *("rouge_l_unstemmed", "rouge_l_unicode"),
)


def score_answer(
    metric: str, output: str, references: Sequence[str], options: Sequence[str] = ()
) -> float:
    """Return the score of an output by a metric: the best over the references."""
    if metric == "classes":
        return max(longbench_scores.classes(output, right, options) for right in references)
    output = output if metric in _UNSTRIPPED else output.strip()
    return max(_METRICS[metric](output, reference) for reference in references)


def check_metrics(metrics: Sequence[str]) -> None:
    """Raise a `UserError` if a metric needs a library that is not installed."""
    if any(metric in _ROUGE for metric in metrics):
        _rouge_scorer("rougeL", True)

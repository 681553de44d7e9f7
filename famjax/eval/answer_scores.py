"""Scores of generated answers, from 0 to 1. With several references, the best score counts."""

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
from famjax.eval.unicode_words import UnicodeTokenizer, is_mostly_latin

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Return a text in lower case without punctuation, articles and extra spaces, as SQuAD does."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(output: str, reference: str) -> float:
    """Return 1 if the output equals the reference after normalization, else 0.

    If normalization leaves nothing of the reference, as with the letter A, both are compared
    without it.
    """
    right = normalize(reference)
    return float(normalize(output) == right) if right else _same(output, reference)


def _same(output: str, reference: str) -> float:
    return float(output.strip().lower().rstrip(".") == reference.strip().lower().rstrip("."))


def f1(output: str, reference: str) -> float:
    """Return the F1 of the normalized words of output and reference (SQuAD, SCROLLS)."""
    words, right = normalize(output).split(), normalize(reference).split()
    if not right:
        return _same(output, reference)
    shared = (Counter(words) & Counter(right)).total()
    return 2 * shared / (len(words) + len(right))


def rouge(kind: str, output: str, reference: str, stemmed: bool = True) -> float:
    """Return the F1 that rouge-score computes for `kind`: "rouge1", "rouge2" or "rougeL".

    rouge-score only knows Latin letters without marks and digits. If these are less than half of
    the reference, this is `rouge_unicode`.
    """
    make = _rouge_scorer if is_mostly_latin(reference) else _unicode_scorer
    return float(make(kind, stemmed).score(reference, output)[kind].fmeasure)


def rouge_unicode(kind: str, output: str, reference: str) -> float:
    """Return the F1 of "rouge1", "rouge2" or "rougeL" for texts in any script.

    rouge-score by itself only knows words of digits and of Latin letters without marks. This is
    like XLSum's multilingual ROUGE, with two differences: scripts without spaces are compared by
    characters instead of by the words of a segmenter, and only words that rouge-score knows are
    stemmed.
    """
    return float(_unicode_scorer(kind, True).score(reference, output)[kind].fmeasure)


def rouge_lsum(output: str, reference: str) -> float:
    """Return summary-level ROUGE-L, as published for CNN-Dailymail (Lin, 2004, 3.2).

    Each line is a sentence. A text of one line is split after every period, question mark or
    exclamation mark that white space follows.
    """
    return rouge("rougeLsum", _by_sentence(output), _by_sentence(reference))


def first_sentence(text: str) -> str:
    """Return the first line of a text, up to the end of its first sentence."""
    return _SENTENCE_END.split(text.strip().partition("\n")[0], 1)[0]


def _by_sentence(text: str) -> str:
    return text if "\n" in text.strip() else _SENTENCE_END.sub("\n", text)


@functools.cache
def _rouge_scorer(kind: str, stemmed: bool) -> Any:
    return _scorer_class()([kind], use_stemmer=stemmed)


@functools.cache
def _unicode_scorer(kind: str, stemmed: bool) -> Any:
    make = _scorer_class()
    from rouge_score.tokenizers import DefaultTokenizer

    return make([kind], tokenizer=UnicodeTokenizer(DefaultTokenizer(use_stemmer=stemmed)))


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
    # LongBench's metrics
    "numbers": longbench_scores.numbers,
    "code": longbench_scores.code,
    "rouge_l_unique": longbench_scores.rouge_l_unique,
    # L-Eval's metrics
    "rouge_l_unstemmed": functools.partial(rouge, "rougeL", stemmed=False),
    "letter": functools.partial(leval_scores.letters, False),
    "letters": functools.partial(leval_scores.letters, True),
    "contains": leval_scores.contains,
    "final_number": leval_scores.final_number,
    "truth": leval_scores.truth,
    "printed": leval_scores.printed,
}
# metrics of the raw output, whose white space at both ends is not stripped
_UNSTRIPPED = ("code", "rouge_l_unique")
# metrics that need the package rouge-score
_ROUGE = (
    *("rouge_1", "rouge_2", "rouge_l", "rouge_lsum"),
    *("rouge_l_unstemmed", "rouge_l_unicode"),
)


def score_answer(
    metric: str, output: str, references: Sequence[str], options: Sequence[str] = ()
) -> float:
    """Return the score of an output by a metric, the best over the references.

    Args:
      options: names of all classes, for the metric "classes".
    """
    if metric == "classes":
        return max(longbench_scores.classes(output, right, options) for right in references)
    output = output if metric in _UNSTRIPPED else output.strip()
    return max(_METRICS[metric](output, reference) for reference in references)


def check_metrics(metrics: Sequence[str]) -> None:
    """Raise a `UserError` if a metric needs a library that is not installed."""
    if any(metric in _ROUGE for metric in metrics):
        _rouge_scorer("rougeL", True)

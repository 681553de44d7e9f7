"""Scores of a collection of data sets, such as LongBench: one for each data set, and their mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from famjax.eval.examples import Example

# ranges of the number of words of a document, from the first number to below the second, as in
# LongBench-E
LENGTHS = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, math.inf)}


class SubsetRow(TypedDict):
    """The scores on a data set of a collection.

    Attributes:
      name: name of the data set.
      documents: number of documents.
      questions: number of questions.
      metric: the first metric of its questions.
      score: mean score.
      cut: number of answers that reached their maximum number of tokens.
      by_words: for each range of `LENGTHS` the score on documents with that many words, where this
        is known.
    """

    name: str
    documents: int
    questions: int
    metric: str
    score: float
    cut: int
    by_words: dict[str, float]


def by_subset(examples: Sequence[Example]) -> dict[str, list[Example]]:
    """Return the examples of each data set; the name of a set outside any collection is ""."""
    subsets: dict[str, list[Example]] = {}
    for example in examples:
        subsets.setdefault(example.subset, []).append(example)
    return subsets


def mean_score(examples: Sequence[Example], metric: str) -> float:
    """Return the mean of a metric over data sets, each averaged over its questions that have it."""
    known = [example for example in examples if metric in example.scores]
    means = [np.mean([e.scores[metric] for e in found]) for found in by_subset(known).values()]
    return float(np.mean(means))


def subset_rows(examples: Sequence[Example]) -> list[SubsetRow]:
    """Return a row for each data set of a collection."""
    return [
        {
            "name": name,
            "documents": len({example.document for example in found}),
            "questions": len(found),
            "metric": next(iter(found[0].scores), ""),
            "score": float(np.mean([example.score for example in found])),
            "cut": sum(example.cut for example in found),
            "by_words": _by_words(found),
        }
        for name, found in sorted(by_subset(examples).items())
        if name
    ]


def _by_words(examples: Sequence[Example]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for name, (low, high) in LENGTHS.items():
        for example in examples:
            if example.words is not None and low <= example.words < high:
                found.setdefault(name, []).append(example.score)
    return {name: float(np.mean(scores)) for name, scores in found.items()}

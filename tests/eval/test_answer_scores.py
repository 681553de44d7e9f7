"""Scores of answers, on published examples and beside lm-evaluation-harness's functions."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

from famjax.core.errors import UserError
from famjax.eval.answer_scores import score_answer


@pytest.fixture(scope="module")
def longbench() -> Any:
    """Return the harness's metrics of LongBench, without the libraries that others of them need."""
    name = "lm_eval.tasks.longbench.metrics"
    names = [n for n in ("jieba", "fuzzywuzzy", "rouge") if n not in sys.modules]
    for each in names:
        sys.modules[each] = ModuleType(each)
    sys.modules["fuzzywuzzy"].fuzz = None  # type: ignore[attr-defined]
    sys.modules["rouge"].Rouge = None  # type: ignore[attr-defined]
    try:
        return importlib.import_module(name)
    finally:
        for each in names:
            del sys.modules[each]


PAIRS = [
    ("The Eiffel Tower, in Paris.", "an Eiffel tower"),
    ("x", "something"),
    ("one two two three", "two two, four"),
    ("A dog!", "the dog"),
]


@pytest.mark.parametrize(("output", "reference"), PAIRS)
def test_f1_is_the_harnesses(output: str, reference: str, longbench: Any) -> None:
    expected = longbench.qa_f1_score(output, reference)
    assert score_answer("f1", output, [reference]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("output", "reference"),
    [("Paragraph 19", "Paragraph 19"), ("2 or 19", "Paragraph 19"), ("none", "Paragraph 1")],
)
def test_numbers_are_the_harnesses(output: str, reference: str, longbench: Any) -> None:
    assert score_answer("numbers", output, [reference]) == longbench.retrieval_score(
        output, reference
    )
    number = reference.removeprefix("Paragraph ")
    assert score_answer("numbers", output, [number]) == longbench.count_score(output, number)


@pytest.mark.parametrize("output", ["Other location", "location", "Date or Food", "Foods", "x"])
def test_classes_are_the_harnesses(output: str, longbench: Any) -> None:
    names = ["Date", "Food", "location", "Other location"]
    for right in names:
        expected = longbench.classification_score(output, right, all_classes=names)
        assert score_answer("classes", output, [right], names) == expected


def test_rouge_is_the_published_example() -> None:
    """The README of rouge-score: F1 12/17 and 10/17."""
    reference = "The quick brown fox jumps over the lazy dog"
    output = "The quick brown dog jumps on the log."
    assert score_answer("rouge_1", output, [reference]) == pytest.approx(12 / 17)
    assert score_answer("rouge_l", output, ["another", reference]) == pytest.approx(10 / 17)
    assert score_answer("rouge_2", output, [reference]) == pytest.approx(4 / 15)


def test_exact_is_equal_but_for_articles_case_and_punctuation() -> None:
    assert score_answer("exact", " The Cat. ", ["dog", "cat"]) == 1
    assert score_answer("exact", "cats", ["cat"]) == 0


def test_nothing_is_no_answer() -> None:
    """Of the letter A nothing is left without articles."""
    for metric in ("exact", "f1"):
        assert score_answer(metric, "a.", ["A"]) == 1
        for output in ("", "...", "the", "B"):
            assert score_answer(metric, output, ["A"]) == 0
    assert score_answer("f1", "", ["cat"]) == 0


def test_a_reference_without_a_number_is_an_error() -> None:
    with pytest.raises(UserError, match="has no number"):
        score_answer("numbers", "1", ["one"])


def test_code_is_the_similarity_of_its_first_line() -> None:
    # 4 letters of 6 and 7 are equal, in order: 2 * 4 / 13
    assert score_answer("code", "kitten", ["sitting"]) == 0.62
    said = "\n# a comment\n```python\n    return x\n    y = 1"
    assert score_answer("code", said, ["    return x"]) == 1
    assert score_answer("code", "# only", ["x"]) == 0


@pytest.mark.parametrize(
    ("output", "reference", "right"),
    [
        ("B", "B", 1),
        ("The answer is (B), not A", "(B) a text", 1),
        ("A or B", "B", 0),
        ("none", "C", 0),
        ("AC", "CA", 1),
        ("A, C", "AC", 1),
        ("A and B", "AC", 0),
        ("AC, or Apples", "AC", 1),
    ],
)
def test_letters_are_those_that_are_chosen(output: str, reference: str, right: float) -> None:
    assert score_answer("letters", output, [reference]) == right

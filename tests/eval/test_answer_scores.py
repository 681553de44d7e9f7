"""Scores of answers, on published examples and beside lm-evaluation-harness's functions."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

from famjax.eval.answer_scores import score_answer
from famjax.eval.unicode_words import split_words


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


def test_rouge_of_whole_summaries_is_that_of_their_sentences() -> None:
    """By hand: every sentence is there, in another order. In one sequence 3 of 6 words are."""
    output, reference = "one two three. four five six?", "four five six. one two three."
    assert score_answer("rouge_l", output, [reference]) == pytest.approx(0.5)
    assert score_answer("rouge_lsum", output, [reference]) == 1
    # of Lin (2004), 3.2: a union of 4 of 5 words, of 5 and 10
    output, reference = "w1 w2 w6 w7 w8\nw1 w3 w8 w9 w5", "w1 w2 w3 w4 w5"
    assert score_answer("rouge_lsum", output, [reference]) == pytest.approx(2 * 4 / 15)
    # lines are the sentences of a text that has several
    assert score_answer("rouge_lsum", "b c. a\nd", ["b c. a\nd"]) == 1
    assert score_answer("rouge_lsum", "a\nb c", ["b c. a\n"]) == 1
    assert score_answer("rouge_lsum", "", ["a"]) == 0


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


def test_code_is_the_similarity_of_its_first_line() -> None:
    # 4 letters of 6 and 7 are equal, in order: 2 * 4 / 13
    assert score_answer("code", "kitten", ["sitting"]) == 0.62
    said = "\n# a comment\n```python\n    return x\n    y = 1"
    assert score_answer("code", said, ["    return x"]) == 1
    assert score_answer("code", "# only", ["x"]) == 0
    # an empty line after a comment is code to LongBench
    assert score_answer("code", "# x\n\nreturn x", ["return x"]) == 0


def test_rouge_of_unique_words() -> None:
    """By hand, with a word of the reference's, o of the output's, c in common."""
    for output, reference, c, o, r in [
        # the example of Lin (2004), 3.2: one reference sentence, two of the output, a union of 4
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 4, 8, 5),
        # case counts, repeated words count once
        ("a cat a cat", "A cat. A cat cat.", 1, 2, 2),
        # white space after a period is an empty word
        ("a b. ", "b a", 1, 3, 2),
    ]:
        expected = 2 * c / (o + r)
        assert score_answer("rouge_l_unique", output, [reference]) == pytest.approx(expected)
    assert score_answer("rouge_l_unique", "...", ["a"]) == 0


def test_rouge_of_any_script() -> None:
    """The first example is that of XLSum's multilingual ROUGE: five of six words."""
    for output, reference, expected in (
        ("আপনার সাথে দেখা হয়ে ভালো লাগলো।", "তোমার সাথে দেখা হয়ে ভালো লাগলো।", 5 / 6),
        ("Кошка сидит.", "кошка спит!", 1 / 2),
        # by characters, with their marks
        ("私は猫", "私は犬。", 2 / 3),
        ("ที่นี่", "ที่ นั่น", 2 / 5),
        # as rouge-score has it
        ("The dogs ran, $5m", "dog ran 5m", 6 / 7),
        ("café’s", "cafe s", 1 / 2),
    ):
        found = score_answer("rouge_l_unicode", output, [reference])
        assert found == pytest.approx(expected), output
        if output.isascii():
            assert found == score_answer("rouge_l", output, [reference])
    assert split_words("می‌خواهم A_b") == ["میخواهم", "a", "b"]


def test_rouge_of_a_script_that_rouge_score_does_not_know() -> None:
    for name in ("rouge_1", "rouge_2", "rouge_l", "rouge_lsum"):
        assert score_answer(name, "Двое мужчин идут", ["Двое мужчин идут"]) == 1
        assert score_answer(name, "Три кошки спят", ["Двое мужчин идут"]) == 0
    # numbers are no script
    assert score_answer("rouge_1", "2020 кот", ["2020 год"]) == 0.5
    assert score_answer("rouge_l_unstemmed", "Двое dogs идут", ["Двое dog идут"]) < 1
    # é is no letter for rouge-score, which finds two words
    assert score_answer("rouge_1", "caf d", ["café d"]) == 1


def test_rouge_of_leval_has_no_stemmer() -> None:
    assert score_answer("rouge_l", "dogs ran", ["dog ran"]) == 1
    assert score_answer("rouge_l_unstemmed", "dogs ran", ["dog ran"]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("metric", "output", "reference", "right"),
    [
        ("letter", "B", "B", 1),
        ("letter", "the answer is (B), not A", "(B) a text", 1),
        ("letter", "A or B", "B", 0),
        ("letter", "", "A", 0),
        # without a letter it counts as A
        ("letter", "none", "C", 0),
        ("letter", "none", "A", 1),
        ("letters", "AC", "AC", 1),
        ("letters", "C. and A) both", "AC", 1),
        ("letters", "AC, or Apples", "AC", 1),
        # a part
        ("letters", "A", "AC", 0.25),
        ("letters", "AB", "AC", 0),
        ("letters", "maybe BD.", "BD", 0.25),
        ("letters", "maybe BD", "BD", 1),
        ("letters", "A. Question 2. C.", "AC", 0.25),
        ("contains", "It is the Role of ART.", "role of art", 1),
        ("contains", "art", "role of art", 0),
        ("contains", "3.0", "3", 1),
        ("final_number", "2 + 3 = 5\nThe answer is $1,005.50", "1005", 1),
        ("final_number", "so 2 + 3 = 5.\n\n7", "5", 1),
        ("final_number", "none", "5", 0),
        ("truth", "This is false, not true", "False", 1),
        ("truth", "maybe", "True", 0),
        (
            "printed",
            "so the final output of the code is array([[1, 2],\n [3, 4]]).",
            "[[1 2][3 4]]",
            1,
        ),
        ("printed", "prints [1, 2] first and then it is over for good", "[1 2]", 0),
        ("printed", "At last it prints [1. 2.0]", "[1. 2]", 1),
    ],
)
def test_exams_are_scored_as_leval_does(
    metric: str, output: str, reference: str, right: float
) -> None:
    assert score_answer(metric, output, [reference]) == right

"""BLEU and chrF against counts by hand and the values in sacrebleu's own tests."""

from __future__ import annotations

import math
import sys

import pytest

from famjax.core.errors import UserError
from famjax.eval import translation_scores
from famjax.eval.translation_scores import (
    bleu,
    choose_tokenizer,
    chrf,
    compound_split_bleu,
    split_compounds,
    tokenized_bleu,
)

HYPOTHESES = ["The cat sat on a mat.", "Hello there"]
REFERENCES = ["The cat sat on the mat.", "Hello there friend"]


def test_bleu_equals_counts_by_hand() -> None:
    """13a splits the full stops; 9 tokens for 10, and n-grams are counted over both sentences."""
    value, signature = bleu(HYPOTHESES, REFERENCES)
    precisions = [8 / 9, 5 / 7, 2 / 5, 1 / 4]
    assert value == pytest.approx(100 * math.exp(1 - 10 / 9) * math.prod(precisions) ** 0.25)
    assert signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")


def test_bleu_smooths_an_order_without_a_match() -> None:
    """As mteval-v13a.pl: 1/2 of a match, where compound_split_bleu has 0."""
    found = bleu(["this is a fest"], ["this is a test"]).value
    assert found == pytest.approx(100 * (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25)
    assert compound_split_bleu(["this is a fest"], ["this is a test"]).value == 0
    assert bleu(["a test of it", ""], ["a test of it", "nothing"]).value == pytest.approx(
        100 * math.exp(1 - 5 / 4)
    )


@pytest.mark.parametrize(
    ("hypotheses", "references", "expected"),
    [
        # of sacrebleu's tests, whose precisions and recalls are equal
        (["a b c"], ["abc"], 100.0),
        (["a", "b"], ["a", "c"], 50.0),
        (["aa"], ["ab"], 25.0),
        (["abcdefg"], ["hijklmnop"], 0.0),
        ([""], ["reference"], 0.0),
        # of 1 to 3 characters the precision is 1 and the recall 3/4, 2/3, 1/2: weighed 1 to 4
        (["abc"], ["abcd"], 100 * 5 / (1 + 4 * 3 / (3 / 4 + 2 / 3 + 1 / 2))),
    ],
)
def test_chrf_is_the_published_value_or_that_by_hand(
    hypotheses: list[str], references: list[str], expected: float
) -> None:
    value, signature = chrf(hypotheses, references)
    assert value == pytest.approx(expected)
    assert signature.startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")


# what Perl makes of the scripts' line
SPLIT = {
    "a rich-text format": "a rich ##AT##-##AT## text format",
    "a - b -c d- 10-12": "a - b -c d- 10 ##AT##-##AT## 12",
    "a-b-c": "a ##AT##-##AT## b-c",
    "aa-bb-cc": "aa ##AT##-##AT## bb ##AT##-##AT## cc",
    "x-y-z-w": "x ##AT##-##AT## y-z ##AT##-##AT## w",
    # its characters are bytes, and é has two
    "a-é-b": "a ##AT##-##AT## é ##AT##-##AT## b",
    "Maß-Öl": "Maß ##AT##-##AT## Öl",
}


@pytest.mark.parametrize("text", SPLIT)
def test_compounds_are_split_as_in_perl(text: str) -> None:
    assert split_compounds(text) == SPLIT[text]


def test_compound_split_bleu_equals_counts_by_hand() -> None:
    """Five tokens, of which the last differs; as three tokens no 4-gram would be right."""
    value, signature = compound_split_bleu(["a rich-text format"], ["a rich-text document"])
    assert value == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a+compounds|smooth:none|version:")
    without = compound_split_bleu(["a rich-text format"], ["a rich- text document"])
    assert without.value == 0


def test_compounds_are_split_after_the_text_is_tokenized() -> None:
    """13a makes a token of the comma; texts that Moses has tokenized are left as they are."""
    hypotheses, references = ["a well-known, old man &apos;s"], ["a well-known , old man &apos;s"]
    assert compound_split_bleu(hypotheses, references).value == pytest.approx(100)
    # 7 tokens for 8: "known," is wrong, and every n-gram with it
    found = compound_split_bleu(hypotheses, references, tokenizer="none")
    precisions = [6 / 7, 4 / 6, 2 / 5, 0]
    assert found.value == 100 * math.prod(precisions) == 0
    assert "tok:none+compounds" in found.signature
    longer = compound_split_bleu(["b c d e f, g"], ["b c d e f , g"], tokenizer="none")
    assert longer.value == pytest.approx(
        100 * math.exp(1 - 7 / 6) * math.prod([5 / 6, 3 / 5, 2 / 4, 1 / 3]) ** 0.25
    )


def test_tokenized_bleu_splits_no_compounds() -> None:
    """Five tokens, of which the last differs; the compound is one of them."""
    hypotheses, references = ["a b c d-e f"], ["a b c d-e g"]
    value, signature = tokenized_bleu(hypotheses, references)
    assert value == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:none|version:")
    split = compound_split_bleu(hypotheses, references)
    assert split.value == pytest.approx(100 * (6 / 7 * 5 / 6 * 4 / 5 * 3 / 4) ** 0.25)
    assert tokenized_bleu(["this is a fest"], ["this is a test"]).value == 0


@pytest.mark.parametrize(
    ("reference", "tokenizer"),
    [
        ("Two men, one of them old.", "13a"),
        ("Двое мужчин идут по улице.", "13a"),
        ("두 남자가 거리를 걷고 있다.", "13a"),
        ("两个男人走在街上,他们在说话。", "zh"),
        ("二人の男性が通りを歩いている。", "char"),
        ("東京都知事選挙、現職が三選確実。", "char"),
        ("ชายสองคนเดินอยู่บนถนน", "char"),
        ("กี้กี้ took 12 photographs of it", "13a"),
        ("", "13a"),
    ],
)
def test_the_tokenizer_fits_the_script(reference: str, tokenizer: str) -> None:
    assert choose_tokenizer([reference, "a b", reference]) == tokenizer
    if reference:
        score, signature = bleu([reference], [reference], choose_tokenizer([reference]))
        assert score == pytest.approx(100)
        assert f"tok:{tokenizer}" in signature


@pytest.mark.parametrize("score", [bleu, tokenized_bleu, compound_split_bleu])
def test_tokens_of_tokenized_texts_are_taken_as_they_are(score) -> None:
    """Moses' apostrophe is a token, of which 13a makes three."""
    hypotheses, references = ["a b c d &apos;s x"], ["a b c d &apos;s y"]
    value, signature = score(hypotheses, references, "none")
    assert value == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)
    assert "tok:none" in signature
    assert score(hypotheses, references).value > value + 1


@pytest.mark.parametrize("score", [bleu, chrf, tokenized_bleu, compound_split_bleu])
@pytest.mark.parametrize(
    ("hypotheses", "references", "said"),
    [
        (["a", "b"], ["a"], "bleu: 2 hypotheses and 1 references; give one reference for each"),
        ([], ["a"], "bleu: 0 hypotheses and 1 references; give one reference for each"),
        ([], [], "bleu: there are no hypotheses; give at least one"),
    ],
)
def test_bad_input_is_one_line(score, hypotheses, references, said) -> None:
    with pytest.raises(UserError) as error:
        score(hypotheses, references)
    assert str(error.value) == said


@pytest.mark.parametrize("score", [bleu, chrf, tokenized_bleu, compound_split_bleu])
def test_a_missing_library_is_one_line(score, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(UserError) as error:
        score(["a"], ["a"])
    assert str(error.value) == "bleu: sacrebleu not installed; pip install -e '.[eval]'"
    assert translation_scores.split_compounds("a-b") == "a ##AT##-##AT## b"

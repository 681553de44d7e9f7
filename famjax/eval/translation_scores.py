"""BLEU and chrF of translations over a corpus, from 0 to 100, by sacrebleu.

Each hypothesis has one reference. A score's signature says how it was computed; only scores with
the same signature are comparable (Post, 2018, arXiv 1804.08771).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from famjax.core.errors import UserError
from famjax.core.optional import missing_message, missing_modules
from famjax.eval.unicode_words import UNSPACED

# sacrebleu's tokenizers; "none" is for texts that are already tokenized, for example by Moses in
# fairseq's preprocessing
Tokenizer = Literal["13a", "zh", "char", "none"]
_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f]")
_COMPOUND = re.compile(rb"(\S)-(\S)")


class CorpusScore(NamedTuple):
    """A score and its sacrebleu signature."""

    value: float
    signature: str


def choose_tokenizer(references: Sequence[str]) -> Tokenizer:
    """Return the tokenizer for the script in which most of the references' letters are written.

    That is zh for Chinese, and char for other scripts without spaces, such as Japanese: sacrebleu's
    tokenizers for these need dictionaries.
    """
    letters = "".join(char for text in references for char in text if char.isalpha())
    unspaced = len(UNSPACED.findall(letters))
    if 2 * unspaced <= len(letters):
        return "13a"
    # Japanese mixes Han with Kana, Chinese has hardly any other letters than Han
    return "zh" if 20 * len(_HAN.findall(letters)) > 19 * unspaced else "char"


def bleu(
    hypotheses: Sequence[str], references: Sequence[str], tokenizer: Tokenizer = "13a"
) -> CorpusScore:
    """Return sacrebleu's BLEU, cased.

    Raises:
      UserError: there are no texts, the numbers of hypotheses and references differ, or sacrebleu
        is not installed.
    """
    return _score(_metrics().BLEU(tokenize=tokenizer), hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> CorpusScore:
    """Return sacrebleu's chrF, with character n-grams up to 6 and beta 2.

    Raises:
      UserError: as `bleu`.
    """
    return _score(_metrics().CHRF(), hypotheses, references)


def tokenized_bleu(
    hypotheses: Sequence[str], references: Sequence[str], tokenizer: Tokenizer = "13a"
) -> CorpusScore:
    """Return the tokenized BLEU of papers on WMT En-Fr, WMT Zh-En and IWSLT De-En.

    It is not smoothed, like multi-bleu.perl and fairseq's score: 0 if no 4-gram is right. The
    papers' text is tokenized by Moses; of raw text, sacrebleu's 13a takes its place.

    Raises:
      UserError: as `bleu`.
    """
    metric = _metrics().BLEU(tokenize=tokenizer, smooth_method="none", force=True)
    return _score(metric, hypotheses, references)


def compound_split_bleu(
    hypotheses: Sequence[str], references: Sequence[str], tokenizer: Tokenizer = "13a"
) -> CorpusScore:
    """Return the tokenized BLEU of papers on WMT En-De (Vaswani et al., 2017): compounds are split.

    It is not comparable with `tokenized_bleu`, since a compound counts as three tokens. Raw text is
    tokenized as there.

    Raises:
      UserError: as `bleu`.
    """
    metrics = _metrics()
    # both are tokenized before compounds are split
    tokenize = metrics.BLEU(tokenize=tokenizer).tokenizer
    ours, theirs = (
        [split_compounds(tokenize(text.rstrip())) for text in texts]
        for texts in (hypotheses, references)
    )
    score = _score(metrics.BLEU(tokenize="none", smooth_method="none", force=True), ours, theirs)
    signature = score.signature.replace("tok:none", f"tok:{tokenizer}+compounds")
    return CorpusScore(score.value, signature)


def split_compounds(text: str) -> str:
    """Return a tokenized text with "a-b" replaced by "a ##AT##-##AT## b", like the papers' scripts.

    get_ende_bleu.sh of tensor2tensor and compound_split_bleu.sh of fairseq replace (\\S)-(\\S) in
    Perl, which sees bytes. Matches do not overlap: "a-b-c" is split once, "aa-bb-cc" twice.
    """
    content = text.encode("utf-8", "surrogatepass")
    return _COMPOUND.sub(rb"\1 ##AT##-##AT## \2", content).decode("utf-8", "surrogatepass")


def _metrics() -> Any:
    """Return the module of sacrebleu's metrics."""
    if missing := missing_modules(["sacrebleu"]):
        raise UserError(f"bleu: {missing_message(missing)}")
    from sacrebleu import metrics

    return metrics


def _score(metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> CorpusScore:
    if len(hypotheses) != len(references):
        raise UserError(
            f"bleu: {len(hypotheses)} hypotheses and {len(references)} references; give one "
            "reference for each"
        )
    if not hypotheses:
        raise UserError("bleu: there are no hypotheses; give at least one")
    value = metric.corpus_score(hypotheses, [references]).score
    return CorpusScore(float(value), str(metric.get_signature()))


def check_library() -> None:
    """Raise a `UserError` if sacrebleu is not installed."""
    _metrics()

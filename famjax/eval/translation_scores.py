"""Scores of translations, from 0 to 100 over a corpus: BLEU and chrF, by sacrebleu.

Each hypothesis has one reference. The signature says how a score was made; scores compare only
where it is the same (Post, 2018, arXiv 1804.08771).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from famjax.core.errors import UserError
from famjax.core.optional import missing_message, missing_modules

# of sacrebleu; none is for texts that are tokenized already, as by Moses in fairseq's preprocessing
Tokenizer = Literal["13a", "none"]
_COMPOUND = re.compile(rb"(\S)-(\S)")


class Score(NamedTuple):
    """A score and sacrebleu's signature of it."""

    value: float
    signature: str


def bleu(
    hypotheses: Sequence[str], references: Sequence[str], tokenizer: Tokenizer = "13a"
) -> Score:
    """Return sacrebleu's BLEU, cased.

    Raises:
      UserError: there are no texts, or not as many references, or sacrebleu is not installed.
    """
    return _score(_metrics().BLEU(tokenize=tokenizer), hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Return sacrebleu's chrF: character n-grams to 6, beta 2. Errors: as of `bleu`."""
    return _score(_metrics().CHRF(), hypotheses, references)


def tokenized_bleu(
    hypotheses: Sequence[str], references: Sequence[str], tokenizer: Tokenizer = "13a"
) -> Score:
    """Return the tokenized BLEU of papers on WMT En-Fr, WMT Zh-En and IWSLT De-En.

    Without smoothing, as multi-bleu.perl and fairseq's score have it: 0 if no 4-gram is right.

    Raises:
      UserError: as of `bleu`.
    """
    metric = _metrics().BLEU(tokenize=tokenizer, smooth_method="none", force=True)
    return _score(metric, hypotheses, references)


def compound_split_bleu(
    hypotheses: Sequence[str], references: Sequence[str], tokenizer: Tokenizer = "13a"
) -> Score:
    """Return the tokenized BLEU of papers on WMT En-De (Vaswani et al., 2017): compounds are split.

    It does not compare with `tokenized_bleu`: a compound is three tokens.

    Raises:
      UserError: as of `bleu`.
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
    return Score(score.value, signature)


def split_compounds(text: str) -> str:
    """Return a tokenized text with "a-b" as "a ##AT##-##AT## b", as the papers' scripts do.

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


def _score(metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    if len(hypotheses) != len(references):
        raise UserError(
            f"bleu: {len(hypotheses)} hypotheses and {len(references)} references; give one "
            "reference for each"
        )
    if not hypotheses:
        raise UserError("bleu: there are no hypotheses; give at least one")
    value = metric.corpus_score(hypotheses, [references]).score
    return Score(float(value), str(metric.get_signature()))


def check_library() -> None:
    """Raise a `UserError` if sacrebleu is not installed."""
    _metrics()

"""Tables of the scores of translations and summaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from famjax.cli.tables import Table
from famjax.core.units import inflect

if TYPE_CHECKING:
    from famjax.eval.translate import TranslationResult

# scores of translations by key; results of earlier versions lack some
_BLEU = {
    "bleu": "BLEU",
    "chrf": "chrF",
    "bleu_tokenized": "BLEU, tokenized",
    "bleu_compounds": "BLEU, compounds split",
}
_ROUGE = {
    "rouge_lsum": "ROUGE-Lsum",
    "rouge_l": "ROUGE-L",
    "rouge_1": "ROUGE-1",
    "rouge_2": "ROUGE-2",
}


def translation_table(result: TranslationResult) -> Table:
    """Return the table of the scores of translations or summaries."""
    values: Mapping[str, Any] = result
    if "bleu" in values:
        names = {name: label for name, label in _BLEU.items() if name in values}
        scores = [f"{values[name]:.2f}" for name in names]
    else:
        names = {name: label for name, label in _ROUGE.items() if name in values}
        scores = [f"{values[name]:.1%}" for name in names]
    table = Table(
        f"{result['task']}:{result['files']}",
        ("pairs", "beam", "length penalty", *names.values(), "cut", "tokens/s"),
    )
    table.add_row(
        f"{result['pairs']:,}",
        str(result["beam"]),
        f"{result['length_penalty']:g}",
        *scores,
        str(result["cut"]),
        search_speed(result),
    )
    return table


def search_speed(result: Mapping[str, Any]) -> str:
    """Return the tokens/s of a search for outputs; "-" for one of several length penalties."""
    speed = result["tokens_per_second"]
    return "-" if speed is None else f"{speed:,.0f}"


def translation_notes(result: TranslationResult) -> list[str]:
    """Return lines on other length penalties, unusual pairs, and sacrebleu's signatures."""
    values: Mapping[str, Any] = result
    signatures: dict[str, str] = result.get("signatures", {})
    notes = [f"{name}: {signature}" for name, signature in signatures.items()]
    counts = {side: values.get(f"empty_{side}s") for side in ("source", "target")}
    empty = [
        f"{count:,} {inflect(count, 'has', 'have')} an empty {side}"
        for side, count in counts.items()
        if count
    ]
    if empty:
        notes.insert(0, f"of the pairs {' and '.join(empty)}")
    lost = {"source": ("unread_sources", "read"), "target": ("unwritten_targets", "write")}
    for side, (key, verb) in lost.items():
        if count := values.get(key):
            has = f"{side} has" if count == 1 else f"{side}s have"
            notes.insert(0, f"{count:,} {has} text that the model's tokenizer cannot {verb}")
    if cut := result.get("cut_sources"):
        are = inflect(cut, "source is", "sources are")
        notes.insert(0, f"{cut:,} {are} cut to data.source_words={result['source_words']}")
    if longer := result.get("longer"):
        notes.insert(
            0,
            f"{longer:,} {inflect(longer, 'source has', 'sources have')} more than "
            f"{result['longest_trained']} tokens, the most that were trained on "
            "(data.source_length)",
        )
    if tried := result.get("penalties"):
        scale, digits = (1, 2) if signatures else (100, 1)
        scores = ", ".join(f"{penalty:g}: {scale * score:.{digits}f}" for penalty, score in tried)
        notes.insert(0, f"the best of length penalties {scores}")
    return notes

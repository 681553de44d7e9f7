"""Tables of scores on texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from famjax.cli.eval_labels import ABLATED, ends_of, few_documents
from famjax.cli.tables import Table
from famjax.core.units import byte_size, counted

if TYPE_CHECKING:
    from famjax.eval.text_results import PositionRow, TextResult, TextScores

_NEGATIVE = (
    "gained by memory is negative where the memory makes predictions worse than a reset at every "
    "block: usual early in training, and for texts unlike the training data, or longer"
)
_UNIGRAM = (
    "unigram: the token frequencies of this text, the best prediction without context; uniform: "
    "equal probabilities for the vocabulary"
)


def text_tables(text: TextResult) -> list[Table | str]:
    """Return the tables of a text's scores, and lines that explain them."""
    words = [_words(text)] if "words" in text else []
    tables: list[Table | str] = [text_table(text), *words, _UNIGRAM]
    if text.get("ablations"):
        tables += [text_ablation_table(text), *few_documents(text["documents"])]
    return [*tables, position_table(text), *([_NEGATIVE] if _has_negative_gain(text) else [])]


def text_table(text: TextResult) -> Table:
    unread = f" ({text['documents_left']:,} not read)" if text["documents_left"] else ""
    how = ""
    if text["window"]:
        how = f", windows of {text['window']:,} scored on their last {text['score']:,}"
    table = Table(
        f"text:{text['files']}: {counted(text['documents'], 'document')}"
        f"{unread}{how}, {text['tokens']:,} tokens, "
        f"{byte_size(text['bytes'])}, {text['tokens_per_second']:,.0f} tokens/s, "
        f"{byte_size(text['state_bytes'])} of memory per document",
        ("", "bits per byte", "loss", "perplexity", "accuracy"),
        words=(0,),
    )
    _add_scores(table, "with memory", text)
    _add_scores(table, "reset at every block", text["without_memory"])
    _add_scores(table, "gained by memory", text["memory_gain"], sign="+")
    for name, ablated in text.get("ablations", {}).items():
        _add_scores(table, ABLATED[name], ablated)
    table.add_rule()
    _add_scores(table, "unigram", text["unigram"])
    _add_scores(table, "uniform", text["uniform"])
    return table


def text_ablation_table(text: TextResult) -> Table:
    """Return the table of how many bits per byte a run gains against each ablation."""
    table = Table("gained, in bits per byte", ("against", "gained", "95%"), words=(0,))
    for name, ablated in text["ablations"].items():
        if "gain" in ablated:
            gain, *ends = ablated["gain"]
            table.add_row(ABLATED[name], f"{gain:+.4f}", ends_of(ends))
    return table


def _words(text: TextResult) -> str:
    perplexity = text["word_perplexity"]
    shown = f"{perplexity:,.2f}" if perplexity < 1e6 else f"{perplexity:.3g}"
    return f"perplexity of a word: {shown} ({text['words']:,} words)"


def _add_scores(table: Table, name: str, scores: TextScores, sign: str = "") -> None:
    table.add_row(
        name,
        f"{scores['bits_per_byte']:{sign}.4f}",
        f"{scores['loss']:{sign}.4f}",
        f"{scores['perplexity']:{sign},.3f}",
        f"{scores['accuracy']:{sign}.2%}",
    )


def position_table(text: TextResult) -> Table:
    columns = ("tokens before", "tokens", "loss", "reset at every block", "gained by memory")
    whole = "window" if text["window"] else "document"
    table = Table(f"loss by position in the {whole}", columns)
    for row in text["by_position"]:
        table.add_row(
            f"{row['from']:,} to {row['to']:,}",
            f"{row['tokens']:,}",
            f"{row['loss']:.4f}",
            f"{row['loss_without_memory']:.4f}",
            f"{_gain(row):+.4f}",
        )
    return table


def _has_negative_gain(text: TextResult) -> bool:
    """Return whether a printed gain is below 0 by more than rounding."""
    return any(gain <= -5e-5 for gain in (*map(_gain, text["by_position"]), _min_gain(text)))


def _gain(row: PositionRow) -> float:
    return row["loss_without_memory"] - row["loss"]


def _min_gain(text: TextResult) -> float:
    gain = text["memory_gain"]
    return min(gain["bits_per_byte"], gain["loss"], gain["accuracy"])

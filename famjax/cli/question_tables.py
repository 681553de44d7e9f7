"""Tables of scores on question sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from famjax.cli.eval_labels import ABLATED, few_documents
from famjax.cli.tables import Table
from famjax.core.units import byte_size, counted
from famjax.eval.subsets import LENGTHS

if TYPE_CHECKING:
    from famjax.eval.questions_result import QuestionsResult
    from famjax.eval.subsets import SubsetRow


def question_tables(result: QuestionsResult) -> list[Table | str]:
    """Return the tables of the scores on a question set, and lines that explain them."""
    return [
        questions_table(result),
        *few_documents(result["documents"]),
        *subset_tables(result),
        *questions_notes(result),
        octaves_table(result),
    ]


def questions_table(result: QuestionsResult) -> Table:
    """Return the table of the scores on a question set."""
    table = Table(
        f"{result['task']}:{result['files']} ({result['source']})",
        ("documents", "longest", "questions", "metric", "score", "95%", "cut"),
        words=(3,),
    )
    table.add_row(
        f"{result['documents']:,}",
        f"{result['longest']:,}",
        f"{result['questions']:,}",
        result["metric"],
        f"{result['score']:.1%}",
        "{:.1f}-{:.1f}".format(*(100 * end for end in result["interval"])),
        f"{result['cut']:,}",
    )
    for name, score in result["scores"].items():
        if name != result["metric"]:
            table.add_row("", "", "", name, f"{score:.1%}", "", "")
    for name, ablated in result["ablations"].items():
        gain, low, high = ablated["gain"]
        table.add_row("", "", "", f"{ABLATED[name]}", f"{ablated['score']:.1%}", "", "")
        ends = f"{100 * low:+.1f} to {100 * high:+.1f}"
        table.add_row("", "", "", "gained", f"{gain:+.1%}", ends, "")
    return table


def subset_tables(result: QuestionsResult) -> list[Table]:
    """Return the tables of a collection's data sets; none for a question set without them."""
    subsets = result.get("subsets", [])
    tables = [subsets_table(subsets)] if len(subsets) > 1 else []
    if any(row.get("by_words") for row in subsets):
        tables.append(words_table(subsets))
    return tables


def subsets_table(subsets: list[SubsetRow]) -> Table:
    """Return the table of a collection's data sets; the mean of their scores is its score."""
    columns = ("data set", "documents", "questions", "metric", "score", "cut")
    table = Table("by data set, whose mean is the score", columns, words=(0, 3))
    for row in subsets:
        table.add_row(
            row["name"],
            f"{row['documents']:,}",
            f"{row['questions']:,}",
            row["metric"],
            f"{row['score']:.1%}",
            f"{row['cut']:,}",
        )
    return table


def words_table(subsets: list[SubsetRow]) -> Table:
    """Return the table of the scores on data sets by the number of words of the document."""
    table = Table("by words of the document (LongBench-E)", ("data set", *LENGTHS), words=(0,))
    for row in subsets:
        scores = (row["by_words"].get(length) for length in LENGTHS)
        table.add_row(row["name"], *("" if score is None else f"{score:.1%}" for score in scores))
    columns = [
        [row["by_words"][length] for row in subsets if length in row["by_words"]]
        for length in LENGTHS
    ]
    if len(subsets) > 1:
        table.add_rule()
        table.add_row("mean", *(f"{sum(c) / len(c):.1%}" if c else "" for c in columns))
    return table


def questions_notes(result: QuestionsResult) -> list[str]:
    """Return lines on how the documents of a question set were read."""
    lines = [
        f"read in {counted(result['lanes'], 'lane')} by {result['chunk']:,} tokens "
        f"({result['padding']:.1%} "
        f"padding), {result['tokens_per_second']:,.0f} tokens/s, {result['answer_seconds']:.2f} "
        f"s/answer, {byte_size(result['state_bytes'])} of memory per document, up to "
        f"{result['updates']:,} memory updates"
    ]
    if result["cut_documents"]:
        lines.append(
            f"cut to their last tokens, --window {result['window']:,}: "
            f"{counted(result['cut_documents'], 'document')}"
        )
    if result["skipped"]:
        first = result["skipped"][0]
        lines.append(f"{counted(len(result['skipped']), 'line')} left out, the first: {first}")
    return lines


def octaves_table(result: QuestionsResult) -> Table:
    """Return the table of the scores by the length of the documents."""
    table = Table("by length of the document", ("tokens", "documents", "questions", "score"))
    for row in result["rows"]:
        table.add_row(
            f"{row['from']:,} to {row['to']:,}",
            f"{row['documents']:,}",
            f"{row['questions']:,}",
            f"{row['score']:.1%}",
        )
    return table

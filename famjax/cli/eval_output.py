"""Tables of `famjax eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from famjax.cli.tables import Output, Table
from famjax.core.units import byte_size, counted, inflect
from famjax.eval.effective_length import effective_lengths
from famjax.eval.subsets import LENGTHS

if TYPE_CHECKING:
    from famjax.eval.long import LongResult
    from famjax.eval.passkey import PasskeyRow
    from famjax.eval.questions import QuestionsResult
    from famjax.eval.subsets import SubsetRow
    from famjax.eval.text_results import PositionRow, TextResult, TextScores
    from famjax.eval.translate import TranslationResult

# a bootstrap over fewer documents gives intervals that are far too narrow
_FEW = 5
_NEGATIVE = (
    "gained by memory is negative where the memory makes predictions worse than a reset at every "
    "block: usual early in training, and for texts unlike the training data, or longer"
)
# for each ablation, a description of what the run is compared with
ABLATED = {
    "reset": "a reset at every block",
    "memory": "the memory at its initial value",
    "segments": "no memory segments",
}
_UNIGRAM = (
    "unigram: the token frequencies of this text, the best prediction without context; uniform: "
    "equal probabilities for the vocabulary"
)


def show_run(report: dict[str, Any]) -> None:
    """Print which run is evaluated."""
    Output().print(f"{report['run']}, step {report['step']:,}")


def show_result(group: str, result: Any) -> None:
    """Print the tables of a result, except for tasks of lm-evaluation-harness."""
    if group == "lm_eval":
        return  # `show_end` has one table of all
    out = Output()
    for part in result_tables(group, result):
        out.print(part)


def show_end(report: dict[str, Any]) -> None:
    """Print what follows the results: the harness's scores, and the peak memory."""
    out = Output()
    if report["lm_eval"]:
        out.print(harness_table(report["lm_eval"]))
    out.print(f"peak memory {byte_size(report['memory']['peak_bytes'])}")


def result_tables(group: str, result: Any) -> list[Table | str]:
    """Return the tables of a result, and lines that explain them.

    Args:
      group: the `Task.group` of the result.
      result: what the task's evaluation returned.
    """
    if group == "passkey":
        ablations = [
            ablation_table("passkey", result, name, "key_accuracy")
            for name in dict.fromkeys(name for row in result for name in row.get("ablations", {}))
        ]
        scores = [{"length": row["length"], "score": row["key_accuracy"]} for row in result]
        scores.sort(key=lambda row: row["length"])
        effective = _effective(effective_lengths(scores))
        return [passkey_table(result), effective, reading_table(result), *ablations]
    if group == "toy":
        return [toy_table(result)]
    if group == "long":
        ablations = [
            ablation_table(result["task"], result["rows"], name)
            for name in result["rows"][0].get("ablations", {})
        ]
        effective = _effective(result["effective_length"])
        return [long_table(result), effective, reading_table(result["rows"]), *ablations]
    if group == "text":
        negative = [_NEGATIVE] if _has_negative_gain(result) else []
        words = [_words(result)] if "words" in result else []
        tables: list[Table | str] = [text_table(result), *words, _UNIGRAM]
        if result.get("ablations"):
            tables += [text_ablation_table(result), *_few_documents(result["documents"])]
        return [*tables, position_table(result), *negative]
    if group == "questions":
        return [
            questions_table(result),
            *_few_documents(result["documents"]),
            *subset_tables(result),
            *questions_notes(result),
            octaves_table(result),
        ]
    if group == "lm_eval":
        return [harness_table([result])]
    if group == "translate":
        return [translation_table(result), *translation_notes(result)]
    return [rows_table(group, result["rows"])]


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


def harness_table(results: list[dict[str, Any]]) -> Table:
    seconds = sum(result["seconds"] for result in results)
    table = Table(
        f"lm-evaluation-harness {results[0]['harness']}, {seconds:.0f} seconds",
        ("task", "version", "shots", "examples", "metric", "value", "standard error"),
        words=(0, 4),
    )
    for row in (row for result in results for row in result["rows"]):
        filtered = "" if row["filter"] == "none" else f", {row['filter']}"
        table.add_row(
            row["task"],
            f"{row['version']}",
            f"{row['shots']}",
            "" if row["examples"] is None else f"{row['examples']:,}",
            f"{row['metric']}{filtered}",
            f"{row['value']:.4f}",
            "" if row["error"] is None else f"{row['error']:.4f}",
        )
    return table


def rows_table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Return the table of a task that has no special one: a column for each value of its rows."""
    table = Table(title, tuple(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(
            *(
                f"{v:.4g}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else str(v)
                for v in row.values()
            )
        )
    return table


def _percent_range(interval: Sequence[float]) -> str:
    return "{:.0f}-{:.0f}".format(*(100 * end for end in interval))


def passkey_table(rows: list[PasskeyRow]) -> Table:
    keys, digits = 100 * rows[0]["key_chance"], rows[0]["token_chance"]
    table = Table(
        f"passkey (guessing gets {keys:.3g}% of whole keys, {digits:.0%} of digits)",
        ("tokens", "documents", "whole keys", "95%", "digits"),
    )
    for row in rows:
        table.add_row(
            f"{row['length']:,}",
            f"{row['examples']:,}",
            f"{row['key_accuracy']:.1%}",
            _percent_range(row["interval"]) if "interval" in row else "",
            f"{row['token_accuracy']:.1%}",
        )
    return table


def reading_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of time and memory of reading, by length.

    Updates and state are those of one document. Rows from before 2026-11-26 lack some values.
    """
    columns = ("tokens", "updates", "state", "seconds", "tokens/s", "s/answer", "peak memory")
    table = Table("reading", columns)
    for row in rows:
        table.add_row(
            f"{row['length']:,}",
            f"{row['updates']:,}" if "updates" in row else "",
            byte_size(row["state_bytes"]) if "state_bytes" in row else "",
            f"{row['seconds']:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['answer_seconds']:.2f}" if "answer_seconds" in row else "",
            byte_size(row["peak_bytes"]),
        )
    return table


def toy_table(toy: dict[str, Any]) -> Table:
    first = toy["rows"][0]
    columns = ("steps", "episodes", "whole episodes", "answers", f"always {first['commonest']}")
    table = Table(
        f"{toy['task']} (guessing gets {first['chance']:.1%} of answers)",
        (*columns, "repeat last answer", "tokens/s"),
    )
    for row in toy["rows"]:
        table.add_row(
            f"{row['length']:,}",
            f"{row['examples']:,}",
            f"{row['episode_accuracy']:.1%}",
            f"{row['accuracy']:.1%}",
            f"{row['commonest_accuracy']:.1%}",
            "" if row["last_accuracy"] is None else f"{row['last_accuracy']:.1%}",
            f"{row['tokens_per_second']:,.0f}",
        )
    return table


def depth_labels(count: int) -> list[str]:
    """Return the labels of `count` equal parts of a document, such as "0-20%"."""
    return [f"{100 * i // count}-{100 * (i + 1) // count}%" for i in range(count)]


def long_table(long: LongResult) -> Table:
    rows = long["rows"]
    depths = depth_labels(len(rows[0]["by_depth"]))
    table = Table(
        f"{long['task']} ({long['source']}): share of the references in the answers, by depth",
        ("tokens", "answers", "score", "95%", *depths, "cut"),
    )
    for row in rows:
        table.add_row(
            f"{row['length']:,}",
            f"{row['examples']:,}",
            f"{row['score']:.1%}",
            _percent_range(row["interval"]),
            *("" if share is None else f"{share:.0%}" for share in row["by_depth"]),
            f"{row['cut']:,}",
        )
    return table


def ablation_table(
    task: str, rows: Sequence[Mapping[str, Any]], name: str, score: str = "score"
) -> Table:
    """Return the table of how much a run gains against an ablation.

    Args:
      task: name of the task.
      rows: results of the lengths.
      name: name of the ablation.
      score: key of the run's own score in the rows.
    """
    table = Table(
        f"{task}: gained against {ABLATED[name]}",
        ("tokens", "updates", "score without", "score with", "gained", "95%"),
    )
    for row in rows:
        if name not in row.get("ablations", {}):
            continue  # a length of an earlier evaluation
        gain, low, high = row["ablations"][name]["gain"]
        table.add_row(
            f"{row['length']:,}",
            f"{row['updates']:,}",
            f"{row['ablations'][name]['score']:.1%}",
            f"{row[score]:.1%}",
            f"{gain:+.1%}",
            f"{100 * low:+.0f} to {100 * high:+.0f}",
        )
    return table


def _effective(lengths: dict[str, int | None]) -> str:
    """Return a line with the effective lengths."""
    shown = {rule: "none" if n is None else f"{n:,} tokens" for rule, n in lengths.items()}
    return (
        f"effective length: {shown['ruler']} (RULER: scores of 85.6% and more), {shown['nolima']} "
        "(NoLiMa: at least 85% of the score of the shortest)"
    )


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


def _few_documents(count: int) -> list[str]:
    """Return a line if intervals over that many documents are not to be relied on."""
    if count >= _FEW:
        return []
    return [f"{counted(count, 'document')}: too few for a reliable interval"]


def ends_of(interval: Sequence[float | None]) -> str:
    """Return the ends of an interval in bits per byte; "" if it has none, for one document."""
    low, high = interval
    return "" if low is None or high is None else f"{low:+.4f} to {high:+.4f}"


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

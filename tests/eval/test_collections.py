"""LongBench and L-Eval: each data set is read and scored by its own rules, and has a row."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from famjax.cli.main import main
from famjax.cli.question_tables import subset_tables
from famjax.core.errors import UserError
from famjax.eval import answer_scores
from famjax.eval.examples import Example
from famjax.eval.questions import _score, _select
from famjax.eval.subsets import mean_score, subset_rows
from famjax.tasks import TASKS
from famjax.tasks.questions import longbench
from famjax.tasks.questions.question_set import QuestionSet
from famjax.tasks.questions.records import Asked, AskedDocument
from famjax.tasks.task import Request

STORY = "Dogs ran off. " * 9


def question_set(name: str) -> QuestionSet:
    found = TASKS[name]
    assert isinstance(found, QuestionSet)
    return found


def write(file: Path, records: list[Any]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def long_record(name: str, **fields: Any) -> dict[str, Any]:
    return {"dataset": name, "context": "C", "input": "Q", "answers": ["1"], **fields}


def leval_record(how: str, answer: str, question: str = "q", **fields: Any) -> dict[str, Any]:
    return {
        "input": STORY,
        "evaluation": how,
        "instructions": [question],
        "outputs": [answer],
        "source": "s",
        **fields,
    }


def test_longbench_is_read_by_its_own_rules() -> None:
    task = question_set("longbench")
    document = task.parse(long_record("hotpotqa_e", length=3999))
    (asked,) = document.questions
    brief = (
        "Answer the question based on the given passages. Only give me the answer and do not "
        "output any other words.\n\n"
    )
    assert document.text == f"{brief}The following are given passages.\nC"
    assert asked.prompt == f"\n\n{brief}Question: Q\nAnswer:"
    assert (asked.metric, asked.answer_tokens, asked.stop) == ("f1", 32, "")
    assert (asked.subset, asked.words) == ("hotpotqa", 3999)
    for name, metric, tokens, stop, end in (
        ("samsum", "rouge_l_unique", 128, "\n", "\n\nQ"),
        ("gov_report", "rouge_l_unique", 512, "", "\n\nSummary:"),
        ("lcc", "code", 64, "", "Next line of code:\n"),
        ("passage_count", "numbers", 32, "", "The final answer is: "),
        ("passage_retrieval_zh", "numbers", 32, "", "答案是："),
    ):
        (asked,) = task.parse(long_record(name)).questions
        assert (asked.metric, asked.answer_tokens, asked.stop) == (metric, tokens, stop)
        assert asked.prompt.endswith(end)


@pytest.mark.parametrize(
    ("how", "answer", "question", "metric", "stop"),
    [
        ("f1", "a", "q", "f1", "\n"),
        ("rouge", "a", "q", "rouge_l_unstemmed", ""),
        ("exam", "(B) x", "q", "letter", "\n"),
        ("exam", "ACD", "q", "letters", "Question"),
        ("exam", "A-level", "q", "contains", "\n"),
        ("exam", "5", "q", "contains", "\n"),
        ("exam", "5", "Let's think step by step\n", "final_number", ""),
        ("exam", "5", "the output of the code? Let's think step by step", "printed", ""),
    ],
)
def test_leval_is_scored_as_its_records_say(
    how: str, answer: str, question: str, metric: str, stop: str
) -> None:
    record = leval_record(how, answer, question, source="quality_raw")
    (asked,) = question_set("leval").parse(record).questions
    assert (asked.metric, asked.stop, asked.references) == (metric, stop, (answer,))
    whole = {"final_number": "gsm100", "printed": "codeU"}.get(metric)
    assert asked.subset == (whole or "quality")
    assert (asked.prompt == f"\n\n{question}") == (whole is not None)


@pytest.mark.parametrize(
    ("answer", "question", "output"),
    [
        ("12", "Let's think step by step", "Twice 3 is 6.\n\nTwice 6 is 12.\n\nThe answer is 12."),
        ("AC", "q", "A. cats\nC. dogs\n\nQuestion: B.\nAnswer: B"),
    ],
)
def test_all_of_an_exams_answer_is_scored(answer: str, question: str, output: str) -> None:
    """As auto_eval.py does; of the predictions in L-Eval's repository some have such lines."""
    task = question_set("leval")
    (asked,) = task.parse(leval_record("exam", answer, question)).questions
    assert _score(task, asked, output, False).scores == {asked.metric: 1}


def test_a_statement_is_judged_in_the_novel_and_in_the_world() -> None:
    for question, world in (
        (
            "x, based on the world described in the document.",
            "x, based on the real-world knowledge and facts up until your last training.",
        ),
        (
            "x.",
            "x. Answer this question based on the real-world knowledge and facts up until your "
            "last training.",
        ),
    ):
        record = leval_record("exam", "True [fact: False]", question)
        asked = question_set("leval").parse(record).questions
        assert [(each.prompt, each.references) for each in asked] == [
            (f"\n\nQuestion: {question}\nAnswer:", ("True",)),
            (f"\n\nQuestion: {world}\nAnswer:", ("False",)),
        ]


def test_what_leval_does_not_score_is_left_out(tmp_path: Path) -> None:
    task = question_set("leval")
    judged = leval_record("LLM", "a")
    files = write(tmp_path / "a.jsonl", [leval_record("f1", "a"), judged])
    documents, left_out = task.load(files, False)
    assert len(documents[0].questions) == 1
    assert left_out == [f"{files}:2: evaluation 'LLM': a model or a person judges its answers"]
    with pytest.raises(UserError, match=r"no document with questions in 1 lines, the first: .*LLM"):
        task.load(write(tmp_path / "b.jsonl", [judged]), False)


def test_a_score_is_the_mean_over_data_sets() -> None:
    def example(subset: str, document: int, score: float, words: int | None = None) -> Example:
        scores = {"f1" if subset != "c" else "code": score}
        return Example(
            *(0, document, 0, 1, None, "", [], "", score, False, scores, {}, subset), words
        )

    examples = [
        example("a", 0, 1.0, 3999),
        example("a", 1, 0.0, 4000),
        example("a", 2, 0.5, 7999),
        example("b", 3, 0.5, 8000),
        example("c", 4, 0.25),
    ]
    assert mean_score(examples, "f1") == 0.5
    assert mean_score(examples, "code") == 0.25
    rows = subset_rows(examples)
    assert [row["by_words"] for row in rows] == [{"0-4k": 1, "4-8k": 0.25}, {"8k+": 0.5}, {}]
    assert [(row["name"], row["metric"], row["score"]) for row in rows] == [
        ("a", "f1", 0.5),
        ("b", "f1", 0.5),
        ("c", "code", 0.25),
    ]
    _, by_words = subset_tables({"subsets": rows})
    assert by_words.lines(None)[-1].split() == ["mean", "100.0%", "25.0%", "50.0%"]


@pytest.mark.long
def test_longbench_has_a_row_for_each_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read, answered, stopped, and continued."""
    for name in ("trec", "passage_count"):
        short = longbench._SETS[name]._replace(answer_tokens=5)
        monkeypatch.setitem(longbench._SETS, name, short)
    shutil.copytree(tiny.folder(), tmp_path / "run")
    shared = {"context": STORY, "answers": ["cat 1"], "all_classes": ["cat 1"]}
    sets = ("trec", "passage_count", "trec")
    records = [long_record(name, **shared, length=9 * i) for i, name in enumerate(sets)]
    records[2]["input"] = "R"
    files = write(tmp_path / "long.jsonl", records)
    arguments = ["eval", str(tmp_path / "run"), "--tasks", f"longbench:{files}"]
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "by data set, whose mean is the score" in shown
    assert re.search(r"passage_count 1 1 numbers [\d.]+% \d", shown)
    assert re.search(r"trec \d 2 classes [\d.]+% \d", shown)
    assert re.search(r"0-4k 4-8k 8k\+ -[- ]+ passage_count [\d.]+% trec", shown)
    (file,) = (tmp_path / "run" / "eval").glob("longbench-*.jsonl")
    lines = file.read_text().splitlines()
    before = [line for line in lines if '"output"' in line]
    # the last document was not answered yet
    times = [line for line in lines if '"first": 0' in line]
    kept = [line for line in before if json.loads(line)["document"] == 0]
    file.write_text("\n".join([lines[0], *kept, times[0]]) + "\n")
    assert main(arguments) == 0
    again = [line for line in file.read_text().splitlines() if '"output"' in line]
    assert sorted(again) == sorted(before)


def test_leval_has_a_row_for_each_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "leval", replace(question_set("leval"), answer_tokens=5))
    folder = shutil.copytree(tiny.folder(), tmp_path / "run")
    records = [
        leval_record("exam", "A", source="toefl_tpo"),
        leval_record("f1", "dogs", source="financial"),
        leval_record("f1", "cats", "r", source="financial"),
        leval_record("human", "dogs", source="financial"),
    ]
    files = write(tmp_path / "leval.jsonl", records)
    assert main(["eval", str(folder), "--tasks", f"leval:{files}"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"financial_qa 1 2 f1 [\d.]+% \d", shown)
    assert re.search(r"tpo 1 1 letter [\d.]+% \d", shown)
    assert "1 line left out, the first: " in shown
    assert "by words" not in shown
    saved = json.loads((folder / "eval" / "report.json").read_text())
    # other tests may have evaluated the folder that is copied
    found = [each["result"] for key, each in saved["results"].items() if "leval" in key]
    (result,) = found
    assert [row["name"] for row in result["subsets"]] == ["financial_qa", "tpo"]
    assert result["metric"] == "mean"
    assert result["score"] == pytest.approx(np.mean([r["score"] for r in result["subsets"]]))
    assert [row["by_words"] for row in result["subsets"]] == [{}, {}]


def test_examples_are_of_all_data_sets_in_turn() -> None:
    documents = [
        AskedDocument(name, (Asked("?", ("a",), subset=name[0]),))
        for name in ("a1", "a2", "a3", "b1", "c1", "c2")
    ]

    def chosen(examples: int | None) -> list[str]:
        request = Request("longbench", "files", examples=examples)
        return [document.text for document in _select(documents, request)]

    assert chosen(None) == ["a1", "b1", "c1", "a2", "c2", "a3"]
    # fewer are the first of more, so that an evaluation of more keeps their answers
    assert chosen(4) == ["a1", "b1", "c1", "a2"]


def test_a_missing_library_is_named_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny.folder(), tmp_path / "run")
    files = write(tmp_path / "leval.jsonl", [leval_record("rouge", "a")])
    answer_scores._rouge_scorer.cache_clear()
    monkeypatch.setattr(answer_scores, "missing_modules", lambda names: names)
    monkeypatch.setattr("famjax.eval.questions._prepare", None)
    assert main(["eval", str(folder), "--tasks", f"leval:{files}"]) == 2
    assert re.search(r"^famjax: .*rouge: .*\n\Z", capsys.readouterr().err)

"""Long documents are read once and asked from copies of the state."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from long_texts import facts, load

from famjax.core.errors import UserError
from famjax.eval import long
from famjax.eval.effective_length import effective_lengths
from famjax.eval.examples import Example, Examples, examples_name, read_lines, weights_version
from famjax.eval.intervals import mean_interval
from famjax.eval.lane_answers import answer_prompts
from famjax.eval.lane_stream import LaneStream
from famjax.eval.long import evaluate_long, score
from famjax.eval.memory_usage import update_tokens
from famjax.eval.passkey import evaluate_passkey
from famjax.eval.streaming import Streamer
from famjax.tasks import TASKS
from famjax.tasks.long.document import LongTask, Question
from famjax.train.run import Run


def continue_greedily(run: Run, tokens: np.ndarray, count: int) -> str:
    """Continue a text by calls of the whole model, up to a stop token."""
    written: list[int] = []
    while len(written) < count:
        line = np.concatenate([tokens, written]).astype(np.int32)[None]
        likeliest = int(tiny.logits(run.model, line)[0, -1].argmax())
        if likeliest in run.tokenizer.stop_ids:
            break
        written.append(likeliest)
    return run.tokenizer.decode(written)


@pytest.fixture(scope="module")
def run() -> Run:
    return tiny.run_with("fam", seed=3, fam_update="gated")


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(TASKS["niah_multikey_1"]), "answer_tokens", 6)


def test_answers_are_the_models_own(run: Run, short_answers: None) -> None:
    task = TASKS["niah_multikey_1"]
    assert isinstance(task, LongTask)
    book = str(Path(__file__).parent.parent / "conftest.py")
    arguments: dict[str, Any] = {"examples": 3, "batch": 2, "questions": 2, "quiet": True}
    # documents of several calls, and shorter than one
    found = long_examples(run, "niah_multikey_1", [2600, 1100], files=book, **arguments)
    assert len(found) == 2 * 3 * 2
    material = task.load(book, "", run.tokenizer)
    for example in found:
        length, number = example["length"], example["document"]
        document = task.evaluated_document(run.tokenizer, length, number, 3, material)
        before = np.concatenate(list(document.tokens()))
        question = document.content.questions[example["question"]]
        tokens = np.concatenate([before, run.tokenizer.encode(question.text)])
        assert example["tokens"] == len(before) <= length
        assert example["prompt"] == question.text
        assert example["references"] == list(question.references)
        max_tokens = document.max_written
        assert example["output"] == continue_greedily(run, tokens, max_tokens)
        assert example["depth"] == document.depths[question.facts[0]]
        assert example["score"] == score(example["output"], question)
    assert any(example["cut"] for example in found)
    # documents of a batch are not equally long
    assert len({example["tokens"] for example in found}) > 2


def long_examples(run: Run, *arguments: Any, **options: Any) -> list[dict[str, Any]]:
    """Return the examples of an evaluation, as they are in its file."""
    folder = tiny.folder().parent / "examples"
    shutil.rmtree(folder, ignore_errors=True)
    result = evaluate_long(run, *arguments, folder=folder, **options)
    return [line for line in read_lines(folder / result["examples"])[1] if "output" in line]


def test_lanes_end_at_a_stop_token_at_all_references_or_at_the_limit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = run.tokenizer.eos_id
    script = np.stack(
        [run.tokenizer.encode("abcdefgh"), run.tokenizer.encode("abcdefgh"), [ord("x")] * 8], 1
    )
    script[3, 1] = stop
    prompts = [np.arange(40, 40 + n, dtype=np.int32) for n in (3, 3, 5)]
    seen: list[np.ndarray] = []

    class Scripted(LaneStream):
        @property
        def logits(self) -> Any:
            # what a lane writes depends on how much of it there is
            drawn = [script[self.positions[n] - len(prompts[n]), n] for n in range(3)]
            return np.eye(300)[drawn]

        def step_lanes(self, tokens: Any) -> None:
            seen.append(tokens[:, 0])
            super().step_lanes(tokens)

    stream = Scripted(run.model, 3)
    states, questions = [stream.lane(0)] * 3, [asks("CD"), asks("zz"), asks("yy")]
    found = answer_prompts(
        stream,
        run.tokenizer,
        states,
        prompts,
        [6] * 3,
        lambda lane, text: long._is_settled(text, questions[lane]),
    )
    assert found == [("abcd", False), ("abc", False), ("xxxxxx", True)]
    assert [len(seen), *seen[0]] == [5, ord("a"), ord("a"), ord("x")]


def test_a_stopped_evaluation_continues(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    evaluate = functools.partial(evaluate_long, run, "vt", [700, 1300], examples=3, quiet=True)
    whole = evaluate(batch=2)
    ask, calls = long._ask, []

    def stop_at_third(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return ask(*given)

    monkeypatch.setattr(long, "_ask", stop_at_third)
    folder = tmp_path / "eval"
    with pytest.raises(KeyboardInterrupt):
        evaluate(batch=2, folder=folder)
    (file,) = folder.glob("vt-*.jsonl")
    assert len(file.read_text().splitlines()) == 1 + 3 + 2
    resumed = evaluate(batch=2, folder=folder)
    assert len(calls) == 3 + 2
    for row, other in zip(resumed["rows"], whole["rows"], strict=True):
        for name in ("length", "examples", "score", "by_depth", "cut", "updates", "state_bytes"):
            assert row[name] == other[name]
    evaluate(batch=2, folder=folder)
    assert len(calls) == 5
    # another batch size changes no answer
    evaluate(batch=1, folder=folder)
    assert len(calls) == 5
    # another evaluation begins anew, says so, and keeps what there is
    capsys.readouterr()
    evaluate_long(run, "vt", [700], examples=2, batch=2, quiet=True, folder=folder)
    assert len(calls) == 6
    (told,) = capsys.readouterr().err.splitlines()
    assert told == (
        f"vt: starts from the beginning (examples changed); earlier answers are kept in {file}"
    )
    evaluate(batch=2, folder=folder)
    assert len(calls) == 6
    assert capsys.readouterr().err == ""
    file.write_text(file.read_text()[:-20])
    number = len(file.read_text().splitlines())
    with pytest.raises(UserError, match=rf"damaged at line {number} \(.*; remove it, and run"):
        evaluate(batch=2, folder=folder)


def test_other_texts_of_equal_size_are_others(
    run: Run, tmp_path: Path, short_answers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    book = tmp_path / "book.txt"
    for word in ("river", "house"):
        book.write_text(f"The {word} is there. " * 99)
        evaluate_long(
            run,
            "niah_multikey_1",
            [900],
            examples=1,
            batch=1,
            files=str(book),
            quiet=True,
            folder=tmp_path / "e",
        )
    assert "starts from the beginning (texts changed)" in capsys.readouterr().err


def test_the_version_of_a_folder_has_its_tokenizer(tmp_path: Path) -> None:
    assert weights_version(tmp_path, 3) == [3]
    (tmp_path / "model.safetensors").write_bytes(b"1")
    versions = []
    for vocabulary in ("a", "b"):
        (tmp_path / "tokenizer.json").write_text(vocabulary)
        versions.append(weights_version(tmp_path, 0))
    assert versions[0] != versions[1]


def test_evaluations_at_once_keep_each_others_answers(run: Run, tmp_path: Path) -> None:
    settings = {"task": "vt", "files": ""}
    file = tmp_path / examples_name(settings)
    first, second = (Examples(file, settings) for _ in range(2))
    times = {"tokens": 1, "read": 1.0, "answer": 1.0, "peak": 1}
    for store, number in ((first, 0), (second, 1), (first, 2)):
        example = Example(64, number, 0, 60, 0.5, "?", ["a"], "a", 1.0, False)
        store.add(((64, [number]), [example], times))
    found = Examples(file, settings)
    assert found.missing(64, range(4)) == [3]
    assert len(found.of_length(64)[1]) == 3


def test_the_peak_of_memory_is_that_when_a_length_was_read(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = iter(range(100))
    report = lambda: {"peak_bytes": next(peaks)}  # noqa: E731
    monkeypatch.setattr(long, "memory_report", report)
    rows = evaluate_long(run, "vt", [700, 1300], examples=3, batch=2, quiet=True)["rows"]
    assert [row["peak_bytes"] for row in rows] == [1, 3]
    monkeypatch.setattr("famjax.eval.passkey.memory_report", report)
    rows = evaluate_passkey(tiny.run(), [260, 450], 4, 2, quiet=True)
    # the second batch reads 260 tokens after the first one's 450
    assert rows[0]["peak_bytes"] + 1 == rows[1]["peak_bytes"]


def test_without_memory_only_the_last_block_is_known(run: Run, short_answers: None) -> None:
    w = run.model.block_len
    found = long_examples(run, "vt", [2400, 700], examples=3, batch=2, ablate=["reset"], quiet=True)
    task = TASKS["vt"]
    assert isinstance(task, LongTask)
    for example in found:
        document = task.evaluated_document(run.tokenizer, example["length"], example["document"], 3)
        (question,) = document.content.questions
        tokens = np.concatenate([*document.tokens(), run.tokenizer.encode(question.text)])
        written: list[int] = []
        ablated = example["ablated"]["reset"]
        while len(written) < len(run.tokenizer.encode(ablated["output"])):
            line = np.concatenate([tokens, written]).astype(np.int32)
            # the block of the last token
            block = line[(len(line) - 1) // w * w :][None]
            written.append(int(tiny.logits(run.model, block)[0, -1].argmax()))
        assert run.tokenizer.decode(written) == ablated["output"]
        assert ablated["score"] == score(ablated["output"], question)
    assert any(example["output"] != example["ablated"]["reset"]["output"] for example in found)


def test_gains_are_paired_and_have_intervals(run: Run) -> None:
    def example(document: int, right: float, forgetful: float) -> Example:
        ablated = {"reset": {"output": "b", "score": forgetful}}
        return Example(64, document, 0, 60, 0.5, "?", ["a"], "a", right, False, ablated=ablated)

    examples = [example(0, 1, 0), example(0, 1, 1), example(1, 1, 0), example(2, 0, 0)]
    times = [{"read": 2.0, "answer": 0.5, "tokens": 240, "peak": 1}]
    row = long._row(run, 64, examples, times)
    assert row["score"] == 0.75
    assert row["ablations"]["reset"]["score"] == 0.25
    assert row["tokens_per_second"] == 120
    gain, low, high = row["ablations"]["reset"]["gain"]
    assert gain == pytest.approx((0.5 + 1 + 0) / 3)
    assert 0 <= low < gain < high <= 1
    assert row["interval"][0] < 0.75 < row["interval"][1]
    without = [replace(e, ablated={}) for e in examples]
    assert not long._row(run, 64, without, times)["ablations"]


@pytest.mark.long
def test_rows_say_how_long_and_how_deep(run: Run) -> None:
    result = evaluate_long(run, "niah_single_1", [1200, 600], examples=5, batch=5, quiet=True)
    assert result["source"].startswith("RULER")
    assert [row["length"] for row in result["rows"]] == [600, 1200]
    for row in result["rows"]:
        assert row["examples"] == 5
        # each document has its needle in a part of its own
        assert None not in row["by_depth"]
        assert row["score"] == pytest.approx(np.mean(row["by_depth"]))
        assert row["updates"] == row["length"] // run.model.block_len
        assert min(row[name] for name in ("seconds", "tokens_per_second", "answer_seconds")) > 0
        assert row["state_bytes"] == Streamer(run.model, 1).state_bytes()


def asks(*references: str, wrong: tuple[str, ...] | None = None) -> Question:
    return Question("", references, (), wrong)


def test_one_of_several_references_suffices() -> None:
    question = Question("?", ("Rome", "the city"), (0,), any_of=True)
    assert score(" in rome.", question) == 1
    assert score(" in Paris", question) == 0


def test_the_score_is_the_share_of_references_whatever_the_case() -> None:
    assert score("they are 12 and Ab-Cd", asks("12", "ab-cd", "99", "98")) == 0.5
    assert score("", asks("12")) == 0
    assert score("112", asks("12")) == 1


def test_an_answer_of_babi_is_its_first_sentence() -> None:
    question = asks("hall", wrong=("office", "garden"))
    assert score(" the Hall. Or the office?", question) == 1
    assert score(" hall\noffice", question) == 1
    assert score("\nhall", question) == 1
    assert score(" the hall or the Office.", question) == 0
    assert score(" the office. No, the hall", question) == 0
    assert score(" I do not know. Hall", question) == 0
    # whole words, all of them
    assert score(" none.", asks("none", wrong=("one",))) == 1
    assert score(" unknown", asks("n,w", wrong=("n,s",))) == 0
    assert score(" n,w.", asks("n,w", wrong=("n,s",))) == 1
    assert score(" milk", asks("milk", "apple", wrong=("football",))) == 0
    assert score(" milk,apple", asks("milk", "apple", wrong=("football",))) == 1


@pytest.mark.parametrize("name", [name for name in TASKS if isinstance(TASKS[name], LongTask)])
def test_the_trained_answer_has_a_full_score(name: str) -> None:
    task, tokenizer = long.find_task(name), tiny.run().tokenizer
    document = task.evaluated_document(tokenizer, 20_000, 0, 1, load(task, ""))
    for question in document.content.questions:
        tokens = tokenizer.encode(question.answer)
        assert len(tokens) < document.max_written
        assert score(tokenizer.decode(tokens), question) == 1


def test_the_effective_length_is_the_longest_up_to_which_all_reach_the_bar() -> None:
    def rows(*scores: float) -> list[dict[str, Any]]:
        return [{"length": 2**i, "score": s} for i, s in enumerate(scores)]

    assert effective_lengths(rows(1, 0.9, 0.856, 0.84, 0.9)) == {"ruler": 4, "nolima": 4}
    assert effective_lengths(rows(0.6, 0.52, 0.5)) == {"ruler": None, "nolima": 2}
    assert effective_lengths(rows(0, 0)) == {"ruler": None, "nolima": None}


def test_mistakes_are_told(run: Run) -> None:
    with pytest.raises(UserError, match="--questions 2: a document of vt has 1"):
        evaluate_long(run, "vt", [900], questions=2)
    with pytest.raises(UserError, match="vt:books: the task has its own filler; write vt"):
        evaluate_long(run, "vt", [900], files="books")
    with pytest.raises(UserError, match="100 tokens do not hold"):
        evaluate_long(run, "vt", [900, 100])
    with pytest.raises(UserError, match="900 tokens do not fit its cache of 64"):
        evaluate_long(tiny.run_with("full"), "vt", [900])


def test_a_story_is_evaluated(run: Run) -> None:
    result = evaluate_long(
        run, "babilong", [900], examples=3, batch=2, facts=facts(), ablate=["reset"], quiet=True
    )
    (row,) = result["rows"]
    assert row["examples"] == 3
    assert 0 <= row["score"] <= 1
    asked = evaluate_long(run, "qa_1", [900], examples=2, batch=2, facts=facts("qa_1"), quiet=True)
    assert asked["rows"][0]["examples"] == 2
    row = long._row(
        run,
        64,
        [Example(64, n, 0, 60, 0.5, "", [], "", 1, False) for n in range(20)],
        [{"read": 1, "answer": 1, "tokens": 1, "peak": 1}],
    )
    # shares, also where all are right
    assert row["interval"] == pytest.approx([0.8316, 1], abs=1e-4)
    (row,) = evaluate_long(run, "cwe", [5000], examples=1, batch=1, quiet=True)["rows"]
    assert row["by_depth"] == [None] * 5


def test_the_memory_of_a_stack_without_blocks_is_its_span(run: Run) -> None:
    model = replace(run.config.model, stack="feedback")
    model = replace(model, feedback=replace(model.feedback, span=24))
    assert update_tokens(replace(run.config, model=model)) == 24
    assert update_tokens(run.config) == run.model.block_len


def test_an_interval_of_equal_values_is_that_of_their_number() -> None:
    mean, low, high = mean_interval(np.ones(20))
    # Clopper and Pearson, 20 of 20
    assert (mean, low) == (1, pytest.approx(0.8316, abs=1e-4))
    assert high > 1
    mean, low, high = mean_interval(np.arange(100) % 2.0)
    assert (low, mean, high) == (pytest.approx(0.4, abs=0.02), 0.5, pytest.approx(0.6, abs=0.02))

"""Questions in files of JSON lines: each document is read once, and nothing is cut unasked."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tiny

from famjax.cli.main import main
from famjax.core.errors import UserError
from famjax.eval import questions
from famjax.eval.examples import Example, ablation_scores, document_interval, read_lines
from famjax.eval.memory_usage import update_tokens
from famjax.experiment.load import load_config
from famjax.tasks import TASKS
from famjax.tasks.questions.html_text import html_text
from famjax.tasks.questions.question_set import QuestionSet
from famjax.tasks.task import Request
from famjax.tokenizers.load import load_tokenizer

pytestmark = pytest.mark.usefixtures("one_device")
STORIES = ["A cat sat. " * 30, "Dogs ran off. " * 9, "One. "]


def write(file: Path, records: list[Any]) -> str:
    text = "".join(json.dumps(record) + "\n" for record in records)
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress(text.encode()))
    else:
        file.write_text(text)
    return str(file)


def narrative() -> list[dict[str, Any]]:
    """Return two questions of each story, a line each."""
    return [
        {"passage": story, "question": f"What is {i}?", "answer": ["a cat", "cats"]}
        for i in range(2)
        for story in STORIES
    ]


def quality() -> list[dict[str, Any]]:
    asked = [
        {"question": "Who sat?", "options": ["a cat", "a dog", "no", "yes"], "gold_label": 1},
        {"question": "Why?", "options": ["so", "not", "x", "because it was late"], "gold_label": 4},
    ]
    return [{"article": story, "questions": asked} for story in STORIES]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("narrativeqa", "leval", "longbench"):
        task = TASKS[name]
        assert isinstance(task, QuestionSet)
        monkeypatch.setitem(TASKS, name, replace(task, answer_tokens=5))


def request(task: str, files: str, **options: Any) -> Request:
    return Request(task, files, batch=2, quiet=True, **options)


def test_answers_are_those_of_the_whole_document(short: None, tmp_path: Path) -> None:
    run = tiny.run_with("fam", seed=3)
    files = write(tmp_path / "qa.jsonl.gz", narrative())
    result = questions.evaluate(
        run, request("narrativeqa", files, folder=tmp_path, ablate=("reset",))
    )
    assert (result["documents"], result["questions"]) == (3, 6)
    assert result["longest"] == 331
    assert result["scores"].keys() == {"rouge_l", "f1"}
    _, lines = read_lines(tmp_path / result["examples"])
    examples = [line for line in lines if "output" in line]
    assert len(examples) == 6
    block = update_tokens(run.config)
    for example in examples:
        text = STORIES[example["document"]] + example["prompt"]
        tokens = np.append(run.tokenizer.bos_id, run.tokenizer.encode(text)).astype(np.int32)
        assert example["output"] == greedy(run, tokens)
        # with a reset at every block the answer depends on the tokens since the last one
        begin = (len(tokens) - 1) // block * block
        if len(tokens) + 5 < begin + block:
            assert example["ablated"]["reset"]["output"] == greedy(run, tokens[begin:])
    # what is there is not answered again
    again = questions.evaluate(
        run, request("narrativeqa", files, folder=tmp_path, ablate=("reset",))
    )
    assert again["tokens_per_second"] == result["tokens_per_second"]


def greedy(run: Any, tokens: np.ndarray) -> str:
    """Return the first line of what follows, at most 5 tokens."""
    written: list[int] = []
    while len(written) < 5:
        line = np.append(tokens, written).astype(np.int32)[None]
        token = int(tiny.logits(run.model, line)[0, -1].argmax())
        if token in run.tokenizer.stop_ids:
            break
        written.append(token)
    return run.tokenizer.decode(written).lstrip("\n ").split("\n")[0]


@pytest.mark.long
def test_options_are_ranked_by_their_log_likelihoods(tmp_path: Path) -> None:
    run = tiny.run_with("bswa", seed=1)
    files = write(tmp_path / "q.jsonl", quality())
    result = questions.evaluate(run, request("quality", files, folder=tmp_path))
    assert result["metric"] == "accuracy"
    _, lines = read_lines(tmp_path / result["examples"])
    for example in (line for line in lines if "output" in line):
        asked = quality()[0]["questions"][example["question"]]
        sums = []
        before = STORIES[example["document"]] + example["prompt"]
        context = np.append(run.tokenizer.bos_id, run.tokenizer.encode(before))
        for option in asked["options"]:
            tokens = run.tokenizer.encode(f" {option}")
            both = np.concatenate([context, tokens]).astype(np.int32)[None]
            logits = tiny.logits(run.model, both)[0].astype(np.float64)
            logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            at = np.arange(len(context) - 1, both.shape[1] - 1)
            sums.append(logs[at, both[0, at + 1]].sum())
        sizes = [len(option) + 1 for option in asked["options"]]
        right = asked["gold_label"] - 1
        assert example["output"] == asked["options"][int(np.argmax(sums))]
        assert example["scores"]["accuracy"] == (int(np.argmax(sums)) == right)
        by_byte = int(np.argmax(np.divide(sums, sizes)))
        assert example["scores"]["accuracy_per_byte"] == (by_byte == right)


def test_an_option_that_the_tokenizer_does_not_know_is_refused(tmp_path: Path) -> None:
    lines = ["abcdefgh ijklmnop", "qrstuvwxyz. aeiou"] * 40
    with (tmp_path / "m.model").open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=32, model_type="char"
        )
    run = replace(tiny.run_with("fam"), tokenizer=load_tokenizer(str(tmp_path / "m.model")))
    for option, said in (("日本", r"q.jsonl:1: tokenizer .* cannot express"), (" ", "is empty")):
        asked = {"question": "who", "options": ["a cat", option], "gold_label": 1}
        files = write(tmp_path / "q.jsonl", [{"article": "a cat sat", "questions": [asked]}])
        with pytest.raises(UserError, match=said):
            questions.evaluate(run, request("quality", files))


def test_equal_questions_have_the_references_of_all(tmp_path: Path) -> None:
    rows = [{"passage": "x", "question": "Who?", "answer": [text]} for text in ("a", "b", "a")]
    task = TASKS["narrativeqa"]
    assert isinstance(task, QuestionSet)
    ((document,), _) = task.load(write(tmp_path / "a.jsonl", rows), False)
    (asked,) = document.questions
    assert asked.references == ("a", "b")


def test_options_in_a_question() -> None:
    def parse(listed: str, answer: str) -> Any:
        record = {"input": "D", "instructions": [f"q?\n{listed}"], "outputs": [answer]}
        task = TASKS["quality"]
        assert isinstance(task, QuestionSet)
        (asked,) = task.parse(record).questions
        return asked.options, asked.references[0]

    # the article is no letter, spaces do not count, and an option may have lines
    assert parse(" (A) he\n (B) A dog  ate it", "A dog ate it") == (
        ("he", "A dog  ate it"),
        "A dog  ate it",
    )
    assert parse(" (A) x\ny\n (B) z", "(A) x") == (("x\ny", "z"), "x\ny")
    assert parse(" (A) x\n (B) y", "B")[1] == "y"


def test_means_are_over_questions() -> None:
    def example(document: int, question: int, score: float) -> Example:
        ablated = {"reset": {"output": "", "score": 1 - score}}
        return Example(0, document, question, 1, None, "", [], "", score, False, ablated=ablated)

    rows = [example(0, 0, 1.0), *(example(1, n, 0.0) for n in range(3))]
    mean, low, high = document_interval(rows, [row.score for row in rows])
    assert (mean, low, high) == (0.25, 0, 1)
    assert ablation_scores(rows)["reset"]["gain"][0] == pytest.approx(0.25 - 0.75)


def test_a_window_reads_the_last_tokens_and_says_so(short: None, tmp_path: Path) -> None:
    run = tiny.run_with("full", capacity=64)
    files = write(tmp_path / "qa.jsonl", narrative())
    with pytest.raises(UserError, match=r"qa.jsonl:1: 36\d tokens .*--window 64"):
        questions.evaluate(run, request("narrativeqa", files))
    result = questions.evaluate(run, request("narrativeqa", files, folder=tmp_path, window=64))
    assert result["cut_documents"] == 2
    _, lines = read_lines(tmp_path / result["examples"])
    first = next(line for line in lines if line.get("document") == 0)
    after = len(first["prompt"]) + 5
    text = (STORIES[0] + first["prompt"])[-(63 - 5) :]
    assert first["tokens"] == 64 - after
    assert first["output"] == greedy(run, np.append(256, list(text.encode())))
    with pytest.raises(UserError, match="--window 20: question and answer"):
        questions.evaluate(run, request("narrativeqa", files, window=20))


@pytest.mark.parametrize(
    ("task", "record", "said"),
    [
        ("narrativeqa", {"passage": "a"}, r"has no field 'answer'; it has 'passage'"),
        (
            "narrativeqa",
            {"passage": "a", "question": "b", "answer": [" "]},
            "a reference that answers .* is empty",
        ),
        ("narrativeqa", {"passage": " ", "question": "b", "answer": "c"}, "document is empty"),
        ("narrativeqa", {"passage": "a", "question": " ", "answer": "c"}, "question is empty"),
        (
            "quality",
            {"article": "a", "questions": [{**quality()[0]["questions"][0], "question": ""}]},
            "question is empty",
        ),
        ("narrativeqa", {"passage": "a", "question": "b", "answer": 3}, "a field is not what"),
        ("quality", {"article": "a", "questions": []}, "has no question"),
        ("narrativeqa", {"passage": None, "question": "b", "answer": "c"}, "None is a NoneType"),
        (
            "quality",
            {"article": "a", "questions": [{**quality()[0]["questions"][0], "gold_label": 0}]},
            "gold_label 0 is none of 1 to 4",
        ),
        ("leval", {"input": "a", "evaluation": "f2"}, "evaluation 'f2' has no metric here"),
        (
            "leval",
            {"input": "a", "evaluation": "f1", "instructions": ["a"], "outputs": []},
            "1 instructions and 0 outputs",
        ),
        ("longbench", {"dataset": "vcsum"}, "dataset 'vcsum': its metric needs Chinese word seg"),
        (
            "longbench",
            {"dataset": "trec", "prompt": "a", "answers": ["c"], "length": "9k"},
            "length '9k' is not a number of words",
        ),
        ("longbench", {"dataset": "treck"}, "dataset 'treck' has no metric here; did you mean"),
        (
            "longbench",
            {"dataset": "passage_count", "prompt": "a\nb", "answers": ["two"]},
            "the reference 'two' has no number",
        ),
        (
            "longbench",
            {"dataset": "trec", "prompt": "a\nb", "answers": ["d"], "all_classes": ["c"]},
            "the reference 'd' is none of all_classes",
        ),
    ],
)
def test_a_broken_record_is_named(
    task: str, record: dict[str, Any], said: str, tmp_path: Path
) -> None:
    good = {"narrativeqa": narrative()[0], "quality": quality()[0]}.get(task) or {
        "leval": {"input": "a", "evaluation": "f1", "instructions": ["q"], "outputs": ["b"]},
        "longbench": {"dataset": "trec", "prompt": "a\nb", "answers": ["c"], "all_classes": ["c"]},
    }[task]
    files = write(tmp_path / "x.jsonl", [good, record])
    found = TASKS[task]
    assert isinstance(found, QuestionSet)
    with pytest.raises(UserError, match=f"line 2: .*{said}"):
        found.load(files, False)
    documents, errors = found.load(files, True)
    assert (len(documents), len(errors)) == (1, 1)


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a", "summary": "b"}\n\n{"text": \n')
    task = TASKS["xlsum"]
    assert isinstance(task, QuestionSet)
    with pytest.raises(UserError, match=r"x.jsonl, line 3: not JSON.*--skip-broken"):
        task.load(str(file), False)
    with pytest.raises(UserError, match="no such file"):
        task.load(str(tmp_path / "y.jsonl"), False)


def test_html_may_be_unbalanced() -> None:
    """A head without an end hides no body, an end without a start nothing."""
    assert html_text("<head><title>T<body><p>a") == "a\n"
    assert html_text("<p>a</p></script><p>b <script>x</script>c</p>") == "a\n\nb c\n"


def test_records_of_all_sets() -> None:
    """In the shapes in which they are published."""
    scrolls = {"input": "Who?\n\n (A) he\n (B) she\n\nOnce upon.\n\nA time.", "output": "she"}
    long = {"dataset": "qasper", "context": "C", "input": "Q", "answers": ["a"]}
    template = {**long, "prompt_template": "Read.\n{context}\nAsk: {input}\nAnswer:"}
    leval = {"input": "D", "evaluation": "exam", "instructions": ["q?\n\n (A) x\n (B) y"]}
    numbered = {f"question1option{i}": f"{i} " for i in range(1, 5)} | {"question1": "Who?"}
    html = ["<html><head><title>T</title></head>\n", "<p>\n A <i>\n b</i>\n<br/>\n c</p><p>d</p>"]
    squality = {"question_text": "Plot?", "responses": [{"response_text": "r"}] * 2}
    for name, record, text, prompt, references, options in [
        ("qasper", long, "C", "\n\nQuestion: Q\nAnswer:", ["a"], []),
        ("longbench", template, "Read.\nC", "\nAsk: Q\nAnswer:", ["a"], []),
        ("quality", scrolls, "Once upon.\n\nA time.", None, ["she"], ["he", "she"]),
        ("quality", {**leval, "outputs": ["(B) y"]}, "D", None, ["y"], ["x", "y"]),
        (
            "quality",
            {**numbered, "question1_gold_label": 3, "article": html},
            "A b\nc\n\nd\n",
            None,
            ["3"],
            ["1", "2", "3", "4"],
        ),
        ("leval", {**leval, "outputs": ["B"]}, "D", None, ["B"], []),
        ("squality", {"document": "S", "questions": [squality]}, "S", None, ["r", "r"], []),
        ("xlsum", {"text": "T", "summary": "s"}, "T", "\n\nSummary:", ["s"], []),
        (
            "longbench",
            {"dataset": "trec", "prompt": "x\nQ: y\nType:", "answers": ["k"], "all_classes": ["k"]},
            "x\nQ: y",
            "\nType:",
            ["k"],
            ["k"],
        ),
    ]:
        task = TASKS[name]
        assert isinstance(task, QuestionSet)
        document = task.parse(record)
        (asked,) = document.questions
        assert document.text == text
        assert prompt in (None, asked.prompt)
        assert list(asked.references) == references
        assert list(asked.options) == options


@pytest.mark.long
def test_a_command_shows_tables_and_examples(
    short: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(tiny.folder(), tmp_path / "run")
    files = write(tmp_path / "qa.jsonl", [*narrative(), {"passage": 3}])
    assert main(["eval", str(folder), "--tasks", f"narrativeqa:{files}"]) == 2
    assert "line 7" in capsys.readouterr().err
    line = ["eval", str(folder), "--tasks", f"narrativeqa:{files}", "--skip-broken"]
    assert main([*line, "--examples", "2", "--questions", "1", "--ablate", "reset,memory"]) == 0
    out = capsys.readouterr().out
    assert "rouge_l" in out
    assert "a reset at every block" in out
    assert "the memory at its initial value" in out
    assert "1 line left out" in " ".join(out.split())
    assert main(["report", str(folder)]) == 0
    assert "What is 0?" in (folder / "eval" / "report.html").read_text()
    other = shutil.copytree(tiny.folder(), tmp_path / "other")
    assert main(["eval", str(other), *line[2:], "--examples", "2", "--questions", "1"]) == 0
    capsys.readouterr()
    assert main(["compare", str(folder), str(other)]) == 0
    assert "+0.0%" in capsys.readouterr().out
    assert main(["eval", str(folder), "--tasks", "passkey", "--skip-broken"]) == 2
    assert "--skip-broken: is for files with questions" in capsys.readouterr().err
    assert main(["eval", str(folder), "--tasks", "quality"]) == 2
    assert "quality: names no files; write quality:FILES.jsonl" in capsys.readouterr().err


def test_it_is_no_task_to_train_on() -> None:
    with pytest.raises(UserError, match="is for famjax eval"):
        load_config("text_fam", ["data.task=xlsum"])


@pytest.mark.long
def test_an_evaluation_goes_on_with_more_documents(
    short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny.run_with("bswa", seed=3)
    files = write(tmp_path / "qa.jsonl", narrative())
    answered: list[int] = []
    answer_all = questions._answer_all

    def spy(run: Any, task: Any, work: list[Any], *rest: Any) -> None:
        answered.extend(each.number for each in work)
        answer_all(run, task, work, *rest)

    monkeypatch.setattr(questions, "_answer_all", spy)

    def evaluate(**options: Any) -> dict[str, Any]:
        answered.clear()
        return questions.evaluate(run, request("narrativeqa", files, folder=tmp_path, **options))

    two = evaluate(examples=2)
    assert answered == [0, 1]
    three = evaluate()
    assert answered == [2]
    assert (three["documents"], three["questions"]) == (3, 6)
    again = evaluate(examples=2)
    assert answered == []
    assert again["score"] == two["score"]
    assert (again["documents"], again["questions"]) == (2, 4)
    # another question of a document, and another text
    evaluate(questions=1)
    assert answered == [0, 1, 2]
    records = narrative()
    records[1]["passage"] = records[4]["passage"] = "Other text. " * 9
    write(tmp_path / "qa.jsonl", records)
    assert evaluate(questions=1)["questions"] == 3
    assert answered == [1]


def test_few_states_are_held(short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny.run_with("bswa", seed=3)
    files = write(tmp_path / "qa.jsonl", narrative())
    expected = questions.evaluate(run, request("narrativeqa", files))
    kept: list[int] = []
    add = questions.Examples.add
    monkeypatch.setattr(
        questions.Examples, "add", lambda self, *given: kept.append(len(given)) or add(self, *given)
    )
    monkeypatch.setattr(questions, "_HELD_BYTES", 1)
    found = questions.evaluate(run, request("narrativeqa", files))
    # saved after each document
    assert kept == [1, 1, 1]
    assert found["score"] == expected["score"]


def test_short_answers_do_not_wait_for_long_ones() -> None:
    """Prompts of equal limits are answered together, those of similar lengths first."""
    limits, lengths = (512, 32, 512, 32, 32), (3, 9, 1, 2, 5)
    prompts: Any = [
        SimpleNamespace(max_tokens=max_tokens, tokens=[0] * length)
        for max_tokens, length in zip(limits, lengths, strict=True)
    ]
    assert list(questions._batches(prompts, 3, lambda prompt: prompt.max_tokens)) == [
        [3, 4, 1],
        [2, 0],
    ]
    assert list(questions._batches(prompts, 2)) == [[2, 3], [0, 4], [1]]

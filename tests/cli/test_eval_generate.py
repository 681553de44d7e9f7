"""`famjax eval` and `famjax generate`: output, saved states and errors."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from tiny_tokenizers import byte_level

from famjax.cli import eval_output, text_tables
from famjax.cli.main import main
from famjax.core.errors import UserError
from famjax.eval.generate import Generator
from famjax.eval.state_file import refuse_special
from famjax.tasks.parse import parse_lengths, parse_tasks
from famjax.tokenizers.load import load_tokenizer
from famjax.train.run import open_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a copy: evaluations write their reports into it."""
    return str(shutil.copytree(tiny.folder(), tmp_path_factory.mktemp("evaluated") / "run"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(tiny.TEXT * 10, encoding="utf-8")
    return path


def error_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removeprefix("famjax: ").strip()


# eval


def test_json_output_is_one_object(
    run: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = f"passkey,text:{text}"
    argv = ["eval", run, "--tasks", tasks, "--lengths", "420", "--examples", "2", "--batch", "2"]
    assert main([*argv, "--json", "--plot"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["step"] == 2
    assert report["passkey"][0]["length"] == 420
    assert report["text"][0]["files"] == str(text)
    assert report["text"][0]["bytes"] == text.stat().st_size
    assert report["text"][0]["unigram"]["loss"] < report["text"][0]["uniform"]["loss"]
    assert report["passkey"][0]["key_chance"] == pytest.approx(1e-3)
    assert report["memory"]["peak_bytes"] > 0
    for name in ("passkey.png", "text.png"):
        assert (Path(run) / "plots" / name).read_bytes().startswith(b"\x89PNG")


def test_tables_are_of_the_training_task(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", run]) == 0
    out = capsys.readouterr().out
    assert "text:holdout" in out
    assert "reset at every block" in out
    assert "0 to 255" in out
    assert "unigram" in out
    assert "uniform" in out
    assert main(["eval", run, "--tasks", "passkey", "--lengths", "420", "--examples", "1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "guessing gets 0.1% of whole keys, 10% of digits" in out
    # one document that was not found
    assert "420 1 0.0% 0-98" in out
    assert "effective length: none (RULER" in out


@pytest.mark.long
def test_long_documents_are_asked_by_length_and_depth(
    run: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "book.txt").write_text("It was a book. " * 50)
    task = f"niah_multikey_1:{tmp_path / 'book.txt'}"
    arguments = ["eval", run, "--tasks", f"{task},vt", "--lengths", "900,1400", "--examples", "1"]
    assert main(["eval", run, "--tasks", task, "--lengths", "600", "--questions", "4"]) == 2
    assert "600 tokens do not hold" in capsys.readouterr().err
    arguments[5] = "1300,1400"
    assert main([*arguments[:3], task, *arguments[4:], "--questions", "4", "--plot"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "niah_multikey_1 (RULER, arXiv 2404.06654): share of the references" in out
    assert "1,300 4 0.0%" in out
    assert "effective length: none (RULER" in out
    (plot,) = (Path(run) / "plots").glob("niah_multikey_1-*.png")
    assert plot.read_bytes().startswith(b"\x89PNG")
    (file,) = (Path(run) / "eval").glob("niah_multikey_1-*.jsonl")
    lines = file.read_text().splitlines()
    examples = [line for line in map(json.loads, lines) if "output" in line]
    assert [example["question"] for example in examples] == [0, 1, 2, 3] * 2
    assert main(["report", run, "--out", str(tmp_path / "page.html")]) == 0
    assert "wrote" in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text()
    assert page.count("<details") == page.count("<dt>question</dt>") == 8
    assert examples[0]["references"][0] in page
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http-equiv", "")
    # what is there is not read again
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [long["task"] for long in report["long"]] == ["niah_multikey_1", "vt"]


def test_a_page_of_results(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["eval", run, "--tasks", "passkey,text", "--lengths", "420", "--examples", "1"]) == 0
    )
    assert main(["report", run, run]) == 0
    page = (Path(run) / "eval" / "report.html").read_text()
    assert page.count("<h1>") == 2
    assert page.count("<h2>passkey</h2>") == page.count("<h2>text:holdout</h2>") == 2
    assert "reset at every block" in page


@pytest.mark.parametrize("content", ["[]", "{", '{"results": []}', '{"results": {"vt": {}}}'])
def test_damaged_results_are_told_before_evaluating(
    content: str, tmp_path: Path, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "eval").mkdir(exist_ok=True)
    (tmp_path / "run" / "eval" / "report.json").write_text(content)
    for argv in (["eval", "--tasks", "vt", "--lengths", "900"], ["report"]):
        assert main([argv[0], str(tmp_path / "run"), *argv[1:]]) == 2
        assert "report.json: damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "name a run that was evaluated"),
        (["/no/such"], "there is no such folder"),
        (["TMP"], "has no results; run famjax eval TMP first"),
    ],
)
def test_a_page_without_results(
    argv: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [arg.replace("TMP", str(tmp_path)) for arg in argv]
    assert main(["report", *argv]) == 2
    assert told.replace("TMP", str(tmp_path)) in capsys.readouterr().err


def test_a_negative_gain_is_explained() -> None:
    scores = {"bits_per_byte": 0.0, "loss": 0.0, "accuracy": 0.0}
    rows = [{"loss": 1.2, "loss_without_memory": 1.3}, {"loss": 1.2, "loss_without_memory": 1.1}]
    assert not text_tables._has_negative_gain({"memory_gain": scores, "by_position": rows[:1]})
    assert text_tables._has_negative_gain({"memory_gain": scores, "by_position": rows})
    assert text_tables._has_negative_gain(
        {"memory_gain": scores | {"accuracy": -0.01}, "by_position": []}
    )


def test_a_negative_gain_is_explained_where_it_is_printed(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", run, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (text,) = report["text"]
    for gain in (-0.01, 0.01):
        text["memory_gain"] = dict.fromkeys(text["memory_gain"], gain)
        for row in text["by_position"]:
            row["loss_without_memory"] = row["loss"] + gain
        eval_output.show_result("text", text)
        assert ("gained by memory is negative" in capsys.readouterr().out) == (gain < 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", []),
        ("passkey", [("passkey", "")]),
        ("text", [("text", "holdout")]),
        ("text:holdout, passkey", [("text", "holdout"), ("passkey", "")]),
        ("text:a.txt,b.txt,passkey", [("text", "a.txt,b.txt"), ("passkey", "")]),
        ("text:a,text:b:c", [("text", "a"), ("text", "b:c")]),
        ("vt,niah_single_2:a,b", [("vt", ""), ("niah_single_2", "a,b")]),
    ],
)
def test_tasks_are_parsed(given: str, expected: list[tuple[str, str]]) -> None:
    assert parse_tasks(given) == expected


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("paskey", "did you mean 'passkey'"),
        ("passkey:a", "unknown task"),
        ("text:", "no files"),
        ("niah_single_2:", "niah_single_2: names no files"),
        (",", "--tasks ,: names no task"),
    ],
)
def test_invalid_tasks_are_rejected(given: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        parse_tasks(given)


def test_lengths_are_parsed() -> None:
    assert parse_lengths("1024,256,1_024") == [256, 1024]
    for bad in ("", "a", "256,", "0", "-4"):
        with pytest.raises(UserError, match="--lengths"):
            parse_lengths(bad)


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--tasks", "tex"], "unknown task 'tex'; did you mean 'text'?"),
        (["--tasks", "text:/no/such/file"], "no such file"),
        (["--tasks", "passkey", "--lengths", "5"], "are too few for needle and question"),
        (["--tasks", "text", "--lengths", "9"], "the given tasks have no lengths"),
        (["--examples", "0"], "--examples 0: must be at least 1"),
        (["--tasks", "text", "--examples", "2"], "--examples 2: texts are read whole; name fewer"),
        (["--tasks", "passkey,text:/no/such"], "--tasks: no such file or folder: /no/such"),
        (["--tasks", "text", "--questions", "2"], "--questions 2: is for tasks on long"),
        (["--tasks", "vt", "--questions", "2"], "--questions 2: a document of vt has 1"),
        (["--tasks", "vt", "--facts", "qa1.txt"], "--facts qa1.txt: is for tasks on long"),
        (["--tasks", "babilong"], "babilong: give the file with its facts, --facts FILE"),
        (["--tasks", "vt:a.txt"], "vt:a.txt: the task has its own filler; write vt"),
        (["--tsks", "x"], "did you mean '--tasks'"),
    ],
)
def test_eval_rejects_invalid_flags(
    run: str, argv: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert what in error_line(["eval", run, *argv], capsys)


def test_a_folder_that_is_not_a_run_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not a run" in error_line(["eval", str(tmp_path)], capsys)
    assert "is not a run" in error_line(["generate", str(tmp_path), "--prompt", "x"], capsys)
    said = error_line(["eval", str(tmp_path / "frist")], capsys)
    assert said.endswith(f"{tmp_path / 'frist'}: there is no such folder")
    (tmp_path / "first").mkdir()
    said = error_line(["generate", str(tmp_path / "frist"), "--prompt", "x"], capsys)
    assert said.endswith(f"there is no such folder; did you mean '{tmp_path / 'first'}'?")
    (tmp_path / "a" / "checkpoints").mkdir(parents=True)
    assert f"give one of {tmp_path / 'a'}" in error_line(["eval", str(tmp_path)], capsys)


# generate


@pytest.mark.long
def test_a_saved_state_can_be_loaded_later(
    run: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = str(tmp_path / "s")
    ask = ["--prompt", "the", "--max-tokens", "8"]
    assert main(["generate", run, "--read", str(text), "--state-out", state, *ask]) == 0
    first, err = capsys.readouterr()
    assert "read 671 tokens; wrote" in err
    assert main(["generate", run, "--state-in", state, *ask]) == 0
    assert capsys.readouterr().out == first
    whole = ["--prompt", text.read_text(encoding="utf-8") + "the", "--max-tokens", "8"]
    assert main(["generate", run, *whole]) == 0
    assert capsys.readouterr().out == first
    # read without generating
    assert main(["generate", run, "--read", str(text), "--state-out", state]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.long
def test_beam_search_writes_the_best_hypothesis(
    run: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["--prompt", "the", "--max-tokens", "8", "--beam", "3"]
    more = ["--length-penalty", "0.5", "--no-repeat-ngram", "2"]
    assert main(["generate", run, *ask, *more]) == 0
    generator = Generator(open_run(run))
    best = generator.search("the", 3, 8, length_penalty=0.5, no_repeat_ngram=2)[0].text
    assert capsys.readouterr().out == best + "\n"
    # greedy decoding without repetitions
    assert main(["generate", run, *ask[:4], "--no-repeat-ngram", "1"]) == 0
    greedy = generator.search("the", 1, 8, no_repeat_ngram=1)[0].text
    assert capsys.readouterr().out == greedy + "\n"
    assert greedy != generator.search("the", 1, 8)[0].text
    # from the memory of a document, and from its file
    state = str(tmp_path / "s")
    assert main(["generate", run, "--read", str(text), "--state-out", state, *ask]) == 0
    first = capsys.readouterr().out
    assert main(["generate", run, "--state-in", state, *ask]) == 0
    assert capsys.readouterr().out == first
    whole = ["--prompt", text.read_text(encoding="utf-8") + "the", *ask[2:]]
    assert main(["generate", run, *whole]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.long
def test_prompt_from_standard_input_and_stop(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = ["--temperature", "1", "--max-tokens", "20", "--seed", "1"]
    assert main(["generate", run, "--prompt", "the cat", *draw]) == 0
    plain = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat")))
    assert main(["generate", run, "--prompt", "-", *draw]) == 0
    assert capsys.readouterr().out == plain
    stops = ["--stop", plain[4], "--stop", plain[6:8]]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the \xff")))
    assert "not UTF-8 at byte 4" in error_line(["generate", run, "--prompt", "-"], capsys)
    assert main(["generate", run, "--prompt", "the cat", *draw, *stops]) == 0
    cut = min(plain.find(plain[4]), plain.find(plain[6:8]))
    assert capsys.readouterr().out == plain[:cut] + "\n"


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        ([], "needs --prompt"),
        (["--read", "x"], "needs --state-out"),
        (["--prompt", "x", "--state-out", "s"], "give --read"),
        (["--prompt", "x", "--read", "a", "--state-in", "b"], "give one of them"),
        (["--prompt", "x", "--read", "a", "--state-out", "/no/such/s"], "no folder"),
        (["--prompt", "x", "--state-in", "/no/such/s"], "No such file"),
        (["--prompt", "x", "--read", "/no/such/file"], "No such file"),
        (
            ["--prompt", "x", "--temperature", "1", "--top-p", "2"],
            "--top-p 2.0: must be more",
        ),
        # before the document is read
        (
            ["--prompt", "x", "--read", "/no/such/file", "--temperature", "1", "--top-k", "-1"],
            "--top-k -1: must be 0",
        ),
        (["--prompt", "x", "--state-in", "/no/such/s", "--stop", ""], "a stop string is empty"),
        (["--prompt", "x", "--temperature", "hot"], "temperature"),
        (["--prompt", "x", "--beam", "0"], "--beam 0: must be from 1 to 258, the size of the"),
        # before the document is read
        (
            ["--prompt", "x", "--read", "/no/such/file", "--beam", "259"],
            "--beam 259: must be from",
        ),
        (["--prompt", "x", "--beam", "2", "--temperature", "1"], "sample one; give either"),
        (["--prompt", "x", "--beam", "2", "--top-k", "5"], "sample one; give either"),
        (["--prompt", "x", "--beam", "2", "--top-p", "0.5"], "sample one; give either"),
        (
            ["--prompt", "x", "--top-k", "5"],
            "--temperature 0 takes the likeliest token;",
        ),
        (["--prompt", "x", "--top-p", "0.5"], "give --temperature 1"),
        (
            ["--prompt", "x", "--length-penalty", "2"],
            "greedy decoding has none; give --beam 2 or more",
        ),
        (["--prompt", "x", "--no-repeat-ngram", "3", "--temperature", "1"], "sampling has no such"),
        (["--prompts", "x"], "x: No such file"),
        (["--prompts", __file__, "--prompt", "x"], "give one of them"),
        (["--prompts", __file__, "--beam", "0"], "--beam 0: must be from 1 to 258"),
        (["--promt", "x"], "did you mean '--prompt'"),
        (["--chat", "--read", "x", "--state-out", "s"], "give --prompt TEXT"),
        (["--prompt", "x", "--chat", "--read", "/no/such/file"], "has no chat template; remove it"),
    ],
)
def test_generate_rejects_invalid_flags(
    run: str, argv: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert what in error_line(["generate", run, *argv], capsys)


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["--beam", "3"], ["--state-in", "MEMORY"]])
def test_each_line_of_a_file_is_continued(
    run: str, text: Path, tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As if it were alone, in the order of the file, whatever lines are continued together."""
    memory = tmp_path / "memory"
    if options[1:] == ["MEMORY"]:
        argv = ["generate", run, "--read", str(text), "--state-out", str(memory)]
        assert main(argv) == 0
        options = ["--state-in", str(memory)]
    lines = ["import", "d" * 21, "class A:", "import", "x"]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    given = ["--max-tokens", "7", *options]
    capsys.readouterr()
    assert main(["generate", run, "--prompts", str(tmp_path / "lines"), *given]) == 0
    together = capsys.readouterr().out.removesuffix("\n").split("\n")
    assert len(set(together)) > 1
    for line, found in zip(lines, together, strict=True):
        assert main(["generate", run, "--prompt", line, *given]) == 0
        assert " ".join(capsys.readouterr().out.removesuffix("\n").splitlines()) == found


def test_an_empty_line_after_a_memory_is_told_before_the_document_is_read(
    run: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines").write_text("a\n\n")
    memory = tmp_path / "memory"
    argv = ["generate", run, "--prompts", str(tmp_path / "lines")]
    for given in (["--read", str(text), "--state-out", str(memory)], ["--state-in", str(memory)]):
        assert "--prompts: line 2 is empty; a memory needs" in error_line([*argv, *given], capsys)
    assert not memory.exists()


def test_lines_that_do_not_fit_a_cache_are_told_before_any_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = tiny.run_with("full", capacity=16)
    monkeypatch.setattr("famjax.convert.open.open_model", lambda *_, **__: opened)
    (tmp_path / "lines").write_text("a\nabcdefghij\n")
    argv = ["generate", "run", "--prompts", str(tmp_path / "lines")]
    for options in ([], ["--temperature", "1"]):
        given = [*argv, *options, "--max-tokens", "7"]
        said = (
            "--max-tokens 7: does not fit the model's cache after the longest line; give at most 6"
        )
        assert said in error_line(given, capsys)
    # the default is what fits
    assert main(argv) == 0
    assert len(capsys.readouterr().out.removesuffix("\n").split("\n")) == 2
    (tmp_path / "lines").write_text("a\n" + "b" * 17 + "\n")
    assert "prompt 2 of 2: its 18 tokens do not fit" in error_line(argv, capsys)


@pytest.mark.parametrize("options", [[], ["--beam", "2"], ["--temperature", "1", "--seed", "3"]])
def test_a_prompt_is_continued_as_far_as_the_cache_has_room(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = tiny.run_with("full", capacity=16)
    monkeypatch.setattr("famjax.convert.open.open_model", lambda *_, **__: opened)
    argv = ["generate", "run", "--prompt", "abcdefghij", *options]
    assert main(argv) == 0
    capsys.readouterr()
    said = "--max-tokens 7: does not fit the model's cache after the prompt; give at most 6"
    assert said in error_line([*argv, "--max-tokens", "7"], capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "3"], "--seed: decoding is greedy at temperature 0; give --temperature 1"),
        (["--beam", "1", "--length-penalty", "2"], "--length-penalty: greedy decoding has none"),
    ],
)
def test_options_without_an_effect_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_line(["generate", "run", "--prompt", "a", *options], capsys)


@pytest.mark.long
def test_samples_of_a_files_lines_differ(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines").write_text("import\nimport\n")
    argv = ["generate", run, "--prompts", str(tmp_path / "lines"), "--temperature", "1"]
    argv += ["--max-tokens", "9"]
    found = []
    for _ in range(2):
        assert main(argv) == 0
        found.append(capsys.readouterr().out.removesuffix("\n").split("\n"))
    assert found[0] == found[1]
    assert len(set(found[0])) == 2


@pytest.mark.long
def test_chat_uses_the_template(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = load_tokenizer(str(byte_level(tmp_path / "tokenizer")))
    run = replace(tiny.run_with("fam", vocab_size=tokenizer.vocab_size), tokenizer=tokenizer)
    monkeypatch.setattr("famjax.convert.open.open_model", lambda *_, **__: run)
    expected = "".join(Generator(run).generate("the cat", 8, chat=True))
    ask = ["generate", "run", "--prompt", "the cat", "--chat", "--max-tokens", "8"]
    assert main(ask) == 0
    assert capsys.readouterr().out == expected + "\n"
    state = str(tmp_path / "state")
    assert main([*ask, "--read", str(text), "--state-out", state]) == 0
    behind = capsys.readouterr().out
    assert main([*ask, "--state-in", state]) == 0
    assert capsys.readouterr().out == behind


def test_the_document_is_not_overwritten(
    run: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", run, "--read", str(text), "--state-out", str(text)]
    assert "is the document itself" in error_line(argv, capsys)


def test_pipes_and_devices_are_not_replaced(
    run: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # as root, /dev/null could be replaced
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    argv = ["generate", run, "--read", str(text), "--state-out", str(pipe)]
    assert "is a device or a pipe; give a file" in error_line(argv, capsys)
    assert pipe.is_fifo()
    with pytest.raises(UserError, match="is a device or a pipe"):
        refuse_special(pipe)


def test_a_state_file_of_another_model_is_rejected(
    run: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_line(["generate", run, "--prompt", "x", "--state-in", str(text)], capsys)
    assert "not a famjax state" in said


# import


def test_import_is_lazy_and_exports_every_name() -> None:
    code = (
        "import sys, famjax; assert not {'jax', 'numpy'} & set(sys.modules);"
        "from famjax import *; import famjax.train.loop; assert 'torch' not in sys.modules;"
        "assert famjax.fit is famjax.train.loop.train and famjax.__version__;"
        "assert set(famjax.__all__) <= set(dir(famjax));"
        "famjax.nothing"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert "has no attribute 'nothing'" in done.stderr.splitlines()[-1], done.stderr

"""Verbs on a run with an encoder: what they write, and one line where they cannot work with it."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import small

from famjax import Generator, UserError, open_run
from famjax.cli.eval import read_report
from famjax.cli.eval_output import result_tables
from famjax.cli.generate import _report_sources
from famjax.cli.main import main
from famjax.cli.next_commands import next_commands
from famjax.cli.translation_tables import translation_notes
from famjax.config.schema import Config
from famjax.eval.progress import TokenProgress
from famjax.experiment.load import override
from famjax.tokenizers.load import load_tokenizer
from famjax.train.loop import train
from famjax.train.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with pairs, and with a run of one step on them."""
    home = tmp_path_factory.mktemp("pairs")
    (home / "words").write_text("abc\nd\nef\n")
    (home / "backwards").write_text("cba\nd\nfe\n")
    (home / "words.jsonl").write_text('{"inputs": "a", "targets": "b"}\n')
    shape = [given for given in small.COMMAND if "block_len" not in given]
    keys = [
        *("model.block_len=1", "model.mixer=full", "model.capacity=32", "model.encoder.layers=1"),
        *("data.task=translate", "data.layout=pairs", f"data.source={home / 'words'}"),
        *(f"data.target={home / 'backwards'}", "data.length=32", "train.steps=1"),
    ]
    train(override(Config(), [*shape, *keys]), home / "run", quiet=True)
    return home


def tasks(home: Path, name: str = "translate") -> str:
    return f"{name}:{home / 'words'}={home / 'backwards'}"


def error_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--beam", "0"], "--beam 0: must be from 1 to 258, the size of the vocabulary"),
        (["--beam", "259"], "--beam 259: must be from 1 to 258"),
        (
            ["--beam", "2", "--length-penalty", "-50"],
            "--length-penalty -50.0: must be from",
        ),
        (["--no-repeat-ngram", "-1"], "--no-repeat-ngram -1: must be 0 (no limit) or more"),
        (["--length-penalty", "2"], "--length-penalty: greedy decoding has none; give --beam 5"),
        (["--tune"], "--tune: greedy decoding has no length penalty; give --beam 5"),
        (["--tune", "--beam", "2", "--length-penalty", "1"], "leave out --length-penalty"),
    ],
)
def test_searches_that_cannot_be_are_refused(
    home: Path, options: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["eval", str(home / "run"), "--tasks", tasks(home), *options]
    assert what in error_line(argv, capsys)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("", "translate: names no files; write translate:SOURCES=TARGETS, or translate:PAIRS."),
        ("text:WORDS", "text: has no sources to read for a model with an encoder; take translate:"),
        ("passkey", "passkey: has no sources to read"),
        ("summarize", "write summarize:SOURCES=TARGETS, or summarize:PAIRS.jsonl"),
        ("translate:WORDS", "famjax: WORDS: is not JSON lines (.jsonl) with inputs and targets; "),
        ("translate:WORDS", "with inputs and targets; write SOURCES=TARGETS"),
        ("translate:WORDS=WORDS.jsonl", "if they have the inputs as well, write WORDS.jsonl alone"),
        ("translate:WORDS=/no/such", "--tasks translate: no such file or folder: /no/such"),
        ("translate:=WORDS", "give the file of the sources before ="),
        ("translate:a=b,c=d", "write all sources before all targets, a.de,b.de=a.en,b.en"),
        ("translate:WORDS.jsonl=WORDS", "targets of their own; write WORDS.jsonl alone"),
    ],
)
def test_tasks_that_a_model_with_an_encoder_lacks_are_refused(
    home: Path, given: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["--tasks", given.replace("WORDS", str(home / "words"))] if given else []
    said = error_line(["eval", str(home / "run"), *named], capsys)
    assert what.replace("WORDS", str(home / "words")) in said


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["analyze", "RUN", "--tasks", "text:WORDS", "--length", "8"], "run: has an encoder"),
        (["analyze", "RUN", "--memory", "--tasks", "text:WORDS"], "run: has an encoder"),
        (["analyze", "RUN", "--attention", "--tasks", "text:WORDS"], "run: has an encoder"),
        (
            ["generate", "RUN", "--prompt", "a", "--beam", "259"],
            "--beam 259: must be from 1 to 258",
        ),
    ],
)
def test_verbs_that_a_model_with_an_encoder_lacks_are_refused(
    home: Path, argv: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"RUN": str(home / "run"), "NEW": str(home / "new")}
    given = [names.get(one, one).replace("WORDS", str(home / "words")) for one in argv]
    assert what in error_line(given, capsys)


def test_commands_named_next_evaluate_a_mean_of_checkpoints(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`famjax average` and `famjax train` name the files that `famjax eval` needs."""
    run, mean = home / "run", home / "a mean"
    assert main(["average", str(run), "--last", "1", "--out", str(mean)]) == 0
    command = capsys.readouterr().out.rstrip("\n").partition("; next: ")[2]
    assert command == f"famjax eval '{mean}' --tasks translate:SOURCES=TARGETS"
    config = open_run(run).config
    assert next_commands(config, None, mean).split(", ")[-1] == command
    given = command.replace("SOURCES", str(home / "words"))
    argv = shlex.split(given.replace("TARGETS", str(home / "backwards")))
    assert main(argv[1:]) == 0


def test_only_the_first_group_compiles(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time of later ones would not count, and rates and times left be wrong."""
    called = []

    def compiling(progress: TokenProgress) -> contextlib.AbstractContextManager[None]:
        called.append(progress)
        return contextlib.nullcontext()

    monkeypatch.setattr(TokenProgress, "compiling", compiling)
    (home / "three").write_text("a\nb\nc\n")
    monkeypatch.setattr("famjax.cli.generate._GROUP", 1)
    assert main(["generate", str(home / "run"), "--prompts", str(home / "three")]) == 0
    assert len(called) == 1
    monkeypatch.setattr("famjax.eval.translate._GROUP", 1)
    three = f"translate:{home / 'three'}={home / 'three'}"
    assert main(["eval", str(home / "run"), "--tasks", three]) == 0
    assert len(called) == 2


@pytest.mark.parametrize(
    "sampled", [[], pytest.param(["--temperature", "1", "--seed", "3"], marks=pytest.mark.long)]
)
def test_each_line_of_a_file_gets_a_target(
    home: Path,
    sampled: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order of the file, whatever sources are decoded together."""
    argv = ["generate", str(home / "run"), "--prompts", str(home / "sources"), *sampled]
    (home / "sources").write_text("d\n" + "abcd" * 12 + "\n\nd\nabc\n")
    assert main(argv) == 0
    out, err = capsys.readouterr()
    together = out.split("\n")
    assert len(together) == 6
    assert (together[0] == together[3]) == (not sampled)
    assert "1 source is empty\n" in err
    assert "cannot read" not in err
    assert "1 source has more than 32 tokens, the most that were trained on" in err
    # the last drawn token takes a place in the cache; which of them end by themselves is chance
    held = 31 if sampled else 32
    assert f"targets were cut; the model's cache holds {held} (model.capacity)" in err
    assert sampled or "\n5 targets" in err
    monkeypatch.setattr("famjax.cli.generate._GROUP", 2)
    assert main(argv) == 0
    assert capsys.readouterr().out.split("\n") == together
    if not sampled:
        for prompt, target in zip(("d", "abc"), (together[0], together[4]), strict=True):
            assert main(["generate", str(home / "run"), "--prompt", prompt]) == 0
            assert capsys.readouterr().out.split() == target.split()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--prompts", "/no/such"], "No such file"),
        (["--prompts", "EMPTY"], "empty: is empty; write a prompt on each line"),
        (["--prompts", "EMPTY", "--prompt", "a"], "is one text and --prompts a file of them"),
        (["--prompts", "WORDS", "--read", "x"], "--read: a model with an encoder writes"),
        (["--prompts", "WORDS", "--beam", "0"], "--beam 0: must be from 1 to 258"),
    ],
)
def test_files_that_are_no_sources_are_refused(
    home: Path, options: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "empty").write_text("")
    named = {"EMPTY": str(home / "empty"), "WORDS": str(home / "words")}
    argv = ["generate", str(home / "run"), *(named.get(option, option) for option in options)]
    assert what in error_line(argv, capsys)


@pytest.mark.long
def test_a_converted_model_goes_on_with_its_source(
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """T2R of both attentions, by the command that `famjax convert` names next."""
    new = str(tmp_path / "t2r")
    argv = ["convert", str(home / "run"), new, "--to", "t2r", "model.encoder.cross=linear"]
    assert main(argv) == 0
    said = capsys.readouterr().out.split("next: famjax ")[1].split()
    rate = "optimizer.learning_rate=2e-4"
    own = ["train", "multi30k", f"init={new}", rate]
    assert said == [*own, "data.source=...", "data.target=..."]
    files = [f"data.source={home / 'words'}", f"data.target={home / 'backwards'}"]
    small = ["data.batch=2", "data.length=32", "data.source_length=28", "train.steps=1"]
    monkeypatch.chdir(tmp_path)
    assert main([*own, *files, *small, "name=tuned"]) == 0
    model = open_run(tmp_path / "runs" / "tuned").config.model
    assert (model.mixer, model.encoder.cross) == ("linear", "linear")


def test_a_generator_reads_no_sources(home: Path) -> None:
    with pytest.raises(UserError, match=r"write its target with famjax\.eval\.translator"):
        Generator(open_run(home / "run"))


@pytest.mark.long
def test_results_of_other_searches_are_kept_and_runs_compared(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(home / name) for name in ("first", "second")]
    for run in runs:
        shutil.copytree(home / "run", run, ignore=shutil.ignore_patterns("eval"))
        for options in ([], ["--no-repeat-ngram", "2"], ["--beam", "2"], ["--beam", "2", "--tune"]):
            assert main(["eval", run, "--tasks", tasks(home), *options]) == 0
    assert main(["eval", runs[0], "--tasks", tasks(home, "summarize")]) == 0
    # outputs that are known are told, since their speed is not measured again
    capsys.readouterr()
    assert main(["eval", runs[0], "--tasks", tasks(home), "--beam", "2"]) == 0
    told = re.search(r"(\d+) of (\d+) outputs.*remove (\S+)", capsys.readouterr().err)
    assert told
    assert told[1] == told[2]
    assert Path(told[3]).exists()
    report = json.loads((home / "first" / "eval" / "report.json").read_text())
    label = tasks(home)
    assert list(report["results"]) == [
        f"{label} --beam 1",
        f"{label} --beam 1 --no-repeat-ngram 2",
        f"{label} --beam 2 --length-penalty 1",
        f"{label} --beam 2 --tune",
        f"{tasks(home, 'summarize')} --beam 1",
    ]
    capsys.readouterr()
    assert main(["compare", *runs]) == 0
    out = capsys.readouterr().out
    # each search has a table of both runs, with the difference of equal outputs
    assert out.count("chrF of each against first") == out.count("+0.0% (") == 4


def test_files_that_are_tokenized_are_scored_as_they_are(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["eval", str(home / "run"), "--json", "--tokenized", "--tasks"]
    assert main([*argv, tasks(home), "--plot"]) == 0
    out, err = capsys.readouterr()
    assert "nothing to plot: results of these tasks do not depend on a length" in err
    (result,) = json.loads(out)["translate"]
    names = ("bleu", "bleu_tokenized", "bleu_compounds")
    assert all("tok:none" in result["signatures"][name] for name in names)
    assert "BLEU, tokenized" in result_tables("translate", result)[0].lines(None)[1]
    assert f"{tasks(home)} --beam 1 --tokenized" in read_report(home / "run" / "eval")["results"]
    said = error_line([*argv, tasks(home, "summarize")], capsys)
    assert "--tokenized: is for translate; remove it" in said


def test_sources_longer_than_those_trained_on_are_told() -> None:
    (line,) = translation_notes({"longer": 3, "longest_trained": 28})
    assert line.startswith("3 sources have more than 28 tokens, the most that were trained on")
    (line,) = translation_notes({"longer": 1, "longest_trained": 28})
    assert line.startswith("1 source has more than 28 tokens")
    assert translation_notes({"longer": 0, "longest_trained": 28}) == []
    lost = {"unread_sources": 1, "unwritten_targets": 2, "cut_sources": 3, "source_words": 400}
    assert translation_notes(lost) == [
        "3 sources are cut to data.source_words=400",
        "2 targets have text that the model's tokenizer cannot write",
        "1 source has text that the model's tokenizer cannot read",
    ]


def test_generate_tells_what_it_cannot_read_of_sources(capsys: pytest.CaptureFixture[str]) -> None:
    config = override(Config(), ["data.source_words=2"])
    run: Any = SimpleNamespace(config=config, tokenizer=load_tokenizer("bytes"))
    _report_sources(["a b ", "a  b c", "", "a b c d"], run)
    assert (
        capsys.readouterr().err == "2 sources are cut to data.source_words=2\n1 source is empty\n"
    )


@pytest.mark.long
def test_a_target_that_is_cut_is_told(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An untrained model writes to the most tokens."""
    for max_tokens in (3, 5):
        argv = ["generate", str(home / "run"), "--prompt", "abc", "--max-tokens", str(max_tokens)]
        assert main(argv) == 0
        said = capsys.readouterr().err
        assert f"the target was cut at {max_tokens} tokens; --max-tokens gives it more" in said
    assert main(["eval", str(home / "run"), "--tasks", tasks(home), "--max-tokens", "2"]) == 0
    results = read_report(home / "run" / "eval")["results"]
    assert results[f"{tasks(home)} --beam 1 --max-tokens 2"]["result"]["tokens"] == 6
    said = error_line(
        ["generate", str(home / "run"), "--prompt", "a", "--max-tokens", "99"], capsys
    )
    assert "--max-tokens 99: does not fit the model's cache, model.capacity=32" in said


@pytest.mark.parametrize(
    "keys", [[], pytest.param(["model.encoder.cross=linear"], marks=pytest.mark.long)]
)
def test_empty_lines_are_told(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: list[str]
) -> None:
    """An empty source is one end-of-text token, for linear attention to it as well."""
    for name, text in (("few", "a\n\nb\n"), ("some", "\n\nb\n")):
        (home / name).write_text(text)
    run = home / "run"
    if keys:
        pairs = [f"data.source={home / 'few'}", f"data.target={home / 'some'}"]
        run = tmp_path / "run"
        train(override(open_run(home / "run").config, [*keys, *pairs]), run, quiet=True)
        assert np.isfinite([row["loss"] for row in read_metrics(run / "metrics.jsonl")]).all()
    files = f"translate:{home / 'few'}={home / 'some'}"
    assert main(["eval", str(run), "--tasks", files]) == 0
    said = capsys.readouterr().out
    assert "of the pairs 1 has an empty source and 2 have an empty target" in said


def test_a_prompt_longer_than_sources_trained_on_is_told(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for prompt in ("abc", "abc" * 20):
        assert main(["generate", str(home / "run"), "--prompt", prompt]) == 0
        said.append(
            "the most that were trained on; its target may be worse" in capsys.readouterr().err
        )
    assert said == [False, True]

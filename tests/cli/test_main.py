"""The command line: help, exit statuses, and one-line errors."""

from __future__ import annotations

import ast
import errno
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import famjax
from famjax.cli.main import VERBS, main, script, split_overrides
from famjax.config.keys import key_types, key_values
from famjax.config.schema import Config
from famjax.experiment.load import (
    available_configs,
    load_config,
    override,
    read_config,
    to_json,
)


def fake_verb(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `famjax bench` raise `error`."""

    def run(argv: list[str]) -> int:
        raise error

    module = ModuleType("famjax.cli.bench")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "famjax.cli.bench", module)


def python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, **options)


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the only line printed to stderr."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("famjax: ")
    assert err.count("\n") == 1
    return err.removeprefix("famjax: ").rstrip("\n")


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_verb(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb} " in out for verb in VERBS)
    assert "example: famjax train" in out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"famjax {famjax.__version__}\n"


def test_help_does_not_import_jax() -> None:
    code = (
        "import sys; from famjax.cli.main import main; status = main(['--help']);"
        "assert not {'jax', 'numpy', 'tyro', 'rich'} & set(sys.modules), 'heavy'; sys.exit(status)"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_an_unknown_verb_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert error_line(capsys).startswith("unknown command 'trian'; did you mean 'train'?")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/x"),
            2,
            "disk full: writing runs/x; free some space and run again",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            2,
            "disk full: no space left; free some space and run again",
        ),
        # status 1: launch scripts retry
        (
            OSError(errno.EIO, "Input/output error", "runs/x"),
            1,
            "input/output error at runs/x; run again to continue",
        ),
        (
            OSError(errno.EIO, "Input/output error"),
            1,
            "input/output error; run again to continue",
        ),
    ],
)
def test_expected_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    said: str,
) -> None:
    fake_verb(monkeypatch, error)
    assert main(["bench"]) == status
    assert error_line(capsys) == said


@pytest.mark.parametrize("error", [ValueError("ours"), OSError(errno.EACCES, "ours")])
def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    fake_verb(monkeypatch, error)
    with pytest.raises(type(error), match="ours"):
        main(["bench"])


def test_a_missing_accelerator_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr("famjax.core.optional.importlib.util.find_spec", lambda name: None)
    try:  # what JAX raises if no GPU is visible
        exec(compile("assert False", "jax/_src/xla_bridge.py", "exec"))
    except AssertionError as error:
        fake_verb(monkeypatch, error)
    assert main(["bench"]) == 2
    assert error_line(capsys) == (
        "JAX_PLATFORMS=cuda: cannot be used here (JAX finds none); pip install -e '.[cuda]', see "
        "famjax doctor, or unset JAX_PLATFORMS"
    )


def test_jax_itself_finds_no_such_device() -> None:
    done = python(
        "from famjax.cli.main import main; raise SystemExit(main(['bench', 'linear']))",
        env=os.environ | {"JAX_PLATFORMS": "nowhere"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("famjax: JAX_PLATFORMS=nowhere: cannot be used here (Backend ")
    assert done.stderr.count("\n") == 1


VERB_THAT_PRINTS = """
import sys
from types import ModuleType
from rich.console import Console
from famjax.cli.main import split_overrides, script
from famjax.cli.tables import Output
from famjax.core.errors import UserError

def run(argv):
    for i in range(10_000):
        {statement}
    raise UserError("too late")

sys.modules["famjax.cli.bench"] = ModuleType("famjax.cli.bench")
sys.modules["famjax.cli.bench"].run = run
sys.argv = ["famjax", "bench"]
script()
"""


@pytest.mark.parametrize("both", [False, True], ids=["stdout", "stdout and stderr"])
@pytest.mark.parametrize(
    "statement",
    [
        "print(i)",
        "Output().print(str(i))",
        "Output(stderr=True).print(str(i)); print(i)",
        "Console().print(i)",
        "Console(stderr=True).print(i); print(i)",
        "raise UserError('a mistake')",
        "print(i, end='') if i == 0 else None",
    ],
)
def test_a_closed_pipe_is_quiet(statement: str, both: bool) -> None:
    """`famjax VERB | head -1`, also with 2>&1."""
    reads, writes = os.pipe()
    os.close(reads)
    with tempfile.TemporaryFile() as said:
        done = subprocess.run(
            [sys.executable, "-c", VERB_THAT_PRINTS.format(statement=statement)],
            stdout=writes,
            stderr=writes if both else said,
            check=False,
        )
        os.close(writes)
        said.seek(0)
        lines = said.read().decode().splitlines()
    mistake = "UserError" in statement and not both
    assert done.returncode == (2 if mistake else 141)
    assert not [
        error_line
        for error_line in lines
        if not error_line.isdecimal() and not error_line.startswith("famjax: ")
    ]


# train


@pytest.fixture
def train_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, Path]]:
    """Replace the training loop by one that records its arguments."""
    calls: list[tuple[Config, Path]] = []

    def train(config: Config, folder: Path) -> tuple[Any, None]:
        calls.append((config, folder))
        return SimpleNamespace(config=config), None

    module = ModuleType("famjax.train.loop")
    module.train_with_source = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "famjax.train.loop", module)
    monkeypatch.setattr("famjax.processes.runtime.setup", lambda: None)
    return calls


def test_train_uses_the_default_folder(train_calls: list[tuple[Config, Path]]) -> None:
    assert main(["train", "text_fam", "model.layers=6", "name=six"]) == 0
    expected = load_config("text_fam", ["model.layers=6", "name=six"])
    assert train_calls == [(expected, Path("runs/six"))]


@pytest.mark.parametrize(
    "argv",
    [
        ["text_fam", "--run", "there"],
        ["--run=there", "text_fam"],
        ["--run", "there", "text_fam"],
    ],
)
def test_train_uses_the_given_folder(
    argv: list[str], train_calls: list[tuple[Config, Path]]
) -> None:
    assert main(["train", *argv]) == 0
    assert train_calls == [(load_config("text_fam"), Path("there"))]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "train needs a config first"),
        (["model.layers=6"], "train needs a config first"),
        (["text_fam", "--run"], "--run needs a folder"),
        (["text_fam", "model.layer=6"], "unknown key 'model.layer'"),
        (["text_fam", "model.layers=0"], "model.layers=0: must be at least 1"),
    ],
)
def test_train_mistakes_are_one_line_errors(
    argv: list[str],
    said: str,
    train_calls: list[tuple[Config, Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", *argv]) == 2
    assert error_line(capsys).startswith(said)
    assert train_calls == []


def test_a_model_in_place_of_a_config_is_an_error(
    tmp_path: Path,
    train_calls: list[tuple[Config, Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "config.json"
    path.write_text(to_json(load_config("text_fam")))
    (tmp_path / "checkpoints" / "000000000").mkdir(parents=True)
    cure = f"to start from its weights: famjax train finetune init={tmp_path}"
    assert main(["train", str(tmp_path)]) == 2
    assert error_line(capsys) == f"{tmp_path} is a run, not a config; {cure}"
    assert main(["train", str(path)]) == 2
    assert error_line(capsys).startswith(f"{path}: is of a converted model, whose weights would")
    assert train_calls == []

    # the config of a run that was trained may train another run
    (tmp_path / "checkpoints" / "000000005").mkdir()
    assert main(["train", str(tmp_path)]) == 2
    assert error_line(capsys).endswith(f"{cure}; to train as it was: famjax train {path}")
    assert main(["train", str(path)]) == 0
    assert len(train_calls) == 1


def help_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["train", *argv]) == 0
    return capsys.readouterr().out


def test_train_help_is_an_overview(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = help_of(capsys, "--help")
    assert set(available_configs()) <= set(re.findall(r"\w+", out))
    groups = {key.rpartition(".")[0] for key in key_types()} - {""}
    assert {*groups, "run", "configs", "all"} <= set(re.findall(r"^  ([\w.]+)  ", out, re.M))
    assert len(out.splitlines()) < 60
    assert help_of(capsys, "text_fam", "-h", "--run", "there") == out


def test_train_help_shows_one_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert re.search(
        r"^  text_fam +TransformerFAM on text", help_of(capsys, "--help=configs"), re.M
    )
    assert "  digits" not in (data := help_of(capsys, "--help", "data"))
    assert "More, each with --help: data.passkey, data.long, data.toy" in data
    assert "  data.passkey.digits=5\n" in help_of(capsys, "--help", "data.passkey")
    rates = help_of(capsys, "--help", "optimizer")
    schedules = r"constant \| cosine \| wsd \| inverse_sqrt; inverse_sqrt falls as"
    assert re.search(rf"^  optimizer.schedule=cosine +{schedules}$", rates, re.M)
    sizes = help_of(capsys, "--help", "model")
    assert re.search(r"^  model.norm=rmsnorm +rmsnorm \| layernorm$", sizes, re.M)
    assert "train.rpo=false" in help_of(capsys, "-h", "train")
    assert help_of(capsys, "--help", "run").splitlines()[3:5] == ["  name=run", "  seed=0"]
    assert help_of(capsys, "--help", "optimizer.clip_norm=3") == (
        "  optimizer.clip_norm=1.0  clips gradients to this global norm; 0 = no clipping\n"
    )
    whole = help_of(capsys, "--help", "all")
    assert all(f"  {key}=" in whole for key in key_types())


@pytest.mark.parametrize("width", [40, 80, 100])
@pytest.mark.parametrize("name", available_configs())
def test_train_help_shows_a_config(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = help_of(capsys, "--help", name)
    about, _, own = out.partition("Keys that it sets")
    assert about.startswith(f"{name}:\n")
    written = (
        ast.get_docstring(ast.parse(available_configs()[name].read_text(encoding="utf-8"))) or ""
    )
    words = re.compile(r"[\w./=']+")
    assert sorted(words.findall(about)) == sorted([name, *words.findall(written)])
    config, defaults = key_values(read_config(name)), key_values(Config())
    shown = set(re.findall(r"^  ([\w.]+)=", own, re.M))
    assert shown == {key for key in config if config[key] != defaults[key]}
    assert f"  name={name}" in own
    long = [error_line for error_line in out.splitlines() if len(error_line) > width]
    assert not [error_line for error_line in long if len(error_line.split()) > 2]


def test_train_help_shows_a_config_by_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(to_json(override(Config(), ["train.steps=7", "train.rpo=true"])))
    out = help_of(capsys, "--help", str(path))
    assert out.splitlines()[-2:] == [
        "  train.steps=7   default 1000",
        "  train.rpo=true  default false",
    ]
    assert main(["train", "--help", str(tmp_path / "none.py")]) == 2
    assert "none.py: No such file" in error_line(capsys)


@pytest.mark.parametrize("width", [40, 80, 300])
def test_train_help_is_as_wide_as_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = help_of(capsys, "--help", "all").splitlines()
    wide = [error_line for error_line in lines if len(error_line) > min(width, 100)]
    assert not [error_line for error_line in wide if len(error_line.split()) > 1]
    # usage patterns and names that cannot be wrapped
    assert len(wide) < 5


@pytest.mark.parametrize("verb", ["eval", "generate", "convert", "export", "analyze", "bench"])
def test_a_verb_without_arguments_is_an_error(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb]) == 2
    said = error_line(capsys)
    assert said.startswith(f"Missing from famjax {verb}: ")
    assert said.rstrip().endswith(f"see famjax {verb} --help")


def test_train_help_of_an_unknown_group_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "optimiser"]) == 2
    said = error_line(capsys)
    assert said.startswith("--help optimiser: no such group; did you mean 'optimizer'? (known: ")
    assert main(["train", "--help", "model.fam_length"]) == 2
    assert "did you mean 'model.fam_len'?" in error_line(capsys)
    assert main(["train", "--help", "text_fm"]) == 2
    assert "did you mean 'text_fam'?" in error_line(capsys)


# tokenizer


@pytest.mark.parametrize(
    ("made", "said"),
    [(500, "m.model: 500 tokens; use"), (322, "322 tokens, the text does not yield 500; use")],
)
def test_tokenizer_train_passes_its_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], made: int, said: str
) -> None:
    calls: list[tuple[str, int, Path]] = []

    def train_sentencepiece(*args: Any) -> Any:
        calls.append(args)
        return SimpleNamespace(vocab_size=made)

    module = ModuleType("famjax.data.train_tokenizer")
    module.train_sentencepiece = train_sentencepiece  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "famjax.data.train_tokenizer", module)
    assert (
        main(["tokenizer", "train", "a.txt", "b", "--vocab-size", "500", "--out", "m.model"]) == 0
    )
    assert calls == [("a.txt,b", 500, Path("m.model"))]
    out = capsys.readouterr().out
    assert said in out
    assert "data.tokenizer=m.model" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("trian", "unknown action 'trian'; did you mean 'train'?"),
        ("train a", "Missing from famjax tokenizer train: --out"),
        ("train a --out m", "tokenizer train needs --vocab-size N, except with --kind words"),
        ("train a --vocab-size 9 --out m --min-count 2", "--min-count 2 is for --kind words"),
        ("train a --kind words --out m --min-count 0", "--min-count 0: must be at least 1"),
        ("train a --kind words --out m", "m: a word list is a .txt file; give --out words.txt"),
        ("train a --vocab-size x --out m", "--vocab-size x: must be a whole number; see"),
        ("train a --vocab-size 1.5 --out m", "--vocab-size 1.5: must be a whole number; see"),
        (
            "train README.md --vocab-size 2 --out m.model",
            "vocab size 2: holds not even the special",
        ),
        (
            "train README.md --kind words --vocab-size 3 --out m.txt",
            "--vocab-size 3: holds no word",
        ),
        (
            "train README.md --kind words --min-count 99999 --out m.txt",
            "--min-count 99999: no word",
        ),
        ("train a --vocab 5 --out m", "unknown option --vocab; did you mean '--vocab-size'?"),
        ("train --vocab-size 5 --out m", "tokenizer train needs files"),
        ("train a --vocab-size 0 --out m", "--vocab-size 0: must be at least 1"),
        ("train a.txt --vocab-size 9 --out m", "tokenizer train: no such file or folder: a.txt"),
    ],
)
def test_tokenizer_mistakes_are_one_line_errors(
    argv: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokenizer", *argv.split()]) == 2
    assert error_line(capsys).startswith(said)


def test_an_empty_file_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    # which would read the folder of Python's standard library
    assert main(["tokenizer", "train", "", "--vocab-size", "400", "--out", "m.model"]) == 2
    assert "an empty name of files; give files" in error_line(capsys)


@pytest.mark.parametrize("verb", ["tokenizer", "tokenizer train", "doctor", "train"])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: famjax ")
    assert err == ""


def test_garbage_collection_thresholds_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing is slower with Python's default thresholds."""
    thresholds: list[int] = []
    monkeypatch.setattr("famjax.processes.runtime.use_huge_pages", lambda keep: None)
    monkeypatch.setattr("famjax.cli.main.main", lambda: 0)
    monkeypatch.setattr(
        "famjax.processes.runtime.gc.set_threshold", lambda *n: thresholds.extend(n)
    )
    with pytest.raises(SystemExit):
        script()
    assert thresholds[0] >= 100_000


def test_overrides_are_told_from_values_of_options() -> None:
    argv = ["runs/a=1", "new", "--only", "c = 0,c = 1", "--to=fam", "model.fam_len=8", "seed=1"]
    overrides, rest = split_overrides(argv)
    assert overrides == ("model.fam_len=8", "seed=1")
    assert rest == argv[:5]

"""Bad input to `famjax train`: a clear one-line error each, and nothing is lost."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small import COMMAND, LAYOUTS, compiled_once, config, rows, texts  # noqa: F401

from famjax.cli.main import main
from famjax.experiment.load import to_json
from famjax.train import checkpoint, lock, loop, metrics, run_folder

pytestmark = pytest.mark.usefixtures("compiled_once", "quiet_runtime")


@pytest.fixture
def quiet_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the compilation cache of the tests."""
    monkeypatch.setattr("famjax.processes.runtime.setup", lambda: None)


class Famjax:
    """Calls `famjax train text_fam` with a small shape in its own folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        self.folder, self.run, self._capsys = folder, folder / "run", capsys
        self.err = ""

    def __call__(self, *overrides: str, run: Path | None = None) -> int:
        shape = [*COMMAND, *LAYOUTS["lanes"], "train.steps=6", *overrides]
        argv = ["train", "text_fam", *shape, "--run", str(run or self.run)]
        self._capsys.readouterr()
        status = main(argv)
        out, self.err = self._capsys.readouterr()
        assert out == ""
        return status

    def error_of(self, *overrides: str, run: Path | None = None) -> str:
        """Return the error line of a call."""
        assert self(*overrides, run=run) == 2, self.err
        said = [line for line in self.err.splitlines() if line.startswith("famjax: ")]
        assert said == self.err.splitlines()[-1:]
        assert "Traceback" not in self.err
        return said[0].removeprefix("famjax: ")

    @property
    def texts(self) -> str:
        return f"data.files={texts(self.folder / 'texts')}"


@pytest.fixture
def famjax(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Famjax:
    return Famjax(tmp_path, capsys)


# texts


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file or folder: "),
        (b"", "no text found; skipped 1 empty"),
        (b"text\0text", "binary, byte 4 is zero"),
        (b"text \xff text", "not UTF-8 at byte 5"),
    ],
)
def test_a_file_that_is_not_text_is_rejected(
    famjax: Famjax, content: bytes | None, said: str
) -> None:
    path = famjax.folder / "book.txt"
    if content is not None:
        path.write_bytes(content)
    line = famjax.error_of(f"data.files={path}")
    assert said in line
    assert str(path) in line


def test_a_file_that_turns_binary_stops_the_run(famjax: Famjax) -> None:
    """Detected by the loading thread in the middle of the run; earlier steps are kept."""
    path = famjax.folder / "book.txt"
    good = b"some text. " * 40
    path.write_bytes(good * 22 + b"\xff" + good)  # after the part that is checked before the run
    line = famjax.error_of(f"data.files={path}", "data.holdout=0", "train.steps=200")
    assert line.startswith(f"{path}: not UTF-8 at byte {len(good) * 22}; ")


def test_a_folder_without_text_is_rejected(famjax: Famjax) -> None:
    folder = famjax.folder / "pictures"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"\x89PNG\0\0")
    assert "no text found; skipped 1 binary" in famjax.error_of(f"data.files={folder}")


@pytest.mark.long
def test_the_run_folder_is_not_read_as_text(famjax: Famjax) -> None:
    # the run's metrics are JSON lines without text, and growing
    (famjax.folder / "book.txt").write_text("some text. " * 60)
    (famjax.folder / "run").mkdir()
    given = f"data.files={famjax.folder}"
    assert famjax(given, "data.holdout=0", "train.steps=2") == 0
    assert famjax(given, "data.holdout=0", "train.steps=3") == 0
    line = famjax.error_of(f"data.files={famjax.run}", run=famjax.folder / "other")
    assert "no text found; skipped 1 folder of a run" in line


def test_similar_names_are_suggested_for_a_missing_file(famjax: Famjax) -> None:
    (famjax.folder / "book.txt").write_text("text")
    line = famjax.error_of(f"data.files={famjax.folder / 'bok.txt'}")
    assert "did you mean '" in line
    assert "book.txt'?" in line
    # equal endings are no similarity
    line = famjax.error_of(f"data.files={famjax.folder / 'nothere.txt'}")
    assert "did you mean" not in line


@pytest.mark.parametrize("content", ["x", "shor", "é"])
def test_the_shortest_texts_train(famjax: Famjax, content: str) -> None:
    """Documents of one byte, and of less than a block."""
    path = famjax.folder / "short.txt"
    path.write_text(content)
    assert famjax(f"data.files={path}", "data.holdout=0") == 0
    assert [row["step"] for row in rows(famjax.run)] == [4, 6]
    shutil.rmtree(famjax.run)
    assert famjax(f"data.files={path}") == 0  # too short to hold anything out


def test_a_failed_first_start_does_not_reserve_the_folder(famjax: Famjax) -> None:
    """A misspelt file name must not reserve the run folder for another experiment."""
    famjax.error_of("data.files=no-such-file")
    assert not famjax.run.exists()
    assert famjax(famjax.texts) == 0


# sizes, keys, configs


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("data.batch=0", "data.batch=0: must be at least 1"),
        ("data.length=-8", "data.length=-8: must be at least 1"),
        ("data.length=12", "data.length=12 is not a multiple of model.block_len=8; take 8 or 16"),
        ("model.heads=3", "model.width=16 is not a multiple of model.heads=3"),
        ("train.accumulate=3", "train.accumulate=3 does not divide data.batch=2"),
        ("train.bptt_segments=3", "train.bptt_segments=3 does not divide the 8 blocks"),
        ("train.steps=0", "train.steps=0: must be at least 1"),
        ("train.steps=ten", "train.steps=ten: must be a whole number"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate=-1.0: must be greater than 0"),
        ("train.rsp=2", "train.rsp=2.0: must be from 0 to 1"),
        ("mesh.data=3", "mesh: data=3 x fsdp=1 x tensor=1 x sequence=1 does not fit 1 devices"),
        ("mesh=all", "mesh=all: must be auto, or give the sizes, such as mesh.data=8"),
        ("mesh.fsdp=0", "mesh.fsdp=0: must be at least 1, or -1"),
        ("model.mixer=bswaa", "model.mixer='bswaa': unknown mixer 'bswaa'; did you mean 'bswa'?"),
        ("modle.layers=2", "unknown key 'modle.layers'; did you mean 'model.layers'?"),
        ("model.vocab_size=100", "model.vocab_size=100: tokenizer bytes has 258 tokens; set 0"),
        ("data.tokenizer=no.model", "no.model"),
        ("model.linear.features=9", "model.linear.features: has no effect with model.mixer=fam;"),
        ("model.feedback.span=9", "model.feedback.span: has no effect with model.stack=residual"),
    ],
)
def test_invalid_values_are_rejected(famjax: Famjax, given: str, said: str) -> None:
    assert said in famjax.error_of(famjax.texts, given)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def config(:\n    pass", r"mine\.py.*SyntaxError"),
        ("from famjax.config.schema import Config\n\nx = 1 / 0", r"mine\.py:3: ZeroDivisionError"),
        ("x = 1", r"mine\.py: must define a function config\(\)"),
    ],
)
def test_mistakes_in_a_config_file_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, said: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    assert main(["train", str(path), "--run", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(said, err)
    assert not (tmp_path / "run").exists()


def test_an_unknown_config_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "text_fan"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("famjax: unknown config 'text_fan'; did you mean 'text_fam'?")
    assert err.count("\n") == 1


# the run folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_with_another_run_is_rejected(famjax: Famjax) -> None:
    assert famjax(famjax.texts) == 0
    before = contents(famjax.run)
    line = famjax.error_of(famjax.texts, "model.fam_len=4", "seed=1")
    assert "holds a run with another config (seed: 0 -> 1; model.fam_len: 2 -> 4)" in line
    assert contents(famjax.run) == before


def test_a_folder_in_use_is_rejected(famjax: Famjax) -> None:
    """Nothing is changed, and the folder can be used when the other process has ended."""
    with lock.hold(famjax.run, pytest.fail):
        before = contents(famjax.run)
        line = famjax.error_of(famjax.texts)
        assert f"{famjax.run}: process {os.getpid()} on " in line
        assert " is training there (user " in line
        assert contents(famjax.run) == before
    assert famjax(famjax.texts) == 0
    assert not (famjax.run / lock.LOCK).exists()


@pytest.mark.parametrize("damage", [b"", b'{"name": "x"', b"\xff\xfe", b"[]", b'{"nmae": 1}'])
def test_a_damaged_config_is_rejected(famjax: Famjax, damage: bytes) -> None:
    assert famjax(famjax.texts) == 0
    (famjax.run / "config.json").write_bytes(damage)
    assert famjax.error_of(famjax.texts).startswith(f"{famjax.run / 'config.json'}: ")


def test_a_run_folder_that_is_a_file_is_rejected(famjax: Famjax) -> None:
    famjax.run.write_text("mine")
    assert "Not a directory" in famjax.error_of(famjax.texts)
    assert "Not a directory" in famjax.error_of(famjax.texts, run=famjax.run / "run")
    assert famjax.run.read_text() == "mine"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_an_unwritable_folder_is_rejected(
    famjax: Famjax, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(path: Path, content: str) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(run_folder, "write_file", refuse)
    given = f"data.files={famjax.folder}"
    assert famjax.error_of(given).startswith(
        f"cannot write the run folder {famjax.run}: {os.strerror(number)}; free some space"
    )


# checkpoints


def newest_checkpoint(run: Path) -> Path:
    return max(run.glob("checkpoints/0*"))


def truncate_file(folder: Path) -> None:
    path = max(folder.glob("params/**/*"), key=lambda p: p.is_file() and p.stat().st_size)
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    "damage",
    [
        truncate_file,
        lambda folder: shutil.rmtree(folder / "rest"),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "extra.json").write_text("{}"),
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(
    famjax: Famjax, damage: Callable[[Path], Any]
) -> None:
    """The previous one is used, and the run ends as if undamaged."""
    assert famjax(famjax.texts, run=famjax.folder / "once") == 0
    assert famjax(famjax.texts) == 0
    damage(newest_checkpoint(famjax.run))
    assert famjax(famjax.texts) == 0
    assert f"checkpoint {newest_checkpoint(famjax.run)} is damaged: " in famjax.err
    assert "continues from step 3 of 6" in famjax.err
    assert rows(famjax.run) == rows(famjax.folder / "once")


def test_no_valid_checkpoint_is_an_error(famjax: Famjax) -> None:
    assert famjax(famjax.texts) == 0
    for folder in famjax.run.glob("checkpoints/0*"):
        truncate_file(folder)
    line = famjax.error_of(famjax.texts)
    assert f"no valid checkpoint in {famjax.run / 'checkpoints'}: [3, 6] damaged; " in line


def test_a_checkpoint_of_another_shape_is_rejected(famjax: Famjax) -> None:
    assert famjax(famjax.texts) == 0
    (famjax.run / "config.json").unlink()
    line = famjax.error_of(famjax.texts, "model.mlp_width=48")
    assert "does not fit" in line
    assert "use the config the run was trained with" in line


def test_a_full_disk_while_saving_is_an_error(
    famjax: Famjax, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert famjax(famjax.texts, "train.steps=12", run=famjax.folder / "once") == 0
    write, calls = checkpoint.write_arrays, []

    def full(folder: Path, leaves: Any) -> None:
        calls.append(folder)
        if "000000006" in str(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(folder, leaves)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_arrays", full)
        line = famjax.error_of(famjax.texts, "train.steps=12")
    path = famjax.run / "checkpoints" / "000000006"
    assert line.startswith(
        f"disk full while saving checkpoint {path}; the last valid one is step 3; "
    )
    assert os.listdir(famjax.run / "checkpoints") == ["000000003"]
    assert famjax(famjax.texts, "train.steps=12") == 0
    assert rows(famjax.run) == rows(famjax.folder / "once")


def test_a_full_disk_while_logging_is_an_error(
    famjax: Famjax, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert famjax(famjax.texts, run=famjax.folder / "once") == 0
    append = metrics.MetricsWriter._append

    class Full:
        def __init__(self, file: Any):
            self.fileno = file.fileno

        def write(self, line: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full(self: metrics.MetricsWriter, line: bytes) -> None:
        if b'"step": 6' not in line:
            append(self, line)
            return
        file, self._file = self._file, Full(self._file)  # type: ignore[assignment]
        try:
            append(self, line)
        finally:
            self._file = file

    with monkeypatch.context() as patch:
        patch.setattr(metrics.MetricsWriter, "_append", full)
        line = famjax.error_of(famjax.texts)
    assert line.startswith(f"cannot write {famjax.run / 'metrics.jsonl'}: No space left on device")
    assert [row["step"] for row in rows(famjax.run)] == [4]
    assert famjax(famjax.texts) == 0
    assert rows(famjax.run) == rows(famjax.folder / "once")


# Ctrl-C


def test_ctrl_c_before_the_first_step(famjax: Famjax, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "start_or_resume", interrupt)
        assert famjax(famjax.texts) == 130
    assert famjax.err.endswith("% of the text\nfamjax: stopped by Ctrl-C\n")
    assert famjax(famjax.texts) == 0


def test_ctrl_c_during_compilation(tmp_path: Path) -> None:
    """A real signal from outside, as soon as the run folder exists."""
    small = config(tmp_path / "texts", "lanes", "text", "train.steps=100000")
    path, run = tmp_path / "small.json", tmp_path / "run"
    path.write_text(to_json(small))
    process = subprocess.Popen(
        [sys.executable, "-m", "famjax.cli.main", "train", str(path), "--run", str(run)],
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (run / "config.json").exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    said = [line for line in err.splitlines() if line.startswith("famjax: ")]
    assert re.fullmatch(
        r"famjax: stopped by (Ctrl-C|SIGINT at step \d+, saved)", "\n".join(said)
    ), err

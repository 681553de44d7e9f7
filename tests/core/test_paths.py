"""Home directories in paths are expanded."""

from __future__ import annotations

from pathlib import Path

import pytest

from famjax.cli.main import main
from famjax.config.keys import replace_values
from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.core.paths import expanded
from famjax.experiment.checks import validate
from famjax.train.loop import train


def test_home_directories_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert expanded("~/a") == Path("/home/someone/a")
    assert expanded("a/~b") == Path("a/~b")
    with pytest.raises(UserError, match="no home folder ~no-such-user; write"):
        expanded("~no-such-user/a")


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "gs://b/x"],
        ["train", "text_fam", "--run", "gs://b/x"],
        ["train", "text_fam", "--run=gs://b/x"],
        ["train", "text_fam", "name=gs://b/x"],
        ["train", "text_fam", "init=gs://b/x"],
        ["train", "text_fam", "data.files=here.txt,gs://b/x"],
        ["eval", "gs://b/x"],
        ["eval", "run", "--tasks", "text:gs://b/x,passkey"],
        ["generate", "run", "--prompt", "https://b", "--state-in", "gs://b/x"],
        ["generate", "run", "--prompt=https://b", "--read", "gs://b/x"],
        ["convert", "model", "gs://b/x"],
        ["export", "gs://b/x", "here"],
    ],
)
def test_urls_in_place_of_paths_are_rejected(
    argv: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    expected = "gs://b/x: only local paths; copy it or mount the bucket (docs/launch.md)\n"
    assert capsys.readouterr().err == f"famjax: {expected}"
    assert not list(tmp_path.iterdir())


def test_urls_in_a_prompt_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "nowhere", "--prompt", "see https://b"]) == 2
    assert "nowhere: there is no such folder" in capsys.readouterr().err


def test_urls_in_a_config_are_rejected(tmp_path: Path) -> None:
    for key in ("name", "init", "data.files", "data.tokenizer"):
        with pytest.raises(UserError, match=f"{key}=s3://b/x: only local paths"):
            validate(replace_values(Config(), {key: "s3://b/x"}))
    with pytest.raises(UserError, match="gs://b/x: only local paths"):
        train(Config(), "gs://b/x")


@pytest.mark.parametrize(
    "argv",
    [
        ["export", "run", "~no-such-user/a"],
        ["convert", "model", "~no-such-user/a"],
        ["generate", "~no-such-user/a", "--prompt", "x"],
        ["train", "text_fam", "init=~no-such-user/a"],
        ["train", "text_fam", "data.files=README.md", "data.tokenizer=~no-such-user/a"],
    ],
)
def test_errors_name_an_unknown_user(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "there is no home folder ~no-such-user" in capsys.readouterr().err

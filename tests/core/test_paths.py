"""Home directories in paths are expanded."""

from __future__ import annotations

from pathlib import Path

import pytest

from famjax.cli.main import main
from famjax.core.errors import UserError
from famjax.core.paths import expanded


def test_home_directories_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert expanded("~/a") == Path("/home/someone/a")
    assert expanded("a/~b") == Path("a/~b")
    with pytest.raises(UserError, match="no home folder ~no-such-user; write"):
        expanded("~no-such-user/a")


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

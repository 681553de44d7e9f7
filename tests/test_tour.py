"""The tour runs every command of the README's five minutes; unknown commands are errors."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import tour

from famjax.cli.main import VERBS
from famjax.experiment.load import load_config

README = (tour.ROOT / "README.md").read_text(encoding="utf-8")


def section(*lines: str) -> str:
    return "\n".join(["# famjax", f"## {tour.SECTION}", *lines, "## More", ""])


def test_every_command_of_the_section_runs() -> None:
    body = README.partition(f"## {tour.SECTION}\n")[2].partition("\n## ")[0]
    told = re.findall(r"^famjax .*?(?= +#|$)", body.replace("\\\n", " "), re.M)
    taken = [step.said for step in tour.steps(README) if step.argv]
    assert taken == [shlex.join(shlex.split(line)) for line in told]
    assert len(taken) >= 12
    assert {line.split()[1] for line in taken} == {
        *("train", "eval", "generate", "convert", "export")
    }
    assert {step.said for step in tour.steps(README) if step.code} == {"Python of the section"}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["```", "famjax fly away", "```"], "`famjax fly away`; add it to SMALLER"),
        (["```", "rm -r runs", "```"], "`rm -r runs`; add it"),
        (["```", "famjax trainer", "```"], "`famjax trainer`"),
        (["```ruby", "puts", "```"], "a block of ruby"),
        (["```python", "import famjax", "```"], 'has no "train.steps=100"'),
    ],
)
def test_unknown_commands_are_rejected(lines: list[str], said: str) -> None:
    with pytest.raises(tour.UnknownError, match=re.escape(said)):
        list(tour.steps(section(*lines)))


def test_a_readme_without_the_section_is_rejected() -> None:
    with pytest.raises(tour.UnknownError, match="has no section"):
        list(tour.steps("# famjax\n"))


def test_continued_lines_and_comments_are_parsed() -> None:
    text = section("```", "famjax export a \\", "  b   # there", "# nothing", "```")
    (step,) = tour.steps(text)
    assert step.argv == ["famjax", "export", "a", "b"]


def test_added_keys_exist(tmp_path: Path) -> None:
    given = [step.argv for step in tour.steps(README) if step.argv] + list(tour.BEFORE)
    for _, verb, *words in given:
        assert verb in VERBS
        if verb == "train":
            words = [word for word in words if not word.startswith(("init=", "data.files="))]
            run = words.index("--run") if "--run" in words else len(words)
            # as converted
            init = ["model.mixer=delta", "model.block_len=64"]
            model = init if words[0] == "finetune_documents" else []
            config = load_config(words[0], [*words[1:run], *model])
            assert config.train.steps <= 4


def test_a_failed_command_ends_the_tour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text(section("```", "famjax export a b", "```"))
    monkeypatch.setattr(tour, "ROOT", tmp_path)
    monkeypatch.setattr(tour.Tour, "prepare", lambda self: None)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(tour.sys, "executable", str(tmp_path / "bin" / "python"))
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "famjax"
    fake.write_text("#!/bin/sh\necho no such run >&2; exit 2\n")
    fake.chmod(0o755)
    assert tour.main() == 1
    printed = capsys.readouterr()
    assert "tour: failed with status 2: famjax export a b" in printed.err
    assert "no such run" in printed.err


def test_ci_runs_the_tour() -> None:
    assert " tour" in (tour.ROOT / ".ci/run").read_text()
    assert "tests/tour.py" in (tour.ROOT / "Makefile").read_text()

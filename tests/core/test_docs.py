"""Files, links and identifiers named in the contributors' pages exist."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import signal
from pathlib import Path

import pytest

from famjax.core import errors
from famjax.mixers.mixer import Mixer
from famjax.models.language_model import LanguageModel
from famjax.stacks.residual import Layer
from famjax.stacks.stack import Stack

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "data/README.md"],
    key=lambda p: p.as_posix(),
)
# pages that name code; others name commands and keys, which tests/cli/test_commands.py parses
NAMING = ["docs/architecture.md", "docs/design.md", "CONTRIBUTING.md"]
SUFFIXES = "py|md|sh|sbatch|toml"


@functools.cache
def words() -> frozenset[str]:
    """Return every word in the source, the tests and the scripts."""
    files = [*ROOT.glob("famjax/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("configs/*.py")]
    files += [*ROOT.glob("launch/*"), ROOT / "pyproject.toml", ROOT / "Makefile"]
    text = " ".join(p.read_text() for p in files if p != Path(__file__))
    return frozenset(re.findall(r"\w+", text))


def code(text: str) -> list[str]:
    """Return the text in single backticks outside code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


@pytest.mark.parametrize("page", NAMING)
def test_files_exist(page: str) -> None:
    """Paths may omit famjax/; those with NAME are placeholders."""
    named = [name for name in code(ROOT.joinpath(page).read_text()) if "NAME" not in name]
    paths = [n for n in named if re.fullmatch(rf"[\w./-]+\.(?:{SUFFIXES})|[\w./-]+/", n)]
    assert len(paths) > 5
    known = {p.name for p in ROOT.glob("**/*.py") if ".venv" not in p.parts} | {"metrics.jsonl"}
    missing = [
        path
        for path in paths
        if not any(base.joinpath(path).exists() for base in (ROOT, ROOT / "famjax"))
        and not ("/" not in path and path in known)
    ]
    assert missing == []


@pytest.mark.parametrize("page", NAMING)
def test_identifiers_exist(page: str) -> None:
    named = {
        part
        for name in code(ROOT.joinpath(page).read_text())
        if re.fullmatch(r"[A-Za-z_][\w.]*(?:\(\))?", name) and not name.isupper()
        for part in name.removesuffix("()").split(".")
    }
    # names of JAX, Python or files
    outside = {"md", "json", "jsonl", "toml"}
    assert sorted(named - words() - outside) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_within_the_repository_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [t for t in targets if not page.parent.joinpath(t).exists()] == []


ARCHITECTURE = ROOT.joinpath("docs/architecture.md").read_text()


def table(heading: str) -> list[list[str]]:
    """Return the rows of the first table after a text, without its header."""
    lines = ARCHITECTURE[ARCHITECTURE.index(heading) :].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first + 2 :])
    return [re.split(r" (?<!\\)\| ", row.strip("| ")) for row in rows]


def test_every_custom_vjp_is_listed() -> None:
    listed = [re.findall(r"`([^`]+)`", row[0]) for row in table("### Custom backward passes")]
    files = [p.relative_to(ROOT / "famjax") for p in (ROOT / "famjax").rglob("*.py")]
    found = [
        f.as_posix()
        for f in files
        for _ in re.findall(r"\.defvjp\(", (ROOT / "famjax" / f).read_text())
    ]
    assert sorted(file for _, file in listed) == sorted(found)
    for name, file in listed:
        assert f"\n{name}.defvjp(" in (ROOT / "famjax" / file).read_text()


def test_the_protocol_has_these_arguments() -> None:
    classes = {c.__name__: c for c in (Mixer, Layer, Stack, LanguageModel)}
    rows = table("Their arguments differ")
    assert [row[0].strip("`") for row in rows] == list(classes)
    for name, init_state, call, _ in rows:
        for method, cell in (("init_state", init_state), ("__call__", call), ("step", call)):
            signature = inspect.signature(getattr(classes[name.strip("`")], method))
            arguments = [str(p.replace(annotation=p.empty)) for p in signature.parameters.values()]
            written = re.sub(r" \[[^]]*\]", "", cell.split("`")[1]).strip("()").split(", ")
            assert written == [a.replace(" = ", "=") for a in arguments[1:]], (name, method)


def test_exit_statuses_are_those_of_the_code() -> None:
    values = {k: v for k, v in vars(errors).items() if k.startswith("EXIT_")}
    values |= {s.name: s.value for s in signal.Signals}
    rows = {row[1].replace("`", ""): int(row[0]) for row in table("#### Exit statuses")[1:]}
    for name, status in rows.items():
        assert sum(values[part] for part in name.split(" + ")) == status
    assert {part for name in rows for part in name.split(" + ")} >= {*vars(errors)} & {*values}

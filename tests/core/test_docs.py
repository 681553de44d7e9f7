"""Files, links and identifiers named in the contributors' pages exist."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

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

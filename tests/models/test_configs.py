"""Every config can be loaded, and the papers' have as many parameters as the papers say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import pytest

from famjax.core.checks import validate
from famjax.core.experiment import load_config
from famjax.models.transplant import abstract

CONFIGS = sorted(Path(__file__).parents[2].joinpath("configs").glob("[!_]*.py"))

# Feedback Transformer v3, Table 9 and 3; v1, Tables 2 to 4; millions
PARAMETERS = {
    "random_walk_paper": (3.2, 0),
    "algorithmic_3_paper": (3.2, 0),
    "char_ptb_paper": (10.7, 0),
    "enwik8_paper": (77, 0),
    "wikitext103_small_paper": (44, 267_735),
    "wikitext103_large_paper": (126, 267_735),
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_loads(path: Path) -> None:
    # those with adapters need a model to begin with
    config = load_config(str(path), [])
    validate(config)
    assert config.name == path.stem
    assert f"famjax train {path.stem}" in path.read_text()
    assert "@@" not in path.read_text()


def test_commands_are_runs_of_their_own() -> None:
    """What a docstring tells to run has a name that no other command has."""
    before: dict[str, str] = {}
    for path in CONFIGS:
        for line in path.read_text().split('"""')[1].replace("\\\n", " ").splitlines():
            command = line.partition("famjax train ")[2].partition("#")[0].split()
            if not command or command[0] != path.stem or any("init=" in x for x in command):
                continue
            name = load_config(command[0], command[1:]).name
            assert before.setdefault(name, line) == line, line


@pytest.mark.parametrize("name", PARAMETERS)
def test_size_of_the_papers(name: str) -> None:
    millions, words = PARAMETERS[name]
    model = load_config(name, []).model
    _, shapes = abstract(replace(model, vocab_size=words or 100))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert abs(count / 1e6 - millions) < 0.05 * millions

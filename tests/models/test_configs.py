"""Every config can be loaded, and the papers' have as many parameters as the papers say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import pytest

from famjax.core.checks import validate
from famjax.core.experiment import load_config
from famjax.models.transplant import abstract
from famjax.train.optimizers import make_schedule

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


def parameters(*given: str) -> int:
    """Return how many the model of `t2r_lm_paper` has on WikiText-103."""
    model = load_config("t2r_lm_paper", [*given]).model
    _, shapes = abstract(replace(model, vocab_size=267_735))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_size_of_t2r() -> None:
    """The T2R paper counts no parameters; Baevski & Auli (2019) have 247M in 16 layers."""
    teacher, shallow = parameters(), parameters("model.layers=16")
    assert abs(shallow / 1e6 - 247) < 1
    d, c = 1024, 4096
    # four projections, two of the feed-forward, their biases, two norms
    layer = 4 * (d * d + d) + 2 * d * c + c + d + 4 * d
    assert teacher - shallow == 16 * layer
    # a map for each head and layer: r k (e + 1) (T2R 2.2)
    assert parameters("model.mixer=linear") - teacher == 32 * 8 * 32 * (128 + 1)


def test_schedule_of_t2r() -> None:
    """Tables 3 and 4: tokens of a step, and a run that is one cycle of the cosine."""
    for name, tokens, period, rates in (
        ("t2r_lm_paper", 3 * 8 * 3072, 270_000, (1, 1e-4)),
        ("t2r_finetune_paper", 8 * 3072, 135_000, (0.5, 5e-5)),
    ):
        config = load_config(name, [])
        o, steps = config.optimizer, config.train.steps
        assert config.data.batch * config.data.length == tokens
        assert 0 <= o.warmup_steps + period - steps <= 1000
        rate = make_schedule(o, steps)
        assert float(rate(o.warmup_steps)) == pytest.approx(rates[0])
        assert float(rate(steps)) == pytest.approx(rates[1], rel=1e-3)


@pytest.mark.parametrize("name", PARAMETERS)
def test_size_of_the_papers(name: str) -> None:
    millions, words = PARAMETERS[name]
    model = load_config(name, []).model
    _, shapes = abstract(replace(model, vocab_size=words or 100))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert abs(count / 1e6 - millions) < 0.05 * millions

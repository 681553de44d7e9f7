"""Every config can be loaded, and docs state the sizes and token counts of those of the papers."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from famjax.config.resolved import resolve_model
from famjax.config.schema import Config
from famjax.experiment.checks import validate
from famjax.experiment.load import difference, load_config
from famjax.models.remap_params import abstract_inference_model
from famjax.optimizers import make_schedule
from famjax.tasks.toy import task_tokenizer
from famjax.train.flops import training_flops

CONFIGS = sorted(Path(__file__).parents[2].joinpath("configs").glob("[!_]*.py"))

ROOT = Path(__file__).parents[2]
# for the adaptive softmax, and for bytes with two special tokens
VOCABULARY = {"wikitext103.txt": 267_735, "bytes": 258, "joint.model": 32_000}
# configs whose shape comes from `init`, and the model that their docstring converts
SHAPE_OF_INIT = {"t2r_finetune_paper": ("t2r_lm_paper", "model.mixer=linear")}
# FLOP/s of a V100 in half precision (NVIDIA's data sheet)
V100 = 125e12
# configs at the papers' sizes
OF_PAPER = re.compile(r"_paper$|^fam_")
# text, with the papers' sizes: the papers train on all of it
WHOLE_TEXT = [
    *("char_ptb_paper", "enwik8_paper", "wikitext103_small_paper", "wikitext103_large_paper"),
    *("t2r_lm_paper", "t2r_finetune_paper", "fam_1b", "fam_8b", "fam_24b"),
]


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading of docs/PAGE, without its header."""
    text = ROOT.joinpath("docs", page).read_text()
    lines = iter(text.partition(f"\n## {heading}\n")[2].splitlines())
    table = itertools.takewhile(
        lambda line: line.startswith("|"),
        itertools.dropwhile(lambda line: not line.startswith("|"), lines),
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return rows[2:]


def docstring(name: str) -> str:
    """Return the docstring of configs/NAME.py."""
    return ROOT.joinpath("configs", f"{name}.py").read_text().split('"""')[1]


def bases_of(name: str) -> set[str]:
    """Return the configs from which configs/NAME.py derives, directly or through another."""
    text = ROOT.joinpath("configs", f"{name}.py").read_text()
    found = set(re.findall(r'load_config\("(\w+)"\)', text))
    return found.union(*map(bases_of, found))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads(path: Path) -> None:
    # configs with adapters need a base model
    config = load_config(str(path), [])
    validate(config)
    assert config.name == path.stem
    assert f"famjax train {path.stem}" in path.read_text()
    assert "@@" not in path.read_text()


def test_no_config_is_a_copy() -> None:
    """Similar configs derive from a common base, so that each value is written once."""
    written = {}
    for path in CONFIGS[0].parent.glob("*.py"):
        if path.stem != "__init__" and "load_config(" not in path.read_text():
            written[path.stem] = set(difference(Config(), load_config(path.stem)))
    assert len(written) > 5
    for a, b in itertools.combinations(written, 2):
        assert len(written[a] & written[b]) < 12, f"{a} and {b} need a base"


def test_commands_have_unique_run_names() -> None:
    """Each command in a docstring uses a run name that no other command has."""
    before: dict[str, str] = {}
    for path in CONFIGS:
        for line in docstring(path.stem).replace("\\\n", " ").splitlines():
            command = line.partition("famjax train ")[2].partition("#")[0].split()
            if not command or command[0] != path.stem or any("init=" in x for x in command):
                continue
            name = load_config(command[0], command[1:]).name
            assert before.setdefault(name, line) == line, line


def test_configs_of_papers_refer_to_departures_of_their_bases() -> None:
    """A docstring names each base whose docstring states more than its subject."""
    papers = {path.stem: bases_of(path.stem) for path in CONFIGS if OF_PAPER.search(path.stem)}
    stated = {base for base in set().union(*papers.values()) if "\n\n" in docstring(base)}
    assert stated == {"_feedback_paper", "_seq2seq_paper", "_t2r_paper", "_toy_paper"}
    for name, bases in papers.items():
        missing = [base for base in bases & stated if f"`{base}`" not in docstring(name)]
        assert not missing, f"{name} does not refer to {missing}"


def parameters(*given: str) -> int:
    """Return the parameter count of `t2r_lm_paper` on WikiText-103."""
    model = load_config("t2r_lm_paper", [*given]).model
    _, shapes = abstract_inference_model(replace(model, vocab_size=267_735))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_parameter_count_of_t2r() -> None:
    """The T2R paper gives no parameter count; Baevski & Auli (2019) have 247M with 16 layers."""
    teacher, shallow = parameters(), parameters("model.layers=16")
    assert abs(shallow / 1e6 - 247) < 1
    d, c = 1024, 4096
    # four projections, two feed-forward kernels, their biases, two norms
    layer = 4 * (d * d + d) + 2 * d * c + c + d + 4 * d
    assert teacher - shallow == 16 * layer
    # a feature map per head and layer: r k (e + 1) (T2R 2.2)
    maps = 32 * 8 * 32 * (128 + 1)
    assert parameters("model.mixer=linear") - teacher == maps
    # the paper: less than 0.2% (2.2)
    assert f"{maps / teacher:.2%}, {maps / 2 / shallow:.2%}" == "0.24%, 0.21%"


def test_schedule_of_t2r() -> None:
    """Tables 3 and 4: tokens per step, and one cosine cycle per run."""
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


def vocabulary_of(config: Config) -> int:
    """Return the size of the vocabulary, from the docstring where a command there trains it."""
    trained = re.search(r"--vocab-size (\d+)", docstring(config.name))
    return int(trained[1]) if trained else VOCABULARY[config.data.tokenizer]


def count_of(config: Config) -> int:
    """Return a config's parameter count; for `fam_*` without embeddings and adapters."""
    model, data = config.model, config.data
    if data.tokenizer == "task":
        words = task_tokenizer(data.task, data.toy).vocab_size
    else:
        words = model.vocab_size or vocabulary_of(config)
    whole = replace(model, vocab_size=words, lora=replace(model.lora, rank=0))
    _, shapes = abstract_inference_model(whole)
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    return count - words * model.width if config.name.startswith("fam_") else count


@pytest.mark.parametrize(
    "row", rows_of("papers.md", "Parameters"), ids=lambda row: row[0].strip("`")
)
def test_parameter_counts_match_the_papers(row: list[str]) -> None:
    """docs/papers.md has the configs' counts, within 1.6% of those in the Feedback papers."""
    command, paper, here, difference = row
    name, *given = command.strip("`").split()
    name, *shape = SHAPE_OF_INIT.get(name, (name,))
    millions = count_of(load_config(name, [*shape, *given])) / 1e6
    shown = f"{millions:,.2f}" if millions < 1000 else f"{millions:,.0f}"
    if not re.fullmatch(r"[\d.]+", paper):
        assert (here, difference) == (shown, "-")
        return
    share = millions / float(paper) - 1
    assert (here, difference) == (shown, f"{share:+.1%}")
    assert abs(share) < 0.016


@pytest.mark.parametrize(
    "row", rows_of("papers.md", "Training cost"), ids=lambda row: row[0].strip("`")
)
def test_training_costs_are_possible(row: list[str]) -> None:
    """docs/papers.md has the lower bounds of the configs' costs, below what the papers took."""
    command, paper, *here = row
    name, *given = command.strip("`").split()
    config = load_config(name, given)
    model = replace(config.model, vocab_size=vocabulary_of(config))
    tokens = config.train.steps * config.data.batch * config.data.length
    flops = tokens * training_flops(resolve_model(model))
    hours = flops / V100 / 3600
    share = hours / float(paper.replace(",", ""))
    assert here == [f"{flops / 1e18:.1f}", f"{hours:.1f}", f"{share:.1%}"]
    assert share < 0.5


@pytest.mark.parametrize("name", WHOLE_TEXT)
def test_configs_of_papers_train_on_the_full_text(name: str) -> None:
    assert load_config(name, []).data.holdout == 0
    assert "--tasks text:" in ROOT.joinpath("configs", f"{name}.py").read_text()


def test_token_counts_of_toy_runs() -> None:
    """docs/tasks.md has the token counts of the configs for two cores."""
    rows = rows_of("tasks.md", "How much the runs read, compared with the papers")
    assert len(rows) == 7
    for command, _, episodes, _, memory, start, lines, tokens in rows:
        name, *given = command.strip("`").split()
        config = load_config(name, given)
        toy, read = config.data.toy, config.train.steps * config.data.batch
        assert episodes == f"{toy.episodes:,}"
        assert memory == ("one stream" if toy.concatenate else "fresh")
        assert start.split()[0] == (str(toy.start_steps) if toy.start_steps else "-")
        assert lines == f"{read:,}"
        assert tokens == f"{read * config.data.length / 1e6:.1f}M"


def test_docs_of_the_papers_are_complete() -> None:
    """docs/papers.md: configs, files, links and keys exist; "Parameters" has all papers' configs.

    Names such as `_5_paper` are suffixes of the previous name.
    """
    text = ROOT.joinpath("docs", "papers.md").read_text()
    code = set(itertools.chain(*(part.split() for part in re.findall(r"`([^`\n]+)`", text))))
    named = {name for name in code if re.fullmatch(r"[a-z][a-z_0-9]*_paper|fam_\d+b", name)}
    ends = {name for name in code if re.fullmatch(r"_[a-z_0-9]+_paper|_\d_paper", name)}
    there = {path.stem for path in CONFIGS if OF_PAPER.search(path.stem)}
    assert named <= there
    assert all(any(name.endswith(end) for name in there) for end in ends)
    counted = {row[0].strip("`").split()[0] for row in rows_of("papers.md", "Parameters")}
    assert counted == there
    files = [name for name in code if "/" in name and name.endswith(".py")]
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    missing = [name for name in files if not ROOT.joinpath(name).exists()]
    assert missing + [name for name in links if not ROOT.joinpath("docs", name).exists()] == []
    for key in re.findall(r"(?:model|data|train|optimizer)\.[a-z_.]+", " ".join(code)):
        value: object = Config()
        for name in key.split("."):
            assert hasattr(value, name), key
            value = getattr(value, name)

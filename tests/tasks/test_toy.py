"""Toy tasks: answers equal those of a literal simulator, baselines the published ones."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from famjax.config.schema import Config, DataConfig, ToyConfig
from famjax.core.errors import UserError
from famjax.data.lanes import Lanes
from famjax.data.packing import PackedRows
from famjax.experiment.load import load_config
from famjax.pipeline import make_source, make_tokenizer
from famjax.tasks.toy import (
    TOYS,
    ToySource,
    baselines,
    episode_answers,
    eval_steps,
    task_tokenizer,
)
from famjax.tokenizers.load import load_tokenizer
from famjax.tokenizers.words import SPECIALS

FEW = ToyConfig(episodes=40)


def source(task, config=FEW, split="train", seed=0):
    return ToySource(task, config, task_tokenizer(task, config), seed, split)


def read(task, config=FEW):
    """Return the words, the answers and the weights of each episode."""
    words = task_tokenizer(task, config).words
    for piece in source(task, config).episodes():
        said = piece.tokens if piece.targets is None else piece.targets
        assert len(piece.tokens) == len(piece.weights) == len(said)
        yield [words[i] for i in piece.tokens], [words[i] for i in said], piece.weights


# simulators


@pytest.mark.parametrize("size", [2, 8])
def test_random_walk_equals_a_simulator(size):
    for words, cells, weights in read("random_walk", replace(FEW, size=size)):
        row = column = 0
        heading = "east"
        right = {"east": "south", "south": "west", "west": "north", "north": "east"}
        left = {behind: before for before, behind in right.items()}
        assert words[0] == "<s>"
        assert len(words) == 101
        assert (weights == 1).all()
        for word, cell in zip(words, cells, strict=True):
            if word == "left":
                heading = left[heading]
            elif word == "right":
                heading = right[heading]
            elif word == "forward":
                row += {"south": 1, "north": -1}.get(heading, 0)
                column += {"east": 1, "west": -1}.get(heading, 0)
                row, column = min(max(row, 0), size - 1), min(max(column, 0), size - 1)
            assert cell == f"{row},{column}"


def test_blocked_walk_equals_a_simulator():
    # neighbors to the east, south, west and north of each cell; "-" is blocked
    around = {
        "A": "BDCG", "B": "C--H", "C": "-FBI", "D": "-GF-", "E": "FHDB",
        "F": "DI-C", "G": "H-ID", "H": "IBG-", "I": "GCHF",
    }  # fmt: skip
    directions = ("east", "south", "west", "north")
    for words, cells, weights in read("blocked_walk"):
        place = "E"
        assert cells[0] == "E"
        assert (weights == 1).all()
        for word, cell in zip(words[1:], cells[1:], strict=True):
            ahead = around[place][directions.index(word)]
            place = place if ahead == "-" else ahead
            assert cell == place
        assert not set(cells[1:]) & {"A"}


def test_sequence_tasks_equal_simulators():
    for task in ("copy", "reverse"):
        for words, _, weights in read(task):
            assert words[0] == "<s>"
            digits, separator, answer = words[1:41], words[41], words[42:]
            assert separator == "="
            assert answer == (digits if task == "copy" else digits[::-1])
            np.testing.assert_array_equal(np.flatnonzero(weights), np.arange(42, 82))
    counts = set()
    for words, _, weights in read("counting", replace(FEW, steps=7, episodes=200)):
        n = words.count("A")
        assert words == ["<s>", *"A" * n, "=", *"B" * n, "."]
        np.testing.assert_array_equal(np.flatnonzero(weights), np.arange(n + 2, 2 * n + 3))
        counts.add(n)
    assert counts == {*range(1, 8)}


@pytest.mark.parametrize("variables", [1, 3, 5])
def test_algorithmic_equals_an_interpreter(variables):
    for words, said, weights in read("algorithmic", replace(FEW, variables=variables)):
        statements = " ".join(words[1:]).split(" ;")[:-1]
        assert len(statements) == 100
        values: dict[str, int] = {}
        printed = []
        for statement in statements:
            printed += execute(statement.split(), values)
        assert {*values} <= {*"xyzpr"[:variables]}
        at = np.flatnonzero(weights)
        assert [said[i] for i in at] == printed
        assert all(words[i - 2] == "print" and words[i] == ";" for i in at)
        assert len(at) == words.count("print")


def execute(words, values):
    """Execute a statement and return its output."""
    match words:
        case ["print", name]:
            return [str(values[name])]
        case [name, "=", value]:
            assert name not in values
            values[name] = int(value)
        case [name, "++"]:
            values[name] += 1
        case [name, "--"]:
            values[name] -= 1
        case ["if", name, sign, right, ":", *nested]:
            assert nested[0] not in ("if", "print")
            bound = values[right] if right in values else int(right)
            holds = values[name] < bound if sign == "<" else values[name] > bound
            # statements that are skipped must be valid too
            execute(nested, values if holds else dict(values))
        case _:
            pytest.fail(f"no statement: {words}")
    assert all(1 <= value <= 10 for value in values.values())
    return []


# published figures


@pytest.mark.parametrize(
    ("task", "variables", "commonest", "last"),
    [
        ("random_walk", 3, 0.134, 0.753),
        ("blocked_walk", 3, 0.144, 0.292),
        ("copy", 3, 0.1, None),
        ("counting", 3, 0.962, None),
        ("algorithmic", 3, 0.104, 0.418),
        ("algorithmic", 5, 0.104, 0.393),
    ],
)
def test_baselines_are_the_published_ones(task, variables, commonest, last):
    config = ToyConfig(variables=variables)
    found = baselines(task, config, 100 if task != "counting" else 50, seed=1)
    assert found["commonest_accuracy"] == pytest.approx(commonest, abs=0.01)
    assert found["last_accuracy"] == (last and pytest.approx(last, abs=0.01))
    assert found["chance"] == pytest.approx(1 / len(TOYS[task](config).answers))


def test_whole_episodes_of_trivial_guesses():
    config = replace(FEW, steps=2)
    found = baselines("copy", config, 2, seed=1)
    assert found["chance_episodes"] == pytest.approx(0.1**2)
    test = source("copy", replace(config, episodes=1000), "holdout", seed=1).episodes()
    answers = [episode_answers(episode) for episode in islice(test, 1000)]
    words = task_tokenizer("copy", config).words
    right = [all(words[i] == found["commonest"] for i in episode) for episode in answers]
    assert 0 < found["commonest_episodes"] == pytest.approx(np.mean(right))
    assert found["last_episodes"] is None
    # a walk of one step repeats the start, if it turns
    assert baselines("random_walk", replace(config, steps=1), 1, seed=1)["last_episodes"] > 0.3


def test_programs_look_like_the_published_ones():
    found = list(islice(source("algorithmic", ToyConfig()).episodes(), 500))
    assert np.mean([len(piece.tokens) for piece in found]) == pytest.approx(432, rel=0.01)
    assert np.mean([len(episode_answers(piece)) for piece in found]) == pytest.approx(25.6, abs=0.6)


def test_default_steps_are_those_of_the_paper():
    assert {task: TOYS[task].steps for task in TOYS} == {
        "random_walk": (100, 100),
        "blocked_walk": (100, 100),
        "copy": (40, 400),
        "reverse": (40, 400),
        "counting": (50, 50),
        "algorithmic": (100, 100),
    }
    assert eval_steps("copy", ToyConfig(steps=9)) == 400
    assert eval_steps("counting", ToyConfig(steps=1000)) == 1000
    assert eval_steps("copy", ToyConfig(test_steps=7)) == 7


# the source


@pytest.mark.parametrize("task", TOYS)
def test_episodes_are_fixed_and_test_episodes_differ(task):
    config = replace(FEW, steps=30)
    first, again, test, other = (
        [piece.tokens.tobytes() for piece in made.episodes()]
        for made in (
            source(task, config),
            source(task, config),
            source(task, config, "holdout"),
            source(task, config, seed=1),
        )
    )
    assert first == again
    assert TOYS.keys() == set(TOYS)
    if task != "counting":  # which has only 30
        assert len({*first, *test, *other}) == 3 * 40
    else:
        assert first != test


@pytest.mark.parametrize("lanes", [3, 50])
@pytest.mark.parametrize("concatenate", [True, False])
def test_an_epoch_has_every_episode_once_in_an_order_of_its_own(lanes, concatenate):
    config = replace(FEW, concatenate=concatenate)
    made = source("random_walk", config)
    fixed = sorted(piece.tokens.tobytes() for piece in made.episodes())
    orders = []
    for epoch in range(2):
        own = []
        for lane in range(lanes if lanes < 40 else 1):
            count = len(range(lane, 40, lanes)) if lanes < 40 else 40
            for k in range(count) if not concatenate else [0]:
                key = made.key(lane, lanes, epoch * (1 if concatenate else count) + k)
                assert json.loads(json.dumps(key)) == key
                *pieces, end = made.open(key)
                assert end.tokens == end.targets == 0
                assert end.weights == 0
                assert len(pieces) == (count if concatenate else 1)
                own += [piece.tokens.tobytes() for piece in pieces]
        assert sorted(own) == fixed
        orders.append(own)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("task", ["random_walk", "counting"])
def test_reading_resumes_at_any_piece(task):
    made = source(task)
    key = made.key(1, 1, 0) if task == "counting" else made.key(0, 1, 0)
    whole = list(made.open(key))
    for at in (0, 1, 33, len(whole) - 1, len(whole)):
        rest = list(made.open(key, at))
        assert len(rest) == len(whole) - at
        for piece, expected in zip(rest, whole[at:], strict=True):
            np.testing.assert_array_equal(piece.tokens, expected.tokens)
            np.testing.assert_array_equal(piece.weights, expected.weights)
            np.testing.assert_array_equal(piece.targets, expected.targets)


@pytest.mark.parametrize("layout", ["lanes", "packed"])
@pytest.mark.parametrize("task", TOYS)
def test_batches_contain_every_answer_and_resume_exactly(task, layout):
    config = replace(FEW, episodes=3, steps=9)
    made = source(task, config)
    lanes = (
        Lanes(made, 2, 32, 8) if layout == "lanes" else PackedRows(made, words_of(task), 2, 32, 0)
    )
    iterator, states, batches = iter(lanes), [], []
    for _ in range(12):
        states.append(json.dumps(iterator.get_state()))
        batches.append(next(iterator))
    # every answer of the first epoch is a target once
    joined = {name: np.concatenate([b[name] for b in batches], 1)[0] for name in batches[0]}
    expected = np.concatenate([episode_answers(piece) for piece in made.open(made.key(0, 2, 0))])
    asked = joined["targets"][joined["weights"] > 0][: len(expected)]
    np.testing.assert_array_equal(asked, expected)
    if task == "random_walk":  # the answer's weight is at its action, not at the next token
        first = next(made.open(made.key(0, 2, 0)))
        np.testing.assert_array_equal(joined["tokens"][:10], first.tokens)
        np.testing.assert_array_equal(joined["targets"][:10], first.targets)
    for at in (1, 3, 8):
        resumed = iter(lanes)
        resumed.set_state(json.loads(states[at]))
        for batch in batches[at:]:
            got = next(resumed)
            for name in batch:
                np.testing.assert_array_equal(got[name], batch[name], err_msg=name)


def words_of(task):
    return task_tokenizer(task, FEW)


def test_episodes_are_not_split():
    made = source("counting", replace(FEW, steps=12, concatenate=False))
    batch = next(iter(Lanes(made, 2, 64, 8, keep_whole=True)))
    for lane in range(2):
        begins = np.flatnonzero(batch["reset"][lane])
        assert len(begins) > 1
        assert not (begins % 8).any()
        # the last episode has ended: its "." is a target
        last = batch["targets"][lane][begins[-1] :][batch["weights"][lane][begins[-1] :] > 0]
        assert last[-1] == task_tokenizer("counting", FEW).words.index(".")


def test_episodes_cannot_begin_longer_than_they_get():
    given = ["data.toy.concatenate=false", "data.toy.start_steps=41"]
    with pytest.raises(UserError, match=r"start_steps=41 is more than data\.toy\.steps=40, to"):
        load_config("copy_feedback", [*given, "data.toy.steps=0"])
    load_config("copy_feedback", [*given, "data.toy.steps=41"])


def test_the_pipeline_makes_toy_sources():
    config = Config(data=DataConfig(task="reverse", tokenizer="task", toy=FEW))
    words = make_tokenizer(config.data)
    assert words.words[: len(SPECIALS)] == SPECIALS
    assert "reverse: 40 episodes of 40 steps" in make_source(config, words).report()
    with pytest.raises(UserError, match="reverse: tokenizer bytes has other words than the task"):
        make_source(config, load_tokenizer("bytes"))

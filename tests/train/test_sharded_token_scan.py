"""A token scan on several devices: each processes its own rows, with one reduction at the end."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

from famjax.config.schema import Config
from famjax.experiment.load import override
from famjax.parallel import sharding
from famjax.stacks.feedback.parts import DropoutRng
from famjax.stacks.feedback.solve import _per_token_rng
from famjax.train.program import TrainProgram, make_program
from famjax.train.resolve import resolve

ROWS, LENGTH, VOCABULARY = 8, 20, 32
SHAPE = (
    f"model.vocab_size={VOCABULARY} model.stack=feedback model.layers=2 model.width=16 "
    "model.heads=4 model.kv_heads=2 model.mlp_width=32 model.block_len=1 model.feedback.span=8 "
    f"data.batch={ROWS} data.length={LENGTH} optimizer.schedule=constant optimizer.warmup_steps=0"
).split()
COLLECTIVE = re.compile(r" = .*(all-reduce|all-gather|all-to-all|collective-permute)(-start)?\(")


def program_on(mesh: tuple[int, int, int], *overrides: str) -> TrainProgram:
    axes = zip(("data", "fsdp", "tensor"), mesh, strict=True)
    given = [*SHAPE, *overrides, *(f"mesh.{name}={size}" for name, size in axes)]
    devices = jax.devices()[: int(np.prod(mesh))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "make_mesh", functools.partial(sharding.make_mesh, devices=devices))
        config = resolve(override(Config(), given), None, len(devices))
        return make_program(config, np.ones(VOCABULARY, np.float32))


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (ROWS, LENGTH), np.int32)
    reset = np.zeros((ROWS, LENGTH), bool)
    reset[3, 7] = True
    return {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, 1),
        "weights": np.ones((ROWS, LENGTH), np.float32),
        "valid": np.ones((ROWS, LENGTH), bool),
        "reset": reset,
    }


def after_two_steps(program: TrainProgram, step: Any) -> Any:
    state = program.start()
    for _ in range(2):
        state = step(state, jax.device_put(batch(), program.batch))
    return jax.tree.map(np.asarray, (state.params, state.memory, state.totals.loss))


@functools.cache
def one_device_state() -> Any:
    program = program_on((1, 1, 1))
    return after_two_steps(program, program.step)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [(8, 1, 1), pytest.param((2, 2, 2), marks=pytest.mark.slow)])
def test_sharded_rows_equal_one_device(mesh: tuple[int, int, int]) -> None:
    """Parameters, memory and loss are equal; there is no collective in the loop."""
    program = program_on(mesh)
    data = jax.device_put(batch(), program.batch)
    compiled = program.step.lower(program.start(), data).compile()  # type: ignore[attr-defined]
    for a, b in zip(
        jax.tree.leaves(after_two_steps(program, compiled)),
        jax.tree.leaves(one_device_state()),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max(initial=1e-6), rtol=0)
    if mesh[2] == 1:  # sharded heads are summed for every token
        assert collectives(compiled.as_text()) == {True}


def collectives(text: str) -> set[bool]:
    """Return, for the collectives of a program, whether they are outside all loops."""
    found, entry = set(), False
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            entry = line.startswith("ENTRY")
        if COLLECTIVE.search(line):
            found.add(entry)
    return found


def test_dropout_keys_differ_between_parts() -> None:
    random = DropoutRng(jax.random.key(0), np.zeros(2, bool))  # type: ignore[arg-type]
    keys = jax.random.key_data(_per_token_rng(random, 3, 4).key)  # type: ignore[union-attr]
    assert keys.shape[:2] == (3, 4)
    assert len(np.unique(keys.reshape(12, -1), axis=0)) == 12


@pytest.mark.long
def test_equal_rows_of_different_parts_have_different_dropout() -> None:
    program = program_on((2, 1, 1), "model.dropout.hidden=0.5")
    data = batch()
    equal = {name: np.broadcast_to(a[:1], a.shape) for name, a in data.items()}
    state = program.step(program.start(), jax.device_put(equal, program.batch))
    slots = np.asarray(state.memory.slots[0])  # type: ignore[union-attr]
    # the first row of each part
    assert np.abs(slots[:, 0] - slots[:, ROWS // 2]).max() > 1e-3

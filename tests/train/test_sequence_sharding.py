"""A step with tokens sharded over eight devices: its communication, and memory per device."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from famjax.config.schema import AXES, Config
from famjax.experiment.load import override
from famjax.parallel import sharding
from famjax.train.program import make_program
from famjax.train.resolve import resolve

ROWS, LENGTH, VOCABULARY, WIDTH, BLOCK, FAM, HEADS = 2, 4096, 64, 32, 32, 4, 2
SHAPE = (
    f"model.vocab_size={VOCABULARY} model.mixer=bswa,fam model.layers=2 model.width={WIDTH} "
    f"model.heads=4 model.kv_heads={HEADS} model.mlp_width=64 model.block_len={BLOCK} "
    f"model.fam_len={FAM} data.batch={ROWS} data.length={LENGTH}"
).split()
# bytes in float32 of a vector per token, the keys of a memory segment and a FAM
ACTIVATIONS = 4 * ROWS * LENGTH * WIDTH
SEGMENT = 4 * ROWS * BLOCK * HEADS * WIDTH // 4
MEMORY = 4 * ROWS * FAM * WIDTH

COLLECTIVE = re.compile(
    r" = (?P<shape>.*?) "
    r"(?P<name>all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\("
)
BYTES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1}


@functools.cache
def compile_step(*mesh: int) -> Any:
    given = [*SHAPE, *(f"mesh.{name}={n}" for name, n in zip(AXES, mesh, strict=True))]
    with pytest.MonkeyPatch.context() as patch:
        devices = jax.devices()[: math.prod(mesh)]
        patch.setattr(sharding, "make_mesh", functools.partial(sharding.make_mesh, devices=devices))
        config = resolve(override(Config(), given), None, len(devices))
        program = make_program(config, np.ones(VOCABULARY, np.float32))
    kinds = {"tokens": int, "targets": int, "weights": float, "valid": bool, "reset": bool}
    batch = {
        name: jax.ShapeDtypeStruct((ROWS, LENGTH), jax.dtypes.canonicalize_dtype(kind))
        for name, kind in kinds.items()
    }
    step: Any = program.step
    return step.lower(jax.eval_shape(program.start), batch).compile()


def collectives(program: str) -> Iterator[tuple[str, int]]:
    """Yield the collectives of a program with the sizes of their results in bytes."""
    for found in COLLECTIVE.finditer(program):
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", found["shape"])
        size = sum(
            BYTES[kind] * math.prod(map(int, filter(None, dims.split(","))))
            for kind, dims in shapes
        )
        yield found["name"], size


@pytest.mark.long
def test_only_memories_are_communicated() -> None:
    """Keys and values of a memory segment and the FAM go to the next device. Gradients and the
    final memory are reduced. Nothing of size t is gathered except counts."""
    program = compile_step(1, 1, 1, 8)
    sent: dict[str, list[int]] = {}
    for name, size in collectives(program.as_text()):
        sent.setdefault(name, []).append(size)
    assert set(sent) == {"collective-permute", "all-reduce", "all-gather"}
    assert max(sent["collective-permute"]) == SEGMENT
    assert MEMORY in sent["collective-permute"]
    assert max(sent["all-gather"]) <= 4 * ROWS * LENGTH // BLOCK
    assert max(sent["all-reduce"]) < ACTIVATIONS / 4


@pytest.mark.long
def test_memory_per_device_is_an_eighth() -> None:
    """Except for gradients, all memory that limits the length of a segment is sharded."""
    one, many = (compile_step(1, 1, 1, n).memory_analysis().temp_size_in_bytes for n in (1, 8))
    assert one > 40 * ACTIVATIONS
    assert many < one / 6

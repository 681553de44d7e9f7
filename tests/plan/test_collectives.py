"""Collectives that FAM adds to a training step: sums over memory tokens, and none per block."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from famjax.config.schema import Config
from famjax.experiment.load import override
from famjax.parallel import sharding
from famjax.plan import hlo, hlo_cost
from famjax.plan.worker import batch_shapes
from famjax.train.program import make_program
from famjax.train.resolve import resolve

# both tests need both programs
pytestmark = pytest.mark.long

LAYERS, BLOCKS, BLOCK, FAM = 2, 5, 16, 2
SHAPE = [
    *(f"model.layers={LAYERS}", "model.vocab_size=64", "model.width=64", "model.heads=4"),
    *("model.mlp_width=256", f"model.block_len={BLOCK}", f"model.fam_len={FAM}"),
    *(
        "data.layout=packed",
        "data.batch=8",
        f"data.length={BLOCKS * BLOCK}",
        "mesh.data=1",
        "mesh.fsdp=8",
    ),
]


@functools.cache
def collectives(mixer: str) -> dict[str, hlo_cost.Collective]:
    """Return the collectives of a step on eight devices, by kind."""
    config = override(Config(), [*SHAPE, f"model.mixer={mixer}"])
    config = resolve(config, None, jax.device_count())
    mesh = sharding.make_mesh(config.mesh)
    program = make_program(config, np.ones(64, np.float32), mesh=mesh)
    shapes = jax.eval_shape(program.start)
    lowered = program.step.lower(shapes, batch_shapes(config, program))  # type: ignore[attr-defined]
    found = hlo_cost.count_cost(hlo.parse(lowered.compile().as_text())).collectives.values()
    assert {c.group for c in found} == {8}
    return {c.kind: c for c in found}


def test_fams_loop_over_blocks_has_no_collectives() -> None:
    """Gradients of what its blocks use are summed once after them, together with those of BSWA."""
    summed = collectives("bswa")["all-reduce"].bytes
    assert summed < collectives("fam")["all-reduce"].bytes < 2.5 * summed


def test_a_layers_weights_are_gathered_once_per_pass() -> None:
    """Forward, and backward with recomputation; FAM needs no more gathers than BSWA."""
    layer = 4 * 64 * 64 + 3 * 64 * 256
    fsdp_all_gather = collectives("bswa")["all-gather"].bytes
    weights = 2 * LAYERS * layer * 4 * 7 / 8
    table = 2 * 64 * 64 * 4 * 7 / 8
    assert weights <= fsdp_all_gather <= weights + 2 * table
    more = collectives("fam")["all-gather"].bytes - fsdp_all_gather
    # tokens of the memory prompt, not a layer's weights
    assert more < 8 * LAYERS * FAM * 64 * 4 < layer * 4

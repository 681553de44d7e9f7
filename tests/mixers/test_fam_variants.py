"""`model.fam_init` and `model.fam_position`, the paper's variants of where a memory begins."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from famjax.config.resolved import resolve_model
from famjax.config.schema import ModelConfig
from famjax.convert.open import open_model
from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.experiment.load import load_config
from famjax.export.export import export
from famjax.stacks.residual import ResidualStack
from famjax.train.loop import train

pytestmark = pytest.mark.usefixtures("one_device")
SMALL = [
    *("model.layers=2", "model.width=16", "model.heads=2", "model.mlp_width=32"),
    *("model.block_len=8", "model.memory_segments=0", "model.fam_len=3"),
    # one body is compiled for both layers
    "model.scan_layers=true",
    *("data.batch=2", "data.length=32", "train.steps=2", "optimizer.warmup_steps=0"),
]
SHAPE = ModelConfig(
    layers=1, width=16, heads=2, block_len=4, fam_len=2, memory_segments=0, mixer="fam"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with a prefix and positions of zero, continued with adapters."""
    folder = tmp_path_factory.mktemp("variants")
    (folder / "train.txt").write_text(tiny.TEXT * 40)
    given = [*SMALL, f"data.files={folder / 'train.txt'}"]
    variant = ["model.fam_init=prefix", "model.fam_position=zero"]
    train(load_config("text_fam", [*given, *variant]), folder / "whole", quiet=True)
    adapters = [f"init={folder / 'whole'}", "model.lora.rank=2"]
    train(load_config("text_fam", [*given, *adapters]), folder / "adapted", quiet=True)
    return folder / "adapted"


def prefix(run: Path) -> np.ndarray:
    return np.asarray(open_model(str(run)).model.stack.layers[0].mixer.prefix[...])


@pytest.mark.long
def test_prefixes_are_trained_beside_adapters(run: Path) -> None:
    before, after = prefix(run.parent / "whole"), prefix(run)
    assert after.shape == (2, 3, 16)
    assert (np.abs(after - before).max((1, 2)) > 1e-4).all()
    assert open_model(str(run)).config.model.fam_position == "zero"


@pytest.mark.long
def test_variants_are_exported_where_their_layers_are(run: Path, tmp_path: Path) -> None:
    assert export(run, tmp_path / "stablehlo", "stablehlo")
    with pytest.raises(UserError, match=r"does not support model\.fam_init=prefix; take --format"):
        export(run, tmp_path / "hf", "hf")


@pytest.mark.parametrize(("position", "is_relative"), [("last", True), ("zero", False)])
def test_a_memory_at_zero_is_as_far_away_as_its_document_is_long(
    position: str, is_relative: bool
) -> None:
    """What a block reads from an equal memory depends on the updates before it."""
    shape = resolve_model(replace(SHAPE, fam_position=position))
    stack = ResidualStack(shape, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 16)), jnp.float32)
    (early,) = stack.init_state(1)
    mixer = stack.layers[0].mixer
    # p updates are enough to know, except with positions of zero
    updates = jnp.full_like(early.updates, 9)

    def at(updates: jnp.ndarray) -> np.ndarray:
        _, k, v = first_layer(mixer).project(early.fam[0], updates[0])
        state = early._replace(updates=updates, k=k[None, :, None], v=v[None, :, None])
        return np.asarray(stack(x, (state,), Context())[0])

    apart = np.abs(at(updates) - at(jnp.ones_like(updates))).max()
    assert (apart < 1e-5) == is_relative


def test_a_reset_needs_the_memory_that_a_document_starts_with() -> None:
    """Otherwise a call would reset the window alone, and a step nothing."""
    stack = ResidualStack(resolve_model(SHAPE), rngs=nnx.Rngs(0))
    layer = stack.layers[0]
    mixer, mlp = first_layer(layer.mixer), first_layer(layer.mlp)
    assert stack.prompt is not None
    prompt = stack.prompt[...]
    state, x, starts = mixer.init_state(1, prompt), jnp.ones((1, 4, 16)), jnp.ones((1, 4), bool)
    for method, length in ((mixer, 4), (mixer.step, 1)):
        ctx = Context(reset=starts[:, :length])
        read = functools.partial(jax.eval_shape, lambda *args, f=method: f(*args, mlp))
        read(x[:, :length], state, ctx._replace(prompt=prompt))
        with pytest.raises(AssertionError):
            read(x[:, :length], state, ctx)


def first_layer(part: Any) -> Any:
    """Return the first of stacked mixers, or feed-forwards."""
    graph, params = nnx.split(part)
    return nnx.merge(graph, nnx.map_state(lambda _, a: a[0], params))

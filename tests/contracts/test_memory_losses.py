"""Auxiliary losses of memories equal their transcription, over whole blocks of documents."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import transformer

from famjax.core.types import Context

from . import transcription
from .harness import WIDTH, B, W, close, jit, marked, runner

TOKENS = 3 * W


@functools.cache
def program(case: str, alone: bool) -> Any:
    """Return a compiled function: without and with losses, or the losses alone."""
    r = runner(case)

    def read(params: Any, x: Any, ctx: Context) -> Any:
        stack = r.model(params).stack
        start = stack.init_state(len(x))
        with_losses = stack.call_with_losses(x, start, ctx)
        return with_losses[2] if alone else (stack(x, start, ctx), with_losses[:2], with_losses[2])

    return jit(read)


def read_twice(case: str, x: Any, ctx: Context) -> Any:
    """Return what a call returns, what `call_with_losses` returns besides, and the losses."""
    with jax.enable_x64(True):
        return program(case, alone=False)(runner(case).params, x, ctx)


def losses(case: str, x: Any, ctx: Context) -> Any:
    with jax.enable_x64(True):
        return program(case, alone=True)(runner(case).params, x, ctx)


def inputs(rows: int = 1) -> np.ndarray:
    return np.random.default_rng(4).normal(size=(rows, TOKENS, WIDTH))


# other windows and positions have the same losses
SAME = [pytest.param(case, marks=pytest.mark.slow) for case in ("fam-2-1", "fam-between")]


@pytest.mark.parametrize("case", ["fam-1-3", "fam-gated", "fam-static", "fam-zero", *SAME])
def test_losses_equal_their_transcription(case: str) -> None:
    x = inputs()
    plain, read, found = read_twice(case, x, Context())
    close(read, plain)
    r = runner(case)
    p = jax.tree.map(np.asarray, nnx.to_pure_dict(r.params))["stack"]
    h, expected = p.get("prompt"), []
    y = x[0]
    for w, _, hyper in transcription.residual_layers(r.config, p):
        given = {"fam_init": h, **hyper}
        expected.append(transformer.fam_losses(w, y, **given))
        y, _, _ = transformer.fam_layer(w, y, **given)
        h = None if h is None else transformer.prompt_layer(w, h)
    diversity, reconstruction, writing = zip(*expected, strict=True)
    close(tuple(found[:2]), (np.mean(diversity), np.mean(reconstruction)))
    if case == "fam-gated":
        close(found.writing, np.mean(writing))
        assert 0.01 < found.writing < 0.99
    else:
        assert found.writing is None


@pytest.mark.parametrize("case", ["delta", "delta-smeared"])
def test_the_writing_of_the_delta_rule_equals_its_transcription(case: str) -> None:
    """The last block is not complete: it writes nothing."""
    x = inputs()
    valid = np.arange(TOKENS)[None] < TOKENS - 1
    plain, read, found = read_twice(case, x, Context(valid=valid))
    close(read, plain)
    r = runner(case)
    p, expected, y = jax.tree.map(np.asarray, nnx.to_pure_dict(r.params))["stack"], [], x[0]
    for w, _, hyper in transcription.residual_layers(r.config, p):
        given = {"memory": hyper["memory"], "block": hyper["block"]}
        expected.append(transformer.delta_writing(w, y[:-1], **given))
        y, _ = transformer.delta_layer(w, y, **hyper)
    close(found.writing, np.mean(expected))
    assert found[:2] == (None, None)
    assert 0.001 < found.writing < 0.99


# static summary tokens have the offset too
@pytest.mark.long
@pytest.mark.parametrize("case", ["fam-static", pytest.param("fam-1-3", marks=pytest.mark.slow)])
def test_random_offsets_change_no_loss(case: str) -> None:
    """Each row has its own prompt then; rows are not as many as blocks."""
    x, r = inputs(2), runner(case)
    expected = losses(case, x, Context())
    offset = np.array([0, 1000])

    def read(params: Any, x: Any, offset: Any) -> Any:
        stack = r.model(params).stack
        ctx = Context(offset=offset)
        return stack.call_with_losses(x, stack.init_state(len(x), offset), ctx)[2]

    with jax.enable_x64(True):
        close(tuple(jit(read)(r.params, x, offset)), tuple(expected))


# a gated memory has all losses
@pytest.mark.parametrize("case", ["fam-gated", pytest.param("fam-1-3", marks=pytest.mark.slow)])
def test_padding_and_partial_blocks_do_not_count(case: str) -> None:
    x = inputs(2)
    alone = losses(case, x[:, : 2 * W], Context())
    valid = np.tile(np.arange(TOKENS) < 2 * W + 1, (2, 1))
    padded = losses(case, x, Context(valid=valid))
    close(tuple(padded), tuple(alone))


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("fam-gated", ("diversity", "reconstruction")),
        pytest.param("delta-smeared", ("writing",), marks=pytest.mark.long),
        pytest.param("fam-1-3", ("diversity", "reconstruction"), marks=pytest.mark.slow),
    ],
)
def test_a_document_within_a_call_begins_with_the_learned_memory(
    case: str, names: tuple[str, ...]
) -> None:
    x = inputs(2)
    reset = np.zeros((2, TOKENS), bool)
    reset[:, [0, 2 * W]] = True
    both = losses(case, x, Context(reset=reset))
    parts = [losses(case, x[:, span], Context()) for span in (np.s_[: 2 * W], np.s_[2 * W :])]
    for name in names:
        first, second = (np.asarray(getattr(part, name)) for part in parts)
        close(getattr(both, name), (2 * first + second) / 3)
    if case == "fam-gated":
        # the first block of a document has no gates: only the second block of the first one does
        close(both.writing, np.asarray(parts[0].writing))
        assert parts[1].writing == 0


@marked(("delta-smeared", "fam-gated", "fam-1-3"), slow=("fam-1-3",), long=("fam-gated",))
def test_gradients_are_finite(case: str) -> None:
    r = runner(case)
    x = inputs(B)

    def total(params: Any, x: Any) -> Any:
        stack = r.model(params).stack
        _, _, found = stack.call_with_losses(x, stack.init_state(B), Context())
        return sum(loss for loss in found if loss is not None)

    with jax.enable_x64(True):
        grads = jit(jax.grad(total))(r.params, jnp.asarray(x))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert max(np.abs(leaf).max() for leaf in leaves) > 1e-3


@pytest.mark.long
def test_the_target_of_the_reconstruction_is_a_constant() -> None:
    """The gradient with respect to a layer's output is 0."""
    r = runner("fam-1-3")

    def error(y: Any, params: Any, x: Any) -> Any:
        stack = r.model(params).stack
        layer = jax.tree.map(lambda a: a[0], stack.layers[0])
        state = jax.tree.map(lambda a: a[0], stack.init_state(B)[0])
        return layer.mixer.memory_losses(x, y, state, Context(), layer.mlp).reconstruction

    with jax.enable_x64(True):
        x = jnp.asarray(inputs(B))
        value, grad = jit(jax.value_and_grad(error))(x + 1, r.params, x)
    assert value > 0.1
    assert not np.asarray(grad).any()

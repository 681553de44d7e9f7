"""Feedback Transformer and Transformer stacks: gradients, dropout, learned spans, sweeps, memory.

Contracts of all stacks are in `tests/contracts`.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts.harness import close, jit, normal, same
from flax import nnx

from famjax.config.resolved import resolve_model
from famjax.config.schema import ArchConfig, DropoutConfig, FeedbackConfig, LoraConfig, ModelConfig
from famjax.core.types import Context
from famjax.layers.dropout import DropoutKey, dropout
from famjax.models.language_model import LanguageModel
from famjax.ops import token_scan
from famjax.ops.einsum_tape import einsum, use_tape
from famjax.ops.token_scan import Visible
from famjax.stacks import feedback as feedback_stacks
from famjax.stacks.feedback import Feedback, Transformer, solve
from famjax.train.partition import inference_config
from famjax.train.step import clip_spans

B, T, D, SPAN = 2, 5, 8, 4

SECTION = FeedbackConfig(span=SPAN, span_ramp=2, span_start=0.4)
BASE = ModelConfig(
    stack="feedback", layers=2, width=D, heads=2, mlp_width=12, block_len=1, feedback=SECTION
)


def config(*, dropout: Any = None, arch: Any = None, lora: Any = None, **changes: Any):
    """Return BASE with changed fields; fields of the feedback section are recognized by name."""
    ours = {k: changes.pop(k) for k in list(changes) if hasattr(SECTION, k)}
    return replace(
        BASE,
        feedback=replace(SECTION, **ours),
        dropout=DropoutConfig(**dropout or {}),
        arch=ArchConfig(**arch or {}),
        lora=LoraConfig(**lora or {}),
        **changes,
    )


class StackRunner:
    """A partitioned stack with non-trivial parameters and a non-initial state."""

    def __init__(
        self, config: ModelConfig, stack_type: type[Feedback] = Feedback, x64: bool = True
    ):
        self.x64 = x64
        with jax.enable_x64(x64):
            stack = stack_type(resolve_model(config), rngs=nnx.Rngs(0))
            self.graph, params, self.rest = nnx.split(stack, nnx.Param, ...)
            self.fresh = jax.tree.map(np.asarray, stack.init_state(B))
        kind = np.float64 if x64 else np.float32
        rng = np.random.default_rng(1)
        self.params = jax.tree.map(
            lambda a: (np.asarray(a) + 0.2 * rng.normal(size=a.shape)).astype(kind), params
        )

    def stack(self, params: Any = None, key: Any = (3, 4)) -> Feedback:
        with jax.enable_x64(self.x64):
            rest = jax.tree.map(lambda a: jnp.array(key, jnp.uint32), self.rest)
            return nnx.merge(self.graph, self.params if params is None else params, rest)

    def run(self, f: Any, *args: Any) -> Any:
        with jax.enable_x64(self.x64):
            return jax.tree.map(np.asarray, f(*args))

    @functools.cached_property
    def _call(self) -> Any:
        return jit(lambda params, key, *args: self.stack(params, key)(*args))

    def call(
        self,
        x: Any,
        state: Any = None,
        ctx: Context | None = None,
        key: Any = (3, 4),
        params: Any = None,
    ) -> Any:
        """[b t d] -> [b t d], state."""
        params = self.params if params is None else params
        state = self.fresh if state is None else state
        return self.run(self._call, params, np.array(key, np.uint32), x, state, ctx or Context())

    def grad(self, x: Any, state: Any) -> Any:
        """Return the value, state and gradients by (params, x, slots) of a sum of all outputs."""
        b, t, d = x.shape
        to_y = normal(7, b, t, d)

        def loss(params: Any, x: Any, slots: Any) -> Any:
            y, new = self.stack(params)(x, state._replace(slots=slots), Context())
            to_slots = [normal(8, *a.shape) for a in new.slots]
            both = [(y, to_y), *zip(new.slots, to_slots, strict=True)]
            total = sum((a * b.astype(a.dtype)).sum() for a, b in both)
            return total, (y, new)

        f = jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
        return self.run(f, self.params, x.astype(self.kind), state.slots)

    @property
    def kind(self) -> Any:
        return np.float64 if self.x64 else np.float32


X = normal(0, B, T, D)
# such calls share a program with calls that have resets and padding
NO_MASKS = Context(np.zeros((B, T), bool), np.ones((B, T), bool))


def filled_state(runner: StackRunner) -> Any:
    """Return a state after more tokens than the ring's size; lane 1 is in its second document."""
    assert SPAN < T
    x = normal(5, B, T, D).astype(runner.kind)
    reset = np.zeros((B, T), bool)
    reset[1, 2] = True
    return runner.call(x, ctx=NO_MASKS._replace(reset=reset))[1]


# equivalence with a Transformer

OWN = {"shared_kv": False}
ROTARY = {"positions": "rotary"}


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        # distances that are learned, which `test_attention_span...` has too
        pytest.param(OWN, marks=pytest.mark.slow),
        {**ROTARY, "adaptive_span": True, "kv_heads": 1},
        pytest.param(
            {**OWN, **ROTARY, "cache": "memory", "arch": {"pre_norm": False}, "remat": "layer"},
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_memory_of_layer_inputs_equals_a_transformer(changes):
    """Sequential and parallel solvers are equal: values, states and gradients."""
    stack_type = config(composition="previous", **changes)
    sequential, at_once = StackRunner(stack_type), StackRunner(stack_type, Transformer)
    reset, valid = np.zeros((B, T), bool), np.ones((B, T), bool)
    reset[0, 2] = True
    valid[1, 4:] = False
    state, ctx = filled_state(sequential), Context(reset, valid)
    close(filled_state(at_once), state)
    close(at_once.grad(X, state), sequential.grad(X, state))
    (y, end), (z, also) = (runner.call(X, state, ctx) for runner in (sequential, at_once))
    close((z[valid], also), (y[valid], end))


# gradients


def token_scan_in_python(
    token: Any, block: int, matmul_params: Any, other_params: Any, line: Any, xs: Any, rest: Any
) -> Any:
    """`token_scan.token_scan` as a Python loop, for plain differentiation."""
    t = jax.tree.leaves(xs)[0].shape[0]
    spans = jax.tree.map(lambda a: a.shape[-2], line)
    line = jax.tree.map(lambda a: token_scan._extend(a, t), line)
    ys = []
    for i in range(t):
        site = i % block
        at = i - site
        before = jax.tree.map(lambda a, n: a[..., at : at + n, :], line, spans)  # noqa: B023
        own = jax.tree.map(lambda a, n: a[..., at + n : at + n + block, :], line, spans)  # noqa: B023
        visible = Visible(before, own, jnp.int32(site), jnp.int32(i))
        with use_tape(einsum):
            y, slots = token(
                matmul_params,
                other_params,
                visible,
                jax.tree.map(operator.itemgetter(i), (xs, rest)),
            )
        line = jax.tree.map(lambda a, s, n: a.at[..., n + i, :].set(s), line, slots, spans)  # noqa: B023
        ys.append(y)
    return jax.tree.map(lambda *a: jnp.stack(a), *ys), line


DROPPED = {"attention": 0.3, "hidden": 0.3, "embedding": 0.2, "output": 0.2, "layer": 0.3}
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
GRADIENTS = {
    "dropout": config(dropout=DROPPED, mlp="relu", norm="layernorm"),
    "spans": config(composition="same_and_lower", adaptive_span=True, arch=BIASES, kv_heads=1),
    "adapters": config(
        composition="average", **OWN, **ROTARY, cache="memory", lora={"rank": 2}, norm="layernorm",
        arch={"pre_norm": False},
    ),
    "families": config(
        composition="top", arch={"qk_norm": True, "attention_cap": 1.5, "post_norm": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "x64", "tolerance"),
    [
        pytest.param("dropout", True, 1e-10, marks=pytest.mark.long),
        # these compile the longest
        pytest.param("spans", True, 1e-10, marks=pytest.mark.slow),
        pytest.param("families", True, 1e-10, marks=pytest.mark.slow),
        pytest.param("adapters", True, 1e-10, marks=pytest.mark.slow),
        pytest.param("dropout", False, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_token_scan_gradients_equal_plain_differentiation(case, x64, tolerance, monkeypatch):
    """With respect to all parameters, inputs and history; in blocks of 2, the last one padded."""
    monkeypatch.setattr(solve, "BLOCK", 2)
    runner = StackRunner(GRADIENTS[case], x64=x64)
    state = filled_state(runner)
    ours = runner.grad(X, state)
    monkeypatch.setattr(solve, "token_scan", token_scan_in_python)
    close(ours, runner.grad(X, state), tolerance)
    moved = jax.tree.map(lambda a: np.abs(a).max() > 0, ours[1][:2])
    assert all(jax.tree.leaves(moved))  # every parameter has an effect


@pytest.mark.long
def test_a_training_step_takes_no_more_memory_than_a_transformer():
    shape = ModelConfig(
        layers=4, width=64, heads=4, mlp_width=256, block_len=1, mlp="relu", vocab_size=32,
        feedback=FeedbackConfig(span=64),
    )  # fmt: skip

    def temporary(stack: str) -> int:
        shared = stack == "feedback"
        stack_type = replace(shape, stack=stack, feedback=replace(shape.feedback, shared_kv=shared))
        graph, params = nnx.split(
            nnx.eval_shape(lambda: LanguageModel(stack_type, rngs=nnx.Rngs(0)))
        )
        tokens = jnp.zeros((8, 128), jnp.int32)

        def loss(params, state):
            model = nnx.merge(graph, params)
            x, _ = model.stack(model.embed(tokens), state, Context())
            return model.losses(x, tokens)[0].mean()

        state = jax.eval_shape(lambda params: nnx.merge(graph, params).init_state(8), params)
        program = jax.jit(jax.grad(loss)).lower(params, state).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary("feedback") <= temporary("transformer")


# dropout

both_stacks = pytest.mark.parametrize("stack_type", [Feedback, Transformer])


def test_dropout_zeroes_a_share_and_keeps_the_mean():
    x, rate = jnp.full((200, 200), 3.0), 0.3
    y = np.asarray(dropout(x, rate, jax.random.key(0)))
    assert set(np.unique(y)) == {0, np.float32(3 / (1 - rate))}
    error = 5 * (rate * (1 - rate) / x.size) ** 0.5
    assert abs((y == 0).mean() - rate) < error
    assert abs(y.mean() - 3) < 3 * error / (1 - rate)


@both_stacks
def test_dropout_is_active_only_in_training(stack_type):
    dropping = StackRunner(config(composition="previous", dropout=DROPPED), stack_type)
    used = inference_config(config(composition="previous", dropout=DROPPED, sweeps=0))
    plain = StackRunner(used, stack_type)
    assert len(jax.tree.leaves(dropping.rest)) == 1
    assert not jax.tree.leaves(nnx.state(plain.stack(), DropoutKey))
    y, _ = plain.call(X)
    one, _ = dropping.call(X, key=(1, 2))
    repeated, _ = dropping.call(X, key=(1, 2))
    other, _ = dropping.call(X, key=(1, 3))
    same(repeated, one)
    assert np.abs(one - other).max() > 1e-3
    assert np.abs(one - y).max() > 1e-3
    # step is used for generation only
    stack = dropping.stack()
    stepped, _ = dropping.run(jit(stack.step), X[:, :1], dropping.fresh, Context())
    close(stepped, y[:, :1])


def _zero_weights(params: Any, part: str) -> Any:
    """Return the parameters with zero weights in `part`, so that it adds nothing to the stream."""
    return jax.tree_util.tree_map_with_path(
        lambda path, a: 0 * a if f"'{part}'" in jax.tree_util.keystr(path) else a, params
    )


@both_stacks
@pytest.mark.parametrize(("site", "silent"), [("hidden", "out"), ("attention", "down")])
def test_dropout_masks_differ_by_token_and_keep_the_mean(stack_type, site, silent):
    """With one layer and equal tokens, the layer's output is linear in what is dropped."""
    b, t, rate = 16, 64, 0.4
    composition = {"composition": "layer", "layer": 0} if stack_type is Feedback else {}
    shape = config(layers=1, **composition, **OWN, **ROTARY)
    x = np.broadcast_to(normal(2, D), (b, t, D))

    def added(dropout: DropoutConfig) -> Any:
        runner = StackRunner(replace(shape, dropout=dropout), stack_type, x64=False)
        state = jax.tree.map(lambda a: np.repeat(a, b // B, 1), runner.fresh)
        y, _ = runner.call(x.astype(np.float32), state, params=_zero_weights(runner.params, silent))
        return (y - x)[:, SPAN:].reshape(-1, D)  # tokens with full spans

    plain, found = added(DropoutConfig())[0], added(DropoutConfig(**{site: rate}))
    distinct = len(np.unique(found.round(5), axis=0))
    # with four equal attention weights, dropout has 16 outcomes but only 5 sums
    assert distinct > (len(found) / 2 if site == "hidden" else 4)
    per_call = found.reshape(b, -1, D).std((0, 1))
    error = per_call / len(found) ** 0.5
    assert (np.abs(found.mean(0) - plain) < 5 * error + 1e-6).all()
    assert (per_call > 0).all()


@both_stacks
def test_dropping_all_layers_is_the_identity(stack_type):
    runner = StackRunner(config(composition="previous", dropout={"layer": 0.999999}), stack_type)
    same(runner.call(X)[0], X)


@both_stacks
def test_embedding_and_output_dropout_apply_to_the_stacks_input_and_output(stack_type):
    x = normal(3, B, 400, D)
    for site in ("embedding", "output"):
        rates = {"layer": 0.999999, site: 0.25}
        y, _ = StackRunner(config(composition="previous", dropout=rates), stack_type).call(x)
        kept = y != 0
        np.testing.assert_allclose(y[kept], x[kept] / 0.75)
        assert abs(kept.mean() - 0.75) < 5 * (0.25 * 0.75 / x.size) ** 0.5


@both_stacks
def test_a_layer_is_dropped_for_the_whole_call(stack_type):
    runner = StackRunner(
        config(composition="previous", layers=3, dropout={"layer": 0.5}), stack_type
    )
    plain = StackRunner(config(composition="previous", layers=3), stack_type)
    drawn = set()
    for key in range(6):
        out = runner.run(lambda key: runner.stack(key=(0, key))._dropout_rng().layers, key)
        drawn.add(tuple(out))
        keep = ~out

        def silent(path, a, keep=keep):
            added = any(f"'{name}'" in jax.tree_util.keystr(path) for name in ("out", "down"))
            return a * keep.reshape(-1, *(1,) * (a.ndim - 1)) if added else a

        params = jax.tree_util.tree_map_with_path(silent, plain.params)
        close(runner.call(X, key=(0, key))[0], plain.call(X, params=params)[0])
    assert len(drawn) > 2


# learned spans


def span_config(**changes: Any) -> ModelConfig:
    return config(**{"adaptive_span": True, "span": 16, "span_loss": 0.5, **changes})


def with_spans(runner: StackRunner, shares: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, a: np.asarray(shares) if "'span'" in jax.tree_util.keystr(path) else a,
        runner.params,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("stack_type", "changes", "attention_span"),
    [
        # one span for all layers
        pytest.param(Feedback, {}, (8,), marks=pytest.mark.slow),
        pytest.param(
            *(Feedback, {"composition": "same_and_lower", "cache": "memory"}, (8, 4)),
            marks=pytest.mark.long,
        ),
        (Transformer, {**OWN, **ROTARY}, (8, 4)),
    ],
    ids=str,
)
def test_attention_span_covers_the_learned_spans(stack_type, changes, attention_span, monkeypatch):
    """Spans of at most 4.8 and 1.6 tokens and a ramp of 2, rounded up to multiples of 4."""
    runner = StackRunner(span_config(**changes), stack_type)
    shares = [[0.1, 0.3], [0.1, 0.05]]
    runner.params = with_spans(runner, shares)
    stack = runner.stack()
    monkeypatch.setattr(feedback_stacks, "ENTRIES", 4)
    assert stack.attention_span() == attention_span
    assert stack.attention_span(margin=100) == (16,) * len(attention_span)
    close(np.asarray(stack.spans()), 16 * np.array(shares))
    np.testing.assert_allclose(stack.auxiliary_loss(), 0.5 * 16 * (0.2 + 0.075))
    state = runner.call(normal(5, B, 20, D))[1]

    def measured() -> Any:
        def steps(x, state):
            # past the ring's size: a step and a call see its slots in different orders
            return jax.lax.scan(
                lambda s, x: runner.stack().step(x[:, None], s, Context())[::-1],
                state,
                jnp.moveaxis(x, 1, 0),
            )

        x = normal(6, B, 20, D)
        with jax.enable_x64(True):
            call = jax.jit(lambda *args: runner.stack()(*args)).lower(X, state, Context())
            # cost analysis counts a loop's body once
            step = jit(steps).lower(x, runner.fresh)
            results = runner.grad(X, state), step.compile()(x, runner.fresh)
        return results, [lowered.cost_analysis()["flops"] for lowered in (call, step)]

    whole, much = measured()
    stack.set_attention_span(attention_span)
    runner.graph = nnx.split(stack, nnx.Param, ...)[0]
    trimmed, less = measured()
    close(trimmed, whole, 1e-12)
    assert all(a < b for a, b in zip(less, much, strict=True))


def test_spans_are_clipped_to_shares_of_the_maximum():
    runner = StackRunner(span_config())
    params = with_spans(runner, [[-0.2, 1.4], [0.3, 1.0]])
    close(runner.run(clip_spans, params), with_spans(runner, [[0.0, 1.0], [0.3, 1.0]]))


def test_a_mean_span_is_reported():
    runner = StackRunner(span_config())
    runner.params = with_spans(runner, np.full((2, 2), 0.25))
    metrics = runner.run(jit(runner.stack().memory_metrics), X, runner.fresh, Context())
    assert metrics == {"mean_span": 4}
    assert runner.stack().mixing_weights().shape == (1, 3)


# parallel sweeps


@pytest.fixture(scope="module")
def exact() -> Any:
    runner = StackRunner(config())
    state = filled_state(runner)
    return state, runner.grad(X, state)


def run_sweeps(sweeps: int, tolerance: float, state: Any) -> Any:
    return StackRunner(config(sweeps=sweeps, tolerance=tolerance)).grad(X, state)


@pytest.mark.slow
def test_after_n_sweeps_the_first_n_tokens_are_exact(exact):
    state, ((_, (y, _)), _) = exact
    for n in (1, 3):
        (_, (z, end)), grads = run_sweeps(n, np.inf, state)
        close(z[:, :n], y[:, :n], 1e-12)
        assert (np.abs(z[:, n:] - y[:, n:]).max((0, 2)) > 1e-6).all()
        assert all(np.isfinite(a).all() for a in jax.tree.leaves((end, grads)))


@pytest.mark.long
def test_one_sweep_per_token_is_exact(exact):
    """One more sweep detects that nothing changes. Gradients too, as it is a fixed point."""
    state, expected = exact
    close(run_sweeps(T + 1, 1e-12, state), expected, 1e-9)


@pytest.mark.long
def test_beyond_the_tolerance_tokens_are_processed_sequentially(exact):
    state, expected = exact
    close(run_sweeps(1, 0.0, state), expected, 1e-12)


def test_a_row_that_has_not_converged_is_not_hidden_by_others():
    new = np.random.default_rng(0).normal(size=(2, 8, 5, 4))
    old = new.copy()
    old[:, 3] *= 1.25
    assert float(solve.relative_change(new, old)) == pytest.approx(0.25, rel=1e-5)


@pytest.mark.long
def test_the_change_of_the_last_sweep_is_reported_in_training_only(exact):
    state, _ = exact
    changes = []
    for n in (1, 2, T + 1):
        runner = StackRunner(config(sweeps=n))
        metrics = runner.run(jit(runner.stack().memory_metrics), X, state, Context())
        changes.append(float(metrics["sweep_change"]))
    assert changes[0] > changes[1] > changes[2]
    assert changes[2] < 1e-12
    assert inference_config(config(sweeps=3)).feedback.sweeps == 0


# the state


@pytest.mark.parametrize(
    ("changes", "factor"),
    [(OWN, 2 * 2), ({}, 2), ({"kv_heads": 1}, 1), ({"composition": "same_and_lower"}, 2)],
    ids=str,
)
def test_cached_memory_is_smaller_than_its_keys_and_values(changes, factor):
    keys_values, memory = (
        StackRunner(config(cache=c, **changes)) for c in ("keys_values", "memory")
    )
    sizes = [sum(a.nbytes for a in runner.fresh.slots) for runner in (keys_values, memory)]
    assert sizes[0] == factor * sizes[1]
    start = [filled_state(runner) for runner in (keys_values, memory)]
    expected, found = (
        runner.call(X, state, NO_MASKS)[0]
        for runner, state in zip((keys_values, memory), start, strict=True)
    )
    close(found, expected)


@pytest.mark.long
@pytest.mark.parametrize(
    "stack_type", [pytest.param(Feedback, marks=pytest.mark.long), Transformer]
)
def test_in_bfloat16_parameters_and_gradients_stay_float32(stack_type):
    narrow, wide = (
        StackRunner(config(composition="previous", dtype=kind), stack_type, x64=False)
        for kind in ("bfloat16", "float32")
    )
    (_, (y, end)), (to_params, *_) = narrow.grad(X, narrow.fresh)
    assert {a.dtype for a in end.slots} == {jnp.dtype(jnp.bfloat16)}
    assert {a.dtype for a in jax.tree.leaves(to_params)} == {np.dtype(np.float32)}
    (_, (z, _)), also = wide.grad(X, wide.fresh)
    assert np.abs(y - z).max() < 0.05
    for a, b in zip(jax.tree.leaves(to_params), jax.tree.leaves(also[0]), strict=True):
        assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b)


@pytest.mark.long
def test_the_initial_memory_is_the_mean_of_all_states():
    stack = Feedback(resolve_model(config(layers=3)), rngs=nnx.Rngs(0))
    np.testing.assert_allclose(stack.mixing_weights(), np.full((1, 4), 0.25))
    lower = Feedback(
        resolve_model(config(layers=3, composition="same_and_lower")), rngs=nnx.Rngs(0)
    )
    expected = [[1 / 2, 1 / 2, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0], [1 / 4] * 4]
    np.testing.assert_allclose(lower.mixing_weights(), expected, rtol=1e-6)

"""The training step: gradients, carried state and metric sums."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from famjax.config.schema import Config
from famjax.core.types import Context
from famjax.experiment.load import override
from famjax.mixers.fam import FamState
from famjax.models.language_model import LanguageModel
from famjax.ops.losses import token_losses
from famjax.optimizers import make_optimizer
from famjax.train.objective import sum_metrics
from famjax.train.program import make_inspect
from famjax.train.run import abstract_model
from famjax.train.state import TrainState
from famjax.train.step import init_train_state, make_step, position_offset

ROWS, LENGTH, VOCABULARY = 4, 16, 32
# beta1=0 and no clipping: Adam's first moment is the gradient
SHAPE = (
    f"model.vocab_size={VOCABULARY} model.layers=1 model.width=16 model.heads=2 model.kv_heads=1 "
    "model.mlp_width=32 model.block_len=8 model.fam_len=2 model.scan_layers=false "
    f"data.batch={ROWS} data.length={LENGTH} optimizer.schedule=constant optimizer.warmup_steps=0 "
    "optimizer.beta1=0 optimizer.clip_norm=0"
).split()
TOKEN_BYTES = np.arange(VOCABULARY) % 3 + 1.0

# quick compilation takes half the time and does not affect correctness
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def jit_quickly(function: Any, *args: Any) -> Any:
    return jax.jit(function).lower(*args).compile(compiler_options=FAST)


class Setup(NamedTuple):
    config: Config
    graph: Any
    state: TrainState
    step: Any


@functools.cache
def setup(*overrides: str) -> Setup:
    """Return a compiled step without donation, and its initial state."""
    config = override(Config(), [*SHAPE, *overrides])
    optimizer = make_optimizer(config.optimizer, config.train.steps)

    def start() -> TrainState:
        model = LanguageModel(config.model, rngs=nnx.Rngs(config.seed))
        return init_train_state(config, model, optimizer)

    graph, *_ = abstract_model(config.model)
    state = jit_quickly(start)()
    step = make_step(config, graph, optimizer, jnp.asarray(TOKEN_BYTES))
    return Setup(config, graph, state, jit_quickly(step, state, batch(0)))


def batch(seed: int, **given: Any) -> dict[str, jax.Array]:
    """Return random rows; in lanes row 1 starts a document in its second block."""
    rng = np.random.default_rng(seed)
    shape = (ROWS, LENGTH)
    reset = np.zeros(shape, bool)
    reset[1, 8] = True
    made = {
        "tokens": rng.integers(0, VOCABULARY, shape, np.int32),
        "targets": rng.integers(0, VOCABULARY, shape, np.int32),
        "weights": rng.choice([0, 0.1, 1], shape).astype(np.float32),
        "valid": np.ones(shape, bool),
        "reset": reset,
    }
    return {name: jnp.asarray(value) for name, value in (made | given).items()}


def gradient(state: TrainState) -> Any:
    return state.opt_state[1][0].mu


def assert_close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    """Check that two trees agree up to rounding, relative to the largest value of each leaf."""

    def compare(x: Any, y: Any) -> None:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        scale = np.abs(y).max(initial=1e-6)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale)

    jax.tree.map(compare, a, b)


def without_totals(state: TrainState) -> dict[str, Any]:
    """Return what accumulation must not change. Parameters may: Adam magnifies tiny gradients."""
    return {"gradient": gradient(state), "memory": state.memory, "totals": state.totals}


# gradients


@pytest.mark.parametrize(
    "cut",
    [
        "train.accumulate=2",
        pytest.param("train.bptt_segments=2", marks=pytest.mark.long),
        pytest.param("train.accumulate=4", marks=pytest.mark.slow),
    ],
)
def test_accumulation_and_segments_give_the_same_step(cut: str) -> None:
    """Accumulate over rows, or over segments with full gradients."""
    whole, parts = setup(), setup(cut)
    state = whole.step(whole.state, batch(0))
    assert_close(without_totals(parts.step(parts.state, batch(0))), without_totals(state))
    # with non-zero initial memory
    again = parts.step(state, batch(1))
    assert_close(without_totals(again), without_totals(whole.step(state, batch(1))))
    assert int(again.step) == 2


@pytest.mark.long
@pytest.mark.parametrize("cut", ["train.accumulate=2", "train.bptt_segments=2"])
@pytest.mark.parametrize(
    "mixer",
    # a hybrid has layers with and without the loss
    ["model.mixer=fam,delta", pytest.param("model.mixer=delta", marks=pytest.mark.slow)],
)
def test_microbatches_count_equally_in_the_losses_of_a_memory(mixer: str, cut: str) -> None:
    """They have as many blocks, but not the same token weights."""
    writes = (mixer, "model.layers=2", "train.write_loss=3")
    whole, parts, without = setup(*writes), setup(*writes, cut), setup(*writes[:2])
    data = batch(0)
    data["weights"] = data["weights"] * jnp.array([0.1, 1] * (ROWS // 2))[:, None]
    state = whole.step(whole.state, data)
    assert_close(without_totals(parts.step(parts.state, data)), without_totals(state))
    added = state.totals.loss - without.step(without.state, data).totals.loss
    assert added / state.totals.weight > 0.1


@pytest.mark.long
@pytest.mark.parametrize("mixer", ["model.mixer=delta", "model.fam_update=gated"])
def test_dropout_is_the_same_with_the_losses_of_a_memory(mixer: str) -> None:
    given = (mixer, "model.dropout.hidden=0.5", "model.dropout.attention=0.3")
    plain, tiny = setup(*given), setup(*given, "train.write_loss=1e-9")
    state = plain.step(plain.state, batch(0))
    assert_close(tiny.step(tiny.state, batch(0)).totals, state.totals)
    # with another key, other values are dropped
    other = plain.state._replace(key=jax.random.key_data(jax.random.key(1)))
    assert abs(plain.step(other, batch(0)).totals.loss / state.totals.loss - 1) > 1e-4


def mean_loss(graph: Any, params: Any, memory: Any, data: dict[str, Any], last: slice) -> Any:
    """Compute the loss of the targets in `last` without segments or accumulation."""
    model = nnx.merge(graph, params)
    logits, _ = model(data["tokens"], memory, Context(data["reset"], data["valid"]))
    nats, _ = token_losses(logits[:, last], data["targets"][:, last])
    weights = data["weights"][:, last]
    return (nats * weights).sum() / weights.sum()


def test_the_gradient_is_truncated_at_the_start_of_a_step() -> None:
    """The gradient of a step equals that with its initial memory held constant."""
    small = setup()
    state = small.step(small.state, batch(0))
    # the memory after batch 0, with the current parameters
    params = small.state.params
    state = state._replace(params=params)
    stepped = gradient(small.step(state, batch(1)))
    whole = slice(None)
    constant = jit_quickly(jax.grad(functools.partial(mean_loss, small.graph, last=whole)), params,
                     state.memory, batch(1))  # fmt: skip
    assert_close(stepped, constant(params, state.memory, batch(1)))

    both = {name: jnp.concatenate([batch(0)[name], batch(1)[name]], 1) for name in batch(0)}
    through = jit_quickly(
        jax.grad(functools.partial(mean_loss, small.graph, last=slice(LENGTH, None))),
        params,
        small.state.memory,
        both,
    )
    long = through(params, small.state.memory, both)
    differ = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), stepped, long)
    assert max(jax.tree.leaves(differ)) > 1e-3


def test_targets_of_weight_zero_are_ignored() -> None:
    small = setup()
    weights = batch(0)["weights"].at[:, 4:].set(0)
    one = small.step(small.state, batch(0, weights=weights))
    targets = batch(0)["targets"].at[:, 4:].set(0)
    other = small.step(small.state, batch(0, weights=weights, targets=targets))
    assert_close(without_totals(one), without_totals(other), 0)
    none = small.step(small.state, batch(0, weights=jnp.zeros_like(weights)))
    assert all(not np.asarray(g).any() for g in jax.tree.leaves(gradient(none)))
    assert int(none.bad) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "cut",
    [("train.accumulate=2", "train.bptt_segments=2"), pytest.param((), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_label_smoothing_changes_only_what_is_minimized(cut: tuple[str, ...]) -> None:
    smoothing = 0.2
    plain, small = setup(), setup(f"train.label_smoothing={smoothing}", *cut)
    params, memory, data = small.state.params, small.state.memory, batch(0)

    def loss(params: Any) -> Any:
        model = nnx.merge(small.graph, params)
        logits, _ = model(data["tokens"], memory, Context(data["reset"], data["valid"]))
        log_p = jax.nn.log_softmax(logits)
        nats = -jnp.take_along_axis(log_p, data["targets"][..., None], -1)[..., 0]
        mixed = (1 - smoothing) * nats - smoothing * log_p.mean(-1)
        return (mixed * data["weights"]).sum() / data["weights"].sum()

    value, slope = jit_quickly(jax.value_and_grad(loss), params)(params)
    state, without = small.step(small.state, data), plain.step(plain.state, data)
    assert_close(gradient(state), slope)
    found, sums = state.totals, without.totals
    assert float(found.loss / found.weight) == pytest.approx(float(value), rel=1e-5)
    assert abs(float(found.loss / sums.loss) - 1) > 5e-3
    assert_close(found._replace(loss=sums.loss, grad_norm=sums.grad_norm), sums)


# random state passing


def packed_start(small: Setup, memory: Any) -> Any:
    """Return row 0's FAM for all rows and an empty window (B.2.3), computed by hand."""
    model = nnx.merge(small.graph, small.state.params)
    fresh = model.init_state(ROWS)
    rows = [jnp.repeat(leaf, ROWS, 1) for leaf in jax.tree.leaves(memory)]
    saved = jax.tree.unflatten(jax.tree.structure(memory), rows)
    assert all(isinstance(layer, FamState) for layer in saved)
    return tuple(
        old._replace(window=new.window) for old, new in zip(saved, fresh, strict=True)
    )  # fmt: skip


@functools.cache
def forward() -> Any:
    """Return a compiled (params, state, batch) -> (loss of packed rows, state)."""
    small = setup("data.layout=packed", "train.rsp=1", "train.rsp_ramp=10")

    def run(params: Any, state: Any, data: dict[str, Any]) -> Any:
        logits, state = nnx.merge(small.graph, params)(data["tokens"], state)
        nats, _ = token_losses(logits, data["targets"])
        return (nats * data["weights"]).sum(), state

    fresh = nnx.merge(small.graph, small.state.params).init_state(ROWS)
    return jit_quickly(run, small.state.params, fresh, batch(0))


def test_random_state_passing_follows_the_paper() -> None:
    small = setup("data.layout=packed", "train.rsp=1", "train.rsp_ramp=10")
    params, zeros = small.state.params, small.state.totals
    model = nnx.merge(small.graph, params)
    fresh = model.init_state(ROWS)

    first = small.step(small.state, batch(0))
    loss, after = forward()(params, fresh, batch(0))
    np.testing.assert_allclose(first.totals.loss, loss, rtol=1e-5)
    assert_close(first.memory, jax.tree.map(lambda a: a[:, :1], model.stack.passable_state(after)))

    def loss_at(step: int, key: int) -> float:
        state = first._replace(
            step=jnp.int32(step),
            params=params,
            totals=zeros,
            key=jax.random.key_data(jax.random.key(key)),
        )
        return float(small.step(state, batch(1)).totals.loss)

    passed = packed_start(small, first.memory)
    assert not any(np.asarray(leaf).any() for s in passed for leaf in s.window)
    assert all(np.asarray(s.updates).all() for s in passed)
    expected = float(forward()(params, passed, batch(1))[0])
    anew = float(forward()(params, fresh, batch(1))[0])
    assert abs(expected - anew) > 1e-2

    # after the ramp always, at step 0 never, in between half of the time
    assert [loss_at(step, step) for step in range(9, 30)] == pytest.approx([expected] * 21, 1e-5)
    assert [loss_at(0, key) for key in range(20)] == pytest.approx([anew] * 20, 1e-5)
    middle = np.array([loss_at(4, key) for key in range(200)])
    used = np.isclose(middle, expected, rtol=1e-5)
    assert np.isclose(middle[~used], anew, rtol=1e-5).all()
    assert 0.38 < used.mean() < 0.62


def test_without_random_state_passing_nothing_is_carried() -> None:
    small = setup("data.layout=packed")
    state = small.step(small.state, batch(0))
    assert state.memory == ()
    fresh = nnx.merge(small.graph, small.state.params).init_state(ROWS)
    state = small.step(state._replace(params=small.state.params, totals=small.state.totals),
                       batch(1))  # fmt: skip
    np.testing.assert_allclose(
        state.totals.loss, forward()(small.state.params, fresh, batch(1))[0], rtol=1e-5
    )


@pytest.mark.parametrize("rsp", ["train.rsp=0", "train.rsp=0.5"])
def test_packed_rows_do_not_attend_to_an_empty_cache(rsp: str) -> None:
    """Attention with a cache has its entries and the row's tokens as keys."""
    capacity = 4096
    hybrid = ("model.mixer=full,fam", "model.layers=2", f"model.capacity={capacity}")
    config = override(Config(), [*SHAPE, *hybrid, "data.layout=packed", rsp])
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    model = nnx.eval_shape(lambda: LanguageModel(config.model, rngs=nnx.Rngs(0)))
    state = jax.eval_shape(
        lambda: init_train_state(config, LanguageModel(config.model, rngs=nnx.Rngs(0)), optimizer)
    )
    graph = nnx.graphdef(model)
    step = make_step(config, graph, optimizer, jnp.asarray(TOKEN_BYTES))
    rows = (state.params, state.frozen, state.memory, batch(0))
    for program in (
        jax.make_jaxpr(step)(state, batch(0)),
        jax.make_jaxpr(make_inspect(config, graph))(*rows),
    ):
        assert f"{capacity}" in str(program)
        assert f"{capacity + LENGTH}" not in str(program)


BY_PARTS = ("model.remat=block", "train.bptt_segments=2", "train.accumulate=2")
RPO_LAYOUTS = [
    ("data.layout=packed", "train.rsp=0.5"),
    *(pytest.param(layout, marks=pytest.mark.slow) for layout in ((), BY_PARTS)),
]


@pytest.mark.long
@pytest.mark.parametrize("layout", RPO_LAYOUTS, ids=" ".join)
def test_random_position_offset_does_not_change_rope(layout: tuple[str, ...]) -> None:
    """RoPE depends on differences of positions only, so a common offset of a row has no effect.

    B.2.2 is kept to reproduce the experiment; it changes only rounding.
    """
    plain, moved = setup(*layout), setup(*layout, "train.rpo=true")
    a, b = plain.state, moved.state
    for seed in range(4):
        a, b = plain.step(a._replace(params=plain.state.params), batch(seed)), moved.step(
            b._replace(params=plain.state.params), batch(seed)
        )  # fmt: skip
        assert_close(gradient(b), gradient(a), 1e-4)
    np.testing.assert_allclose(a.totals.loss, b.totals.loss, rtol=1e-5)
    moved_bits = jax.tree.map(lambda x, y: bool((x != y).any()), gradient(a), gradient(b))
    assert any(jax.tree.leaves(moved_bits))  # the offset was applied


LEARNED = ("model.arch.positions=learned", "model.capacity=64", "train.rpo=true")


@pytest.mark.long
@pytest.mark.parametrize(
    "cut", ["train.accumulate=2", pytest.param("train.bptt_segments=2", marks=pytest.mark.slow)]
)
def test_random_position_offset_is_the_same_with_accumulation(cut: str) -> None:
    """Learned positions depend on the offset of a row, so another offset gives another loss."""
    whole, parts = setup(*LEARNED), setup(*LEARNED, cut)
    plain = setup(*LEARNED[:2])
    found = [each.step(whole.state, batch(0)) for each in (whole, parts, plain)]
    assert_close(without_totals(found[1]), without_totals(found[0]))
    assert abs(float(found[2].totals.loss) / float(found[0].totals.loss) - 1) > 1e-4


def test_random_position_offsets_are_sampled_as_in_the_paper() -> None:
    """B.2.2: one for each row, uniform up to the longest wavelength, and 0 for half of them."""
    config = override(Config(), SHAPE)
    offset = np.asarray(position_offset(jax.random.key(0), config, 4000))
    assert offset.shape == (4000,)
    zero = offset == 0
    assert 0.46 < zero.mean() < 0.54
    longest = 2 * np.pi * config.model.rope_base
    assert offset.max() <= longest
    shares, _ = np.histogram(offset[~zero] / longest, 4, (0, 1))
    assert (np.abs(shares / (~zero).sum() - 0.25) < 0.03).all()
    other = np.asarray(position_offset(jax.random.key(1), config, 4000))
    assert (other != offset)[~zero].all()


# metric sums


def test_metric_sums_equal_numpy() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, 5, VOCABULARY)).astype(np.float32)
    targets = rng.integers(0, VOCABULARY, (2, 5))
    targets[0, :2] = logits[0, :2].argmax(-1)
    weights = np.array([[1, 1, 0.1, 0, 1], [0, 0, 1, 0.5, 0]], np.float32)
    valid = weights > 0
    given = {"targets": targets, "weights": weights, "valid": valid}
    scores = token_losses(jnp.asarray(logits), jnp.asarray(targets))
    found = sum_metrics(*scores, jax.tree.map(jnp.asarray, given), jnp.asarray(TOKEN_BYTES))

    exact = logits.astype(np.float64)
    p = np.exp(exact) / np.exp(exact).sum(-1, keepdims=True)
    nats = -np.log(np.take_along_axis(p, targets[..., None], -1)[..., 0])
    right = (exact.argmax(-1) == targets) & (weights == 1)
    expected = {
        "weight": weights.sum(),
        "loss": (nats * weights).sum(),
        "answers": 4,
        "right": right.sum(),
        "nats": nats[weights > 0].sum(),
        "bytes": TOKEN_BYTES[targets][weights > 0].sum(),
        "tokens": 6,
        "steps": 0,
        "grad_norm": 0,
    }
    assert right.sum() >= 2
    assert {n: float(v) for n, v in found._asdict().items()} == pytest.approx(expected, rel=1e-5)


def test_metric_sums_accumulate() -> None:
    small = setup()
    state = small.step(small.state, batch(0))
    norm = math.sqrt(sum(float(jnp.square(g).sum()) for g in jax.tree.leaves(gradient(state))))
    assert float(state.totals.grad_norm) == pytest.approx(norm, rel=1e-5)
    second = small.step(state, batch(1))
    norm += math.sqrt(sum(float(jnp.square(g).sum()) for g in jax.tree.leaves(gradient(second))))
    assert float(second.totals.grad_norm) == pytest.approx(norm, rel=1e-5)
    assert float(second.totals.steps) == 2
    assert float(second.totals.tokens) == 2 * ROWS * LENGTH


def test_the_first_non_finite_step_is_recorded() -> None:
    small = setup()
    bad = batch(1, weights=batch(1)["weights"].at[0, 0].set(jnp.nan))
    state = small.step(small.state, batch(0))
    assert int(state.bad) == 0
    state = small.step(state, bad)
    assert int(state.bad) == 2
    assert int(small.step(state, batch(2)).bad) == 2


def test_overflow_of_parameters_is_detected_in_the_same_step() -> None:
    """Overflow is detected before the next loss is computed, so that no checkpoint stores it."""
    small = setup("optimizer.learning_rate=3e38", "optimizer.weight_decay=100")
    state = small.step(small.state, batch(0))
    assert np.isfinite(float(state.totals.loss))
    assert int(state.bad) == 1


@pytest.mark.long
def test_bfloat16_keeps_float32_parameters() -> None:
    small, half = setup(), setup("model.dtype=bfloat16")
    state = half.state
    for seed in range(3):
        state = half.step(state, batch(seed))
    assert int(state.bad) == 0
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt_state))}
    assert dtypes == {jnp.dtype("float32"), jnp.dtype("int32")}
    about = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)  # noqa: E731
    assert about(state) == about(half.state)
    one = small.step(small.state, batch(0)).totals
    other = half.step(half.state, batch(0)).totals
    assert float(other.loss) == pytest.approx(float(one.loss), rel=0.02)

"""Optimizers and schedules against NumPy."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from famjax.config.schema import OptimizerConfig
from famjax.experiment.load import load_config
from famjax.models.seq2seq import make_model
from famjax.optimizers import make_optimizer, make_schedule
from famjax.parallel.sharding import path_name

PARAMETERS = {"w": np.linspace(-1, 1, 12).reshape(3, 4), "b": np.full(4, 0.5)}
GRADIENTS = [
    {"w": np.cos(np.arange(12.0)).reshape(3, 4), "b": np.full(4, 0.01)},
    {"w": np.sin(np.arange(12.0)).reshape(3, 4), "b": np.full(4, -2.0)},
]


def updates(config: OptimizerConfig) -> list[dict[str, np.ndarray]]:
    """Return the parameters after each gradient."""
    optimizer = make_optimizer(config, 10)
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), PARAMETERS)
    state, found = optimizer.init(params), []
    for grads in GRADIENTS:
        grads = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), grads)
        change, state = optimizer.update(grads, state, params)
        params = jax.tree.map(jnp.add, params, change)
        found.append(params)
    return found


def clip(grads: dict[str, np.ndarray], max_norm: float) -> dict[str, np.ndarray]:
    norm = math.sqrt(sum(np.square(g).sum() for g in grads.values()))
    return {name: g * min(1, max_norm / norm) for name, g in grads.items()}


def compare(found: list[Any], expected: list[Any]) -> None:
    for a, b in zip(found, expected, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


def test_adamw_against_numpy() -> None:
    config = OptimizerConfig(
        learning_rate=0.1, schedule="constant", warmup_steps=2, beta1=0.8, beta2=0.9,
        weight_decay=0.05, clip_norm=1.0,
    )  # fmt: skip
    params = {name: value.copy() for name, value in PARAMETERS.items()}
    m, v = ({name: np.zeros_like(a) for name, a in params.items()} for _ in range(2))
    expected = []
    for t, grads in enumerate(GRADIENTS, 1):
        rate = 0.1 * (t - 1) / 2
        for name, g in clip(grads, 1.0).items():
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.9 * v[name] + 0.1 * g**2
            unbiased = (m[name] / (1 - 0.8**t)) / (np.sqrt(v[name] / (1 - 0.9**t)) + 1e-8)
            params[name] = params[name] - rate * (unbiased + 0.05 * params[name])
        expected.append(dict(params))
    compare(updates(config), expected)


# each optimizer and each memory
@pytest.mark.parametrize(
    ("mixer", "name"),
    [
        ("delta", "nag"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("fam", "adamw"), ("delta", "adafactor"))
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("delta", "adamw"), ("fam", "nag"), ("fam", "adafactor"))
        ),
    ],
)
def test_timescales_of_a_memory_do_not_decay(name: str, mixer: str) -> None:
    settings = ["model.layers=1", "model.vocab_size=16", f"model.mixer={mixer}"]
    settings += ["model.fam_update=gated"] if mixer == "fam" else []
    config = load_config("text_fam", settings).model
    params = nnx.state(make_model(config, rngs=nnx.Rngs(0)), nnx.Param)
    optimizer = make_optimizer(
        OptimizerConfig(name=name, schedule="constant", warmup_steps=0, weight_decay=0.1), 10
    )
    none = jax.tree.map(jnp.zeros_like, params)
    change, _ = optimizer.update(none, optimizer.init(params), params)
    named = jax.tree_util.tree_flatten_with_path(params)[0]
    kept = {
        path_name(path)
        for (path, value), moved in zip(named, jax.tree.leaves(change), strict=True)
        if value.any() and not moved.any()
    }
    bias = "memory_gate/bias" if mixer == "fam" else "delta_memory/rate_bias"
    assert kept == {f"stack/layers/0/mixer/{bias}"}


def test_nag_against_numpy() -> None:
    """As in fairseq's NAG, whose buffer is scaled by the learning rate at its update."""
    config = OptimizerConfig(
        name="nag", learning_rate=0.1, schedule="cosine", final_fraction=0.3, warmup_steps=0,
        beta1=0.9, weight_decay=0.3, clip_norm=0,
    )  # fmt: skip
    params = {name: value.copy() for name, value in PARAMETERS.items()}
    buffer = {name: np.zeros_like(a) for name, a in params.items()}
    rates = [float(make_schedule(config, 10)(step)) for step in range(len(GRADIENTS))]
    expected = []
    for grads, rate, before in zip(GRADIENTS, rates, [rates[0], *rates], strict=False):
        for name, g in grads.items():
            carried = buffer[name] * rate / before
            params[name] = params[name] * (1 - rate * 0.3)
            params[name] = params[name] + 0.9**2 * carried - 1.9 * rate * g
            buffer[name] = 0.9 * carried - rate * g
        expected.append(dict(params))
    compare(updates(config), expected)


def test_adafactor_against_numpy() -> None:
    """Parameters too small to factor: decay of second moments, update clipping, scale, momentum."""
    config = OptimizerConfig(
        name="adafactor", learning_rate=0.1, schedule="constant", warmup_steps=0, beta1=0.9,
        beta2=0.3, weight_decay=0.01, clip_norm=0,
    )  # fmt: skip
    params = {name: value.copy() for name, value in PARAMETERS.items()}
    m, v = ({name: np.zeros_like(a) for name, a in params.items()} for _ in range(2))
    expected = []

    def rms(a: np.ndarray) -> float:
        return float(np.sqrt(np.square(a).mean()))

    for t, grads in enumerate(GRADIENTS, 1):
        decay = min(0.3, 1 - t**-0.8)
        assert decay == (0 if t == 1 else 0.3)  # 1 - 2^-0.8 is 0.43: the limit is reached
        for name, g in grads.items():
            v[name] = decay * v[name] + (1 - decay) * (g**2 + 1e-30)
            update = g / np.sqrt(v[name])
            update = update / max(1, rms(update)) * max(rms(params[name]), 1e-3)
            m[name] = 0.9 * m[name] + 0.1 * update
            params[name] = params[name] - 0.1 * (m[name] + 0.01 * params[name])
        expected.append(dict(params))
    compare(updates(config), expected)


@pytest.mark.parametrize("path", [("stack",), ("encoder",), ("stack", "transformer")])
def test_adafactor_treats_stacked_layers_separately(path: tuple[str, ...]) -> None:
    """Two layers of different scale are updated like separate parameters."""
    config = OptimizerConfig(name="adafactor", learning_rate=0.1, warmup_steps=0, clip_norm=0)
    optimizer = make_optimizer(config, 10)
    rng = np.random.default_rng(0)
    layers = rng.normal(size=(2, 160, 130)) * np.array([1.0, 100.0])[:, None, None]
    gradient = rng.normal(size=layers.shape)

    def update(params: Any, grads: Any) -> Any:
        return optimizer.update(grads, optimizer.init(params), params)[0]

    def nest(stacked: np.ndarray) -> Any:
        return functools.reduce(
            lambda tree, name: {name: tree}, reversed(path), {"layers": [{"w": stacked}]}
        )

    params, grads = nest(jnp.asarray(layers)), nest(jnp.asarray(gradient))
    (together,) = jax.tree.leaves(update(params, grads))
    for i in range(2):
        alone = update({"w": jnp.asarray(layers[i])}, {"w": jnp.asarray(gradient[i])})["w"]
        np.testing.assert_allclose(together[i], alone, rtol=1e-5)
    assert np.abs(together[1]).mean() > 50 * np.abs(together[0]).mean()


def test_adafactor_takes_an_encoder_of_another_depth() -> None:
    config = OptimizerConfig(name="adafactor", learning_rate=0.1, warmup_steps=0, clip_norm=0)
    optimizer = make_optimizer(config, 10)
    rng = np.random.default_rng(0)
    sizes = {"encoder": 3, "stack": 2}
    params, grads = (
        {
            name: {"layers": [{"w": jnp.asarray(rng.normal(size=(n, 4, 5)))}]}
            for name, n in sizes.items()
        }
        for _ in range(2)
    )
    both = optimizer.update(grads, optimizer.init(params), params)[0]
    for name in sizes:
        own = {name: params[name]}
        alone = optimizer.update({name: grads[name]}, optimizer.init(own), own)[0]
        jax.tree.map(np.testing.assert_array_equal, both[name], alone[name])


def test_adafactor_factors_large_matrices() -> None:
    optimizer = make_optimizer(OptimizerConfig(name="adafactor"), 10)
    large = {"w": jnp.zeros((2, 160, 130)), "b": jnp.zeros(160)}
    state = jax.eval_shape(optimizer.init, large)
    shapes = {
        jax.tree_util.keystr(path).replace("'", ""): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    factors = {name[name.index(".v") :]: shape for name, shape in shapes.items() if ".v" in name}
    assert factors.pop(".v[b]") == (160,)
    assert {factors[".v_row[w]"], factors[".v_col[w]"]} == {(2, 160), (2, 130)}
    assert factors[".v[w]"] == (1,)


@pytest.mark.parametrize("name", ["constant", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 10])
def test_schedules_equal_numpy(name: Any, warmup: int) -> None:
    config = OptimizerConfig(
        learning_rate=2.0, schedule=name, warmup_steps=warmup, decay_fraction=0.2,
        final_fraction=0.1,
    )  # fmt: skip
    rate = make_schedule(config, 100)
    assert float(rate(0)) == (0 if warmup else 2)
    assert float(rate(warmup)) == 2
    if warmup:
        assert float(rate(5)) == pytest.approx(1)
    middle = warmup + (100 - warmup) // 2
    middles = {"constant": 2, "cosine": 2 * (0.1 + 0.9 / 2), "wsd": 2}
    assert float(rate(middle)) == pytest.approx(middles[name])
    assert float(rate(90)) == pytest.approx(
        {"constant": 2, "wsd": 1}.get(name, float(rate(90))), rel=1e-5
    )
    ends = {"constant": 2, "cosine": 0.2, "wsd": 0}
    assert float(rate(100)) == pytest.approx(ends[name], abs=1e-6)


@pytest.mark.parametrize("name", ["constant", "cosine", "wsd", "inverse_sqrt"])
@pytest.mark.parametrize("warmup", [10, 50])
def test_warmup_may_be_as_long_as_the_run(name: Any, warmup: int) -> None:
    rate = make_schedule(OptimizerConfig(learning_rate=1.0, schedule=name, warmup_steps=warmup), 10)
    found = [float(rate(step)) for step in range(10)]
    assert found == pytest.approx([step / warmup for step in range(10)])


def test_inverse_sqrt_is_that_of_vaswani_et_al() -> None:
    """5.3: d^-0.5 min(step^-0.5, step warmup^-1.5), whose highest rate is (d warmup)^-0.5."""
    d, warmup = 512, 4000
    config = OptimizerConfig(
        learning_rate=(d * warmup) ** -0.5, schedule="inverse_sqrt", warmup_steps=warmup
    )
    rate = make_schedule(config, 100_000)
    steps = [1, 2, 1999, 4000, 4001, 16_000, 100_000, 10**7]
    expected = [d**-0.5 * min(step**-0.5, step * warmup**-1.5) for step in steps]
    # optax takes the rise off the highest rate, in float32
    rounding = 1e-7 * config.learning_rate
    found = [float(rate(step)) for step in steps]
    assert found == pytest.approx(expected, rel=1e-5, abs=rounding)
    assert float(rate(0)) == 0
    # of a step that is counted on the device, and whatever the length of the run
    assert float(jax.jit(make_schedule(config, 10))(16_000)) == pytest.approx(expected[5], rel=1e-5)


@pytest.mark.long
def test_wsd_decays_to_zero_after_a_long_warmup() -> None:
    config = OptimizerConfig(learning_rate=1.0, schedule="wsd", warmup_steps=95, decay_fraction=0.2)
    rate = make_schedule(config, 100)
    assert [float(rate(step)) for step in (95, 100)] == pytest.approx([1, 0])

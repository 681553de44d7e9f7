"""The Feedback Transformer: cost in training, gain in generation (arXiv 2002.09402, Table 5).

Three models are measured interleaved: the Feedback Transformer, a Transformer with the same
components, and a Transformer of equal size on the residual stack (`swa`), the fastest one here.

The floor of the training ratio is the ratio of matrix FLOPs, from `famjax.train.flops`. It is not
reachable: a matrix product of the Transformer has batch * length rows, but the token scan has only
`batch` rows in the two products that cannot be deferred (forward, input gradient); only the weight
gradient has more. The slowdown by small products is measured, too (`measure_rows_floor`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.bench.comparison import Comparison, compare
from famjax.bench.greedy import make_writer
from famjax.bench.timing import PairedTimes, compare_times, time_interleaved
from famjax.config.resolved import resolve_model
from famjax.config.schema import Config, ModelConfig
from famjax.core.types import Context, Params, tree_bytes
from famjax.models.language_model import LanguageModel
from famjax.ops import token_scan
from famjax.stacks.feedback import solve
from famjax.stacks.feedback.ring import FeedbackState
from famjax.stacks.feedback.solve import BLOCK
from famjax.train.flops import training_flops
from famjax.train.program import TrainProgram, make_program
from famjax.train.resolve import resolve

# aims, relative to the Transformer: training step time; temporary bytes; tokens/s
TRAINING_AIM, MEMORY_AIM, GENERATION_AIM = 1.8, 1.0, 3.7
SWEEPS = (2, 4)
SPANS = (512, 2048, 8192)
BATCHES = (1, 16)
# number of tokens generated per call
TOKENS = 8

# words/s of generation in v3's Table 5: Feedback Transformer, Transformer
PAPER_SPEEDS = 2176, 592
# days of training on WikiText-103 (v3 4.3.3)
PAPER_DAYS = 3.5, 1.2
# v1's models have keys per layer: days of the Feedback Transformer and of the Transformer (Table 6)
PAPER_V1_DAYS = 17, 1.2
# days if the length grows from 32 to 256, with equally many steps of each (v1 5.2, B.5). Figure 9,
# the time of a step by length, has no printed numbers
PAPER_V1_GROWING_DAYS = 10


class TrainingStep(NamedTuple):
    """A training step of one model.

    Attributes:
      name: name of the model.
      transformer, swa: times of the model, and of the Transformer or `swa`.
      temporary_bytes: XLA's temporary bytes of a step.
      floor: ratio of the model's matrix FLOPs to the Transformer's.
      sweep_change: relative change of the memory in the last sweep; None without sweeps.
    """

    name: str
    transformer: PairedTimes
    swa: PairedTimes
    temporary_bytes: int
    floor: float
    sweep_change: float | None


class Trainer(NamedTuple):
    """A compiled training step.

    Attributes:
      run: function that takes a step.
      temporary_bytes: XLA's temporary bytes.
      sweep_change: see `TrainingStep`.
    """

    run: Callable[[], Any]
    temporary_bytes: int
    sweep_change: float | None


class LengthStep(NamedTuple):
    """A training step with a back-propagation length (v1 3.2, Figure 9).

    Attributes:
      name: name of the model.
      length: tokens of a row, through which gradients are propagated.
      batch: number of rows; all steps have equally many tokens.
      time: times of the model, and of the Transformer with rows of this length.
    """

    name: str
    length: int
    batch: int
    time: PairedTimes


class Generation(NamedTuple):
    """One-token steps of a Feedback Transformer after `span` tokens, compared with a Transformer.

    Attributes:
      name: name of the model.
      span: number of tokens before.
      equal: what is equal in both: "batch", the number of lanes, or "bytes", the size of the state.
      batch, state_bytes, tokens_per_second: values of the Feedback Transformer.
      other_*: values of the Transformer.
      time: times of the Feedback Transformer and of the Transformer, for equally many tokens per
        lane.
      ratio: ratio of the tokens/s of all lanes, the Feedback Transformer's to the Transformer's.
    """

    name: str
    span: int
    equal: str
    batch: int
    other_batch: int
    state_bytes: int
    other_state_bytes: int
    tokens_per_second: float
    other_tokens_per_second: float
    time: PairedTimes
    ratio: float


def bench_models(model: ModelConfig) -> dict[str, ModelConfig]:
    """Return the measured models by name; all have the same width, depth and span."""
    c = replace(model.feedback, sweeps=0, tolerance=math.inf)

    def feedback(**changes: Any) -> ModelConfig:
        return replace(model, stack="feedback", feedback=replace(c, **changes))

    own = replace(c, shared_kv=False)
    models = {
        "transformer": replace(model, stack="transformer", feedback=own),
        "swa": replace(
            model, stack="residual", mixer="swa", window=c.span + 1, block_len=model.block_len
        ),
        "feedback": feedback(shared_kv=True),
        "feedback, keys per layer": feedback(shared_kv=False),
        "feedback, plain autodiff": feedback(shared_kv=True),
    }
    return models | {f"feedback, {n} sweeps": feedback(shared_kv=True, sweeps=n) for n in SWEEPS}


def measure_training(
    model: ModelConfig, batch: int, length: int, repetitions: int
) -> Iterator[TrainingStep]:
    """Measure a training step of all models, interleaved."""
    models = bench_models(model)
    trainers = {}
    for name, model_config in models.items():
        with plain_autodiff("plain" in name):
            trainers[name] = make_trainer(model_config, batch, length)
    times = time_interleaved({name: each.run for name, each in trainers.items()}, repetitions)
    transformer_flops = training_flops(resolve_model(models["transformer"]))
    for name, model_config in models.items():
        yield TrainingStep(
            name,
            compare_times(times[name], times["transformer"]),
            compare_times(times[name], times["swa"]),
            trainers[name].temporary_bytes,
            training_flops(resolve_model(model_config)) / transformer_flops,
            trainers[name].sweep_change,
        )


def measure_lengths(
    model: ModelConfig, batch: int, lengths: Sequence[int], repetitions: int
) -> Iterator[LengthStep]:
    """Measure training steps by the length of the rows, interleaved.

    Args:
      model: shape of the models.
      batch: number of rows of the longest length; shorter ones have more.
      lengths: lengths that divide the longest one.
      repetitions: repetitions of each step.
    """
    all_models = bench_models(model)
    names = "transformer", "feedback", "feedback, keys per layer"
    settings = [
        (name, length, batch * max(lengths) // length) for length in lengths for name in names
    ]
    runs = {
        setting: make_trainer(all_models[setting[0]], setting[2], setting[1]).run
        for setting in settings
    }
    times = time_interleaved(runs, repetitions)
    for setting in settings:
        name, length, rows = setting
        time = compare_times(times[setting], times["transformer", length, rows])
        yield LengthStep(name, length, rows, time)


def compare_with_paper(
    steps: Sequence[TrainingStep], generated: Sequence[Generation]
) -> Iterator[Comparison]:
    """Compare the ratios to the Transformer with v3's Table 5 and v1's Table 6."""
    ratios = {step.name: step.transformer.ratio for step in steps}
    for name, days, source in (
        ("feedback", PAPER_DAYS, "v3 4.3.3"),
        ("feedback, keys per layer", PAPER_V1_DAYS, "v1 Table 6"),
    ):
        quantity = f"training step / transformer's, {name}"
        yield compare(quantity, ratios[name], days, "days", f"{source}, WikiText-103")
    best = best_generation(generated)
    yield compare(
        f"tokens/s / transformer's after {best.span:,}, best (equal {best.equal})",
        best.ratio,
        PAPER_SPEEDS,
        "words/s",
        "v3 Table 5, WikiText-103",
    )


def best_generation(rows: Sequence[Generation]) -> Generation:
    """Return the best row of the Feedback Transformer with its keys, after the longest span."""
    longest = max(row.span for row in rows)
    own = [row for row in rows if row.span == longest and row.name == "feedback"]
    return max(own, key=lambda row: row.ratio)


def compare_lengths_with_paper(rows: Sequence[LengthStep]) -> Comparison:
    """Compare what a growing length saves, in steps of equally many tokens, with v1's Table 6."""
    name = "feedback, keys per layer"
    seconds = {row.length: row.time.first for row in rows if row.name == name}
    return Comparison(
        f"mean step of all lengths / the longest's, {name}",
        sum(seconds.values()) / len(seconds) / seconds[max(seconds)],
        PAPER_V1_GROWING_DAYS / PAPER_V1_DAYS[0],
        f"v1 Table 6: {PAPER_V1_GROWING_DAYS} days with lengths from 32 to 256 (B.5), "
        f"{PAPER_V1_DAYS[0]} without; Figure 9 has no printed numbers",
    )


def make_trainer(model: ModelConfig, batch: int, length: int) -> Trainer:
    """Return a training step on rows of random tokens; with an encoder, a row has one pair."""
    config = replace(Config(), model=model)
    config = replace(config, data=replace(config.data, batch=batch, length=length))
    if model.encoder.layers:
        pairs = replace(config.data, task="translate", layout="pairs", source_length=length)
        config = replace(config, data=pairs)
    program = make_program(
        resolve(config, None, jax.device_count()), np.ones(model.vocab_size, np.int32)
    )
    state, data = program.start(), _data(program, model, batch, length)
    compiled = program.step.lower(state, data).compile()  # type: ignore[attr-defined]
    memory = compiled.memory_analysis()
    change = None
    if model.stack == "feedback" and model.feedback.sweeps:
        metrics = program.inspect(state.params, state.frozen, state.memory, data)
        change = float(metrics["sweep_change"])

    def run() -> Any:
        nonlocal state
        state = compiled(state, data)
        return state

    return Trainer(run, memory.temp_size_in_bytes if memory else 0, change)


def _data(program: TrainProgram, model: ModelConfig, batch: int, length: int) -> Any:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.vocab_size, (batch, length), np.int32)
    data = {
        "tokens": tokens,
        "targets": tokens,
        "weights": np.ones((batch, length), np.float32),
        "valid": np.ones((batch, length), bool),
        "reset": np.zeros((batch, length), bool),
    }
    if model.encoder.layers:
        data["reset"][:, 0] = True
        ones = np.ones((batch, length), np.int32)
        data |= {"segment": ones, "source": tokens, "source_segment": ones}
    return jax.device_put(data, program.batch)


@contextmanager
def plain_autodiff(really: bool = True) -> Iterator[None]:
    """Make functions traced within use JAX's autodiff of `lax.scan`, without the custom VJP.

    Args:
      really: False changes nothing.
    """
    ours: Any = solve.token_scan
    if really:
        solve.token_scan = _plain_token_scan  # type: ignore[assignment]
    try:
        yield
    finally:
        solve.token_scan = ours


def _plain_token_scan(token: Any, block: int, *arguments: Any) -> Any:
    """The forward pass of `token_scan.token_scan` without its custom VJP."""
    return token_scan._forward(token, block, *arguments)[0]


def compare_gradients(model: ModelConfig, batch: int, length: int) -> float:
    """Return the largest difference of gradients from plain autodiff's, relative to their range.

    It is the maximum over all weights, each relative to the range of its own gradient.
    """
    module = LanguageModel(replace(model, stack="feedback"), rngs=nnx.Rngs(0))
    graph, params = nnx.split(module)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, model.vocab_size, (batch, length), np.int32))

    def loss(params: Params) -> jax.Array:
        model = nnx.merge(graph, params)
        x, _ = model.stack(model.embed(tokens), model.init_state(batch), Context())
        return model.losses(x, jnp.roll(tokens, -1, 1))[0].mean()

    ours = jax.jit(jax.grad(loss))(params)
    with plain_autodiff():
        plain = jax.jit(jax.grad(lambda params: loss(params)))(params)
    differences = jax.tree.map(lambda a, b: jnp.abs(a - b).max() / jnp.ptp(b), ours, plain)
    return float(jnp.stack(jax.tree.leaves(differences)).max())


def measure_rows_floor(
    model: ModelConfig, batch: int, length: int, repetitions: int
) -> PairedTimes:
    """Time the matrix products of a layer, as in the token scan, and for all tokens in parallel.

    In the scan, forward and input gradient have `batch` rows per token, and the weight gradient has
    batch * BLOCK rows. In parallel, all three have batch * length rows.
    """
    hidden = resolve_model(model).mlp_width
    kernel = jnp.ones((model.width, hidden), model.dtype)
    count = -(-length // BLOCK)

    def three(kernel: jax.Array, x: jax.Array, dy: jax.Array) -> Any:
        to_x, to_kernel = dy @ kernel.T, x.T @ dy
        return x @ kernel, to_x, to_kernel

    @jax.jit
    def parallel(kernel: jax.Array, x: jax.Array, dy: jax.Array) -> Any:
        return three(kernel, x, dy)

    @jax.jit
    def in_loop(kernel: jax.Array, x: jax.Array, dy: jax.Array) -> Any:
        def block(total: jax.Array, xs: Any) -> Any:
            x, dy = xs

            def token(_: None, xs: Any) -> Any:
                x, dy = xs
                return None, (x @ kernel, dy @ kernel.T)

            _, out = jax.lax.scan(token, None, (x, dy))
            rows = (a.reshape(-1, a.shape[-1]) for a in (x, dy))
            return total + next(rows).T @ next(rows), out

        cut = (a.reshape(count, BLOCK, batch, -1) for a in (x, dy))
        return jax.lax.scan(block, jnp.zeros_like(kernel), tuple(cut))

    x = jnp.ones((count * BLOCK * batch, model.width), model.dtype)
    dy = jnp.ones((len(x), hidden), model.dtype)
    runs = {
        "loop": lambda: in_loop(kernel, x, dy),
        "parallel": lambda: parallel(kernel, x, dy),
    }
    times = time_interleaved(runs, repetitions)
    return compare_times(times["loop"], times["parallel"])


def measure_generation(
    model: ModelConfig, repetitions: int, note: Callable[[str], None]
) -> Iterator[Generation]:
    """Measure one-token steps after `SPANS` tokens, for `BATCHES`.

    If its state may have as many bytes as the Transformer's, the Feedback Transformer has `layers`
    times as many lanes.
    """
    for span in SPANS:
        for batch in BATCHES:
            note(f"generation: {span:,} tokens before, batch {batch}")
            yield from _measure_generation_step(_models_with_span(model, span), batch, repetitions)


def _models_with_span(model: ModelConfig, span: int) -> dict[str, ModelConfig]:
    c = replace(model.feedback, span=span, shared_kv=True, sweeps=0)
    feedback = replace(model, stack="feedback", feedback=c)
    return {
        "transformer": replace(model, stack="transformer", feedback=replace(c, shared_kv=False)),
        "feedback": feedback,
        "feedback, memory cached": replace(feedback, feedback=replace(c, cache="memory")),
    }


def _measure_generation_step(
    models: dict[str, ModelConfig], batch: int, repetitions: int
) -> Iterator[Generation]:
    # a Transformer of L layers has L KV caches where feedback has one
    more = batch * models["feedback"].layers
    settings = {(name, "batch"): (model_config, batch) for name, model_config in models.items()}
    settings["feedback", "bytes"] = (models["feedback"], more)
    runs, sizes = {}, {}
    for key, (model_config, lanes) in settings.items():
        runs[key], sizes[key] = _generator(model_config, lanes)
    times = time_interleaved(runs, repetitions)
    base = ("transformer", "batch")
    for key, (_, lanes) in settings.items():
        if key == base:
            continue
        time = compare_times(times[key], times[base])
        mine, other = lanes * TOKENS / time.first, batch * TOKENS / time.second
        span = models["feedback"].feedback.span
        yield Generation(
            key[0],
            span,
            key[1],
            lanes,
            batch,
            sizes[key],
            sizes[base],
            mine,
            other,
            time,
            mine / other,
        )


def _generator(model: ModelConfig, batch: int) -> tuple[Callable[[], Any], int]:
    """Return a function that writes `TOKENS` tokens after a full memory, and the state's bytes."""
    module = LanguageModel(model, rngs=nnx.Rngs(0))
    graph, params = nnx.split(module)
    state = jax.block_until_ready(
        jax.jit(functools.partial(_full_state, module.init_state, batch))()
    )
    size = tree_bytes(state)
    token = jnp.zeros((batch, 1), jnp.int32)

    write = make_writer(graph, TOKENS)
    compiled = jax.jit(write, donate_argnums=1).lower(params, state, token).compile()

    def run() -> Any:
        nonlocal state, token
        token, state = compiled(params, state, token)
        return token

    return run, size


def _full_state(init_state: Callable[[int], FeedbackState], batch: int) -> FeedbackState:
    """Return the state of all lanes after `span` tokens, with random entries."""
    state = init_state(batch)
    slots = tuple(jax.random.normal(jax.random.key(0), a.shape, a.dtype) for a in state.slots)
    return FeedbackState(slots, state.place, jnp.full_like(state.filled, slots[0].shape[-2]))

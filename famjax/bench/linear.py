"""Linear attention: training and decoding speed (T2R, arXiv 2103.13076, 3.3, Figures 2 and 3).

Attention alone, forward and backward on arrays: the chunkwise form that training uses is compared
with a scan over tokens, with masked attention over all pairs, and with softmax attention. Its floor
is the time that its FLOPs take at the speed of one large matrix product in the same repetition.

Decoding: a Transformer with a KV cache of a given length is compared with linear attention with
each feature map, on models of equal shape. T2R's map is folded into the projections (Equation 8)
where possible, as `famjax generate` does, and is also measured unfolded. In an encoder-decoder the
source is as long as the target (3.3), and linear attention also has one matrix for each head of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.bench.comparison import Comparison
from famjax.bench.greedy import make_writer
from famjax.bench.timing import PairedTimes, compare_times, time_interleaved
from famjax.config.resolved import resolve_model
from famjax.config.schema import ModelConfig
from famjax.core.types import Params, State, tree_bytes
from famjax.models.fold_feature_maps import fold_feature_maps, why_not_foldable
from famjax.models.seq2seq import Seq2Seq, make_model
from famjax.ops import attention
from famjax.ops.kernels import kernel_platform, without_kernels
from famjax.ops.linear_attention import EPS, Sums, chunkwise_attention, recurrent_attention
from famjax.train.flops import linear_attention_flops

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# a form is skipped at lengths where a call would take longer, or would need more temporary bytes
MAX_SECONDS, MAX_BYTES = 20.0, 4e9
# time budget of one length; repetitions are reduced to fit in it, but to no fewer than two
LENGTH_SECONDS = 60.0
# size of the matrix product that measures peak speed
PRODUCT = 2048
# the chunkwise form by XLA, measured where the chunkwise form is a kernel
WITHOUT_KERNEL = "without kernel"
# aims: speedup over softmax at a length; ratio to the floor
SOFTMAX_AIM, AIM_LENGTH, FLOOR_AIM = 10.0, 4096, 2.0

# the model with the map folded, as `famjax generate` runs it
FOLDED = "T2R"
CONTEXTS = (8, 32, 128, 512, 2048, 8192)
# number of lanes as in the paper's Figures 2 and 3; number of tokens per call
LANES, TOKENS = 16, 16
# aims: T2R's tokens/s relative to the Transformer's after AIM_CONTEXT tokens, relative to elu's and
# rfa's, and after the longest context relative to AIM_CONTEXT; bytes of state relative to elu's
TRANSFORMER_AIM, AIM_CONTEXT, MAPS_AIM, FLAT_AIM, BYTES_AIM = 4.0, 512, 1.15, 0.9, 0.3
# the numbers that 3.3 states beside Figures 2 and 3, which have none: speed relative to the
# Transformer's and to the other maps', bytes relative to elu's
PAPER_TRANSFORMER, PAPER_MAPS, PAPER_BYTES = 4.0, 1.15, 0.3


# q and k [b t h k], v and the gradient of the result [b t h e]; softmax's q and k are [b t h e]
Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
Form = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Attention(NamedTuple):
    """Forward and backward pass of one form of attention at one length.

    Attributes:
      name: name of the form.
      length: number of tokens.
      time: times of the form, and of the chunkwise form; the ratio is the slowdown. None if the
        form was skipped.
      floor: for the chunkwise form, its times and its floor; None for the others.
      max_difference: largest difference of the result from the chunkwise form's, relative to its
        range; None for softmax, which is another function.
    """

    name: str
    length: int
    time: PairedTimes | None
    floor: PairedTimes | None
    max_difference: float | None


def scan(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Compute Equations 4 to 7, one token at a time."""
    resets = jnp.full((len(q), 1), -1)

    def token(sums: Sums, xs: Any) -> tuple[Sums, jax.Array]:
        q, k, v = (a[:, None] for a in xs)
        y, sums = recurrent_attention(q[..., None, :], k, v, sums, resets)
        return sums, y[:, 0, :, 0]

    _, y = jax.lax.scan(token, _empty_sums(k, v), tuple(jnp.moveaxis(a, 1, 0) for a in (q, k, v)))
    return jnp.moveaxis(y, 0, 1)


def all_pairs(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Compute Equation 3 directly: phi(q_i) phi(k_j) for all j <= i, normalized by their sum."""
    a = jnp.einsum("bihk,bjhk->bhij", q, k)
    a = jnp.where(_causal_mask(len(q[0])), a, 0)
    y = jnp.einsum("bhij,bjhe->bihe", a, v)
    return y / jnp.maximum(a.sum(-1), EPS).swapaxes(1, 2)[..., None]


def softmax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return attention.attend(q, k, v, _causal_mask(len(q[0])))


def chunkwise(chunk: int) -> Form:
    def form(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        resets = jnp.full(q.shape[:2], -1)
        return chunkwise_attention(q[..., None, :], k, v, _empty_sums(k, v), resets, chunk)[0][
            ..., 0, :
        ]

    return form


def forms(chunk: int) -> dict[str, tuple[Form, int]]:
    """Return each form by name, with the exponent of the length in its time."""
    without = {WITHOUT_KERNEL: (chunkwise(chunk), 1)} if kernel_platform() else {}
    return {
        "chunkwise": (chunkwise(chunk), 1),
        **without,
        "token scan": (scan, 1),
        "all pairs": (all_pairs, 2),
        "softmax": (softmax, 2),
    }


def measure_attention(
    model: ModelConfig, batch: int, longest: int, repetitions: int, note: Callable[[str], None]
) -> Iterator[Attention]:
    """Measure all forms, interleaved, at each of `LENGTHS` up to `longest`."""
    spent: dict[str, float] = {}
    before = 0
    lengths = [n for n in LENGTHS if n <= longest]
    for i, length in enumerate(lengths):
        note(
            f"attention: {length:,} tokens"
            f"{_remaining_note(spent, before, lengths[i:], repetitions)}"
        )
        runs, max_difference = _runs(model, batch, length, spent, before)
        repetition_seconds = sum(_expected_seconds(spent, before, length).values())
        times = time_interleaved(
            runs | {"product": _reference_product()}, _repetitions(repetition_seconds, repetitions)
        )
        k, e = model.linear.features, resolve_model(model).head_dim
        flops = linear_attention_flops(batch * length * model.heads, k, e, model.linear.chunk)
        floor = [flops / (2 * PRODUCT**3) * t for t in times["product"]]
        ours = times["chunkwise"]
        for name in forms(model.linear.chunk):
            if name not in runs:
                spent[name] = np.inf
                yield Attention(name, length, None, None, None)
                continue
            spent[name] = min(times[name])
            to_floor = compare_times(ours, floor) if name == "chunkwise" else None
            yield Attention(
                name, length, compare_times(times[name], ours), to_floor, max_difference.get(name)
            )
        before = length


def _expected_seconds(spent: dict[str, float], before: int, length: int) -> dict[str, float]:
    """Extrapolate the seconds of each form to a length; leave out forms that are skipped there."""
    powers = {name: power for name, (_, power) in forms(1).items()}
    times = {name: t * (length / before) ** powers[name] for name, t in spent.items()}
    return {name: t for name, t in times.items() if name == "chunkwise" or t <= MAX_SECONDS}


def _repetitions(repetition_seconds: float, repetitions: int) -> int:
    return max(2, min(repetitions, int(LENGTH_SECONDS / max(repetition_seconds, 1e-9))))


def _remaining_note(
    spent: dict[str, float], before: int, lengths: list[int], repetitions: int
) -> str:
    """Return a note on the remaining run time, without compilation."""
    if not spent:
        return ""
    each = [sum(_expected_seconds(spent, before, length).values()) for length in lengths]
    # two more calls: one to warm up, and one for the result
    seconds = sum(
        (_repetitions(repetition_seconds, repetitions) + 2) * repetition_seconds
        for repetition_seconds in each
    )
    return f"; attention's runs have about {seconds:.0f} s left"


def random_inputs(model: ModelConfig, batch: int, length: int, width: int) -> Inputs:
    """Return random features and values like a layer's: q and k are positive, [... width]."""
    rng, e = np.random.default_rng(0), resolve_model(model).head_dim
    shapes = [(batch, length, model.heads, n) for n in (width, width, e, e)]
    q, k, v, to_y = (rng.standard_normal(s, np.float32) for s in shapes)
    q, k, v, to_y = (jax.device_put(a) for a in (np.abs(q), np.abs(k), v, to_y))
    return q, k, v, to_y


def _runs(
    model: ModelConfig, batch: int, length: int, spent: dict[str, float], before: int
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Return a function for each form that is not skipped, and `Attention.max_difference`."""
    runs: dict[str, Callable[[], Any]] = {}
    results = {}
    expected = _expected_seconds(spent, before, length)
    for name, (form, _) in forms(model.linear.chunk).items():
        if before and name not in expected:
            continue
        width = resolve_model(model).head_dim if name == "softmax" else model.linear.features
        arrays = random_inputs(model, batch, length, width)
        with without_kernels() if name == WITHOUT_KERNEL else contextlib.nullcontext():
            lowered = jax.jit(forward_backward(form)).lower(*arrays)
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        if memory and memory.temp_size_in_bytes > MAX_BYTES and name != "chunkwise":
            continue
        runs[name] = functools.partial(compiled, *arrays)
        if name != "softmax":
            results[name] = np.asarray(runs[name]()[0])
    ours = results["chunkwise"]
    max_difference = {
        name: float(np.abs(y - ours).max() / np.ptp(ours)) for name, y in results.items()
    }
    return runs, max_difference


def forward_backward(form: Form) -> Callable[..., Any]:
    """Return a function that computes a form's result, and the gradients of q, k and v."""

    def both(q: jax.Array, k: jax.Array, v: jax.Array, to_y: jax.Array) -> Any:
        y, backward = jax.vjp(form, q, k, v)
        return y, backward(to_y)

    return both


def _reference_product() -> Callable[[], Any]:
    matrix = jnp.ones((PRODUCT, PRODUCT))
    return functools.partial(jax.jit(jnp.dot), matrix, matrix)


def _empty_sums(k: jax.Array, v: jax.Array) -> Sums:
    b, _, g, width = k.shape
    return Sums(jnp.zeros((b, g, width, v.shape[-1])), jnp.zeros((b, g, width)))


def _causal_mask(t: int) -> jax.Array:
    index = jnp.arange(t)
    return index[:, None] >= index


class Decoding(NamedTuple):
    """Greedy decoding of one model after `length` tokens.

    Attributes:
      name: name of the model.
      length: number of tokens before.
      seconds: seconds of each repetition for `TOKENS` tokens in all lanes; empty if skipped.
      state_bytes: size of the attention state of all lanes, with that of their sources.
    """

    name: str
    length: int
    seconds: tuple[float, ...]
    state_bytes: int

    @property
    def tokens_per_second(self) -> float:
        return LANES * TOKENS / min(self.seconds)


def bench_models(model: ModelConfig, length: int) -> dict[str, ModelConfig]:
    """Return the measured models by name, all with the same width and depth.

    Args:
      model: config with the shape; it may have an encoder.
      length: size of the Transformer's KV cache in tokens.
    """
    encoder = replace(model.encoder, cross="linear", features=model.linear.features)

    def linear(kind: Any) -> ModelConfig:
        maps = replace(model.linear, map=kind, rope=False)
        return replace(model, mixer="linear", linear=maps, encoder=encoder)

    maps = {FOLDED: linear("relu"), "T2R, map not folded": linear("relu")}
    maps |= {"elu": linear("elu"), "rfa": linear("rfa")}
    return {"transformer": replace(model, mixer="full", capacity=length)} | maps


def fold_obstacle(model: ModelConfig) -> str:
    """Return the reason if T2R's map cannot be folded at this shape, else ""."""
    return why_not_foldable(bench_models(model, 1)[FOLDED])["causal"]


def measure_decoding(
    model: ModelConfig, repetitions: int, note: Callable[[str], None]
) -> Iterator[Decoding]:
    """Measure all models, interleaved, on the last `TOKENS` tokens of each of `CONTEXTS`."""
    spent, before = 0.0, 1
    what = "translation" if model.encoder.layers else "decoding"
    # linear attention has one program for all lengths
    decoders: dict[tuple[str, int], _Decoder] = {}
    for i, length in enumerate(CONTEXTS):
        note(f"{what}: {length:,} tokens, {len(CONTEXTS) - i} lengths left")
        runs, sizes, count = {}, {}, min(TOKENS, length)
        for name, config in bench_models(model, length).items():
            if name == "transformer" and spent * length / before > MAX_SECONDS:
                continue
            if name == "transformer" or (name, count) not in decoders:
                decoders[name, count] = _decoder(config, count, name == FOLDED, length)
            runs[name] = functools.partial(decoders[name, count].run, length)
            sizes[name] = decoders[name, count].state_bytes
        times = time_interleaved(runs, repetitions)
        for name in bench_models(model, length):
            yield Decoding(name, length, tuple(times.get(name, ())), sizes.get(name, 0))
        spent, before = min(times.get("transformer", [np.inf])), length


class _Decoder(NamedTuple):
    """A function that decodes the `TOKENS` tokens up to a length, and the size of its state."""

    run: Callable[[int], Any]
    state_bytes: int


def _decoder(model: ModelConfig, count: int, fold: bool, length: int) -> _Decoder:
    """Compile the decoding of `count` tokens, with T2R's map folded if possible.

    Args:
      length: number of tokens of each source, for a model with an encoder.
    """
    module = make_model(model, rngs=nnx.Rngs(0))
    if fold and not why_not_foldable(model)["causal"]:
        module = fold_feature_maps(module, model)
    graph, params = nnx.split(module)
    # unstacked layer states are donated and updated in place between calls
    state = jax.jit(lambda: module.unstack(module.init_state(LANES)))()
    source = _make_source(module, length) if isinstance(module, Seq2Seq) else None
    size = tree_bytes((state, source))
    token = jnp.zeros((LANES, 1), jnp.int32)

    def write(params: Params, state: State, token: jax.Array, read: jax.Array, source: Any) -> Any:
        return make_writer(graph, count)(params, _set_length(state, read), token, source)

    arguments = (params, state, token, jnp.int32(0), source)
    compiled = jax.jit(write, donate_argnums=1).lower(*arguments).compile()

    def run(length: int) -> Any:
        nonlocal state, token
        for _ in range(TOKENS // count):
            token, state = compiled(params, state, token, jnp.int32(length - count), source)
        return token

    return _Decoder(run, size)


def relative_speed(rows: Sequence[Decoding], other: str, length: int | None = None) -> float:
    """Return T2R's tokens/s relative to another model's, at one length or at all of them."""
    best = {
        name: min(
            seconds
            for row in rows
            if row.name == name and length in (None, row.length)
            for seconds in row.seconds
        )
        for name in (FOLDED, other)
    }
    return best[other] / best[FOLDED]


def relative_bytes(rows: Sequence[Decoding]) -> float:
    """Return the bytes of T2R's attention relative to elu's, after `AIM_CONTEXT` tokens."""
    sizes = {row.name: row.state_bytes for row in rows if row.length == AIM_CONTEXT}
    return sizes[FOLDED] / sizes["elu"]


def is_measured(rows: Sequence[Decoding], name: str, length: int) -> bool:
    return any(row.seconds for row in rows if (row.name, row.length) == (name, length))


def compare_with_paper(
    decoded: Sequence[Decoding], translated: Sequence[Decoding]
) -> Iterator[Comparison]:
    """Compare decoding of a language model, and translation, with what 3.3 states."""
    if is_measured(decoded, "transformer", AIM_CONTEXT):
        yield Comparison(
            f"language model, tokens/s / transformer's at {AIM_CONTEXT:,} tokens",
            relative_speed(decoded, "transformer", AIM_CONTEXT),
            PAPER_TRANSFORMER,
            '3.3: "~4x speedup in generating 512 consecutive words"',
        )
    for name in ("elu", "rfa"):
        yield Comparison(
            f"translation, tokens/s / {name}'s",
            relative_speed(translated, name),
            PAPER_MAPS,
            '3.3, Figure 2: "15%+ speedup over ELU and RFA"',
        )
    yield Comparison(
        "translation, attention's bytes / elu's",
        relative_bytes(translated),
        PAPER_BYTES,
        '3.3, Figure 3: "70% memory reduction"',
    )


def _make_source(model: Seq2Seq, length: int) -> Any:
    """Return what a decoder attends to, of ones instead of encoded sources of `length` tokens."""
    tokens = jax.ShapeDtypeStruct((LANES, length), jnp.int32)
    shapes = jax.eval_shape(model.read_source, tokens, tokens)
    return jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), shapes)


def _set_length(state: State, length: jax.Array) -> State:
    """Return the state with its position set to `length`."""

    def is_layer(s: Any) -> bool:
        return hasattr(s, "length")

    def set_back(s: Any) -> Any:
        return s._replace(length=jnp.full_like(s.length, length))

    return jax.tree.map(set_back, state, is_leaf=is_layer)

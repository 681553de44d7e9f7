"""The cost of feedback memory: FAM against BSWA of equal shape (TransformerFAM D.4, Tables 13, 14).

The floor of the ratio is that of the FLOPs, about 1 + f / w: the layers of FAM process f + w tokens
where those of BSWA process w, so Algorithm 2 cannot be cheaper while matrix products dominate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.bench.comparison import Comparison, compare
from famjax.bench.steps import training_call
from famjax.bench.timing import PairedTimes, reset_peak_memory, time_pair
from famjax.config.resolved import resolve_model
from famjax.config.schema import ModelConfig
from famjax.core.types import Context, tree_bytes
from famjax.eval.memory_usage import memory_report
from famjax.models.language_model import LanguageModel
from famjax.train.flops import forward_flops

# block lengths and FAM lengths; f / w is from 1/64 to 1/8
SIZES = ((64, 8), (128, 8), (128, 16), (256, 16), (512, 8))
GENERATED = 256
CHUNK = 2048
# the paper's 26k, 34k, 66k, 130k and 258k tokens, and a million, as whole chunks plus generated
# tokens
LENGTHS = tuple(k * CHUNK + GENERATED for k in (12, 16, 32, 63, 126, 488))


class PaperDocument(NamedTuple):
    """A column of Tables 13 and 14 (D.4): GB of memory and seconds for one document, on a TPUv4."""

    tokens: str
    fam_gb: float
    bswa_gb: float
    fam_seconds: float
    bswa_seconds: float


# documents of the first of `LENGTHS`; the paper has none of a million tokens
PAPER = (
    PaperDocument("26k", 4.5, 4.4, 16.5, 16.2),
    PaperDocument("34k", 4.9, 4.8, 21.2, 20.9),
    PaperDocument("66k", 6.5, 6.4, 40.7, 40.2),
    PaperDocument("130k", 9.7, 9.6, 77.2, 76.8),
    PaperDocument("258k", 16.1, 16.0, 154.9, 154.1),
)


class FamCost(NamedTuple):
    """The times of FAM, and of BSWA, at one size. `floor` is the ratio of their FLOPs."""

    block_len: int
    fam_len: int
    training: PairedTimes
    streaming: PairedTimes
    floor: float


class LongDocument(NamedTuple):
    """Seconds and peak bytes of FAM and BSWA for one document.

    `tokens` is its length; the last 256 of them are generated (D.4).
    """

    tokens: int
    fam_seconds: float
    bswa_seconds: float
    fam_bytes: int
    bswa_bytes: int
    state_bytes: int


def measure_costs(
    model: ModelConfig, batch: int, length: int, repetitions: int
) -> Iterator[FamCost]:
    """Measure training step and streaming at each of `SIZES`."""
    for block_len, fam_len in SIZES:
        fam, bswa = (
            replace(model, mixer=mixer, block_len=block_len, fam_len=fam_len)
            for mixer in ("fam", "bswa")
        )
        flops, bswa_flops = (forward_flops(resolve_model(m), computed=True) for m in (fam, bswa))
        yield FamCost(
            block_len,
            fam_len,
            time_pair(
                training_call(fam, batch, length), training_call(bswa, batch, length), repetitions
            ),
            time_pair(
                streaming_call(fam, batch, length), streaming_call(bswa, batch, length), repetitions
            ),
            flops / bswa_flops,
        )


def streaming_call(model: ModelConfig, batch: int, length: int) -> Callable[[], Any]:
    """Return a function that reads `batch` rows of `length` tokens, further and further."""
    reader = _GreedyReader(model, batch)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (batch, length), np.int32)
    return lambda: reader.read(tokens)


class _GreedyReader:
    """A random model that reads, and generates greedily; its parameters are program arguments."""

    def __init__(self, model: ModelConfig, batch: int):
        module = LanguageModel(model, rngs=nnx.Rngs(0))
        graph, self.params = nnx.split(module)
        self.state = module.init_state(batch)

        def best(logits: jax.Array) -> jax.Array:
            return logits.argmax(-1).astype(jnp.int32)

        def read(params, state, tokens):
            model = nnx.merge(graph, params)
            ctx = model.with_tokens(Context(), tokens)
            x, state = model.stack(model.embed(tokens), state, ctx)
            return best(model.logits(x[:, -1:])), state

        def step(params, state, token):
            logits, state = nnx.merge(graph, params).step(token, state)
            return best(logits), state

        self._read = jax.jit(read, donate_argnums=1)
        self._step = jax.jit(step, donate_argnums=1)

    def read(self, tokens: np.ndarray) -> jax.Array:
        token, self.state = self._read(self.params, self.state, tokens)
        return token

    def step(self, token: jax.Array) -> jax.Array:
        token, self.state = self._step(self.params, self.state, token)
        return token


def measure_long_documents(
    model: ModelConfig, note: Callable[[str], None]
) -> Iterator[LongDocument]:
    """Read documents of increasing length, and generate 256 tokens after each."""
    readers = {name: _GreedyReader(replace(model, mixer=name), 1) for name in ("fam", "bswa")}
    for reader in readers.values():  # compile
        jax.block_until_ready(reader.step(reader.read(np.zeros((1, CHUNK), np.int32))))
    size = tree_bytes(readers["fam"].state)
    for tokens in LENGTHS:
        seconds, memory = {}, {}
        for name, reader in readers.items():
            note(f"{name}: {tokens:,} tokens")
            reset_peak_memory()
            seconds[name] = _read_and_generate(reader, tokens, model.vocab_size)
            memory[name] = memory_report()["peak_bytes"]
        yield LongDocument(
            tokens, seconds["fam"], seconds["bswa"], memory["fam"], memory["bswa"], size
        )


def compare_with_paper(rows: Sequence[LongDocument]) -> Iterator[Comparison]:
    """Compare documents of `LENGTHS` with Tables 13 and 14: FAM with BSWA, and long with short."""
    pairs = list(zip(rows, PAPER, strict=False))
    for row, paper in pairs:
        yield compare(
            f"peak memory / BSWA's, {row.tokens:,} tokens",
            row.fam_bytes / row.bswa_bytes,
            (paper.fam_gb, paper.bswa_gb),
            "GB",
            f"Table 13, {paper.tokens}",
        )
    for row, paper in pairs:
        yield compare(
            f"seconds / BSWA's, {row.tokens:,} tokens",
            row.fam_seconds / row.bswa_seconds,
            (paper.fam_seconds, paper.bswa_seconds),
            "s",
            f"Table 14, {paper.tokens}",
        )
    (short, short_paper), (long, long_paper) = pairs[0], pairs[-1]
    lengths = f"{long.tokens:,} tokens / {short.tokens:,}"
    memory = long_paper.fam_gb, short_paper.fam_gb
    seconds = long_paper.fam_seconds, short_paper.fam_seconds
    bytes_ratio = long.fam_bytes / short.fam_bytes
    yield compare(f"FAM's peak memory, {lengths}", bytes_ratio, memory, "GB", "Table 13")
    seconds_ratio = long.fam_seconds / short.fam_seconds
    yield compare(f"FAM's seconds, {lengths}", seconds_ratio, seconds, "s", "Table 14")


def _read_and_generate(reader: _GreedyReader, tokens: int, vocabulary: int) -> float:
    """Read `tokens` in chunks, generating the last ones; return the seconds."""
    begin = time.perf_counter()
    rng = np.random.default_rng(0)
    token = jnp.zeros((1, 1), jnp.int32)
    for _ in range((tokens - GENERATED) // CHUNK):
        token = reader.read(rng.integers(0, vocabulary, (1, CHUNK), np.int32))
    for _ in range(GENERATED):
        token = reader.step(token)
    jax.block_until_ready(token)
    return time.perf_counter() - begin

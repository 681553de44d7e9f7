"""Translation with the Feedback Transformer as the decoder (arXiv 2002.09402, Table 5).

Training steps on rows of one pair, and greedy decoding of a target with the encoding of its source,
compared with a Transformer as the decoder; the encoder is the same. All programs are measured
interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.bench.comparison import Comparison, compare
from famjax.bench.feedback import make_trainer
from famjax.bench.timing import PairedTimes, compare_times, time_interleaved
from famjax.config.schema import ModelConfig
from famjax.core.types import Array, Context, Params
from famjax.models.seq2seq import Seq2Seq

# layers of the decoders, as in the paper
DECODER = 2
_BASE = "transformer"
# words/s of the Feedback Transformer and of the Transformer on WMT14 En-De (v3 Table 5)
PAPER_TRAINING, PAPER_DECODING = (126_000, 280_000), (5410, 3190)


class TranslationSpeed(NamedTuple):
    """The speed of a decoder with an encoder.

    Attributes:
      name: name of the decoder.
      training, decoding: times of the Transformer, and of this decoder, for equally many tokens;
        the ratio is the speed relative to the Transformer's.
      training_speed, decoding_speed: tokens of targets per second, of all rows.
    """

    name: str
    training: PairedTimes
    decoding: PairedTimes
    training_speed: float
    decoding_speed: float


def bench_decoders(model: ModelConfig, length: int) -> dict[str, ModelConfig]:
    """Return the measured models by name; their encoders have the layers of `model`.

    Args:
      model: shape of the layers.
      length: number of tokens of a source, and of a target.
    """
    encoder = replace(model.encoder, layers=model.layers)
    both = replace(model, layers=DECODER, encoder=encoder)
    # spans hold the whole target, like full attention
    c = replace(model.feedback, sweeps=0, span=length)

    def feedback(shared_kv: bool) -> ModelConfig:
        return replace(both, stack="feedback", feedback=replace(c, shared_kv=shared_kv))

    return {
        _BASE: replace(both, stack="residual", mixer="full", capacity=length),
        "feedback": feedback(True),
        "feedback, keys per layer": feedback(False),
    }


def measure_translation(
    model: ModelConfig, batch: int, length: int, repetitions: int
) -> Iterator[TranslationSpeed]:
    """Measure training and decoding with each of `bench_decoders`."""
    models = bench_decoders(model, length)
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, config in models.items():
        runs["training", name] = make_trainer(config, batch, length).run
        runs["decoding", name] = _decoder(config, batch, length)
    times = time_interleaved(runs, repetitions)
    for name in models:
        training, decoding = (
            compare_times(times[kind, _BASE], times[kind, name])
            for kind in ("training", "decoding")
        )
        tokens = batch * length
        speeds = tokens / training.second, tokens / decoding.second
        yield TranslationSpeed(name, training, decoding, *speeds)


def compare_with_paper(rows: Sequence[TranslationSpeed]) -> Iterator[Comparison]:
    """Compare the speeds of the Feedback Transformer with those of v3's Table 5."""
    row = next(row for row in rows if row.name == "feedback")
    for kind, time, speeds in (
        ("training", row.training, PAPER_TRAINING),
        ("decoding", row.decoding, PAPER_DECODING),
    ):
        quantity = f"translation, {kind} speed / transformer's"
        yield compare(quantity, time.ratio, speeds, "words/s", "v3 Table 5, WMT14 En-De")


def _decoder(config: ModelConfig, batch: int, length: int) -> Callable[[], Array]:
    """Return a function that encodes sources and decodes as many tokens, [b t]."""
    graph, params = nnx.split(Seq2Seq(config, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (batch, length), np.int32)

    def translate(params: Params, tokens: Array) -> Array:
        model: Seq2Seq = nnx.merge(graph, params)
        ctx = Context(source=model.read_source(tokens, jnp.ones_like(tokens)))

        def one(carry: Any, _: None) -> Any:
            token, state = carry
            logits, state = model.step(token, state, ctx)
            token = logits.argmax(-1).astype(jnp.int32)
            return (token, state), token[:, 0]

        state = model.unstack(model.init_state(batch))
        model.stack.unstack_layers(state)
        start = jnp.zeros((batch, 1), jnp.int32), state
        return jax.lax.scan(one, start, None, length)[1].T

    program = jax.jit(translate)
    return lambda: program(params, tokens)

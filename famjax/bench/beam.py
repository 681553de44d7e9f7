"""Beam search compared with greedy decoding, and with transformers' beam search on equal models.

The floor is greedy decoding with as many rows as there are hypotheses: it takes the same steps of
the model, without choosing among beams or copying their states. There are no stop tokens, so no
hypothesis ends early.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.bench.greedy import make_writer
from famjax.bench.lora import llama_config, transformers_llama
from famjax.bench.timing import PairedTimes, compare_times, time_interleaved, time_pair
from famjax.config.schema import ModelConfig
from famjax.convert.load import load_pretrained
from famjax.core.optional import missing_modules
from famjax.core.types import Params, State
from famjax.eval.beam import BeamSettings, Hypotheses, repeat_rows
from famjax.eval.streaming import Streamer
from famjax.eval.translator import jit_programs
from famjax.models.language_model import LanguageModel
from famjax.parallel.sharding import mesh_of
from famjax.processes import runtime

PEERS = ("torch", "transformers")
BEAMS = 5
MIXERS = ("full", "bswa", "fam")
# aims: tokens/s relative to greedy decoding with as many rows, and relative to transformers
GREEDY_AIM, PEER_AIM = 0.7, 2.0
# number of tokens of a prompt, or of a source
PROMPT = 64
# the id that Marian's targets begin after
_START = 0


class BeamCost(NamedTuple):
    """The cost of beam search after a prompt, with one mixer.

    Attributes:
      mixer: mixer of all layers.
      hypotheses: number of hypotheses of all rows.
      equal: times of greedy decoding with as many rows as hypotheses, and of beam search; the ratio
        is beam search's share of the speed of greedy decoding.
      single: times of greedy decoding with one hypothesis per row, and of beam search.
    """

    mixer: str
    hypotheses: int
    equal: PairedTimes
    single: PairedTimes


class BeamPeer(NamedTuple):
    """Reading a prompt or a source and beam search, in transformers and in famjax.

    Attributes:
      time: times of transformers, and of famjax; the ratio is the speedup of famjax.
      same: share of the hypotheses that are the same in both.
    """

    time: PairedTimes
    same: float


def measure_costs(
    model: ModelConfig, batch: int, tokens: int, repetitions: int
) -> Iterator[BeamCost]:
    """Measure each of `MIXERS`; the programs of one mixer run interleaved."""
    for mixer in MIXERS:
        config = replace(model, mixer=mixer, capacity=PROMPT + tokens)
        made = LanguageModel(config, rngs=nnx.Rngs(0))
        stream = _read(Streamer(made, batch), model.vocab_size)
        runs: dict[str, Callable[[], Any]] = {
            "equal": _greedy_runner(made, stream, BEAMS, tokens),
            "single": _greedy_runner(made, stream, 1, tokens),
            "beam": functools.partial(_search, stream, model.vocab_size, tokens),
        }
        times = time_interleaved(runs, repetitions)
        equal, single = (compare_times(times[name], times["beam"]) for name in ("equal", "single"))
        yield BeamCost(mixer, batch * BEAMS, equal, single)


def _read(streamer: Streamer, vocab_size: int) -> Streamer:
    """Return a stream that has read random prompts."""
    stream = streamer.new_stream()
    stream.read(_prompts(streamer.batch, vocab_size))
    return stream


def _prompts(batch: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab_size, (batch, PROMPT), np.int32)


def _search(stream: Streamer, vocab_size: int, tokens: int) -> Hypotheses:
    return stream.search(BeamSettings(BEAMS, tokens, vocab_size), np.zeros(0, np.int32))


def _greedy_runner(
    model: LanguageModel, stream: Streamer, copies: int, tokens: int
) -> Callable[[], Any]:
    """Return a function that decodes greedily after a stream, with each row in `copies` copies."""
    graph, params = nnx.split(model)

    def write(params: Params, state: State, logits: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        state = model.unstack(repeat_rows(state, model.stack.row_axes(state), copies))
        token = jnp.repeat(logits.argmax(-1, keepdims=True).astype(jnp.int32), copies, 0)
        return make_writer(graph, tokens - 1)(params, state, token)[0]

    program, state, logits = jax.jit(write), stream.state.memory, stream.logits
    return lambda: program(params, state, logits)


def has_peers() -> bool:
    """Return whether the packages of `measure_peer` are installed."""
    return not missing_modules(PEERS)


def measure_peer(model: ModelConfig, batch: int, tokens: int, repetitions: int) -> BeamPeer:
    """Measure a Llama of the model's shape in both packages, with the same weights."""
    net = _peer_model(llama_config(model), tokens)
    with tempfile.TemporaryDirectory() as folder:
        net.save_pretrained(folder)
        _, ours = load_pretrained(folder)
    streamer = Streamer(ours, batch, PROMPT)
    theirs = _peer_runner(net, batch, tokens)

    def search() -> Hypotheses:
        return _search(_read(streamer, model.vocab_size), model.vocab_size, tokens)

    return _compare(theirs, search, batch, tokens, repetitions)


def measure_translation_peer(
    model: ModelConfig, batch: int, tokens: int, repetitions: int
) -> BeamPeer:
    """Measure a Marian with `model.layers` layers on each side; sources are as long as prompts."""
    net = _marian(model, tokens)
    with tempfile.TemporaryDirectory() as folder:
        net.save_pretrained(folder)
        _, ours = load_pretrained(folder)
    graph, params = nnx.split(ours)
    programs = jit_programs(graph, mesh_of(params))
    sources = _prompts(batch, model.vocab_size)
    settings = BeamSettings(BEAMS, tokens, model.vocab_size)
    arguments = (settings, np.zeros(0, np.int32), (np.int32(_START), None))

    def search() -> Hypotheses:
        return jax.block_until_ready(
            programs.search(params, sources, np.ones_like(sources), *arguments)
        )

    return _compare(_peer_runner(net, batch, tokens), search, batch, tokens, repetitions)


def _compare(
    theirs: Callable[[], np.ndarray],
    ours: Callable[[], Hypotheses],
    batch: int,
    tokens: int,
    repetitions: int,
) -> BeamPeer:
    pairs = theirs().reshape(batch, BEAMS, tokens) == np.asarray(ours().tokens)
    return BeamPeer(time_pair(theirs, ours, repetitions), float(pairs.all(-1).mean()))


def _peer_model(model: ModelConfig, tokens: int) -> Any:
    """Return transformers' Llama of this shape, with random weights and no stop token."""
    import transformers

    _start_torch()
    config = transformers_llama(
        model, PROMPT + tokens, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )
    return transformers.LlamaForCausalLM(config).eval()


def _marian(model: ModelConfig, tokens: int) -> Any:
    """Return transformers' Marian of these sizes, with random weights and no stop token."""
    import transformers

    _start_torch()
    sizes: dict[str, Any] = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", model.layers),
            ("attention_heads", model.heads),
            ("ffn_dim", model.mlp_width),
        )
    }
    config = transformers.MarianConfig(
        vocab_size=model.vocab_size,
        d_model=model.width,
        max_position_embeddings=PROMPT + tokens,
        pad_token_id=_START,
        decoder_start_token_id=_START,
        eos_token_id=None,
        forced_eos_token_id=None,
        **sizes,
    )
    return transformers.MarianMTModel(config).eval()


def _start_torch() -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(runtime.count_cores())


def _peer_runner(net: Any, batch: int, tokens: int) -> Callable[[], np.ndarray]:
    """Return a function that runs transformers' beam search, and returns the tokens, [b*n t]."""
    import torch

    prompts = torch.tensor(_prompts(batch, net.config.vocab_size).astype(np.int64))

    def run() -> np.ndarray:
        written = net.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            num_beams=BEAMS,
            num_return_sequences=BEAMS,
            max_new_tokens=tokens,
            early_stopping="never",
            do_sample=False,
        )
        return written[:, -tokens:].numpy()

    return run

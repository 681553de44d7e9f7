"""Generation of targets with an encoder-decoder, in batches, by beam search or sampling."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from famjax.core.errors import UserError
from famjax.core.types import Array, Context, Params, State
from famjax.data.pairs import cut_source
from famjax.eval.beam import BeamSettings, Hypotheses, Step, beam_search
from famjax.eval.generate import check_beams
from famjax.eval.sampling import Sampling
from famjax.experiment.memory import check_bytes_fit
from famjax.models.seq2seq import Seq2Seq
from famjax.parallel.sharding import mesh_of
from famjax.parallel.traced import with_mesh
from famjax.train.run import Run

# lengths of sources are rounded up to this or a multiple of it, see `padded_size`
_PAD_MULTIPLE = 16
# the maximum number of tokens of a target is _LENGTH_RATIO times the source's, plus _EXTRA_TOKENS
_LENGTH_RATIO, _EXTRA_TOKENS = 2, 16

# the id before a target, and the id that every target begins with, if there is one
Start = tuple[np.int32, np.int32 | None]


class Translation(NamedTuple):
    """The generated target of a source.

    Attributes:
      text: the best hypothesis of the search, or the sampled text.
      score: log p / length ** length_penalty; 0 if the text was sampled.
      tokens: number of generated tokens, including eos.
      cut: whether the text ended at the maximum number of tokens, and not with eos.
      source_tokens: number of tokens of `Tokenizer.encode_source`.
    """

    text: str
    score: float
    tokens: int
    cut: bool
    source_tokens: int = 0


def longest_source(run: Run) -> int | None:
    """Return the maximum number of tokens of a source in training, including eos.

    For a model that was not trained here, this is the number of its positions; None if it has none.
    """
    data, model = run.config.data, run.config.model
    if run.step:
        return data.source_length or data.length
    return None if model.arch.positions == "none" else model.capacity


class Translator:
    """Translates texts: `Translator(run).translate(["Guten Tag."])[0].text`.

    Args:
      run: a run whose model has an encoder.
      beams: number of hypotheses that are extended at once; 1 is greedy decoding.
      length_penalty: see `famjax.eval.beam`.
      no_repeat_ngram: size of the n-grams that must not occur twice in a target; 0 allows
        repetitions.
      batch: number of sources that are decoded together.
      sampling: sampling parameters, to sample targets instead of searching; None searches.
      max_tokens: maximum number of tokens of a target, including eos. None is twice the source's
        number as padded (`padded_size`), plus 16, but at most the longest target in training.

    Attributes:
      seconds: time that compiled programs have run so far, without compilation.
      capacity: maximum number of tokens of a target that the model's cache holds; None is any.

    Raises:
      UserError: the model has no encoder, or a number is out of its range.
    """

    def __init__(
        self,
        run: Run,
        beams: int = 1,
        length_penalty: float = 1.0,
        no_repeat_ngram: int = 0,
        batch: int = 32,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
    ):
        if not isinstance(run.model, Seq2Seq):
            raise UserError(
                "this model has no encoder, model.encoder.layers=0; train one with "
                "data.task=translate"
            )
        check_beams(beams, length_penalty, no_repeat_ngram, run.tokenizer.output_size)
        if batch < 1:
            raise UserError(f"batch={batch}: must be at least 1")
        self._run, self._batch, self._sampling = run, batch, sampling
        # the last token of a sample takes a place in the cache, since it is read, unlike that of a
        # hypothesis
        capacity = run.model.stack.capacity
        self.capacity = capacity if capacity is None or sampling is None else capacity - 1
        self._max_tokens = max_tokens
        self._check_max_tokens()
        assert isinstance(run.model, Seq2Seq)
        self._positions = run.model.encoder.positions
        graph, self._params = nnx.split(run.model)
        self._programs = jit_programs(graph, mesh_of(self._params))
        self._length_penalty = length_penalty
        self._beams, self._no_repeat_ngram = beams, no_repeat_ngram
        self._stops = np.array(sorted(run.tokenizer.stop_ids), np.int32)
        self._compiled: set[tuple[Any, ...]] = set()
        self.seconds = 0.0

    def translate(self, texts: Sequence[str], first: int = 0) -> list[Translation]:
        """Return the translation of each text.

        Args:
          texts: the sources.
          first: number of the first text; a sample depends on the number of its text.
        """
        return self.translate_each(texts, [self._length_penalty], first)[0]

    def translate_each(
        self,
        texts: Sequence[str],
        length_penalties: Sequence[float],
        first: int = 0,
    ) -> list[list[Translation]]:
        """Return for each of several length penalties the translations of texts, in one search."""
        sources = self._encode(texts, first)
        translations: list[dict[int, Translation]] = [{} for _ in length_penalties]
        for numbers, tokens, segment in batches(sources, self._batch):
            counted = [first + number for number in numbers]
            written = self._write(tokens, segment, counted, length_penalties)
            for by_number, batch in zip(translations, written, strict=True):
                for number, translation in zip(numbers, batch, strict=False):
                    by_number[number] = translation._replace(source_tokens=len(sources[number]))
        return [[by_number[i] for i in range(len(texts))] for by_number in translations]

    def check(self, texts: Iterable[str]) -> None:
        """Raise a `UserError` that names the first text that is too long for the encoder."""
        if self._positions is not None and self._positions.table is not None:
            self._encode(texts, 0)

    def _encode(self, texts: Iterable[str], first: int) -> list[np.ndarray]:
        """Return the tokens of sources, of which the first has the number `first`."""
        sources = []
        for number, text in enumerate(texts, first + 1):
            # without white space at the ends, and cut, as in training
            text = cut_source(text, self._run.config.data.source_words)
            source = self._run.tokenizer.encode_source(text)
            if self._positions is not None:
                self._positions.check_source(len(source), f"source {number:,}")
            sources.append(source)
        return sources

    @property
    def longest(self) -> int | None:
        """See `longest_source`."""
        return longest_source(self._run)

    def _write(
        self,
        tokens: np.ndarray,
        segment: np.ndarray,
        numbers: Sequence[int],
        length_penalties: Sequence[float],
    ) -> list[list[Translation]]:
        """Translate sources [b s] with each length penalty; `numbers` seed the sampling."""
        tokenizer = self._run.tokenizer
        settings = BeamSettings(
            self._beams,
            max_tokens=self._max_target_tokens(tokens.shape[1]),
            vocab_size=tokenizer.vocab_size,
            length_penalty=np.array(length_penalties, np.float32),
            no_repeat_ngram=self._no_repeat_ngram,
            best=1,
            output_size=tokenizer.output_size,
        )
        hypotheses = len(tokens) * self._beams
        what = f"decoding {len(tokens):,} sources at a time with --beam {self._beams}"
        # at least the logits and the tokens of the hypotheses
        needed = hypotheses * (4 * settings.vocab_size + 8 * settings.max_tokens)
        check_bytes_fit(what, needed, mesh_of(self._params).size)
        first = None if tokenizer.first_id is None else np.int32(tokenizer.first_id)
        start = np.int32(tokenizer.start_id), first
        arguments = (self._params, tokens, segment, settings, self._stops, start)
        if self._sampling is not None:
            rows = np.resize(np.array(numbers, np.uint32), len(tokens))
            given = *arguments, self._sampling, rows
            written, lengths = self._run_program(self._programs.sample, *given)
            one = [self._decode(*row, 0.0) for row in zip(written, lengths, strict=True)]
            return [one for _ in length_penalties]
        found = self._run_program(self._programs.search, *arguments)
        return [
            [self._decode(*best) for best in zip(*(a[i, :, 0] for a in found), strict=True)]
            for i in range(len(length_penalties))
        ]

    def _run_program(self, program: Any, params: Params, tokens: np.ndarray, *others: Any) -> Any:
        """Run a jitted function on sources [b s], and add its time to `seconds`."""
        arguments = (params, tokens, *others)
        shapes = tuple(np.shape(a) for a in jax.tree.leaves((tokens, others)))
        if shapes not in self._compiled:
            program.lower(*arguments).compile()  # now, so that timings exclude compilation
            self._compiled.add(shapes)
        began = time.perf_counter()
        result = jax.device_get(program(*arguments))
        self.seconds += time.perf_counter() - began
        return result

    def _max_target_tokens(self, source: int) -> int:
        """Return the maximum number of tokens of targets for sources of `source` tokens."""
        if self._max_tokens is not None:
            return self._max_tokens
        data = self._run.config.data
        trained = data.length if data.layout == "pairs" else None
        limits = _LENGTH_RATIO * source + _EXTRA_TOKENS, trained, self.capacity
        return min(limit for limit in limits if limit is not None)

    def _check_max_tokens(self) -> None:
        max_tokens = self._max_tokens
        if max_tokens is None:
            return
        if max_tokens < 1:
            raise UserError(f"max_tokens={max_tokens}: must be at least 1")
        if self.capacity is not None and max_tokens > self.capacity:
            raise UserError(
                f"max_tokens={max_tokens}: does not fit the model's cache, model.capacity="
                f"{self._run.model.stack.capacity}; give at most {self.capacity}"
            )

    def _decode(self, tokens: np.ndarray, length: int, score: float) -> Translation:
        written = tokens[:length]
        cut = not np.isin(written[-1:], self._stops).any()
        text = self._run.tokenizer.decode(written if cut else written[:-1])
        return Translation(text, float(score), int(length), cut)


class SourcePrograms(NamedTuple):
    """The jitted functions of a model; see `_search` and `_sample`."""

    search: Callable[..., Hypotheses]
    sample: Callable[..., tuple[Array, Array]]


@functools.lru_cache(maxsize=8)
def jit_programs(graph: Any, mesh: Mesh) -> SourcePrograms:
    """Return the jitted functions of a model's graph; they take its parameters as arguments.

    Args:
      mesh: the devices that the parameters are on.
    """
    return SourcePrograms(
        *(jax.jit(functools.partial(with_mesh(mesh, f), graph)) for f in (_search, _sample))
    )


def _search(
    graph: Any,
    params: Params,
    tokens: Array,
    segment: Array,
    settings: BeamSettings,
    stops: Array,
    start: Start,
) -> Hypotheses:
    """Encode sources [b s], and find their targets by beam search.

    Args:
      segment: [b s] int32, 1 where there is a token.
      stops: ids that end a target.
      start: the id that a target begins after, and the id of its first token; None leaves it open.
    """
    model: Seq2Seq = nnx.merge(graph, params)
    max_tokens = settings.max_tokens
    step, logits, state = _begin(model, tokens, segment, start, settings.beams, max_tokens)
    return beam_search(step, logits, state, model.stack.row_axes(state), settings, stops)


def _sample(
    graph: Any,
    params: Params,
    tokens: Array,
    segment: Array,
    settings: BeamSettings,
    stops: Array,
    start: Start,
    sampling: Sampling,
    numbers: Array,
) -> tuple[Array, Array]:
    """Encode sources [b s], and sample their targets: tokens [b t] and lengths [b].

    The randomness of a source depends on its number [b], not on its row or batch.
    """
    keys = jax.vmap(jax.random.fold_in, (None, 0))(sampling.key, numbers)
    b, max_tokens = len(tokens), settings.max_tokens
    step, logits, state = _begin(nnx.merge(graph, params), tokens, segment, start, 1, max_tokens)

    def keep_writing(carry: Any) -> Array:
        length, _, lengths, *_ = carry
        return (length < max_tokens) & (lengths == 0).any()

    def write_token(carry: Any) -> Any:
        length, written, lengths, logits, state = carry
        token = jax.vmap(
            lambda logits, key: sampling._replace(key=key).draw(logits[None], length)[0]
        )(logits, keys)
        written = written.at[:, length].set(token[:, 0])
        length = length + 1
        ends = jnp.isin(token[:, 0], stops) | (length == max_tokens)
        # finished targets continue until all are finished; their lengths cut off the rest
        lengths = jnp.where((lengths == 0) & ends, length, lengths)
        logits, state = step(token, state)
        return length, written, lengths, logits[:, 0], state

    empty = jnp.zeros((b, max_tokens), jnp.int32)
    carry = (jnp.int32(0), empty, jnp.zeros(b, jnp.int32), logits, state)
    _, written, lengths, *_ = jax.lax.while_loop(keep_writing, write_token, carry)
    return written, lengths


def _begin(
    model: Seq2Seq, tokens: Array, segment: Array, start: Start, beams: int, max_tokens: int
) -> tuple[Step, Array, State]:
    """Encode sources [b s], and read what stands before a target of at most `max_tokens` tokens.

    Returns:
      the model's step, bound to the encoded sources; the logits [b v] of the target's first token;
      the state.
    """
    before, first = start
    ctx = Context(source=model.read_source(tokens, segment))
    # `start`, and in a search all but the last token of a target
    state = model.stack.shorten(model.init_state(len(tokens)), max_tokens + 1)
    state = model.unstack(state, beams)
    model.stack.unstack_layers(state)
    logits, state = model.step(jnp.full((len(tokens), 1), before), state, ctx)
    if first is not None:
        is_first = jnp.arange(logits.shape[-1]) == first
        logits = jnp.broadcast_to(jnp.where(is_first, 0, -jnp.inf), logits.shape)
    # the beams of a row read the same source
    return functools.partial(model.step, ctx=ctx), logits[:, 0], state


def padded_size(length: int) -> int:
    """Return the size to which a source is padded: 16, 32, 48, 64, 96, 128, 192, 256, ...

    A program is compiled for each size, and the last batch of a size is not full. So there are few
    sizes for long sources.
    """
    size = -(-length // _PAD_MULTIPLE) * _PAD_MULTIPLE
    if size <= 4 * _PAD_MULTIPLE:
        return size
    double = 1 << (size - 1).bit_length()  # the next power of two
    return double * 3 // 4 if size <= double * 3 // 4 else double


def batches(
    sources: Sequence[np.ndarray], batch: int
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Yield batches of sources whose rounded-up lengths are equal, longest first.

    The padding of a source (`padded_size`), and the maximum number of tokens of its target, thus do
    not depend on other sources.

    Yields:
      numbers [n] of the sources, at most `batch`; tokens and segment [batch s] for
      `Seq2Seq.read_source`. With fewer than `batch` sources, the last rows repeat the first ones.
    """

    def size_of(number: int) -> int:
        return padded_size(len(sources[number]))

    order = sorted(range(len(sources)), key=size_of, reverse=True)
    for size, group in itertools.groupby(order, size_of):
        while numbers := list(itertools.islice(group, batch)):
            rows = [sources[i] for i in itertools.islice(itertools.cycle(numbers), batch)]
            lengths = np.array([len(row) for row in rows])
            tokens = np.stack([np.pad(row, (0, size - len(row))) for row in rows])
            segment = (np.arange(size) < lengths[:, None]).astype(np.int32)
            yield numbers, tokens.astype(np.int32), segment

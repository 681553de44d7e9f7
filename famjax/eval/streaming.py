"""Streaming documents of any length through a model: constant memory, one compiled shape."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.core.errors import UserError
from famjax.core.types import Array, Batch, Context, State, tree_bytes
from famjax.eval.beam import BeamSettings, Hypotheses
from famjax.eval.sampling import Sampling
from famjax.eval.stream_functions import jit_functions
from famjax.experiment.memory import check_bytes_fit
from famjax.models.language_model import LanguageModel
from famjax.parallel.sharding import mesh_of
from famjax.parallel.traced import target_device

# approximate number of tokens of a lane per call: enough to keep the device busy, few enough to fit
# in memory
CHUNK = 1024
# maximum tokens of all lanes per call on CPU, where the arrays of larger calls leave the cache: 20
# lanes of `make demo-full` read 1.2 (delta) to 1.3 (fam) times as many tokens per second
_CPU_TOKENS = 4096
# maximum number of calls in flight: the host prepares the next one while the device computes
_MAX_IN_FLIGHT = 2


class StreamState(NamedTuple):
    """The state of a stream.

    Attributes:
      memory: the model's carried state for b lanes.
      tokens: number of tokens that every lane has read so far.
    """

    memory: State
    tokens: int


class Streamer:
    """A stream of b lanes through a model, all at the same position.

    Calls are padded to `chunk` tokens, so that there is one compiled shape, and memory does not
    depend on the length of the input. In the middle of a block, one call reads token by token up to
    the block's end. Pieces of whole chunks are therefore the fastest (see `rechunk`).

    Args:
      model: a model whose `stack` follows the protocol of carried states.
      batch: b, the number of lanes.
      chunk: tokens of a lane per call, a multiple of `model.block_len`; None is about 1024, or on
        CPU what keeps a call of all lanes in the cache.
      reset_every: number of tokens after which the state is reset again and again, a multiple of
        `model.block_len`; the block length itself ablates the memory. None never resets.

    Attributes:
      batch, chunk: as given.
      block: block length of the model.
      tokens: number of tokens that every lane has read so far.

    Raises:
      UserError: a size does not fit the model.
    """

    def __init__(
        self,
        model: LanguageModel,
        batch: int,
        chunk: int | None = None,
        reset_every: int | None = None,
    ):
        if model.stack.is_approximate:
            raise UserError(
                "model.feedback.sweeps approximates the memory and is for training only; streaming "
                "is exact: set model.feedback.sweeps=0 in the model's config"
            )
        self.block = model.block_len
        size = model.stack.call_len or CHUNK
        if target_device().platform == "cpu":
            size = min(size, _CPU_TOKENS // max(batch, 1))
        self.chunk = max(size // self.block, 1) * self.block if chunk is None else chunk
        self._check_multiple("chunk", self.chunk)
        if reset_every is not None:
            self._check_multiple("reset_every", reset_every)
        self._reset_every = reset_every
        self._capacity = model.stack.capacity
        self._cache_sizes = model.stack.cache_sizes()
        graph, params = nnx.split(model)
        # committed to its devices, as an assigned state is; otherwise jit would recompile
        self._params = jax.tree.map(lambda a: jax.device_put(a, a.sharding), params)
        # state of a lane, and its layer inputs in a call
        self._lane_bytes = model.state_bytes() + self.chunk * model.width * model.dtype.itemsize
        self._functions = jit_functions(graph, mesh_of(self._params))
        self._start(batch)

    def _check_multiple(self, name: str, size: int) -> None:
        if size <= 0 or size % self.block:
            raise UserError(f"{name}={size}: must be a multiple of the model's block, {self.block}")

    def _start(self, batch: int) -> None:
        if batch <= 0:
            raise UserError(f"batch={batch}: must be at least 1")
        what = f"reading {batch:,} documents in a batch, {self.chunk:,} tokens at a time,"
        check_bytes_fit(what, batch * self._lane_bytes, self._count_devices())
        self.batch = batch
        self.tokens = 0
        self._logits: Array | None = None
        self._in_flight: deque[Array] = deque()
        self._memory = jax.tree.map(self._commit, self._functions.start(self._params, batch))

    def _count_devices(self) -> int:
        return len(jax.tree.leaves(self._params)[0].sharding.device_set)

    def _commit(self, array: Array) -> Array:
        """Commit an array of the initial state to the parameters' device, if they are on one.

        Arrays that do not depend on a parameter are not committed by themselves.
        """
        device = jax.tree.leaves(self._params)[0].sharding
        if array.committed or self._count_devices() > 1:
            return array
        return jax.device_put(array, device)

    def new_stream(self, batch: int | None = None) -> Self:
        """Return a stream in the initial state, with the same jitted functions."""
        stream = copy.copy(self)
        stream._start(batch or self.batch)
        return stream

    def copy(self) -> Self:
        """Return a stream that continues from a copy of this one's state."""
        stream = copy.copy(self)
        stream._memory = jax.tree.map(jnp.copy, self._memory)
        stream._in_flight = deque()
        return stream

    def read(self, tokens: np.ndarray) -> None:
        """Read tokens [b t]; asynchronous.

        Raises:
          UserError: the tokens exceed full attention's KV cache; nothing was read.
        """
        for _ in self._dispatch(tokens, None):
            pass

    def skim(self, tokens: np.ndarray) -> None:
        """Read `chunk` tokens [b chunk] from a block's start, without logits; asynchronous.

        The state afterwards is the same as after `read`. For small models without `scan_layers`
        this is faster.

        Raises:
          UserError: the tokens exceed full attention's KV cache; nothing was read.
        """
        if tokens.shape != (self.batch, self.chunk) or self.tokens % self.block:
            raise ValueError(f"tokens {tokens.shape} at {self.tokens} are not a whole chunk")
        self._check_capacity(self.chunk)
        ctx = Context(self._reset_mask(np.ones(tokens.shape, bool)))
        self._wait()
        ready, self._memory = self._functions.skim(
            self._params, self._memory, jnp.asarray(tokens, jnp.int32), ctx
        )
        self._in_flight.append(ready)
        self._logits = None
        self.tokens += self.chunk

    def losses(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read tokens [b t], and return the loss of each target [b t].

        Returns:
          nll [b t], -log p(target) in nats; correct [b t] bool, whether no token was likelier.

        Raises:
          UserError: the tokens exceed full attention's KV cache; nothing was read.
        """
        # fetched at the end; pending results take 5 bytes per token
        nll = [np.zeros((self.batch, 0), np.float32)]
        correct = [np.zeros((self.batch, 0), bool)]
        for size, results in jax.device_get(list(self._dispatch(tokens, targets))):
            nll.append(results[0][:, :size])
            correct.append(results[1][:, :size])
        return np.concatenate(nll, 1), np.concatenate(correct, 1)

    def batch_losses(self, batch: Batch[np.ndarray]) -> tuple[Array, ...]:
        """Read one batch of `famjax.data.lanes` [b chunk], with a different document in each row.

        This must not be mixed with the other methods, which need all lanes at the same position. It
        does not count tokens, or check the capacity of full attention.

        Returns:
          nll and correct as `losses`, but on the device; asynchronous.
        """
        ctx = Context(jnp.asarray(batch["reset"]), jnp.asarray(batch["valid"]))
        return self._call(batch["tokens"], batch["targets"], ctx, self.chunk - 1)

    def step(self, tokens: Array | np.ndarray) -> None:
        """Read one token per lane, [b 1] on the host or the device; asynchronous."""
        self._check_capacity(1)
        self._step(tokens, Context(self._reset_mask(np.ones((self.batch, 1), bool))))
        self.tokens += 1

    def _step(self, tokens: Any, ctx: Context) -> None:
        self._wait()
        self._logits, self._memory = self._functions.step(
            self._params, self._memory, jnp.asarray(tokens, jnp.int32), ctx
        )
        self._in_flight.append(self._logits)

    def draw(self, sampling: Sampling) -> np.ndarray:
        """Sample the next token [1] without reading it. Only for streams of one lane."""
        return np.asarray(self._functions.draw(self.logits, sampling, self._position(0)))[0]

    def write(
        self, token: int, count: int, sampling: Sampling, stops: np.ndarray, final_len: int
    ) -> np.ndarray:
        """Alternately read a token and sample the next one, in one compiled program.

        Only for streams of one lane.

        Args:
          token: the last sampled token, which was not read yet.
          count: maximum number of tokens to sample, at most TOKENS_PER_CALL. If full attention's
            KV cache has room for fewer, only those are sampled.
          sampling: the sampling parameters.
          stops: [...] int32, stop tokens; sampling ends after one.
          final_len: maximum number of tokens of the document when the text is complete. Full
            attention computes with a cache of that size.

        Returns:
          [1 to count], the sampled tokens. The last one, stop token or not, is not read.

        Raises:
          UserError: full attention's KV cache is full.
        """
        if self._reset_every is not None or self.batch != 1:
            raise ValueError("write needs one lane and no reset_every")
        self._check_capacity(1)
        if self._capacity is not None:
            count = min(count, self._capacity - self.tokens)
        if self.tokens + count > final_len:
            raise ValueError(f"{self.tokens} and {count} more tokens exceed final_len={final_len}")
        # the token to read precedes the one to sample
        arguments = (
            self._cache_size(final_len),
            np.array([[token]], np.int32),
            self._position(1),
            np.int32(count),
            sampling,
            stops,
        )
        tokens, written, self._logits, self._memory = self._functions.write(
            self._params, self._memory, *arguments
        )
        drawn = np.asarray(tokens)[: int(written)]
        self.tokens += len(drawn)
        return drawn

    def search(
        self, settings: BeamSettings, stops: np.ndarray, prompt: np.ndarray | None = None
    ) -> Hypotheses:
        """Return the best continuations of each lane by beam search. The stream is not modified.

        Args:
          settings: settings of the search.
          stops: [...] int32, stop tokens.
          prompt: [b p] int32, previous tokens whose n-grams count for `no_repeat_ngram`; -1 is
            padding.

        Raises:
          UserError: the hypotheses do not fit full attention's KV cache, or the device.
        """
        if self._reset_every is not None:
            raise ValueError("search needs no reset_every")
        read, max_tokens = self._longest(), settings.max_tokens
        # the last token is not read
        if self._capacity is not None and read + max_tokens - 1 > self._capacity:
            raise UserError(
                f"max_tokens={max_tokens}: does not fit the model's cache of {self._capacity:,} "
                f"after {read:,} tokens; give at most {self._capacity - read + 1:,}"
            )
        hypotheses = self.batch * settings.beams
        what = f"searching with {hypotheses:,} hypotheses of up to {max_tokens:,} tokens"
        # 8 bytes per token: the tokens of the finished hypotheses, and of the unfinished ones
        needed = hypotheses * (self._lane_bytes + 8 * max_tokens)
        check_bytes_fit(what, needed, self._count_devices())
        size = self._cache_size(read + max_tokens)
        return self._functions.search(
            self._params, self._memory, size, self.logits, settings, stops, prompt
        )

    def _cache_size(self, tokens: int) -> int:
        """Return the size of the KV cache to compute with, for documents of that many tokens."""
        return next((s for s in self._cache_sizes if s >= tokens), self._cache_sizes[-1])

    def _longest(self) -> int:
        """Return the largest number of tokens that a lane has read of its document."""
        return self.tokens

    def _position(self, ahead: int) -> np.uint32:
        return np.uint32((self.tokens + ahead) % 2**32)

    @property
    def logits(self) -> Array:
        """[b v], logits of the token after the last one that was read."""
        if self._logits is None:
            raise ValueError("no logits: nothing was read yet, or only skimmed")
        return self._logits

    def wait(self) -> None:
        """Wait until everything is read."""
        jax.block_until_ready(self._memory)

    def warm_up(self) -> None:
        """Compile `skim` and `losses`, so that later timings exclude compilation."""
        tokens = np.zeros((self.batch, self.chunk), np.int32)
        block = tokens[:, : self.block]
        self.new_stream().losses(block, block)
        if self._capacity is None or self.chunk <= self._capacity:
            self.new_stream().skim(tokens)

    def _dispatch(
        self, tokens: np.ndarray, targets: np.ndarray | None
    ) -> Iterator[tuple[int, tuple[Array, ...]]]:
        """Dispatch the calls that read `tokens`; yield for each its number of tokens and result."""
        if tokens.ndim != 2 or tokens.shape[0] != self.batch:
            raise ValueError(f"tokens {tokens.shape} are not [b t] with b={self.batch}")
        count = tokens.shape[1]
        self._check_capacity(count)
        at = 0
        while at < count:
            in_block = self.tokens % self.block
            size = self.block - in_block if in_block else self.chunk
            window = slice(at, min(at + size, count))
            wanted = None if targets is None else targets[:, window]
            yield window.stop - at, self._read_piece(tokens[:, window], wanted)
            at = window.stop

    def _check_capacity(self, count: int) -> None:
        longest = self.tokens + count
        if self._reset_every is not None:
            longest = min(longest, self._reset_every)
        check_capacity(self._capacity, longest)

    def _read_piece(self, tokens: np.ndarray, targets: np.ndarray | None) -> tuple[Array, ...]:
        """Read up to `chunk` tokens from a block's start, or up to the block's end from within it.

        Returns:
          nll and correct, padded to [b chunk] or [b block] each, or () without targets.
        """
        size, steps = tokens.shape[1], self.tokens % self.block > 0
        width = self.block if steps else self.chunk
        padding = ((0, 0), (0, width - size))
        ctx = Context()
        if not steps:  # within a block nothing is reset
            valid = np.broadcast_to(np.arange(width) < size, (self.batch, width))
            ctx = Context(self._reset_mask(valid), jnp.asarray(valid))
        wide = None if targets is None else np.pad(targets, padding)
        results = self._call(np.pad(tokens, padding), wide, ctx, size - 1, steps)
        self.tokens += size
        return results

    def _call(
        self,
        tokens: np.ndarray,
        targets: np.ndarray | None,
        ctx: Context,
        last: int | np.ndarray,
        steps: bool = False,
    ) -> tuple[Array, ...]:
        arguments = (self._params, self._memory, jnp.asarray(tokens, jnp.int32))
        where = jnp.asarray(last, jnp.int32)
        self._wait()
        if targets is None:
            self._logits, self._memory = self._functions.read(*arguments, ctx, where, steps=steps)
            results: tuple[Array, ...] = ()
        else:
            wanted = jnp.asarray(targets, jnp.int32)
            *scores, self._logits, self._memory = self._functions.losses(
                *arguments, wanted, ctx, where, steps=steps
            )
            results = tuple(scores)
        self._in_flight.append(self._logits)
        return results

    def _wait(self) -> None:
        """Wait for the device, to bound the number of calls in flight."""
        if len(self._in_flight) >= _MAX_IN_FLIGHT:
            self._in_flight.popleft().block_until_ready()

    def _reset_mask(self, valid: np.ndarray) -> Array | None:
        """Return the reset mask [b t]. It is False at padding: a reset would discard the state."""
        if self._reset_every is None:
            return None
        index = self.tokens + np.arange(valid.shape[1])
        return jnp.asarray((index % self._reset_every == 0) & valid)

    @property
    def state(self) -> StreamState:
        """A copy of the stream's state; later calls do not change it."""
        return StreamState(jax.tree.map(jnp.copy, self._memory), self.tokens)

    @state.setter
    def state(self, state: StreamState) -> None:
        """Continue from a state, which is copied."""

        def position(new: Any, old: Array) -> Array:
            if new.shape != old.shape or new.dtype != old.dtype:
                raise ValueError(
                    f"a state of {new.dtype}{new.shape} does not fit {old.dtype}{old.shape}"
                )
            # a state without parameters is not on the mesh before the first call
            return jax.device_put(new, old.sharding if old.committed else None, may_alias=False)

        self._memory = jax.tree.map(position, state.memory, self._memory)
        self.tokens = state.tokens
        self._logits = None

    def state_bytes(self) -> int:
        """Return the size of the carried state of all lanes, in bytes."""
        return tree_bytes(self._memory)


def check_capacity(
    capacity: int | None, tokens: int, document: str = "", remedy: str = "read less"
) -> None:
    """Raise a `UserError` if a document is longer than the model's state can hold.

    Args:
      capacity: the stack's capacity in tokens; None is unlimited.
      tokens: number of tokens of the document.
      document: the document's name, for the message; "" leaves it out.
      remedy: advice for the message on what can be done with the model as it is.
    """
    if capacity is not None and tokens > capacity:
        of = f" of {document}" if document else ""
        raise UserError(
            f"the model: {tokens:,} tokens{of} do not fit its cache of {capacity:,}; {remedy}, or "
            "train with a larger model.capacity, or with a mixer that streams (fam, bswa)"
        )


def rechunk(pieces: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Regroup `pieces` [... n] to pieces [... size]; the last one may be shorter.

    At most about one input piece and one output piece are in memory.
    """
    held: list[np.ndarray] = []
    count = 0
    for piece in pieces:
        held.append(piece)
        count += piece.shape[-1]
        if count < size:
            continue
        line = np.concatenate(held, -1)
        full = count - count % size
        for at in range(0, full, size):
            yield line[..., at : at + size]
        held, count = [line[..., full:]], count - full
    if count:
        yield np.concatenate(held, -1)

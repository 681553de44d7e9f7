"""The base class of stacks: layers between the embedding and the head, and the state they carry."""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core.errors import UserError
from famjax.core.types import Array, Context, PyTree, State
from famjax.layers.cross_attention import EncodedSource
from famjax.parallel.sharding import is_axes


class Stack(nnx.Module):
    """Layers on a residual stream: a function of a segment and a carried state.

    The contract is that of `famjax.mixers.mixer.Mixer`: constant shapes, consecutive calls equal
    one call, `step` equals `__call__` on one token.

    Attributes:
      block_len: a call takes a multiple of this many tokens.
      capacity: maximum number of tokens of a document; None means unbounded.
      receptive_field: number of tokens before a block that its outputs depend on; None means all.
      repeats: number of layers that an array of parameters holds.
      call_len: preferred number of tokens of a call, which streams use; None: no preference.
        Padding costs as much as tokens.
      reads_tokens: whether calls need `Context.tokens` (`LanguageModel.with_tokens`).
    """

    block_len: int
    capacity: int | None
    receptive_field: int | None
    repeats: int = 1
    call_len: int | None = None
    reads_tokens: bool = False

    @abc.abstractmethod
    def init_state(self, batch: int, offset: Array | None = None) -> State:
        """Return the state of streams that have read nothing.

        Args:
          offset: [b], as in `Context`.
        """

    @abc.abstractmethod
    def state_axes(self) -> State:
        """Return the logical axes of the state's arrays (`famjax.parallel.sharding`)."""

    @abc.abstractmethod
    def __call__(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        """Process whole blocks, from their start: [b t d] -> [b t d], and the state after them."""

    @abc.abstractmethod
    def step(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        """Process one token per lane: [b 1 d] -> [b 1 d], and the state after it."""

    # attention to an encoder's output

    def project_source(self, source: Array) -> PyTree:
        """Return each layer's keys and values [repeats b s ..] of an encoder's output [b s d]."""
        raise UserError(
            "model.encoder.layers: this stack has no cross attention; set model.encoder.layers=0"
        )

    def summarize_source(self, source: EncodedSource) -> EncodedSource:
        """Return the source with its keys reduced to the sums that linear attention needs.

        Args:
          source: has the mask [b 1 s].
        """
        return source

    # memories: stacks without any keep these defaults

    def memories(self, state: State) -> list[Array]:
        """Return a state's memories, one [repeats b f d] for each pattern layer that has one."""
        return []

    def passable_state(self, state: State) -> State:
        """Return the part of a state that `pass_state` uses."""
        return ()

    def pass_state(self, fresh: State, saved: State) -> State:
        """Return `fresh` with the memories of `saved`, a state or its `passable_state` (B.2.3)."""
        return fresh

    # training

    def auxiliary_loss(self) -> Array:
        """Return an auxiliary loss that depends only on the parameters."""
        return jnp.zeros(())

    def memory_metrics(self, x: Array, state: State, ctx: Context) -> dict[str, Array]:
        """Return metrics, by name, of the memory in a call."""
        return {}

    def match_softmax(self, x: Array, ctx: Context) -> tuple[Array, Array]:
        """Process documents with softmax attention in layers whose feature maps are to match it.

        Returns:
          [b t d]; the errors of these layers' feature maps, [l b].
        """
        raise UserError("train.match: this stack has no feature maps; set train.match=false")

    # layouts and sizes that callers choose

    def cache_sizes(self) -> tuple[int, ...]:
        """Return the sizes that `shorten` is to be called with, ascending.

        They are few, since a program is compiled for each. (0,) means that it changes nothing.
        """
        return (0,)

    def shorten(self, state: State, tokens: int) -> State:
        """Return the state with caches of at most `tokens` entries.

        They are enough for `step`s of documents of at most that many tokens; 0 for a call whose
        final state is not used.
        """
        return state

    def lengthen(self, state: State, whole: State) -> State:
        """Undo `shorten`, for a state that continues the state `whole`."""
        return state

    def unstack(self, state: State) -> State:
        """Return the state in the layout that is faster for a loop of `step` in one program."""
        return state

    def unstack_layers(self, state: State) -> None:
        """Give each layer arrays of its own, if the state is an unstacked one.

        For a loop in the same program as this call: within the loop the layers' parameters would be
        copied out of their stack at every token.
        """

    def restack(self, state: State) -> State:
        """Undo `unstack`."""
        return state

    def row_axes(self, state: State) -> tuple[int, ...]:
        """Return the batch axis of each array of a state, which may be unstacked."""
        axes = jax.tree.leaves(self.state_axes(), is_leaf=is_axes)
        return tuple(names.index("batch") for names in axes)

    @property
    def is_approximate(self) -> bool:
        """Return whether calls only approximate a sequence of `step`."""
        return False

    def attention_span(self, margin: float = 0.0) -> tuple[int, ...]:
        """Return how many entries the layers of each set of keys must attend to; () means all.

        Args:
          margin: number of tokens by which learned spans may grow until the next call of this.
        """
        return ()

    def set_attention_span(self, entries: tuple[int, ...]) -> None:
        """Attend only to the newest `entries` of each set of keys from now on; () means all."""

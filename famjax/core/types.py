"""Dimension letters, array types, and the arguments of every sequence model.

Dimensions, used in every docstring and einsum of the project:

    b  batch rows, called lanes when each follows one document
    t  tokens of one call          n  blocks or chunks of one call, iterations of a scan over them
    w  tokens of a block (block_len)                            c  tokens of a chunk or scan
    d  model width                 h  query heads               g  key/value heads
    e  width of one head           v  vocabulary                l  layers
    m  memory segments             p  previous FAMs attended    f  FAM length
    k  features of linear attention                             r  query heads of a key head, h / g
    s  keys that are attended to                                j  memories of a token, 1 or l

c is used in linear attention (a chunk) and in `famjax.ops.token_scan` (a block), and j in the stack
`feedback`. Other dimensions are named by words: repeats (of the layer pattern), span, sets, pairs,
rank, lead (any leading axes). Some modules have letters of their own, which their docstrings
explain: `famjax.ops.linear_attention_kernel` (m, i, j), `famjax.layers.adaptive` (c, s, n),
`famjax.eval.beam` (n, p, c, e, s), and `famjax.ops.ngrams` (o, s, k).

A model is a function of a segment and a carried state. `Context` holds the other arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, NotRequired, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
# The logical axis names of one array (`famjax.parallel.sharding`).
Axes = tuple[str | None, ...]
# A pytree of arrays, or of stand-ins for arrays such as shapes or shardings.
PyTree = Any
# A pytree of parameters: `nnx.State`, or a part of it.
Params = PyTree
# A pytree of named tuples of arrays: the whole carried state, whose shapes are constant.
State = PyTree
# The dropout function of one site (`famjax.layers.dropout`).
DropoutFn = Callable[[Array], Array]

AnyArray = TypeVar("AnyArray", np.ndarray, Array)


class Batch(TypedDict, Generic[AnyArray]):
    """Rows of tokens, as np.ndarray on the host and as `Array` on the devices.

    A single row is a `Batch` with arrays [t].
    """

    tokens: AnyArray  # [b t] int32
    targets: AnyArray  # [b t] int32, mostly the next token
    weights: AnyArray  # [b t] float32, loss weights of the targets; 0 if not predicted
    valid: AnyArray  # [b t] bool, False at padding
    reset: AnyArray  # [b t] bool, True at the first token of a document
    # [b t] bool, True at a reset whose document begins with the memory of the lane's previous
    # document (state passing); if missing, no document does
    pass_state: NotRequired[AnyArray]
    # in windows of evaluation: [b t] bool, True at tokens that are not in an earlier window; and
    # [b t] bool, True at the first token of a document's first window
    new: NotRequired[AnyArray]
    starts: NotRequired[AnyArray]
    # in sequence to sequence: [b s] int32, tokens of the sources; [b s] and [b t] int32, the number
    # of the source or target in its row, from 1; 0 is padding
    source: NotRequired[AnyArray]
    source_segment: NotRequired[AnyArray]
    segment: NotRequired[AnyArray]


class Context(NamedTuple):
    """Arguments of a call besides the tokens and the carried state.

    Attributes:
      reset: [b t] bool, or None for no reset. True at the first token of a document, which is also
        the first token of a block. The lane's state is reset before this token.
      pass_state: [b t] bool, or None for nowhere. True at a reset whose document starts with the
        memory of the lane's previous document, such as its FAM, instead of the prompt. This is
        state passing as in TransformerFAM B.2.3, except that the data decides and gradients flow
        through the memory. If a block attends to more than one previous FAM, the previous document
        must have ended with a whole block.
      valid: [b t] bool, or None for all valid. False marks padding. Padding follows the tokens of
        its lane up to the next reset or the end of the call. It never updates the state; outputs at
        padding are undefined.
      offset: [b], in tokens, or None. Added to all positions of a row, including its FAMs and its
        FAM prompt (random position offset, TransformerFAM B.2.2). `step` accepts no offset.
      key: PRNG key of one layer's dropout, set by the stack in training; None disables dropout.
        `step`, the prompt and the initial state have no dropout.
      prompt: [f d], or [b f d] with an offset, the FAM prompt at this layer's input
        (TransformerFAM B.1), set by the stack when a reset needs it; None otherwise.
      mutual: [b t] bool, or None for nowhere. True at tokens that attend to each other in both
        directions. Set by the stacks in `famjax.stacks.segments`; only full attention supports it,
        and `step` does not accept it.
      tokens: [b t] int32, the call's tokens, for an n-gram memory (`LanguageModel.with_tokens`);
        None if the model has none.
      embed: a function from tokens [b t] to their embeddings [b t d], set with `tokens`.
      source: what cross attention attends to (`famjax.layers.cross_attention.EncodedSource`), with
        the keys and values of all layers, or, within a layer, of that layer; None without an
        encoder.
    """

    reset: Array | None = None
    valid: Array | None = None
    offset: Array | None = None
    prompt: Array | None = None
    pass_state: Array | None = None
    key: Array | None = None
    mutual: Array | None = None
    tokens: Array | None = None
    embed: Callable[[Array], Array] | None = None
    source: Any = None


def compute_dtype(name: str) -> jnp.dtype:
    """Return the compute dtype: the configured one, or float64 if JAX has x64 enabled.

    Parameters, optimizer state and the feedback memory are in `param_dtype` regardless.
    """
    wide = param_dtype()
    return wide if wide == jnp.float64 else jnp.dtype(name)


def param_dtype() -> jnp.dtype:
    """Return float32, or float64 if JAX has x64 enabled (the oracle tests)."""
    return jnp.dtype(jnp.result_type(float))


def acc_dtype(x: Array) -> jnp.dtype:
    """Return float32, or x's dtype if wider: that of sums over many elements."""
    return jnp.promote_types(x.dtype, jnp.float32)


def at_least_float32(x: Array) -> Array:
    """Return an array in float32, or in its own dtype if that is wider."""
    return x.astype(acc_dtype(x))


def tree_bytes(tree: PyTree) -> int:
    """Return the bytes of a tree's arrays, or of the arrays that its `ShapeDtypeStruct`s describe.

    The elements of a sharded array count once.
    """
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))

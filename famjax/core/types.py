"""The alphabet of dimensions, and what every sequence model here is called with.

Dimensions, used in every docstring and einsum of the project:

    b  batch rows, called lanes when each follows one document
    t  tokens of one call          n  blocks of one call        w  tokens in a block (block_len)
    d  model width                 h  query heads               g  key/value heads
    e  width of one head           v  vocabulary                l  layers
    m  memory segments             p  previous FAMs attended    f  FAM length
    k  features of linear attention                             r  query heads of a key head, h / g

A model is a function of a segment and a state. `Context` holds what is not carried.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
# The logical axis names of one array, as `famjax.core.sharding` knows them.
Axes = tuple[str | None, ...]
# A pytree of named tuples of arrays: everything a model remembers. Its size never changes.
State = Any


class Context(NamedTuple):
    """What a call needs besides the tokens and the carried state.

    Attributes:
      reset: [b t] bool, or None for no reset. True at the first token of a document, which stands
        at the first token of a block: the lane forgets everything before it.
      passing: [b t] bool, or None for nowhere. True at a reset whose document starts with the FAM
        that the lane's last document left, and not with the prompt: state passing as in
        TransformerFAM B.2.3, but by the data's choice, and the gradient flows through it. With
        more than one previous FAM, that document must have ended with a whole block.
      valid: [b t] bool, or None for all valid. False marks padding. Padding stands behind the
        tokens of its lane, and is followed only by padding until the next reset or the end of the
        call. It never updates the state; the outputs at padding mean nothing.
      offset: [b], tokens, added to all positions of a row, those of its FAMs and of its FAM prompt
        included (random position offset, TransformerFAM B.2.2), or None. Only a call has one.
      key: random key of one layer's dropouts, set by the stack in training; None drops nothing.
        Only a call has one: `step`, the prompt and the initial state never drop anything.
      prompt: [f d], or [b f d] with an offset, the FAM prompt as it stands before the layer
        (TransformerFAM B.1), set by the stack when a reset needs it; None otherwise.
    """

    reset: Array | None = None
    valid: Array | None = None
    offset: Array | None = None
    prompt: Array | None = None
    passing: Array | None = None
    key: Array | None = None


def compute_dtype(name: str) -> jnp.dtype:
    """Return the type of the maths: the configured one, or float64 where JAX is switched to x64.

    Parameters, optimizer and the feedback memory are in `param_dtype` whatever it is.
    """
    wide = param_dtype()
    return wide if wide == jnp.float64 else jnp.dtype(name)


def param_dtype() -> jnp.dtype:
    """Return float32, or float64 where JAX is switched to x64 (the oracles' tests)."""
    return jnp.dtype(jnp.result_type(float))

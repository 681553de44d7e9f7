"""The LSTM baseline (Feedback Transformer 4.1.2, 7.2, 7.3): layers of plain LSTMs.

    i, f, g, o = W x_t + R h_{t-1} + b
    c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)
    h_t = sigmoid(o) tanh(c_t)

(Hochreiter & Schmidhuber, 1997; the forget gate is Gers et al.'s, 2000.) No peepholes, norm or
residual: a layer's input is the hidden state of the layer below.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.schema import ModelConfig
from famjax.core.types import Array, Context, State, compute_dtype, param_dtype
from famjax.layers.linear import Linear
from famjax.parallel import sharding, traced
from famjax.stacks.stack import Stack

_GATES = 4  # input, forget, candidate, output

# the recurrent kernel is used at every token, so it is not sharded over fsdp
sharding.register_parameter_axes(
    (r"cells/\d+/input/kernel$", ("embed", None, "mlp")),
    (r"cells/\d+/hidden/kernel$", (None, None, "mlp")),
)


class LstmState(NamedTuple):
    """h and c of all layers [l b d], or of one layer [b d], float32. Both are initially zero."""

    h: Array
    c: Array


def cell(gates: Array, c: Array) -> tuple[Array, Array]:
    """Return h and c [b d] after a token, from pre-activation gates [b 4 d] and the previous c."""
    i, f, g, o = (gates[:, k] for k in range(_GATES))
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


@jax.custom_vjp
def recurrence(
    inputs: Array, kernel: Array, start: LstmState, reset: Array, valid: Array
) -> tuple[Array, LstmState]:
    """Scan one layer over the tokens, with a custom VJP that computes R's gradient by one product.

    Plain differentiation would accumulate R's gradient token by token, and read and write all of it
    each time.

    Args:
      inputs: [t b 4 d], W x + b.
      kernel: [d 4 d], R, in the compute dtype.
      start: the layer's initial state, in the state's dtype.
      reset: [t b] bool, whether to reset the state before the token.
      valid: [t b] bool, False at padding, which leaves the state unchanged.

    Returns:
      h [t b d] in the state's dtype, and the final state.
    """
    y, end, _ = _scan(inputs, kernel, start, reset, valid)
    return y, end


def _scan(
    inputs: Array, kernel: Array, start: LstmState, reset: Array, valid: Array
) -> tuple[Array, LstmState, tuple[Array, ...]]:
    """Return the results of `recurrence`, and its residuals: each token's gates, and prior h, c."""

    def token(state: LstmState, xs: tuple[Array, ...]) -> tuple[LstmState, tuple[Array, ...]]:
        x, reset, valid = xs
        h, c = (jnp.where(reset[:, None], 0, a) for a in state)
        gates = x.astype(h.dtype) + jnp.einsum("bd,dgk->bgk", h.astype(kernel.dtype), kernel)
        new = cell(gates, c)
        held = (jnp.where(valid[:, None], a, b) for a, b in zip(new, state, strict=True))
        return LstmState(*held), (new[0], gates, h, c)

    end, (y, *residuals) = jax.lax.scan(token, start, (inputs, reset, valid))
    return y, end, tuple(residuals)


def _forward(
    inputs: Array, kernel: Array, start: LstmState, reset: Array, valid: Array
) -> tuple[tuple[Array, LstmState], Any]:
    y, end, residuals = _scan(inputs, kernel, start, reset, valid)
    # a residual must be an array: this one has the inputs' dtype but no elements
    return (y, end), (inputs[:0], kernel, reset, valid, *residuals)


def _backward(residuals: Any, grads: tuple[Array, LstmState]) -> tuple[Any, ...]:
    inputs, kernel, reset, valid, gates, h, c = residuals

    def token(grad: LstmState, xs: tuple[Array, ...]) -> tuple[LstmState, Array]:
        dy, gates, c, reset, valid = xs
        reset, valid = reset[:, None], valid[:, None]
        d_new = (jnp.where(valid, a, 0) for a in grad)
        d_held = (jnp.where(valid, 0, a) for a in grad)
        dh, dc = d_new
        dgates, dc = jax.vjp(cell, gates, c)[1]((dh + dy, dc))
        dh = jnp.einsum("bgk,gkd->bd", dgates.astype(kernel.dtype), kernel_t).astype(dy.dtype)
        d_before = (a + jnp.where(reset, 0, b) for a, b in zip(d_held, (dh, dc), strict=True))
        return LstmState(*d_before), dgates

    dy, dend = grads
    # transposed once here; in the scan XLA on CPU would transpose it at every token
    kernel_t = jnp.moveaxis(kernel, 0, -1)
    start, dgates = jax.lax.scan(token, dend, (dy, gates, c, reset, valid), reverse=True)
    narrow_dgates = dgates.astype(kernel.dtype)
    dkernel = jnp.einsum("tbd,tbgk->dgk", h.astype(kernel.dtype), narrow_dgates)
    return dgates.astype(inputs.dtype), dkernel, start, None, None


recurrence.defvjp(_forward, _backward)


class Lstm(nnx.Module):
    """One layer.

    Kernels are initialized as N(0, 1/d) and biases as 0, except that the forget gate's bias is 1,
    with which the initial layer remembers (Jozefowicz et al., 2015).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d = config.width
        dtype = compute_dtype(config.dtype)
        shape = ("...d,dgk->...gk", (d, _GATES, d), d)
        self.input = Linear(*shape, dtype=dtype, rngs=rngs)
        self.hidden = Linear(*shape, dtype=dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((_GATES, d)).at[1].set(1.0))
        self.dtype = dtype

    def __call__(
        self, x: Array, state: LstmState, reset: Array, valid: Array
    ) -> tuple[Array, LstmState]:
        """Process all tokens: [t b d] -> [t b d], and the layer's state after them.

        `reset` and `valid` are [t b], as in `recurrence`.
        """
        inputs = self.input(x) + self.bias[...].astype(self.dtype)
        y, state = recurrence(
            inputs, self.hidden.kernel[...].astype(self.dtype), state, reset, valid
        )
        return y.astype(x.dtype), state


class LstmStack(Stack):
    """Stacked LSTMs.

    They use the config's layers, width and dtype. A layer projects the inputs of all tokens in
    parallel; only the recurrence is sequential. The state is float32 regardless of the compute
    dtype, since c is a sum over all tokens.

    `Context.pass_state` has no effect, since it passes FAMs, which an LSTM does not have.

    Attributes:
      block_len: 1, a call may have any number of tokens.
      capacity, receptive_field: None, unbounded.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.cells = nnx.List([Lstm(config, rngs=rngs) for _ in range(config.layers)])
        self.width = config.width
        self.block_len = 1
        self.capacity = None
        self.receptive_field = None

    def init_state(self, batch: int, offset: Array | None = None) -> LstmState:
        zero = jnp.zeros((len(self.cells), batch, self.width), param_dtype())
        return LstmState(zero, zero)

    def state_axes(self) -> State:
        axes: Any = (None, "batch", "mlp")
        return LstmState(axes, axes)

    def __call__(self, x: Array, state: LstmState, ctx: Context) -> tuple[Array, LstmState]:
        """Process any number of tokens: [b t d] -> [b t d]."""
        # the recurrence is sequential: sharded tokens would not save time
        x = traced.all_gather_tokens(x)
        none = jnp.zeros(x.shape[:2], bool)
        reset = (none if ctx.reset is None else ctx.reset).T
        valid = (~none if ctx.valid is None else ctx.valid).T
        x = x.swapaxes(0, 1)
        ends = []
        for i, layer in enumerate(self.cells):
            x, end = layer(x, LstmState(state.h[i], state.c[i]), reset, valid)
            ends.append(end)
        return x.swapaxes(0, 1), jax.tree.map(lambda *a: jnp.stack(a), *ends)

    step = __call__

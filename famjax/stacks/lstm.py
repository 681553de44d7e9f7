"""The LSTM baseline (Feedback Transformer 4.1.2, 7.2, 7.3): layers of plain LSTMs.

    i, f, g, o = W x_t + R h_{t-1} + b
    c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)
    h_t = sigmoid(o) tanh(c_t)

(Hochreiter & Schmidhuber, 1997; the forget gate is Gers et al.'s, 2000.) No peepholes, no norm, no
residual: a layer reads the hidden states of the one below.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core import sharding
from famjax.core.config import ModelConfig
from famjax.core.types import Array, Context, State, compute_dtype, param_dtype
from famjax.layers.linear import Linear

_GATES = 4  # input, forget, candidate, output


class LstmState(NamedTuple):
    """h, c: [l b d] float32; of one layer [b d]. Both are zero where nothing was read."""

    h: Array
    c: Array


def cell(gates: Array, c: Array) -> tuple[Array, Array]:
    """gates [b 4 d] before their nonlinearities, c [b d] -> h, c of the next token."""
    i, f, g, o = (gates[:, k] for k in range(_GATES))
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


@jax.custom_vjp
def recur(
    inputs: Array, kernel: Array, start: LstmState, reset: Array, valid: Array
) -> tuple[Array, LstmState]:
    """Run one layer over the tokens, its inputs already projected.

    The gradient is that of plain differentiation, but R's is one product over all tokens: JAX adds
    it up token by token, and reads and writes all of it each time.

    Args:
      inputs: [t b 4 d], W x + b.
      kernel: [d 4 d], R, in the type of its products.
      start: of the layer, in the type of the state.
      reset: [t b] bool, where the state is zero before the token.
      valid: [t b] bool; where not, the state stays as it was.

    Returns:
      h [t b d] in the state's type, and the state behind the last token.
    """
    y, end, _ = _scan(inputs, kernel, start, reset, valid)
    return y, end


def _scan(
    inputs: Array, kernel: Array, start: LstmState, reset: Array, valid: Array
) -> tuple[Array, LstmState, tuple[Array, ...]]:
    """As `recur`, with what its gradient needs: each token's gates, and h and c before it."""

    def token(state: LstmState, xs: tuple[Array, ...]) -> tuple[LstmState, tuple[Array, ...]]:
        x, reset, valid = xs
        h, c = (jnp.where(reset[:, None], 0, a) for a in state)
        gates = x.astype(h.dtype) + jnp.einsum("bd,dgk->bgk", h.astype(kernel.dtype), kernel)
        new = cell(gates, c)
        kept = (jnp.where(valid[:, None], a, b) for a, b in zip(new, state, strict=True))
        return LstmState(*kept), (new[0], gates, h, c)

    end, (y, *saved) = jax.lax.scan(token, start, (inputs, reset, valid))
    return y, end, tuple(saved)


def _forward(
    inputs: Array, kernel: Array, start: LstmState, reset: Array, valid: Array
) -> tuple[tuple[Array, LstmState], Any]:
    y, end, saved = _scan(inputs, kernel, start, reset, valid)
    # of the inputs the type alone, which no residual can be
    return (y, end), (inputs[:0], kernel, reset, valid, *saved)


def _backward(saved: Any, grads: tuple[Array, LstmState]) -> tuple[Any, ...]:
    inputs, kernel, reset, valid, gates, h, c = saved

    def token(grad: LstmState, xs: tuple[Array, ...]) -> tuple[LstmState, Array]:
        dy, gates, c, reset, valid = xs
        reset, valid = reset[:, None], valid[:, None]
        of_new = (jnp.where(valid, a, 0) for a in grad)
        past = (jnp.where(valid, 0, a) for a in grad)
        dh, dc = of_new
        dgates, dc = jax.vjp(cell, gates, c)[1]((dh + dy, dc))
        dh = jnp.einsum("bgk,gkd->bd", dgates.astype(kernel.dtype), back).astype(dy.dtype)
        before = (a + jnp.where(reset, 0, b) for a, b in zip(past, (dh, dc), strict=True))
        return LstmState(*before), dgates

    dy, dend = grads
    # turned here, once: XLA on CPU would turn it at every token
    back = jnp.moveaxis(kernel, 0, -1)
    start, dgates = jax.lax.scan(token, dend, (dy, gates, c, reset, valid), reverse=True)
    narrow = dgates.astype(kernel.dtype)
    dkernel = jnp.einsum("tbd,tbgk->dgk", h.astype(kernel.dtype), narrow)
    return dgates.astype(inputs.dtype), dkernel, start, None, None


recur.defvjp(_forward, _backward)


class Lstm(nnx.Module):
    """One layer. Both kernels start as N(0, 1/d), biases as 0, but 1 at the forget gate.

    With that bias a layer remembers before it has learned to (Jozefowicz et al., 2015).
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
        """[t b d] -> [t b d], a layer's state, masks [t b]."""
        inputs = self.input(x) + self.bias[...].astype(self.dtype)
        y, state = recur(inputs, self.hidden.kernel[...].astype(self.dtype), state, reset, valid)
        return y.astype(x.dtype), state


class LstmStack(nnx.Module):
    """LSTMs on one another, by the protocol of `famjax.stacks.residual.ResidualStack`.

    Of the config it reads layers, width and dtype. All tokens' inputs are projected at once, layer
    by layer; only the recurrence goes from token to token. The state is float32 whatever the
    compute type, since c is a sum over all tokens ever read.

    A document that begins with the last one's memory (`Context.passing`) begins with none here:
    what is passed is a FAM.

    Attributes:
      block_len: any number of tokens is a call.
      capacity, reach: None, a document may have any length, and all of it can matter.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.cells = nnx.List([Lstm(config, rngs=rngs) for _ in range(config.layers)])
        self.width = config.width
        self.block_len = 1
        self.capacity = None
        self.receptive_field = None

    def init_state(self, batch: int) -> LstmState:
        zero = jnp.zeros((len(self.cells), batch, self.width), param_dtype())
        return LstmState(zero, zero)

    def state_axes(self) -> State:
        axes: Any = (None, "batch", "mlp")
        return LstmState(axes, axes)

    def pass_state(self, fresh: LstmState, saved: State) -> LstmState:
        """Random state passing (B.2.3) passes FAMs, of which there are none."""
        return fresh

    def report(self, x: Array, state: LstmState, ctx: Context) -> dict[str, Array]:
        """Return what tells how the memory fares: of this one, nothing."""
        return {}

    def loss(self) -> Array:
        """Return the stack's own loss, 0."""
        return jnp.zeros(())

    def __call__(self, x: Array, state: LstmState, ctx: Context) -> tuple[Array, LstmState]:
        """[b t d] -> [b t d]."""
        x = sharding.all_gather_tokens(
            x
        )  # read token by token, which dividing them would not spare
        no = jnp.zeros(x.shape[:2], bool)
        reset = (no if ctx.reset is None else ctx.reset).T
        valid = (~no if ctx.valid is None else ctx.valid).T
        x = x.swapaxes(0, 1)
        ends = []
        for i, layer in enumerate(self.cells):
            x, end = layer(x, LstmState(state.h[i], state.c[i]), reset, valid)
            ends.append(end)
        return x.swapaxes(0, 1), jax.tree.map(lambda *a: jnp.stack(a), *ends)

    step = __call__

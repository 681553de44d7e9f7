"""A decoder-only language model over any stack."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core.config import ModelConfig
from famjax.core.types import Array, Context, State, compute_dtype
from famjax.layers.linear import Linear
from famjax.layers.norm import Norm
from famjax.ops.attention import soft_cap
from famjax.stacks import make_stack

# up to this vocabulary a gradient by one-hot product is faster than one by scatter, on CPU by far
_SMALL_VOCABULARY = 4096


@jax.custom_vjp
def look_up(table: Array, tokens: Array) -> Array:
    """Return the rows of `table` [v d] at `tokens` [...]: [... d]."""
    return jnp.take(table, tokens, axis=0)


def _look_up_forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return look_up(table, tokens), (jnp.zeros_like(table[:, :0]), tokens)


def _look_up_backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, None]:
    shape, tokens = saved
    grad = grad.reshape(-1, grad.shape[-1])
    if len(shape) > _SMALL_VOCABULARY:
        return jax.ops.segment_sum(grad, tokens.reshape(-1), len(shape)), None
    one_hot = jax.nn.one_hot(tokens.reshape(-1), len(shape), dtype=grad.dtype)
    return one_hot.T @ grad, None


look_up.defvjp(_look_up_forward, _look_up_backward)


class LanguageModel(nnx.Module):
    """Token embedding, stack, final norm, head.

    A function of a segment and a state, by the protocol of all sequence models here:

        state = model.init_state(batch)
        logits, state = model(tokens, state)          # whole blocks
        logits, state = model.step(tokens, state)     # one token a lane

    Args:
      config: its vocab_size is v, not 0.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        v, d = config.vocab_size, config.width
        self.dtype = compute_dtype(config.dtype)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (v, d)) * d**-0.5)
        self.stack = make_stack(config, rngs=rngs)
        self.norm = Norm(config.norm, d, config.arch) if config.arch.pre_norm else None
        self.embed_scale = config.arch.embed_scale or d**0.5
        self.logit_cap = config.arch.logit_cap
        self.head = (
            None if config.tied else Linear("...d,dv->...v", (d, v), d, dtype=self.dtype, rngs=rngs)
        )
        self.block_len = self.stack.block_len

    def init_state(self, batch: int) -> State:
        return self.stack.init_state(batch)

    def state_axes(self) -> State:
        return self.stack.state_axes()

    def embed(self, tokens: Array) -> Array:
        """[b t] int32 -> [b t d]. Rows are scaled, the table is not."""
        return look_up(self.embedding[...], tokens).astype(self.dtype) * self.embed_scale

    def logits(self, x: Array) -> Array:
        """[... d] -> [... v] in float32 or wider."""
        x = x.astype(self.dtype) if self.norm is None else self.norm(x, self.dtype)
        if self.head is not None:
            y = self.head(x)
        else:
            y = jnp.einsum("...d,vd->...v", x, self.embedding[...].astype(self.dtype))
        return soft_cap(y.astype(jnp.promote_types(y.dtype, jnp.float32)), self.logit_cap)

    def __call__(
        self, tokens: Array, state: State, ctx: Context | None = None
    ) -> tuple[Array, State]:
        """Read whole blocks: tokens [b n*w] -> logits of the next tokens [b n*w v]."""
        x, state = self.stack(self.embed(tokens), state, ctx or Context())
        return self.logits(x), state

    def step(self, tokens: Array, state: State, ctx: Context | None = None) -> tuple[Array, State]:
        """Read one token a lane: tokens [b 1] -> logits [b 1 v]."""
        x, state = self.stack.step(self.embed(tokens), state, ctx or Context())
        return self.logits(x), state

"""What of a Feedback Transformer is known before any array: its sizes and its composition."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from famjax.core.config import FeedbackConfig, ModelConfig
from famjax.core.types import Array, compute_dtype
from famjax.layers.qkv import head_dim
from famjax.ops import rotary


@dataclass(frozen=True)
class Plan:
    """The shape of a stack; it can be compared and hashed, so compiled functions may depend on it.

    Attributes:
      model: the config.
      composition: what a memory is made of; a Transformer's is always its layers' inputs.
      attention_span: entries that the layers of each set of keys attend to; () is all of them.
    """

    model: ModelConfig
    composition: str
    attention_span: tuple[int, ...] = field(default=())

    @property
    def config(self) -> FeedbackConfig:
        return self.model.feedback

    @property
    def span(self) -> int:
        return self.config.span

    @property
    def memories(self) -> int:
        """Return j: memories of a token, one or one for each layer."""
        own = self.composition in ("same_and_lower", "previous")
        return self.model.layers if own else 1

    @property
    def sets(self) -> int:
        """Return s: sets of keys and values of a token, one or one for each layer."""
        return 1 if self.config.shared_kv and self.memories == 1 else self.model.layers

    @property
    def spans(self) -> tuple[int, ...]:
        """Return how many slots the layers of each set look at, [s]."""
        return self.attention_span or (self.span,) * self.sets

    @property
    def remembers_states(self) -> bool:
        """Tell whether memories are carried, and not the keys and values made from them."""
        return self.config.cache == "memory"

    @property
    def kv_heads(self) -> int:
        return self.model.kv_heads or self.model.heads

    @property
    def head_dim(self) -> int:
        return head_dim(self.model)

    @property
    def dtype(self) -> jnp.dtype:
        return compute_dtype(self.model.dtype)

    def rotate(self, x: Array, places: Array) -> Array:
        """Rotate [... n e] to places [... n], if positions are rotary."""
        if self.config.positions == "learned":
            return x
        theta = rotary.frequencies(self.head_dim, self.model.rope_base, self.model.arch)
        return rotary.rotate(x, rotary.angles(places, theta))

    def mix(self, logits: Array | None) -> Array:
        """Return what share of each state a memory is made of (Equation 1): [j L+1].

        Args:
          logits: [j L+1], the learned ones; None where nothing is learned.
        """
        count = self.model.layers
        if logits is not None:
            if self.composition == "same_and_lower":
                own = jnp.arange(count)[:, None] + 1
                logits = jnp.where(jnp.arange(count + 1) <= own, logits, -jnp.inf)
            return jax.nn.softmax(logits, axis=-1)
        if self.composition == "average":
            return jnp.full((1, count + 1), 1 / (count + 1))
        if self.composition == "previous":
            return jnp.eye(count, count + 1)
        layer = count if self.composition == "top" else self.config.layer
        return jax.nn.one_hot(jnp.array([layer]), count + 1)

"""The static specification of a Feedback Transformer: sizes and memory composition."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from famjax.config.resolved import ResolvedModelConfig
from famjax.config.schema import FeedbackConfig
from famjax.core.types import Array, compute_dtype
from famjax.ops import rotary


@dataclass(frozen=True)
class FeedbackSpec:
    """Static, hashable specification of a stack, for use as a static argument of jitted functions.

    Attributes:
      model: the config.
      composition: which layers' states form a memory; "previous" for a Transformer.
      attention_span: number of entries that the layers of each set of keys attend to; () means
        all.
    """

    model: ResolvedModelConfig
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
        """Return j, the number of memories per token: 1, or one for each layer."""
        own = self.composition in ("same_and_lower", "previous")
        return self.model.layers if own else 1

    @property
    def sets(self) -> int:
        """Return the number of sets of keys and values per token: 1, or one for each layer."""
        return 1 if self.config.shared_kv and self.memories == 1 else self.model.layers

    @property
    def spans(self) -> tuple[int, ...]:
        """Return how many entries the layers of each set attend to, [sets]."""
        return self.attention_span or (self.span,) * self.sets

    @property
    def caches_memory(self) -> bool:
        """Return whether the state holds memories instead of their keys and values."""
        return self.config.cache == "memory"

    @property
    def kv_heads(self) -> int:
        return self.model.kv_heads

    @property
    def head_dim(self) -> int:
        return self.model.head_dim

    @property
    def dtype(self) -> jnp.dtype:
        return compute_dtype(self.model.dtype)

    def rotate(self, x: Array, positions: Array) -> Array:
        """Rotate [... s e] to positions [... s], if positions are rotary."""
        if self.config.positions == "learned":
            return x
        theta = rotary.frequencies(self.head_dim, self.model.rope_base, self.model.arch)
        return rotary.rotate(x, rotary.angles(positions, theta))

    def mixing_weights(self, logits: Array | None) -> Array:
        """Return the weights of the layers' states in each memory (Equation 1): [j l+1].

        Args:
          logits: [j l+1], or None if weights are not learned.
        """
        count = self.model.layers
        if logits is not None:
            if self.composition == "same_and_lower":
                highest = jnp.arange(count)[:, None] + 1
                logits = jnp.where(jnp.arange(count + 1) <= highest, logits, -jnp.inf)
            return jax.nn.softmax(logits, axis=-1)
        if self.composition == "average":
            return jnp.full((1, count + 1), 1 / (count + 1))
        if self.composition == "previous":
            return jnp.eye(count, count + 1)
        layer = count if self.composition == "top" else self.config.layer
        return jax.nn.one_hot(jnp.array([layer]), count + 1)

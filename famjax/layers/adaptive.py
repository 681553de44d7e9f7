"""Adaptive input (Baevski & Auli, 2019, arXiv 1809.10853) and adaptive softmax (Grave et al., 2017,
arXiv 1609.04309): rare words in narrower tables (Feedback Transformer 7.6, WikiText-103).

The vocabulary is cut into clusters at `model.adaptive.cutoffs`. Its ids are sorted by falling
frequency, which is the tokenizer's to see to: the first cluster holds the words that most tokens
are. Cluster i has vectors of c = d / factor^i elements.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core.checks import cutoffs
from famjax.core.config import ModelConfig
from famjax.core.types import Array, compute_dtype
from famjax.layers.linear import Linear
from famjax.ops.lookup import look_up
from famjax.ops.losses import chosen


class Cluster(nnx.Module):
    """The words of one cluster: a table [s c], and a projection [c d] if there is one.

    The table starts as N(0, 1/c) and the projection as N(0, 1/d): a word's vector is then N(0, 1/d)
    in each element as a plain embedding's is, and its score of a normed x has variance 1.
    """

    def __init__(
        self, size: int, c: int, d: int, *, projected: bool, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.dtype = dtype
        self.table = nnx.Param(jax.random.normal(rngs.params(), (size, c)) * c**-0.5)
        kernel = jax.random.normal(rngs.params(), (c, d)) * d**-0.5 if projected else None
        self.projection = None if kernel is None else nnx.Param(kernel)

    def embed(self, words: Array, here: Array) -> Array:
        """Words [...] of this cluster, from 0 -> [... d]; where not `here` [...], zero."""
        rows = look_up(self.table[...], jnp.where(here, words, 0)).astype(self.dtype)
        rows = jnp.where(here[..., None], rows, 0)
        if self.projection is None:
            return rows
        return jnp.einsum("...c,cd->...d", rows, self.projection[...].astype(self.dtype))

    def logits(self, x: Array, *, projected: bool) -> Array:
        """[... d] -> [... s], by the transposed projection and table."""
        if projected and self.projection is not None:
            x = jnp.einsum("...d,cd->...c", x, self.projection[...].astype(self.dtype))
        return jnp.einsum("...c,sc->...s", x, self.table[...].astype(self.dtype))


def _clusters(config: ModelConfig, *, first_projected: bool, rngs: nnx.Rngs) -> nnx.List:
    d, dtype = config.width, compute_dtype(config.dtype)
    edges = itertools.pairwise((0, *cutoffs(config), config.vocab_size))
    return nnx.List(
        Cluster(
            end - start,
            d // config.adaptive.factor**i,
            d,
            projected=first_projected or i > 0,
            dtype=dtype,
            rngs=rngs,
        )
        for i, (start, end) in enumerate(edges)
    )


class AdaptiveEmbedding(nnx.Module):
    """Every cluster's vectors, each cluster projected to the model's width, the first one too.

    Args:
      config: its vocab_size is v, not 0.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.starts = (0, *cutoffs(config))
        self.clusters = _clusters(config, first_projected=True, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        """[...] -> [... d]."""
        cluster = which(tokens, self.starts)
        parts = [
            words.embed(tokens - start, cluster == i)
            for i, (words, start) in enumerate(zip(self.clusters, self.starts, strict=True))
        ]
        return sum(parts[1:], parts[0])


class AdaptiveSoftmax(nnx.Module):
    """p(word) = p(word) in the head, or p(cluster) in the head times p(word | cluster) in its tail.

    The head has the first cluster's words and one entry for each tail. A tail projects d -> c -> s.
    The head's words are scored without a projection, as in fairseq and PyTorch; so where the model
    is tied the tables are shared, and the tails' projections, but not the first one.

    Every cluster is computed for every token, and what a token does not need is left out: shapes do
    not depend on the words, which is what compiled programs ask for. What is spared is the width.

    Args:
      config: its vocab_size is v, not 0.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d = config.width
        self.starts = (0, *cutoffs(config))
        tails = len(self.starts) - 1
        dtype = compute_dtype(config.dtype)
        self.entries = Linear("...d,dn->...n", (d, tails), d, dtype=dtype, rngs=rngs)
        own = None if config.tied else _clusters(config, first_projected=False, rngs=rngs)
        self.clusters = own

    def logits(self, x: Array, embedding: AdaptiveEmbedding) -> tuple[Array, list[Array]]:
        """Return the head's [... s+n] and each tail's [... s], in float32 or wider.

        Args:
          x: [... d], normed.
          embedding: whose clusters are these where the model is tied.
        """
        first, *rest = embedding.clusters if self.clusters is None else self.clusters
        head = jnp.concatenate([first.logits(x, projected=False), self.entries(x)], -1)
        tails = [words.logits(x, projected=True) for words in rest]
        wide = jnp.promote_types(head.dtype, jnp.float32)
        return head.astype(wide), [tail.astype(wide) for tail in tails]

    def log_probs(self, x: Array, embedding: AdaptiveEmbedding) -> Array:
        """Return log p of every word: [... v]."""
        head, tails = self.logits(x, embedding)
        words = head.shape[-1] - len(tails)
        head = head - _log_sum(head)[..., None]
        parts = [
            head[..., words + i, None] + (tail - _log_sum(tail)[..., None])
            for i, tail in enumerate(tails)
        ]
        return jnp.concatenate([head[..., :words], *parts], -1)

    def losses(self, x: Array, targets: Array, embedding: AdaptiveEmbedding) -> tuple[Array, Array]:
        """Return -log p(target) in nats, and whether no word is likelier, without log p of all.

        Args:
          x: [... d], normed; targets: [...].

        Returns:
          Two [...], float and bool.
        """
        head, tails = self.logits(x, embedding)
        words = head.shape[-1] - len(tails)
        cluster = which(targets, self.starts)
        total = _log_sum(head)
        own = chosen(head, jnp.where(cluster == 0, targets, words + cluster - 1)) - total
        best = head[..., :words].max(-1) - total
        for i, tail in enumerate(tails):
            within = _log_sum(tail)
            inner = chosen(tail, targets - self.starts[i + 1]) - within
            own = jnp.where(cluster == i + 1, own + inner, own)
            # the same sums as the target's own, so that equal ones are equal to the bit
            best = jnp.maximum(best, (head[..., words + i] - total) + (tail.max(-1) - within))
        return -own, own >= best


def which(tokens: Array, starts: tuple[int, ...]) -> Array:
    """Return the cluster of each token: [...] -> [...] int32."""
    edges = jnp.asarray(starts[1:], tokens.dtype)
    return (tokens[..., None] >= edges).sum(-1, dtype=jnp.int32)


def _log_sum(logits: Array) -> Array:
    return jax.nn.logsumexp(logits, axis=-1)

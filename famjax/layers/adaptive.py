"""Adaptive input (Baevski & Auli, 2019, arXiv 1809.10853) and adaptive softmax (Grave et al., 2017,
arXiv 1609.04309): rare words in narrower tables (Feedback Transformer 7.6, WikiText-103).

The vocabulary is split into clusters at `model.adaptive.cutoffs`. The tokenizer must sort its ids
by decreasing frequency: the first cluster has the most frequent words. Cluster i has vectors of
c = d / factor^i elements.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.derived import cutoffs
from famjax.config.schema import ModelConfig
from famjax.core.types import Array, acc_dtype, compute_dtype
from famjax.layers.linear import Linear
from famjax.ops.lookup import look_up
from famjax.ops.losses import select_logit
from famjax.ops.weight_einsum import weight_einsum


class Cluster(nnx.Module):
    """The s words of one cluster: a table [s c], and a projection [c d] if `projected`.

    The table is initialized as N(0, 1/c) and the projection as N(0, 1/d). The elements of a word's
    vector are then N(0, 1/d) as in a plain embedding, and the word's logit for a normalized x has
    variance 1.
    """

    def __init__(
        self, size: int, c: int, d: int, *, projected: bool, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.dtype = dtype
        self.table = nnx.Param(jax.random.normal(rngs.params(), (size, c)) * c**-0.5)
        kernel = jax.random.normal(rngs.params(), (c, d)) * d**-0.5 if projected else None
        self.projection = None if kernel is None else nnx.Param(kernel)

    def embed(self, words: Array, mask: Array) -> Array:
        """Embed word indices of this cluster: [...] -> [... d]; 0 where `mask` [...] is False."""
        rows = look_up(self.table[...], jnp.where(mask, words, 0)).astype(self.dtype)
        rows = jnp.where(mask[..., None], rows, 0)
        if self.projection is None:
            return rows
        return jnp.einsum("...c,cd->...d", rows, self.projection[...].astype(self.dtype))

    def logits(self, x: Array, *, projected: bool) -> Array:
        """Return the logits of the cluster's words, in float32 or wider: [... d] -> [... s].

        Args:
          projected: whether to apply the transposed projection, if there is one.
        """
        if projected and self.projection is not None:
            x = jnp.einsum("...d,cd->...c", x, self.projection[...].astype(self.dtype))
        table = self.table[...].astype(self.dtype)
        return weight_einsum("...c,cs->...s", x, table.T, acc_dtype(x))


def _make_clusters(config: ModelConfig, *, first_projected: bool, rngs: nnx.Rngs) -> nnx.List:
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
    """Embedding whose clusters, including the first, are projected to the model's width.

    Args:
      config: the model's config; its vocab_size, v, must not be 0.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.starts = (0, *cutoffs(config))
        self.clusters = _make_clusters(config, first_projected=True, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        """Embed tokens: [...] -> [... d]."""
        index = cluster_index(tokens, self.starts)
        parts = [
            cluster.embed(tokens - start, index == i)
            for i, (cluster, start) in enumerate(zip(self.clusters, self.starts, strict=True))
        ]
        return sum(parts[1:], parts[0])


class AdaptiveSoftmax(nnx.Module):
    """Computes p(word) by the head, or as p(cluster) by the head times p(word | cluster) by a tail.

    The head has the first cluster's words and one entry for each other cluster, which has a tail
    that projects d -> c -> s. The head's words have no projection, as in fairseq and PyTorch; so
    tied embeddings share the tables and the tails' projections, but not the first projection.

    Every cluster is computed for every token and masked, since shapes are static. The savings come
    from the narrower tables.

    Args:
      config: the model's config; its vocab_size, v, must not be 0.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d = config.width
        self.starts = (0, *cutoffs(config))
        tails = len(self.starts) - 1
        dtype = compute_dtype(config.dtype)
        self.entries = Linear("...d,dn->...n", (d, tails), d, dtype=dtype, rngs=rngs)
        self.clusters = (
            None if config.tied else _make_clusters(config, first_projected=False, rngs=rngs)
        )

    def logits(self, x: Array, embedding: AdaptiveEmbedding) -> tuple[Array, list[Array]]:
        """Return the logits of the head [... s+n], for n tails, and of each tail [... s].

        They are in float32 or wider.

        Args:
          x: [... d], normalized.
          embedding: provides the clusters if the model is tied.
        """
        first, *rest = embedding.clusters if self.clusters is None else self.clusters
        entries = self.entries(x, acc_dtype(x))
        head = jnp.concatenate([first.logits(x, projected=False), entries], -1)
        return head, [cluster.logits(x, projected=True) for cluster in rest]

    def log_probs(self, x: Array, embedding: AdaptiveEmbedding) -> Array:
        """Return log p of every word: [... v]."""
        head, tails = self.logits(x, embedding)
        num_words = head.shape[-1] - len(tails)
        head = head - _log_sum(head)[..., None]
        parts = [
            head[..., num_words + i, None] + (tail - _log_sum(tail)[..., None])
            for i, tail in enumerate(tails)
        ]
        return jnp.concatenate([head[..., :num_words], *parts], -1)

    def losses(self, x: Array, targets: Array, embedding: AdaptiveEmbedding) -> tuple[Array, Array]:
        """Return -log p(target) in nats, and whether the target is the argmax.

        This does not compute log p of all words.

        Args:
          x: [... d], normalized; targets: [...].

        Returns:
          Two [...], float and bool.
        """
        head, tails = self.logits(x, embedding)
        num_words = head.shape[-1] - len(tails)
        index = cluster_index(targets, self.starts)
        total = _log_sum(head)
        target_log_prob = (
            select_logit(head, jnp.where(index == 0, targets, num_words + index - 1)) - total
        )
        best_log_prob = head[..., :num_words].max(-1) - total
        for i, tail in enumerate(tails):
            within = _log_sum(tail)
            inner = select_logit(tail, targets - self.starts[i + 1]) - within
            target_log_prob = jnp.where(index == i + 1, target_log_prob + inner, target_log_prob)
            # summed in the same order as for the target, so that ties are exact
            best_log_prob = jnp.maximum(
                best_log_prob, (head[..., num_words + i] - total) + (tail.max(-1) - within)
            )
        return -target_log_prob, target_log_prob >= best_log_prob


def cluster_index(tokens: Array, starts: tuple[int, ...]) -> Array:
    """Return the cluster of each token: [...] -> [...] int32."""
    edges = jnp.asarray(starts[1:], tokens.dtype)
    return (tokens[..., None] >= edges).sum(-1, dtype=jnp.int32)


def _log_sum(logits: Array) -> Array:
    return jax.nn.logsumexp(logits, axis=-1)

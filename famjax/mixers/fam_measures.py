"""Measures of a FAM, and its auxiliary losses.

TransformerFAM tried the first two losses and dropped them (C.4, C.5).

Diversity (Equations 2a, 2b): the attention of a block should reach all of its keys equally. Let
p_hlk be the weight of key k for query l in head h. The queries are those of the block's w tokens
and of the f memory tokens; the keys are all keys that they attend to, including those of memory
segments and FAMs:

    p_k = 1 / (H L) sum_h sum_l p_hlk,      L_d = mean over blocks of sum_k p_k log p_k

Reconstruction: the memory that a block leaves should contain what the block has computed. The
block's queries attend to its F_tau alone, and the rest of the layer is applied as usual:

    A^_i = SelfAttention(q_i, K_tau^F, V_tau^F) + x_i,    y^_i = FF(PreLN(A^_i)) + A^_i
    L_r = mean over blocks, tokens and elements of (y^_i - y_i)^2

C.5 says "autoregressively from the updated FAM and the query sequence". Keys of earlier tokens are
left out here, because a block could be reconstructed from them without a memory. C.5 does not say
where gradients flow. Here y is a constant, so that the loss does not pull outputs towards what the
memory can express; queries, projections and the layers below do receive its gradient.

Writing (not in the paper): the mean gate of the update (`model.fam_update=gated`), over memory
tokens and all blocks but a document's first. It closes gates for text that is never asked about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from famjax.core.lanes import select_rows
from famjax.core.types import Array, Context, param_dtype
from famjax.layers.mlp import FeedForward
from famjax.mixers.blocks import BlockInputs
from famjax.mixers.fam_scan import BlockFams, scan_call
from famjax.mixers.mixer import BlockWeights, MemoryLosses, mean_where
from famjax.ops.attention import attention_weights

if TYPE_CHECKING:
    from famjax.mixers.fam import Fam, FamState


def attention_mass(mixer: Fam, x: Array, state: FamState, ctx: Context, mlp: FeedForward) -> Array:
    """Return the mean share of attention weights on the FAM: a scalar."""
    inputs, _, extra = scan_call(mixer, x, state, ctx, mlp)
    q, k, _, mask = mixer.window.attention_inputs(inputs, state.window, ctx, extra)
    first = mixer.window.segments * mixer.block_len
    weights = attention_weights(q, k, mask, mixer.qkv.cap)
    return weights[..., first : first + mixer.previous * mixer.fam_len].sum(-1).mean()


def block_weights(
    mixer: Fam, x: Array, state: FamState, ctx: Context, mlp: FeedForward
) -> BlockWeights:
    """Return the attention weights of one block [b w d], and of the FAM's update by it."""
    inputs, _, extra = scan_call(mixer, x, state, ctx, mlp)
    weights = mixer.window.weights(inputs, state.window, ctx, extra)
    q, fam_k, _ = mixer.project(state.fam, state.updates)
    if state.summary is not None:
        q, _, _ = mixer.project(state.summary, state.updates)
    keys = jnp.concatenate([fam_k, inputs.seen_k[:, 0]], 1)
    return weights._replace(from_memory=mixer.qkv.weights(q, keys, None))


def memory_gates(mixer: Fam, x: Array, state: FamState, ctx: Context) -> Array | None:
    """Return the gates of the update by one block, [b w d] -> [b f]; None without gates."""
    if mixer.memory_gate is None:
        return None
    inputs = mixer.window.project_blocks(x, state.window, ctx)
    fam = state.fam
    keys, values = inputs.seen_k[:, 0], inputs.v[:, 0]
    attended = mixer.attend_block(fam, mixer.project(fam, state.updates), keys, values)
    gates = mixer.memory_gate(attended)[..., 0]
    return select_rows(state.updates > 0, gates, 1)


def memory_losses(
    mixer: Fam, x: Array, y: Array, state: FamState, ctx: Context, mlp: FeedForward
) -> MemoryLosses:
    """Return the losses of a call.

    Args:
      x, y: [b n*w d], the layer's input and output.
    """
    inputs, fams, extra = scan_call(mixer, x, state, ctx, mlp, keep=True)
    assert fams.before is not None
    assert fams.after is not None
    is_whole = inputs.blocks.valid == mixer.block_len  # [b n]

    query = mixer.first_memory(ctx.prompt) if mixer.reads_prompt else fams.before
    assert query is not None
    if mixer.reads_prompt and query.ndim == 3:
        # with random position offsets each row has its own prompt
        query = query[:, None]
    fam_q, _, _ = mixer.project(jnp.broadcast_to(query, fams.before.shape), fams.updates)
    q, keys, _, mask = mixer.window.attention_inputs(inputs, state.window, ctx, extra)
    # all keys of the FAM's queries; for the tokens' queries, they come last
    fam_keys = jnp.concatenate([fams.k, inputs.seen_k], 2)
    mass = _key_mass(attention_weights(q, keys, mask, mixer.qkv.cap))
    mass = mass.at[..., -fam_keys.shape[2] :].add(
        _key_mass(attention_weights(fam_q, fam_keys, None, mixer.qkv.cap))
    )
    queries = q.shape[2] + fam_q.shape[2]
    diversity = negative_entropy(mass / (q.shape[3] * queries))

    after_k, after_v = mixer.project(fams.after, fams.updates + 1)[1:]
    # from positions relative to the next block to positions relative to the block itself
    after_k = mixer.qkv.rotate(after_k, jnp.full(mixer.fam_len, mixer.block_len))
    attended = mixer.qkv.attend(inputs.q, after_k, after_v).reshape(*x.shape[:2], *q.shape[3:])
    rebuilt = mlp(mixer.qkv.output_projection(attended, x), x)
    error = jnp.square(rebuilt - jax.lax.stop_gradient(y)).astype(param_dtype())
    return MemoryLosses(
        mean_where(diversity, is_whole),
        mean_where(error, is_whole),
        _mean_gate(mixer, inputs, fams),
    )


def _mean_gate(mixer: Fam, inputs: BlockInputs, fams: BlockFams) -> Array | None:
    """Return the mean gate of all updates except by documents' first blocks, which have no gate."""
    if mixer.memory_gate is None:
        return None
    assert fams.before is not None
    # blocks as rows
    rows = jax.tree.map(
        lambda a: a.reshape(-1, *a.shape[2:]),
        (fams.before, fams.updates, inputs.seen_k, inputs.v),
    )
    fam, updates, k, v = rows
    gates = mixer.memory_gate(mixer.attend_block(fam, mixer.project(fam, updates), k, v))
    is_gated = (inputs.blocks.valid == mixer.block_len) & (fams.updates > 0)
    return mean_where(gates, is_gated)


def negative_entropy(p: Array) -> Array:
    """Return sum_k p_k log p_k in nats, with 0 log 0 = 0: [... k] -> [...]."""
    return (p * jnp.log(jnp.where(p > 0, p, 1))).sum(-1)


def _key_mass(weights: Array) -> Array:
    """Sum weights [... g r t s] over heads and queries: [... s]."""
    return weights.sum((-4, -3, -2)).astype(param_dtype())

"""Comparison with `feedback-transformer-pytorch` at equal sizes and mathematics.

That package runs one token at a time (`seq_len=1`), and eagerly, as its users run it. Remaining
differences of the package:

    positions    T5's bucketed bias per head; here learned vectors added to the keys, which is one
                 more product
    memory       no norm before its keys and values; here there is one
    biases       in the feed-forward, of the attention output and of an untied head
    gelu         exact; here the tanh approximation
    first token  attends to nothing and skips the output bias
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.bench.timing import PairedTimes, compare_times, time_interleaved
from famjax.config.schema import ArchConfig, MeshConfig, ModelConfig
from famjax.core.optional import missing_modules
from famjax.core.types import Context, Params
from famjax.models.language_model import LanguageModel
from famjax.parallel import sharding, traced
from famjax.processes import runtime
from famjax.stacks.feedback import Feedback

PEERS = ("torch", "feedback_transformer_pytorch")
NAME = "feedback-transformer-pytorch"
DIFFERENCES = "T5's bias for learned distances, memory not normed, linear biases, exact gelu"
WIDTHS = (128, 256)
AIM = 5.0


class FeedbackPeer(NamedTuple):
    """Forward and backward pass of the mean loss, in the other package and in famjax.

    Attributes:
      width: width of the models.
      time: times of the package, and of famjax; the ratio is the speedup of famjax.
      max_difference: largest difference of logits with the same weights, relative to their range.
    """

    width: int
    time: PairedTimes
    max_difference: float


def is_installed() -> bool:
    """Return whether the packages of `measure_peers` are installed."""
    return not missing_modules(PEERS)


def measure_peers(
    model: ModelConfig, batch: int, length: int, repetitions: int
) -> Iterator[FeedbackPeer]:
    """Measure both packages at each of `WIDTHS`; all other sizes are those of `model`."""
    for width in WIDTHS:
        peer = match_peer(replace(model, width=width))
        tokens = _tokens(peer, batch, length)
        times = time_interleaved(
            {"theirs": _peer_step(peer, tokens), "ours": _famjax_step(peer, tokens)},
            repetitions,
        )
        max_difference = check_peer(peer, 2, min(length, 2 * peer.feedback.span, 40))
        yield FeedbackPeer(width, compare_times(times["theirs"], times["ours"]), max_difference)


def match_peer(model: ModelConfig) -> ModelConfig:
    """Return the config with the mathematics closest to the package's."""
    feedback = replace(
        model.feedback, shared_kv=True, composition="all", positions="learned", sweeps=0
    )
    # the package's feed-forward width and norm epsilon are fixed
    return replace(
        model,
        stack="feedback",
        feedback=feedback,
        kv_heads=0,
        head_dim=0,
        mlp="geglu",
        mlp_width=4 * model.width,
        norm="layernorm",
        tied=False,
        arch=ArchConfig(norm_eps=1e-5, embed_scale=1.0),
    )


def _tokens(model: ModelConfig, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, model.vocab_size, (batch, length), np.int32)


def _peer_model(model: ModelConfig) -> Any:
    import feedback_transformer_pytorch
    import torch

    torch.manual_seed(0)
    return feedback_transformer_pytorch.FeedbackTransformer(
        num_tokens=model.vocab_size,
        dim=model.width,
        depth=model.layers,
        seq_len=1,
        mem_len=model.feedback.span,
        heads=model.heads,
        dim_head=model.width // model.heads,
    )


def _peer_step(model: ModelConfig, tokens: np.ndarray) -> Callable[[], Any]:
    import torch

    torch.set_num_threads(runtime.count_cores())
    net, ids = _peer_model(model), torch.tensor(tokens.astype(np.int64))

    def run() -> None:
        net.zero_grad(set_to_none=True)
        logits = net(ids)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()

    return run


def _famjax_step(model: ModelConfig, tokens: np.ndarray) -> Callable[[], Any]:
    graph, params = nnx.split(LanguageModel(model, rngs=nnx.Rngs(0)))
    mesh = sharding.make_mesh(MeshConfig())
    batch = jax.device_put(tokens, sharding.batch_sharding(mesh, len(tokens)))
    params = jax.device_put(params, sharding.replicated(mesh))

    def gradients(params: Params, tokens: jax.Array) -> Any:
        def loss(params: Params) -> jax.Array:
            model = nnx.merge(graph, params)
            x, _ = model.stack(model.embed(tokens), model.init_state(len(tokens)), Context())
            return model.losses(x, tokens)[0].mean()

        return jax.grad(loss)(params)

    compiled = jax.jit(traced.with_mesh(mesh, gradients))
    return lambda: compiled(params, batch)


def check_peer(model: ModelConfig, batch: int, length: int) -> float:
    """Compare the logits of both with the same weights in float32, without their differences.

    Positions and biases are zero; in the package, the memory is normed before its keys and values,
    and gelu is the tanh approximation.

    Returns:
      The largest difference, relative to the logits' range.
    """
    import torch

    module = LanguageModel(match_peer(model), rngs=nnx.Rngs(0))
    stack = module.stack
    assert isinstance(stack, Feedback)
    assert stack.distances is not None
    stack.distances[...] = jnp.zeros_like(stack.distances[...])
    net, tokens = _peer_model(model), _tokens(model, batch, length)
    with torch.no_grad():
        _copy_weights(net, module)
        theirs = _evaluate_peer(net, torch.tensor(tokens.astype(np.int64))).numpy()
    ours, _ = module(jnp.asarray(tokens), module.init_state(batch))
    return float(np.abs(np.asarray(ours) - theirs).max() / np.ptp(theirs))


def _evaluate_peer(net: Any, tokens: Any) -> Any:
    """Return the package's logits, with the memory normed and gelu approximated."""
    import torch
    from torch.nn import functional

    plain = net.shared_kv_proj
    width = plain.in_features
    net.shared_kv_proj = torch.nn.Sequential(
        torch.nn.LayerNorm(width, elementwise_affine=False), plain
    )

    class Gate(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            x, gate = x.chunk(2, dim=-1)
            return functional.gelu(gate, approximate="tanh") * x

    for _, ff in net.layers:
        ff.fn.fn.net[1] = Gate()
    return net(tokens)


def _copy_weights(net: Any, module: LanguageModel) -> None:
    """Copy famjax's weights into the package's modules, and zero its other parameters."""
    stack: Any = module.stack
    head: Any = module.head
    layers, keys, width = stack.layers[0], stack.keys, net.token_emb.weight.shape[1]
    for parameter in net.parameters():
        if parameter.ndim == 1:
            parameter.zero_()
    norms = [net.to_logits[0]]
    _copy(net.token_emb.weight, module.embedding)
    _copy(net.to_logits[1].weight, head.kernel[...].T)
    net.pos_emb.relative_attention_bias.weight.zero_()
    both = [kernel[...].reshape(width, -1) for kernel in (keys.k.kernel, keys.v.kernel)]
    _copy(net.shared_kv_proj.weight, jnp.concatenate(both, 1).T)
    for i, (attend, ff) in enumerate(net.layers):
        attend = attend.fn.fn  # inside SkipIf, and inside the residual
        ff = ff.fn
        norms += [attend.norm, ff.norm]
        _copy(attend.fn.to_q.weight, layers.qkv.q.kernel[i].reshape(width, -1).T)
        _copy(attend.fn.to_out.weight, layers.qkv.out.kernel[i].reshape(-1, width).T)
        up = (layers.mlp.up.kernel[i], layers.mlp.gate.kernel[i])
        _copy(ff.fn.net[0].weight, jnp.concatenate(up, 1).T)
        _copy(ff.fn.net[3].weight, layers.mlp.down.kernel[i].T)
    for norm in norms:
        norm.weight.fill_(1.0)


def _copy(parameter: Any, array: Any) -> None:
    import torch

    parameter.copy_(torch.tensor(np.asarray(array)))

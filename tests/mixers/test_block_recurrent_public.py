"""`model.mixer=block_recurrent` and the package block-recurrent-transformer-pytorch.

Skipped unless it is installed. It imports only PyTorch, einops and beartype, but depends on a
package that brings CUDA:

    pip install --no-deps block-recurrent-transformer-pytorch
    pip install einops

The package has the fixed gate only, and its g is our 1 - g. The outputs of its attentions pass
through two matrices, whose product is our W_z. It has a single key head. Three differences are
removed: the normalization of the recurrent layer's keys and queries (an argument of its layers,
which its model sets), xPos's scales, and the exact GELU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import public_weights as public
import pytest

from famjax.config.schema import ArchConfig, ModelConfig

pytest.importorskip("torch")
package = pytest.importorskip("block_recurrent_transformer_pytorch")
import public_torch  # noqa: E402, needs PyTorch
import torch  # noqa: E402

B, W, F, WIDTH, HEADS, VOCAB = 2, 5, 3, 16, 2, 11
E = WIDTH // HEADS
WHOLE = 4 * W  # tokens in whole blocks; the last block is incomplete
LENGTH = WHOLE + 3
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(B, LENGTH))
PROBE = np.random.default_rng(1).normal(size=(B, WHOLE, VOCAB))
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    layers=2,
    width=WIDTH,
    heads=HEADS,
    kv_heads=1,
    mlp_width=2 * WIDTH,
    mlp="geglu",
    norm="layernorm",
    mixer="block_recurrent,bswa",
    block_len=W,
    memory_segments=1,
    fam_len=F,
    tied=False,
    arch=ArchConfig(norm_eps=1e-5, embed_scale=1.0),
)


def their_model() -> Any:
    """Return the package's model in float64, without the differences, with weights drawn anew."""
    model = package.BlockRecurrentTransformer(
        num_tokens=VOCAB,
        dim=WIDTH,
        depth=2,
        dim_head=E,
        heads=HEADS,
        ff_mult=3,
        max_seq_len=WHOLE,
        block_width=W,
        recurrent_layers=(1,),
        num_state_vectors=F,
    ).double()
    public_torch.approximate_gelu(model)
    for module in model.modules():
        if hasattr(module, "qk_rmsnorm"):
            module.qk_rmsnorm = False
    rotary = model.rotary_pos_emb
    rotary.inv_freq = 10_000.0 ** (-torch.arange(E // 2).double() / (E // 2))
    rotary.scale = torch.ones(E // 2).double()
    return model


def rename(weights: public.Weights) -> public.Weights:
    """Return the parameters of our model."""
    heads, zeros = public_torch.split_heads, jnp.zeros(WIDTH)

    def qkv(theirs: str, ours: str) -> public.Weights:
        kv = weights[f"{theirs}.to_kv.weight"]
        return {
            f"{ours}.norm.scale": weights[f"{theirs}.norm.gamma"],
            f"{ours}.norm.bias": zeros,
            f"{ours}.q.kernel": heads(weights[f"{theirs}.to_q.weight"], HEADS),
            f"{ours}.k.kernel": heads(kv[:E], 1),
            f"{ours}.v.kernel": heads(kv[E:], 1),
            f"{ours}.out.kernel": public_torch.merge_heads(
                weights[f"{theirs}.to_out.weight"][:, :WIDTH], HEADS
            ),
        }

    def mlp(theirs: str, ours: str) -> public.Weights:
        up = weights[f"{theirs}.1.weight"]
        return {
            f"{ours}.norm.scale": weights[f"{theirs}.0.gamma"],
            f"{ours}.norm.bias": zeros,
            f"{ours}.up.kernel": up[: 2 * WIDTH].T,
            f"{ours}.gate.kernel": up[2 * WIDTH :].T,
            f"{ours}.down.kernel": weights[f"{theirs}.3.weight"].T,
        }

    def cell(theirs: str, ours: str) -> public.Weights:
        kv = weights[f"{theirs}.state_to_kv.weight"]
        # each head has what it reads from the states, then what it reads from the block
        out = public_torch.merge_heads(weights[f"{theirs}.to_state_out.weight"], HEADS)
        out = out.reshape(HEADS, 2, E, WIDTH).swapaxes(0, 1).reshape(2 * HEADS, E, WIDTH)
        return {
            f"{ours}.norm.scale": weights[f"{theirs}.state_norm.gamma"],
            f"{ours}.norm.bias": zeros,
            f"{ours}.initial": weights[f"{theirs}.init_state"],
            f"{ours}.ids": weights[f"{theirs}.state_pos_ids"],
            f"{ours}.q.kernel": heads(weights[f"{theirs}.state_to_q.weight"], HEADS),
            f"{ours}.block_q.kernel": heads(weights[f"{theirs}.q_from_state.weight"], HEADS),
            f"{ours}.token_q.kernel": heads(weights[f"{theirs}.q_to_state.weight"], HEADS),
            f"{ours}.k.kernel": heads(kv[:E], 1),
            f"{ours}.v.kernel": heads(kv[E:], 1),
            f"{ours}.z.kernel": out @ weights[f"{theirs}.state_out_to_gate.weight"].T,
            f"{ours}.z.bias": weights[f"{theirs}.state_out_to_gate.bias"],
            f"{ours}.gate": -weights[f"{theirs}.learned_ema_beta"],
            f"{ours}.token_out.kernel": public_torch.merge_heads(
                weights["layers.0.0.to_out.weight"][:, WIDTH:], HEADS
            ),
        }

    layers = {
        **qkv("layers.0.0", "stack.layers.0.mixer.window.qkv"),
        **cell("layers.0.0.state_container", "stack.layers.0.mixer.recurrent_cell"),
        **mlp("layers.0.1", "stack.layers.0.mlp"),
        **qkv("layers.1.0", "stack.layers.1.mixer.qkv"),
        **mlp("layers.1.1", "stack.layers.1.mlp"),
    }
    return {
        "embedding": weights["token_emb.weight"],
        "head.kernel": weights["to_logits.1.weight"].T,
        "norm.scale": weights["to_logits.0.gamma"],
        "norm.bias": zeros,
        **{name: a[None] for name, a in layers.items()},  # one repeat of the pattern
    }


def test_the_package_has_equal_logits_states_and_gradients() -> None:
    model = their_model()
    weights = public_torch.draw_weights(model)
    # but those of normalized queries and keys
    weights = {name: a for name, a in weights.items() if not name.endswith(("q_scale", "k_scale"))}
    tokens = torch.tensor(TOKENS)
    y, window, states = model(tokens[:, :WHOLE])
    rest, _, _ = model(tokens[:, WHOLE:], xl_memories=window, states=states)
    (y * torch.tensor(PROBE)).sum().backward()
    values = {"logits": y, "states": states[0], "logits of steps": rest}
    expected = {name: public_torch.numpy(a) for name, a in values.items()}
    expected["gradient"] = public_torch.read_gradients(model)
    with jax.enable_x64(True):
        found = read_ours(public.graph(CONFIG), weights)
    public.check(found, expected, 1e-11)


def read_ours(graph: Any, weights: public.Weights) -> dict[str, Any]:
    """Return logits, the states after whole blocks, and the gradient for weights by their names.

    The last block is read token by token.
    """

    def whole(weights: public.Weights) -> Any:
        model = public.model_with(graph, rename(weights))
        logits, state = model(TOKENS[:, :WHOLE], model.init_state(B))
        return (logits * PROBE).sum(), (logits, state)

    @jax.jit
    def step(weights: public.Weights, tokens: np.ndarray, state: Any) -> Any:
        return public.model_with(graph, rename(weights)).step(tokens, state)

    loss = jax.jit(jax.value_and_grad(whole, has_aux=True))
    (_, (logits, state)), gradient = loss(weights)
    found = {"logits": logits, "states": state[0].states[0], "gradient": gradient}
    rest = []
    for t in range(WHOLE, LENGTH):
        y, state = step(weights, TOKENS[:, t : t + 1], state)
        rest.append(y)
    return found | {"logits of steps": jnp.concatenate(rest, 1)}


def test_its_logits_depend_on_the_states() -> None:
    """So those above would differ if states were not passed on."""
    model = their_model()
    public_torch.draw_weights(model)
    tokens = torch.tensor(TOKENS)
    _, window, states = model(tokens[:, :WHOLE])
    y, _, _ = model(tokens[:, WHOLE:], xl_memories=window, states=states)
    fresh, _, _ = model(tokens[:, WHOLE:], xl_memories=window)
    assert (y - fresh).abs().max() > 0.1

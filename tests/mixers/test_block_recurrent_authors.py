"""`model.mixer=block_recurrent` and the authors' layer, with equal weights and both gates.

Skipped unless a checkout of https://github.com/google-research/meliad is in PYTHONPATH, with what
it imports: gin-config, clu, tensorboard, and the `seqio` extra.

Their layer is set to a window of one block, no positions and plain keys: with a longer window
states also read its previous block, and by default their keys and queries are normalized. Their
gate "bias" is our fixed one. Two differences have no option and are removed: their tokens do not
attend to themselves, and their gate "lstm" has a tanh only in the configuration "single".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import public_weights as public
import pytest

from famjax.config.schema import ArchConfig, ModelConfig
from famjax.core.types import Array, Context

gin = pytest.importorskip("gin")
transformer_layer = pytest.importorskip("transformer.memory.transformer_layer")
from transformer import nn_components, position  # noqa: E402, of the authors

B, W, F, WIDTH, HEADS = 2, 5, 3, 16, 2
BLOCKS = 4
X = np.random.default_rng(0).normal(size=(B, BLOCKS * W, WIDTH)).astype(np.float32)
PROBE = np.random.default_rng(1).normal(size=X.shape).astype(np.float32)
NO_START = np.zeros(B, bool)


@pytest.fixture(params=["fixed", "lstm"])
def gate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return our name of a gate, with the authors' layer configured for it."""

    def causal_mask(queries: int, keys: int, window_length: int) -> np.ndarray:
        return np.tri(queries, keys, dtype=bool)

    def projection(features: int, *, gate_type: str, **given: Any) -> Any:
        given["final_activation"] = "tanh" if gate_type == "lstm" else None
        bias = gate_type != "residual"  # the states have one, tokens do not
        given |= {"num_layers": 1, "hidden_activation": None, "use_bias": bias}
        return nn_components.MLP(features, gate_type=gate_type, **given)

    def feed_forward(features: int, **given: Any) -> Any:
        return nn_components.MLP(features, num_layers=2, use_bias=False, **given)

    monkeypatch.setattr(position, "causal_mask", causal_mask)
    gin.bind_parameter("MemTransformerBase.attn_mlp_factory", projection)
    gin.bind_parameter("MemTransformerBase.ffn_factory", feed_forward)
    gin.bind_parameter("MemTransformerBase.normalize_keys", False)
    yield request.param
    gin.clear_config()


def their_layer(gate: str) -> Any:
    return transformer_layer.TransformerLayer(
        mode="test",
        batch_size=B,
        embedding_size=WIDTH,
        recurrent_attention=True,
        num_heads=HEADS,
        head_size=WIDTH // HEADS,
        mlp_dim=2 * WIDTH,
        window_length=W,
        use_long_xl_architecture=False,
        relative_position_type=None,
        recurrent_num_states=F,
        recurrent_gate_type={"fixed": "bias", "lstm": "lstm"}[gate],
        recurrent_skip_ffn=True,
        supported_modes_for_cache=(),
    )


def read_theirs(layer: Any, params: Any) -> tuple[Array, Array]:
    """Return the outputs of all blocks of X, and the states after them."""
    states = jnp.broadcast_to(params["recurrent_initial_state"], (B, F, WIDTH))
    ys = []
    for block in np.split(X, BLOCKS, 1):
        given = {"global_info": {}, "window_state": (None, states)}
        y, _, (_, states), *_ = layer.apply({"params": params}, block, NO_START, **given)
        ys.append(y)
    return jnp.concatenate(ys, 1), states


def rename(params: Any) -> public.Weights:
    """Return the parameters of our model; those outside of the stack do not matter."""

    def heads(part: Any, name: str) -> Array:
        return part["_kvq"][name]["kernel"].reshape(WIDTH, HEADS, -1)

    def to_width(kernel: Array) -> Array:
        """[h*e d] or [2h*e d], with e last in each head."""
        return kernel.reshape(-1, WIDTH // HEADS, WIDTH)

    tokens, states = params["tbase"], params["recurrent_tbase"]
    out = to_width(tokens["post_attn_mlp"]["output_layer"]["kernel"])
    from_heads = {"z": "output_layer", "keep": "forget_gate", "write": "input_gate"}
    qkv, cell = "mixer.window.qkv", "mixer.recurrent_cell"
    layer = {
        f"{qkv}.norm.scale": tokens["_kvq"]["pre_attn_layernorm"]["scale"],
        f"{qkv}.q.kernel": heads(tokens, "queries_layer"),
        f"{qkv}.k.kernel": heads(tokens, "keys_layer"),
        f"{qkv}.v.kernel": heads(tokens, "values_layer"),
        f"{qkv}.out.kernel": out[:HEADS],
        f"{cell}.token_q.kernel": heads(tokens, "queries2_layer"),
        f"{cell}.token_out.kernel": out[HEADS:],
        f"{cell}.norm.scale": states["_kvq"]["pre_attn_layernorm"]["scale"],
        f"{cell}.initial": params["recurrent_initial_state"],
        f"{cell}.ids": states["_kvq"]["position_embeddings"],
        f"{cell}.q.kernel": heads(states, "queries_layer"),
        f"{cell}.block_q.kernel": heads(states, "queries2_layer"),
        f"{cell}.k.kernel": heads(states, "keys_layer"),
        f"{cell}.v.kernel": heads(states, "values_layer"),
        "mlp.norm.scale": tokens["pre_ffn_layernorm"]["scale"],
        "mlp.up.kernel": tokens["ffn"]["hidden0"]["kernel"],
        "mlp.down.kernel": tokens["ffn"]["output_layer"]["kernel"],
    }
    for ours, theirs in from_heads.items():
        if (given := states["post_attn_mlp"].get(theirs)) is not None:
            layer[f"{cell}.{ours}.kernel"] = to_width(given["kernel"])
            layer[f"{cell}.{ours}.bias"] = given["bias"]
    if "gate_bias" in states["post_attn_mlp"]:
        layer[f"{cell}.gate"] = states["post_attn_mlp"]["gate_bias"]
    return {
        "embedding": jnp.zeros((1, WIDTH)),
        "norm.scale": jnp.ones(WIDTH),
        **{f"stack.layers.0.{name}": a[None] for name, a in layer.items()},
    }


def ours(gate: str) -> Any:
    return public.graph(
        ModelConfig(
            vocab_size=1,
            layers=1,
            width=WIDTH,
            heads=HEADS,
            mlp_width=2 * WIDTH,
            mlp="relu",
            mixer="block_recurrent",
            block_len=W,
            memory_segments=0,
            fam_len=F,
            recurrent_gate=gate,
            dtype="float32",
            arch=ArchConfig(rotary_fraction=0.0),
        )
    )


def drawn(layer: Any) -> Any:
    """Return random parameters of the authors' layer, with non-trivial norms and biases."""
    given = {"global_info": {}, "window_state": (None, jnp.zeros((B, F, WIDTH)))}
    params = layer.init(jax.random.key(0), X[:, :W], NO_START, **given)["params"]
    rng = np.random.default_rng(2)

    def draw(path: Any, a: Array) -> Array:
        sizes = rng.normal(size=a.shape)
        if path[-1].key == "kernel":
            return jnp.asarray(1.5 * len(a) ** -0.5 * sizes, a.dtype)
        return jnp.asarray(a + 0.3 * sizes, a.dtype)

    return jax.tree_util.tree_map_with_path(draw, params)


def test_the_authors_layer_has_equal_outputs_states_and_gradients(gate: str) -> None:
    layer, graph = their_layer(gate), ours(gate)
    params = drawn(layer)

    def read_ours(params: Any) -> tuple[Array, Array]:
        model = public.model_with(graph, rename(params))
        y, state = model.stack(X, model.init_state(B), Context())
        return y, state[0].states[0]

    def values_and_gradient(read: Any) -> Any:
        def loss(params: Any) -> Any:
            y, states = read(params)
            return (y * PROBE).sum(), {"outputs": y, "states": states}

        (_, values), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        return values | {"gradient": gradient}

    found = values_and_gradient(read_ours)
    expected = values_and_gradient(lambda params: read_theirs(layer, params))
    public.check(found, expected, 1e-5)

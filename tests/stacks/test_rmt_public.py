"""RMT and the package recurrent-memory-transformer-pytorch, with equal weights.

Skipped unless it is installed; the `dev` extra has it.

The package's options take the paper's recurrence: memory tokens see each other in both directions,
the tokens that write the next memory begin as the last one, and gradients flow through all
segments. Four differences have no option, and hooks remove them: a null key, which each query may
attend to besides the tokens; the mixture of a layer's values with the first layer's; the exact
GELU; and rotary positions, which are 0 for memory tokens and from 10,000 on for the others. The
package's absolute positions, of tokens in their segment, need no hook.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import public_weights as public
import pytest

from famjax.config.schema import ArchConfig, ModelConfig
from famjax.core.types import Array, Context

pytest.importorskip("torch")
package = pytest.importorskip("recurrent_memory_transformer_pytorch")
import public_torch  # noqa: E402, needs PyTorch
import torch  # noqa: E402

B, W, F, WIDTH, HEADS, LAYERS, VOCAB = 2, 5, 3, 16, 2, 2, 11
WHOLE = 4 * W  # tokens in whole segments; the last segment is incomplete
LENGTH = WHOLE + 3
BASE = 32768.0  # the package's rotary base
TOKENS = np.random.default_rng(0).integers(VOCAB, size=(B, LENGTH))
PROBE = np.random.default_rng(1).normal(size=(B, WHOLE, VOCAB))
POSITIONS = ["absolute", "rotary"]
# weights that ours do not have
ABSENT = {
    *("memory_tokens", "read_memory_emb", "to_logits.bias"),
    *(f"layers.{i}.0.branch.null_kv" for i in range(LAYERS)),
    *(f"layers.{i}.0.branch.learned_value_residual_mix.0.weight" for i in range(1, LAYERS)),
}


class Theirs:
    """The package's model in float64, with weights by their names; `memory` [f d] is the first."""

    def __init__(self, positions: str):
        torch.manual_seed(0)
        self.model = package.RecurrentMemoryTransformer(
            WIDTH,
            num_tokens=VOCAB,
            depth=LAYERS,
            num_memory_tokens=F,
            seq_len=W,
            dim_head=WIDTH // HEADS,
            heads=HEADS,
            ff_mult=3,
            abs_pos_emb=positions == "absolute",
            rotary_pos_emb=positions == "rotary",
            use_xl_memories=False,
            emb_gradient_frac=1.0,
            memory_not_causal=True,
            add_write_to_next_write_mem=True,
            next_write_mem_stop_grad=False,
            num_residual_streams=1,
        ).double()
        self.segments = package.RecurrentMemoryTransformerWrapper(self.model)
        weights = public_torch.draw_weights(self.model)
        self.memory = torch.tensor(np.random.default_rng(2).normal(size=(F, WIDTH)))
        self.memory.requires_grad_()
        self.first = self.memory.expand(B, F, WIDTH)
        self.weights = weights | {"memory": public_torch.numpy(self.memory)}
        with torch.no_grad():
            # ours adds nothing to the memory, and has no bias of logits
            for a in (self.model.memory_tokens, self.model.read_memory_emb):
                a.zero_()
            self.model.to_logits.bias.zero_()
        self._remove_differences()

    def _remove_differences(self) -> None:
        def mask_null_key(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
            mask = kwargs["mask"].clone()
            mask[..., 0] = False
            return args, kwargs | {"mask": mask}

        def count_positions(module: Any, args: Any) -> torch.Tensor:
            (given,) = args
            has_null_key = int(given[0] != 0)  # other keys, and queries, begin with the memory
            return torch.arange(len(given)).double() - has_null_key

        public_torch.approximate_gelu(self.model)
        for layer, _ in self.model.layers:
            layer.branch.attend.register_forward_pre_hook(mask_null_key, with_kwargs=True)
            if (mix := layer.branch.learned_value_residual_mix) is not None:
                mix.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
        if (rotary := self.model.rotary_pos_emb) is not None:
            half = WIDTH // HEADS // 2
            rotary.inv_freq = BASE ** (-torch.arange(half).double() / half)
            rotary.register_forward_pre_hook(count_positions)

    def gradients(self) -> public.Weights:
        """Return the gradients for the weights that our model has, too."""
        found = public_torch.read_gradients(self.model)
        found = {name: a for name, a in found.items() if name not in ABSENT}
        return found | {"memory": public_torch.numpy(self.memory.grad)}

    def __call__(self, tokens: np.ndarray, memory: torch.Tensor) -> tuple[Any, Any]:
        """Return the logits of a stream of segments, and the memory after it."""
        return self.segments(torch.tensor(tokens), memory)


def ours(positions: str) -> Any:
    return public.graph(
        ModelConfig(
            vocab_size=VOCAB,
            layers=LAYERS,
            width=WIDTH,
            heads=HEADS,
            mlp_width=2 * WIDTH,
            mlp="geglu",
            stack="rmt",
            block_len=W,
            fam_len=F,
            tied=False,
            rope_base=BASE,
            arch=ArchConfig(
                norm_eps=float(torch.finfo(torch.float64).eps),
                embed_scale=1.0,
                rotary_fraction=float(positions == "rotary"),
            ),
        )
    )


def rename(weights: public.Weights) -> public.Weights:
    """Return the parameters of our model, with the first memory as the weight `memory`."""

    def stacked(name: str, change: Any = lambda a: a) -> Array:
        return jnp.stack([change(weights[f"layers.{i}.{name}"]) for i in range(LAYERS)])

    def heads(a: Array) -> Array:
        return public_torch.split_heads(a, HEADS)

    qkv, mlp = "stack.transformer.layers.0.mixer.qkv", "stack.transformer.layers.0.mlp"
    kv, up = "0.branch.to_kv.weight", "1.branch.1.weight"
    return {
        "embedding": weights["token_emb.weight"],
        "head.kernel": weights["to_logits.weight"].T,
        "norm.scale": weights["norm.weight"],
        "stack.memory_norm.scale": weights["norm.weight"],
        "stack.prompt": weights["memory"],
        f"{qkv}.norm.scale": stacked("0.branch.norm.weight"),
        f"{qkv}.q.kernel": stacked("0.branch.to_q.weight", heads),
        f"{qkv}.k.kernel": stacked(kv, lambda a: heads(a[:WIDTH])),
        f"{qkv}.v.kernel": stacked(kv, lambda a: heads(a[WIDTH:])),
        f"{qkv}.out.kernel": stacked(
            "0.branch.to_out.weight", lambda a: public_torch.merge_heads(a, HEADS)
        ),
        f"{mlp}.norm.scale": stacked("1.branch.0.weight"),
        f"{mlp}.up.kernel": stacked(up, lambda a: a[: 2 * WIDTH].T),
        f"{mlp}.gate.kernel": stacked(up, lambda a: a[2 * WIDTH :].T),
        f"{mlp}.down.kernel": stacked("1.branch.4.weight", lambda a: a.T),
    }


def embed(model: Any, weights: public.Weights, tokens: np.ndarray) -> Array:
    """Return our embeddings, plus the package's positions in a segment where they are learned."""
    x = model.embed(tokens)
    if "pos_emb.weight" not in weights:
        return x
    return x + jnp.asarray(weights["pos_emb.weight"])[jnp.arange(tokens.shape[1]) % W]


@pytest.mark.long
@pytest.mark.parametrize("positions", POSITIONS)
def test_the_package_has_equal_logits_memories_and_gradients(positions: str) -> None:
    theirs = Theirs(positions)
    y, memory = theirs(TOKENS[:, :WHOLE], theirs.first)
    rest, _ = theirs(TOKENS[:, WHOLE:], memory)
    (y * torch.tensor(PROBE)).sum().backward()
    values = {"logits": y, "memory": memory, "logits of steps": rest}
    expected = {name: public_torch.numpy(a) for name, a in values.items()}
    expected["gradient"] = theirs.gradients()
    with jax.enable_x64(True):
        found = read_ours(ours(positions), theirs.weights)
    for name in ABSENT & set(found["gradient"]):
        del found["gradient"][name]
    public.check(found, expected, 1e-11)


def read_ours(graph: Any, weights: public.Weights) -> dict[str, Any]:
    """Return logits, the memory after whole segments, and the gradient for weights by their names.

    The last segment is read token by token.
    """

    def whole(weights: public.Weights) -> Any:
        model = public.model_with(graph, rename(weights))
        x = embed(model, weights, TOKENS)
        y, state = model.stack(x[:, :WHOLE], model.init_state(B), Context())
        logits = model.logits(y)
        return (logits * PROBE).sum(), (logits, state, x[:, WHOLE:])

    @jax.jit
    def step(weights: public.Weights, x: Array, state: Any) -> Any:
        model = public.model_with(graph, rename(weights))
        y, state = model.stack.step(x, state, Context())
        return model.logits(y), state

    loss = jax.jit(jax.value_and_grad(whole, has_aux=True))
    (_, (logits, state, x)), gradient = loss(weights)
    found = {"logits": logits, "memory": state.memory[0], "gradient": gradient}
    rest = []
    for t in range(LENGTH - WHOLE):
        y, state = step(weights, x[:, t : t + 1], state)
        rest.append(y)
    return found | {"logits of steps": jnp.concatenate(rest, 1)}


@pytest.mark.parametrize("positions", POSITIONS)
def test_its_logits_depend_on_the_memory(positions: str) -> None:
    """So those above would differ if a memory were not passed on."""
    theirs = Theirs(positions)
    y, _ = theirs(TOKENS[:, : 2 * W], theirs.first)
    alone, _ = theirs(TOKENS[:, W : 2 * W], theirs.first)
    assert (y[:, W:] - alone).abs().max() > 0.1

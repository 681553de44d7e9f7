"""How one parameter of ours lies in a Hugging Face checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from famjax.core.config import ModelConfig


@dataclass(frozen=True)
class Tensor:
    """A parameter's name and layout there.

    Attributes:
      name: "{}" stands for the layer.
      turned: a linear map, [outputs inputs] there and [inputs... outputs...] here.
    """

    name: str
    turned: bool = False

    def read(self, there: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return our [shape] of their array; the sizes must agree."""
        return (there.T if self.turned else there).reshape(shape)


# keys are paths of parameters: those of a layer below "layer"
Tensors = dict[str, Tensor]


def llama(model: ModelConfig) -> Tensors:
    """The names that Llama gave and most others took over."""
    kernels = {
        "mixer.qkv.q": "self_attn.q_proj",
        "mixer.qkv.k": "self_attn.k_proj",
        "mixer.qkv.v": "self_attn.v_proj",
        "mixer.qkv.out": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }
    norms = {"mixer.qkv.norm": "input_layernorm", "mlp.norm": "post_attention_layernorm"}
    if model.arch.qk_norm:
        norms |= {
            "mixer.qkv.q_norm": "self_attn.q_norm",
            "mixer.qkv.k_norm": "self_attn.k_norm",
        }
    biases = ["mixer.qkv.q", "mixer.qkv.k", "mixer.qkv.v"] if model.arch.qkv_bias else []
    biases += ["mixer.qkv.out"] if model.arch.out_bias else []
    biases += ["mlp.gate", "mlp.up", "mlp.down"] if model.arch.mlp_bias else []
    layer = "model.layers.{}."
    tensors = {
        "embedding": Tensor("model.embed_tokens.weight"),
        "norm.scale": Tensor("model.norm.weight"),
    }
    if not model.tied:
        tensors["head.kernel"] = Tensor("lm_head.weight", turned=True)
    for ours, theirs in kernels.items():
        tensors[f"layer.{ours}.kernel"] = Tensor(f"{layer}{theirs}.weight", turned=True)
    for ours, theirs in norms.items():
        tensors[f"layer.{ours}.scale"] = Tensor(f"{layer}{theirs}.weight")
    for ours in biases:
        tensors[f"layer.{ours}.bias"] = Tensor(f"{layer}{kernels[ours]}.bias")
    return tensors

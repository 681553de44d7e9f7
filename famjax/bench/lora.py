"""The savings of adapters: a LoRA training step compared with one that trains all weights.

The floor of the ratio is that of the FLOPs. A linear map has three products in training: output,
input gradient and kernel gradient. Frozen weights save the last one, also in the head; attention
scores and the adapters save nothing. If installed, PyTorch's peft is measured with the same
mathematics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from famjax.bench.timing import PairedTimes, time_pair
from famjax.config.resolved import resolve_model
from famjax.config.schema import ArchConfig, Config, LoraConfig, ModelConfig
from famjax.core.optional import missing_modules
from famjax.core.types import tree_bytes
from famjax.train.flops import forward_flops, weight_flops
from famjax.train.program import TrainProgram, make_program
from famjax.train.resolve import resolve

PEERS = ("torch", "transformers", "peft")
# LoRA targets in transformers' Llama: all linear layers
_MAPS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class TrainingFootprint(NamedTuple):
    """The memory of a training step.

    Attributes:
      trained: number of trained parameters.
      optimizer_bytes: size of the optimizer's state.
      step_bytes: XLA's temporary bytes of a step; 0 if unknown.
    """

    trained: int
    optimizer_bytes: int
    step_bytes: int


class LoraTimes(NamedTuple):
    """Training adapters compared with training all weights, in one framework."""

    name: str
    adapters: TrainingFootprint
    everything: TrainingFootprint
    time: PairedTimes


def compare(model: ModelConfig, rank: int, batch: int, length: int, repetitions: int) -> LoraTimes:
    """Measure the training steps of famjax, with AdamW."""
    adapter_config = replace(model, lora=LoraConfig(rank=rank))
    (some, one), (all_, other) = (_famjax_step(m, batch, length) for m in (adapter_config, model))
    return LoraTimes("famjax", some, all_, time_pair(one, other, repetitions))


def flops_floor(model: ModelConfig, rank: int, length: int) -> float:
    """Return the ratio of the FLOPs of a step, including those of the adapters."""
    # with full attention, a token attends to half of the document on average
    resolved = resolve_model(replace(model, mixer="full", capacity=length))
    full, adapters = 3 * forward_flops(resolved), 3 * 2 * adapter_parameters(model, rank)
    return (full - weight_flops(resolved) + adapters) / full


def adapter_parameters(model: ModelConfig, rank: int) -> int:
    """Return the number of parameters of adapters on every linear map."""
    config = Config(model=replace(model, lora=LoraConfig(rank=rank)))
    shapes = jax.eval_shape(_program(config, 1, model.block_len).start)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes.params))


def llama_config(model: ModelConfig) -> ModelConfig:
    """Return a config with the mathematics of transformers' Llama."""
    arch = ArchConfig(embed_scale=1.0)
    return replace(model, mixer="full", mlp="swiglu", norm="rmsnorm", tied=False, arch=arch)


def transformers_llama(model: ModelConfig, tokens: int, **settings: Any) -> Any:
    """Return transformers' config of a Llama of this shape, for documents of `tokens` tokens."""
    import transformers

    model = resolve_model(model)
    return transformers.LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.width,
        intermediate_size=model.mlp_width,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=tokens,
        **settings,
    )


def _program(config: Config, batch: int, length: int) -> TrainProgram:
    data = replace(config.data, layout="packed", batch=batch, length=length)
    resolved = resolve(replace(config, data=data), None, jax.device_count())
    return make_program(resolved, np.ones(config.model.vocab_size, np.int32))


def _famjax_step(
    model: ModelConfig, batch: int, length: int
) -> tuple[TrainingFootprint, Callable[[], Any]]:
    program = _program(Config(model=replace(model, capacity=length)), batch, length)
    state = program.start()
    tokens = _tokens(model, batch, length)
    data = jax.device_put(
        {
            "tokens": tokens,
            "targets": tokens,
            "weights": np.ones((batch, length), np.float32),
            "valid": np.ones((batch, length), bool),
            "reset": np.zeros((batch, length), bool),
        },
        program.batch,
    )
    compiled = program.step.lower(state, data).compile()  # type: ignore[attr-defined]
    memory = compiled.memory_analysis()
    footprint = TrainingFootprint(
        sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        tree_bytes(state.opt_state),
        memory.temp_size_in_bytes if memory else 0,
    )

    def run() -> Any:
        nonlocal state
        state = compiled(state, data)
        return state

    return footprint, run


def compare_peft(
    model: ModelConfig, rank: int, batch: int, length: int, repetitions: int
) -> LoraTimes:
    """Measure the same in PyTorch with transformers and peft, run eagerly, as users run it."""
    (some, one), (all_, other) = (_peft_step(model, r, batch, length) for r in (rank, 0))
    return LoraTimes("PyTorch, peft", some, all_, time_pair(one, other, repetitions))


def has_peers() -> bool:
    """Return whether the packages of `compare_peft` are installed."""
    return not missing_modules(PEERS)


def _peft_step(
    model: ModelConfig, rank: int, batch: int, length: int
) -> tuple[TrainingFootprint, Callable[[], Any]]:
    import peft
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers_llama(model, length, use_cache=False)
    net: Any = transformers.LlamaForCausalLM(config)
    if rank:
        adapters = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=_MAPS)
        net = peft.get_peft_model(net, adapters)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    tokens = torch.tensor(_tokens(model, batch, length).astype(np.int64))

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        net(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()

    run()
    held = [x for s in optimizer.state.values() for x in s.values() if torch.is_tensor(x)]
    size = sum(x.numel() * x.element_size() for x in held)
    return TrainingFootprint(sum(p.numel() for p in trained), size, 0), run


def _tokens(model: ModelConfig, batch: int, length: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, model.vocab_size, (batch, length), np.int32)

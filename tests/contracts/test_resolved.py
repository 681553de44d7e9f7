"""Resolving the model configs of all contract cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from famjax.config.resolved import ResolvedModelConfig, resolve_model
from famjax.config.schema import LinearConfig, LoraConfig, ModelConfig

from .harness import CASES, FAMILIES

LINEAR = {
    f"linear, {kind}": ModelConfig(vocab_size=9, mixer="linear", linear=LinearConfig(kind))
    for kind in ("elu", "rfa")
}
LORA = {"lora": ModelConfig(vocab_size=9, lora=LoraConfig(rank=4))}
MODELS = CASES | FAMILIES | LINEAR | LORA


@pytest.mark.parametrize("name", MODELS)
def test_resolving_again_changes_nothing(name: str) -> None:
    found = resolve_model(MODELS[name])
    assert found is resolve_model(found)
    # nor when loaded from its fields, as from a file
    assert resolve_model(ModelConfig(**vars(found))) == found


@pytest.mark.parametrize("name", MODELS)
def test_no_size_is_left_open(name: str) -> None:
    found = resolve_model(MODELS[name])
    assert isinstance(found, ResolvedModelConfig)
    sizes = (found.kv_heads, found.head_dim, found.mlp_width, found.linear.features)
    assert all(size > 0 for size in sizes)
    assert found.arch.embed_scale > 0
    assert found.arch.query_scale > 0
    assert found.lora.alpha > 0 or not found.lora.rank


def test_what_is_filled_in() -> None:
    model = ModelConfig(width=32, heads=4, linear=LinearConfig("elu"), lora=LoraConfig(rank=3))
    found = resolve_model(model)
    assert (found.kv_heads, found.head_dim, found.mlp_width) == (4, 8, 128)
    assert found.arch == replace(model.arch, embed_scale=32**0.5, query_scale=8.0)
    assert found.linear == replace(model.linear, features=8)
    assert found.lora == replace(model.lora, alpha=3.0)
    given = replace(found, kv_heads=2, mlp_width=7, arch=replace(found.arch, query_scale=6.0))
    assert resolve_model(ModelConfig(**vars(given))) == given

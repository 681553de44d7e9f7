"""Every mixer, stack and composition has cases in the harness, an oracle and configs."""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import Any, get_args, get_type_hints

import pytest
from flax import nnx
from memories import MEMORIES
from oracles import feedback, transformer

import configs
from famjax.config.derived import mixer_pattern
from famjax.config.resolved import resolve_model
from famjax.config.schema import Config, FeedbackConfig, ModelConfig
from famjax.experiment.load import override
from famjax.mixers import MIXERS
from famjax.mixers.mixer import Mixer
from famjax.stacks import STACKS

from . import transcription
from .harness import CASES, KINDS
from .test_gradients import GRADIENTS, VALUES
from .test_numerics import BFLOAT16, BFLOAT16_LONG, BFLOAT16_SLOW, FAR
from .test_sharded import LONG, QUICK, SHARDED, SLOW


def allowed(section: type, name: str) -> set[Any]:
    return set(get_args(get_type_hints(section)[name]))


def test_every_mixer_has_a_case_an_oracle_and_a_schema_entry():
    for cases in (CASES, KINDS):
        named = {mixer for case in cases for mixer in mixer_pattern(CASES[case])}
        assert named == set(MIXERS)
    assert set(transcription.MIXERS) == set(MIXERS)
    for name in ("fam_update", "fam_init", "fam_position"):
        assert {getattr(case, name) for case in CASES.values()} == allowed(ModelConfig, name)
    called = {transcription.MIXERS[name](CASES["full"])[0] for name in MIXERS}
    assert called == set(transformer.LAYERS)


@pytest.mark.parametrize("cases", [SHARDED, QUICK + LONG + SLOW], ids=["rows", "tokens"])
def test_every_mixer_and_kind_of_memory_runs_on_a_mesh(cases: tuple[str, ...]) -> None:
    configs = [CASES[case] for case in cases]
    assert {mixer for config in configs for mixer in mixer_pattern(config)} == set(MIXERS)
    assert {config.stack for config in configs} == set(STACKS)
    for name in ("fam_update", "fam_init"):
        assert {getattr(config, name) for config in configs} == allowed(ModelConfig, name)
    assert {config.smeared_keys for config in configs} == {True, False}


@pytest.mark.parametrize(
    ("cases", "without"),
    [
        # full attention and AutoCompressors have a capacity; bswa_sg has the values of bswa
        pytest.param(FAR, {"full", "bswa_sg", "autocompressor"}, id="far from the start"),
        pytest.param(BFLOAT16 + BFLOAT16_LONG + BFLOAT16_SLOW, {"bswa_sg"}, id="bfloat16"),
        # an LSTM has neither remat nor a scan over layers
        pytest.param((*GRADIENTS, *VALUES), {"lstm"}, id="remat"),
    ],
)
def test_every_mixer_and_stack_is_in_the_lists_of_a_contract(
    cases: tuple[str, ...], without: set[str]
) -> None:
    configs = [CASES[case] for case in cases]
    residual = [config for config in configs if config.stack == "residual"]
    found = {mixer for config in residual for mixer in mixer_pattern(config)}
    found |= {config.stack for config in configs}
    assert found == {*MIXERS, *STACKS} - without


def test_every_stack_and_composition_has_a_case_an_oracle_and_a_schema_entry():
    for cases in (CASES, KINDS):
        assert {CASES[case].stack for case in cases} == set(STACKS)
    assert set(transcription.STACKS) == set(STACKS) == allowed(ModelConfig, "stack")
    compositions = {c.feedback.composition for c in CASES.values() if c.stack == "feedback"}
    assert compositions == set(feedback.COMPOSITIONS)
    assert compositions == allowed(FeedbackConfig, "composition")


def test_every_memory_is_generated_exported_and_resumed():
    configs = [override(Config(), keys.split()).model for keys in MEMORIES.values()]
    residual = [config for config in configs if config.stack == "residual"]
    assert {mixer for config in residual for mixer in mixer_pattern(config)} == set(MIXERS)
    assert {config.stack for config in configs} == set(STACKS)
    for name in ("fam_update", "fam_init", "fam_position"):
        assert {getattr(config, name) for config in residual} == allowed(ModelConfig, name)


@pytest.mark.parametrize("name", MIXERS)
def test_a_spec_knows_whether_its_mixer_has_an_attention_map(name):
    config = resolve_model(ModelConfig(width=16, heads=2))
    mixer = nnx.eval_shape(lambda: MIXERS[name].make(config, nnx.Rngs(0)))
    defined = type(mixer).attention_map is not Mixer.attention_map
    assert MIXERS[name].has_attention_map == defined


def test_every_stack_has_a_config():
    """Its own config, or one override in the command of a config."""
    names = [module.name for module in pkgutil.iter_modules(configs.__path__)]
    modules = [importlib.import_module(f"configs.{name}") for name in names]
    shown = {module.config().model.stack for module in modules}
    for module in modules:
        shown.update(re.findall(r"model\.stack=(\w+)", module.__doc__ or ""))
    assert shown == set(STACKS)


def test_the_variants_meet_every_norm_feed_forward_and_kind_of_head():
    def seen(field: str, *stacks: str) -> set:
        return {getattr(c, field) for c in CASES.values() if c.stack in stacks}

    feedback_stacks = ("feedback", "transformer")
    for stacks, plain in [(("residual",), set()), (feedback_stacks, {"relu"})]:
        assert seen("norm", *stacks) == {"rmsnorm", "layernorm"}
        assert seen("mlp", *stacks) == {"gelu", "swiglu", "geglu"} | plain
        assert seen("kv_heads", *stacks) == {1, 2, 4}
        assert seen("tied", *stacks) == {True, False}
    sections = [c.feedback for c in CASES.values() if c.stack in feedback_stacks]
    for name, values in {
        "shared_kv": {True, False},
        "adaptive_span": {True, False},
        "cache": allowed(FeedbackConfig, "cache"),
        "positions": allowed(FeedbackConfig, "positions"),
    }.items():
        assert {getattr(section, name) for section in sections} == values
    norms = {c.arch.pre_norm for c in CASES.values() if c.stack in feedback_stacks}
    assert norms == {True, False}

"""A key without effect on a model is rejected, and every key of the schema has a rule."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from famjax.config.keys import key_types
from famjax.core.errors import UserError
from famjax.experiment.load import available_configs, load_config
from famjax.experiment.unused_keys import ALWAYS, find_rules, make_rules

HOME = Path(__file__).parents[2]


@pytest.mark.parametrize("key", key_types())
def test_every_key_has_a_rule(key: str) -> None:
    """A new key is always used or has a rule in famjax/experiment/unused_keys.py."""
    always = any(fnmatchcase(key, pattern) for pattern in ALWAYS)
    assert always != bool(find_rules(key))


def test_every_pattern_matches_a_key() -> None:
    patterns = [*ALWAYS, *(pattern for rule in make_rules() for pattern in rule.keys)]
    assert not [p for p in patterns if not any(fnmatchcase(key, p) for key in key_types())]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("model.window=64", "model.window: has no effect with model.mixer=fam; remove it, or"),
        ("model.window=64 model.mixer=full", "model.window: has no effect with model.mixer=full"),
        (
            "train.bptt_start=1024 data.length=1024",
            "train.bptt_start: has no effect with train.bptt",
        ),
        (
            "train.bptt_double_every=9 train.bptt_start=512 data.length=512",
            "remove it, or set train.bptt_start to less than data.length",
        ),
        ("model.capacity=2048", "model.capacity: has no effect with model.mixer=fam"),
        (
            "model.stack=transformer model.block_len=1 model.capacity=64",
            "model.capacity: has no effect with model.stack=transformer; remove it, or set "
            "model.stack=residual model.mixer=full",
        ),
        ("model.mixer=bswa model.fam_len=4", "model.fam_len: has no effect with model.mixer=bswa"),
        ("model.mixer=bswa model.fam_previous=2", "model.fam_previous: has no effect"),
        ("model.mixer=bswa model.fam_update=gated", "model.fam_update: has no effect with"),
        ("model.mixer=fm model.smeared_keys=true", "model.smeared_keys: has no effect with"),
        ("model.ngram_slots=9", "model.ngram_slots: has no effect with model.ngram_memory=0"),
        ("model.fam_update=static model.fam_max_timescale=9", "with model.fam_update=static"),
        ("model.fam_update=sum model.fam_max_timescale=9", "with model.fam_update=sum"),
        ("model.fam_update=sum model.fam_gate_threshold=0", "with model.fam_update=sum"),
        ("model.fam_update=sum model.fam_min_timescale=9", "with model.fam_update=sum"),
        ("model.mixer=full model.memory_segments=2", "model.memory_segments: has no effect"),
        ("model.mixer=linear model.memory_segments=2", "model.memory_segments: has no effect"),
        ("model.stack=feedback model.block_len=1 model.window=9", "with model.stack=feedback"),
        ("model.stack=lstm model.block_len=1 model.heads=8", "model.heads: has no effect with"),
        ("model.stack=lstm model.block_len=1 model.arch.parallel=true", "with model.stack=lstm"),
        ("model.stack=feedback model.block_len=1 model.scan_layers=false", "model.scan_layers"),
        ("model.arch.rope_factor=2", "has no effect with model.arch.rope_scaling=none"),
        ("model.arch.rope_scaling=linear", "has no effect with model.arch.rope_factor=1.0"),
        (
            "model.arch.rope_scaling=linear model.arch.rope_factor=2 model.arch.rope_low=2",
            "rope_scaling=linear",
        ),
        ("model.stack=feedback model.block_len=1 model.rope_base=9", "positions=learned"),
        ("model.arch.rotary_fraction=0 model.rope_base=9", "model.arch.rotary_fraction=0"),
        ("model.mixer=linear model.linear.rope=false model.rope_base=9", "linear.rope=false"),
        ("model.arch.local_rope_base=9", "model.arch.local_rope_base: has no effect with"),
        ("model.norm=layernorm model.arch.norm_plus_one=true", "with model.norm=layernorm"),
        ("model.mixer=linear model.arch.attention_cap=9", "no attention weights"),
        ("model.feedback.span=9", "model.feedback.span: has no effect with model.stack=residual"),
        ("model.stack=feedback model.block_len=1 model.feedback.layer=1", "composition=all"),
        ("model.stack=feedback model.block_len=1 model.feedback.span_ramp=9", "adaptive_span=fal"),
        ("model.stack=feedback model.block_len=1 model.feedback.tolerance=1", "sweeps=0"),
        ("model.linear.chunk=9", "model.linear.chunk: has no effect with model.mixer=fam"),
        ("model.lora.alpha=9", "model.lora.alpha: has no effect with model.lora.rank=0"),
        ("model.lora.on=mlp.*", "model.lora.on: has no effect with model.lora.rank=0"),
        ("model.lora.base=bfloat16", "with model.lora.rank=0 and train.only=all"),
        ("model.adaptive.factor=2", "has no effect with model.adaptive.cutoffs=''"),
        ("data.passkey.digits=9", "data.passkey.digits: has no effect with data.task=text"),
        ("data.toy.episodes=9", "data.toy.episodes: has no effect with data.task=text"),
        ("data.feature=body", "data.feature: has no effect with data.task=text and data.tfds=''"),
        (
            "data.seqio=famjax_x data.feature=body",
            "data.feature: has no effect with data.task=text",
        ),
        (
            "eval.every=100 eval.tasks=passkey data.tfds=lm1b eval.batches=2",
            "eval.batches: has no effect with",
        ),
        (
            "eval.every=100 eval.tasks=passkey data.passkey.max_length=512",
            "data.passkey.max_length: has no effect with data.task=text; remove it, or set",
        ),
        ("data.tfds=lm1b data.holdout=9", "data.holdout: has no effect with data.tfds=lm1b"),
        ("data.layout=packed data.keep_whole=true", "data.keep_whole: has no effect with"),
        ("data.layout=packed data.repeat_weight=1", "has no effect with data.repeat_len=0"),
        ("optimizer.name=nag optimizer.beta2=0.9", "has no effect with optimizer.name=nag"),
        ("optimizer.decay_fraction=0.5", "has no effect with optimizer.schedule=cosine"),
        ("optimizer.schedule=wsd optimizer.final_fraction=0.5", "optimizer.schedule=wsd"),
        ("data.layout=packed train.rsp_ramp=9", "has no effect with train.rsp=0.0"),
        ("data.layout=packed model.mixer=bswa train.rsp=0.5", "train.rsp: has no effect with"),
    ],
)
def test_an_unused_key_is_rejected(given: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config("text_fam", given.split())
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("passkey", "data.files=x.txt", "data.files: has no effect with data.task=passkey"),
        ("passkey", "data.holdout=9", "data.holdout: has no effect with data.task=passkey"),
        (
            "passkey",
            "eval.every=100 eval.tasks=passkey eval.batches=2",
            "eval.batches: has no effect with data.task=passkey; remove it, or set",
        ),
        ("passkey", "data.toy.steps=9", "data.toy.steps: has no effect with data.task=passkey"),
        ("copy_feedback", "data.passkey.digits=9", "has no effect with data.task=copy"),
        ("copy_feedback", "data.toy.size=9", "data.toy.size: has no effect with data.task=copy"),
        ("copy_feedback", "data.toy.variables=3", "has no effect with data.task=copy"),
        (
            "copy_feedback",
            "data.toy.start_steps=0 data.toy.threshold=1",
            "data.toy.threshold: has no effect with data.toy.start_steps=0",
        ),
        ("multi30k", "data.files=x", "data.files: has no effect with data.task=translate"),
        ("multi30k", "model.encoder.cross=linear model.linear.rope=false", "model.mixer=full"),
        ("multi30k", "model.encoder.cross=linear model.linear.features=8", "model.mixer=full"),
        (
            "multi30k",
            "model.encoder.cross=linear model.linear.map=elu model.encoder.features=8",
            "model.encoder.features: has no effect with model.linear.map=elu",
        ),
        ("multi30k", "model.mixer=linear model.linear.rope=false train.rpo=true", "rope=false"),
    ],
)
def test_keys_of_another_task_are_rejected(name: str, given: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(name, given.split())
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        "model.window=64 model.mixer=swa,fam",
        "model.capacity=2048 model.arch.positions=learned model.mixer=fam",
        "model.mixer=linear,bswa model.arch.attention_cap=9 model.memory_segments=2",
        "model.arch.rope_scaling=llama3 model.arch.rope_factor=2 model.arch.rope_low=2",
        "model.lora.rank=4 model.lora.alpha=9",
        "data.layout=packed data.repeat_len=9 data.repeat_weight=1",
        "optimizer.schedule=wsd optimizer.decay_fraction=0.5",
        "data.tfds=lm1b data.feature=body",
        "data.task=passkey data.text_rows=1 data.tfds=lm1b data.feature=body",
        "data.task=passkey data.text_rows=1 eval.every=100 eval.batches=2",
        "eval.every=100 eval.tasks=passkey data.passkey.digits=3 data.passkey.multiple=64",
        "data.task=niah_single_2 data.files=x.txt data.holdout=9",
        # disables what a config file may have enabled
        "model.stack=lstm model.block_len=1 model.dropout.attention=0 model.arch.parallel=false",
        "train.rsp=0 train.rpo=false data.keep_whole=false model.lora.dropout=0 data.files=",
    ],
)
def test_a_used_key_is_accepted(given: str) -> None:
    load_config("text_fam", given.split())


@pytest.mark.parametrize(
    "given",
    [
        # an encoder's layers have softmax attention with rotary positions, whatever the decoder has
        "model.mixer=linear model.linear.rope=false model.dropout.attention=0.1 model.rope_base=9",
        "model.mixer=linear model.encoder.cross=linear model.linear.features=8",
        "model.encoder.cross=linear model.encoder.features=8 model.linear.map=cos",
    ],
)
def test_a_key_that_an_encoder_uses_is_accepted(given: str) -> None:
    load_config("multi30k", given.split())


def commands() -> list[str]:
    """Return the commands in docs and configs that train or plan."""
    paths = [HOME / "README.md", *HOME.glob("docs/*.md"), *HOME.glob("configs/[!_]*.py")]
    texts = [path.read_text(encoding="utf-8").replace("\\\n", " ") for path in paths]
    found = [
        m[1] for text in texts for m in re.finditer(r"famjax (?:train|plan) ([^`#|;&\n]*)", text)
    ]
    return sorted(
        {" ".join(words) for words in map(str.split, found) if words[0] in available_configs()}
    )


@pytest.mark.parametrize("command", commands())
def test_documented_commands_have_no_unused_keys(command: str) -> None:
    name, *words = command.split()
    # keys for `init` and its stage need a folder that does not exist here
    needs_init = ("init=", "train.only=", "train.match=")
    given = [w.strip("'\"") for w in words if re.match(r"[a-z0-9_.]+=", w) and "..." not in w]
    # as converted: a write penalty is for models with a memory
    converted = ["model.mixer=delta"] if "init=" in command and "write_loss" in command else []
    load_config(name, [*converted, *(w for w in given if not w.startswith(needs_init))])

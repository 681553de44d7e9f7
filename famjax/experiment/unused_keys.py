"""Config keys without effect: an override that would be silently ignored is an error.

Every key of the schema is either in `ALWAYS`, the keys that always have an effect, or in one of the
rules of `make_rules()`, which say when a key has no effect.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from famjax.config.derived import (
    has_linear_cross,
    holds_out_text,
    is_segmented,
    mixer_pattern,
)
from famjax.config.keys import key_values
from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.mixers import MIXERS, MixerSpec, mixer_specs
from famjax.optimizers import OPTIMIZERS
from famjax.tasks import TASKS, Task


class Rule(NamedTuple):
    """Says when keys have no effect.

    Attributes:
      keys: `fnmatch` patterns of keys.
      unused: function from a config to the setting that leaves the keys without effect; "" if the
        keys are used.
      fix: a setting with which the keys have an effect.
      switch: always accept the values 0, false, none and "", which turn off what a config file may
        have turned on.
    """

    keys: tuple[str, ...]
    unused: Callable[[Config], str]
    fix: str
    switch: bool = False


def check_unused_keys(config: Config, overridden: Iterable[str]) -> None:
    """Raise a `UserError` for the first of the given keys that has no effect in this config."""
    now = key_values(config)
    for key in overridden:
        for rule in find_rules(key):
            off = now[key] in (0, "", "none")
            if not (rule.switch and off) and (value := rule.unused(config)):
                fix = rule.fix
                if value.startswith("model.stack=") and fix.startswith("model.mixer="):
                    # mixers are layers of this stack alone
                    fix = f"model.stack=residual {fix}"
                raise UserError(f"{key}: has no effect with {value}; remove it, or set {fix}")


def has_effect(key: str, config: Config) -> bool:
    """Return whether a key has an effect in a config."""
    return not any(rule.unused(config) for rule in find_rules(key))


def find_rules(key: str) -> list[Rule]:
    """Return the rules that apply to a key, in order."""
    rules = make_rules()
    return [rule for rule in rules if any(fnmatchcase(key, pattern) for pattern in rule.keys)]


def make_rules() -> tuple[Rule, ...]:
    """Return all rules; registry rules are made anew, since mixers may be registered later."""
    return (*_registry_rules(), *_RULES)


# Conditions


def _unused_unless(used: Callable[[Config], bool], *keys: str) -> Callable[[Config], str]:
    """Return a rule's `unused`, which names the values of `keys` if `used(config)` is false."""

    def unused(config: Config) -> str:
        if used(config):
            return ""
        now = key_values(config)
        return " and ".join(f"{key}={_format_value(now[key])}" for key in keys)

    return unused


def _format_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


def _requires_mixer(*names: str) -> Callable[[Config], str]:
    """Return a rule's `unused` for keys that only layers with one of these mixers use."""

    def unused(config: Config) -> str:
        model = config.model
        if model.stack != "residual":
            return f"model.stack={model.stack}"
        return "" if set(names) & set(mixer_pattern(model)) else f"model.mixer={model.mixer}"

    return unused


def _registry_rules() -> list[Rule]:
    """Return a rule for each key that only some mixers, tasks or optimizers use."""
    rules = []
    for switch in (False, True):
        for key, names in _names_by_key(MIXERS, switch).items():
            used = _USED_WITHOUT_MIXER.get(key, lambda config: False)
            unused = _requires_mixer_unless(used, *names)
            rules.append(Rule((key,), unused, f"model.mixer={' or '.join(names)}", switch))
        for key, names in _names_by_key(TASKS, switch).items():
            rules.append(Rule((key,), _requires_task(*names), f"data.task={names[0]}", switch))
    for name, optimizer in OPTIMIZERS.items():
        for key in optimizer.unused:
            other = next(n for n, its in OPTIMIZERS.items() if key not in its.unused)
            rules.append(Rule((key,), _requires_other_optimizer(name), f"optimizer.name={other}"))
    return rules


def _names_by_key(
    registry: Mapping[str, MixerSpec] | Mapping[str, Task], switch: bool
) -> dict[str, list[str]]:
    """Return the names of the mixers or tasks that use a key, by key."""
    listed = {name: one.switches if switch else one.keys for name, one in registry.items()}
    return {
        key: [name for name, keys in listed.items() if key in keys]
        for key in dict.fromkeys(itertools.chain(*listed.values()))
    }


# keys of mixers that may be used without these mixers, and when they are
_USED_WITHOUT_MIXER: dict[str, Callable[[Config], bool]] = {
    "model.capacity": lambda config: (
        config.model.arch.positions == "learned" or config.model.stack == "autocompressor"
    ),
    "model.fam_len": lambda config: is_segmented(config.model),
    "model.linear.*": lambda config: has_linear_cross(config.model),
}


def _requires_mixer_unless(used: Callable[[Config], bool], *names: str) -> Callable[[Config], str]:
    """Return `_requires_mixer` for a key that is also used whenever `used(config)` is true."""
    unused = _requires_mixer(*names)
    return lambda config: "" if used(config) else unused(config)


def _requires_other_optimizer(name: str) -> Callable[[Config], str]:
    return _unused_unless(lambda c: c.optimizer.name != name, "optimizer.name")


def _requires_stack(*names: str) -> Callable[[Config], str]:
    return _unused_unless(lambda c: c.model.stack in names, "model.stack")


def _evaluated(config: Config) -> set[str]:
    """Return the names of the tasks in `eval.tasks`, and parts of their files' names."""
    return {part.partition(":")[0].strip() for part in config.eval.tasks.split(",")}


def _requires_task(*names: str) -> Callable[[Config], str]:
    def used(config: Config) -> bool:
        texts = {"text"} if config.data.text_rows > 0 else set()
        return bool({config.data.task, *_evaluated(config), *texts} & {*names})

    return _unused_unless(used, "data.task")


def _no_attention_weights(config: Config) -> str:
    specs = mixer_specs(config.model)
    # an encoder's layers have attention weights
    if (
        not specs
        or config.model.encoder.layers
        or any(spec.has_attention_weights for spec in specs)
    ):
        return ""
    return f"model.mixer={config.model.mixer}, which has no attention weights"


def _no_rotation(config: Config) -> str:
    """Return the setting that disables rotary positions; "" if queries and keys are rotated."""
    model = config.model
    if model.stack == "lstm":
        return "model.stack=lstm"
    if model.stack in ("feedback", "transformer"):
        learned = model.feedback.positions == "learned"
        return "model.feedback.positions=learned" if learned else ""
    if is_segmented(model):
        return ""
    settings = [spec.rope_off_setting(model) for spec in mixer_specs(model)]
    return settings[0] if settings and all(settings) else ""


def _nothing_rotated(config: Config) -> str:
    """Return `_no_rotation` of the whole model: "" with an encoder, whose layers use RoPE."""
    return "" if config.model.encoder.layers else _no_rotation(config)


def _no_rotated_elements(config: Config) -> str:
    """Return `_nothing_rotated`, or the setting that makes the rotated share of elements 0."""
    nothing = config.model.arch.rotary_fraction == 0
    return _nothing_rotated(config) or ("model.arch.rotary_fraction=0" if nothing else "")


def _elu_map(config: Config) -> str:
    elu = config.model.linear.map == "elu"
    return "model.linear.map=elu, which has as many as a head has elements" if elu else ""


# The lists

# keys that every model and every run uses; `experiment/checks.py` rejects some combinations of them
ALWAYS = (
    "name",
    "seed",
    "init",
    "model.vocab_size",
    "model.stack",
    "model.layers",
    "model.width",
    "model.norm",
    "model.tied",
    "model.block_len",  # 1 for the stacks without blocks
    "model.remat",
    "model.dtype",
    "model.adaptive.cutoffs",
    "model.arch.norm_eps",
    "model.arch.pre_norm",
    "model.arch.logit_bias",
    "model.arch.logit_cap",
    "model.arch.embed_scale",
    "model.lora.rank",
    "model.encoder.layers",
    "data.task",
    "data.tokenizer",
    "data.layout",
    "data.batch",
    "data.length",
    "data.repeat_len",
    "data.text_rows",
    "optimizer.name",
    "optimizer.learning_rate",
    "optimizer.schedule",
    "optimizer.warmup_steps",
    "optimizer.beta1",
    "optimizer.weight_decay",
    "optimizer.clip_norm",
    "train.steps",
    "train.only",
    "train.match",
    "train.accumulate",
    "train.bptt_segments",
    "train.label_smoothing",
    "train.log_every",
    "train.checkpoint_every",
    "train.keep",
    "eval.every",
    "profile.*",
    "mesh.*",
)


def _full_bptt_start(config: Config) -> str:
    start = config.train.bptt_start
    return f"train.bptt_start=data.length={start}" if start == config.data.length else ""


def _has_write_gates(config: Config) -> bool:
    return any(spec.has_write_gates(config.model) for spec in mixer_specs(config.model))


def _nothing_held_out(config: Config) -> str:
    """Return the settings because of which no text is held out; "" if there is some."""
    if holds_out_text(config):
        return ""
    data = config.data
    if data.task != "text" and not data.text_rows:
        return f"data.task={data.task}"
    sets = (f"data.{name}={value}" for name in ("seqio", "tfds") if (value := getattr(data, name)))
    return next(sets, "data.holdout=0")


def _requires_training(task: str) -> Callable[[Config], str]:
    """Return a rule's `unused` for keys of a task's training documents."""
    return _unused_unless(lambda c: c.data.task == task, "data.task")


_REQUIRES_ATTENTION = _unused_unless(lambda c: c.model.stack != "lstm", "model.stack")

_RULES = (
    Rule(
        ("train.bptt_start", "train.bptt_double_every"),
        _full_bptt_start,
        "train.bptt_start to less than data.length",
        switch=True,
    ),
    # stacks and mixers
    Rule(("model.mixer",), _requires_stack("residual"), "model.stack=residual"),
    Rule(
        ("model.scan_layers",),
        _requires_stack("residual", "rmt", "autocompressor"),
        "model.stack=residual",
    ),
    Rule(("model.linear.features",), _elu_map, "another map"),
    Rule(
        ("model.fam_min_timescale", "model.fam_max_timescale", "model.fam_gate_threshold"),
        _unused_unless(lambda c: c.model.fam_update == "gated", "model.fam_update"),
        "model.fam_update=gated",
    ),
    Rule(
        ("model.short_conv", "model.ngram_memory"),
        _requires_stack("residual"),
        "model.stack=residual",
        switch=True,
    ),
    Rule(
        ("model.ngram_slots",),
        _unused_unless(lambda c: c.model.ngram_memory > 0, "model.ngram_memory"),
        "model.ngram_memory=8",
    ),
    Rule(
        ("train.write_loss",),
        _unused_unless(_has_write_gates, "model.mixer", "model.fam_update"),
        "model.fam_update=gated",
        switch=True,
    ),
    Rule(
        (
            "model.heads",
            "model.kv_heads",
            "model.head_dim",
            "model.mlp_width",
            "model.mlp",
            "model.arch.query_scale",
            "model.arch.attention_cap",
            "model.arch.post_norm",
            "model.arch.qk_norm",
            "model.arch.qkv_bias",
            "model.arch.out_bias",
            "model.arch.mlp_bias",
            "model.arch.parallel",
            "model.dropout.*",
        ),
        _REQUIRES_ATTENTION,
        "model.stack=residual",
        switch=True,
    ),
    Rule(
        ("model.dropout.attention", "model.arch.attention_cap"),
        _no_attention_weights,
        "another mixer",
        switch=True,
    ),
    # arch
    Rule(
        ("model.arch.norm_plus_one",),
        _unused_unless(lambda c: c.model.norm == "rmsnorm", "model.norm"),
        "model.norm=rmsnorm",
        switch=True,
    ),
    Rule(
        ("model.arch.embed_norm",), _requires_stack("residual"), "model.stack=residual", switch=True
    ),
    Rule(
        ("model.arch.positions",),
        _unused_unless(
            lambda c: c.model.stack == "residual" or c.model.encoder.layers > 0, "model.stack"
        ),
        "model.stack=residual, or an encoder",
        switch=True,
    ),
    Rule(
        ("model.arch.position_offset",),
        _unused_unless(lambda c: c.model.arch.positions == "learned", "model.arch.positions"),
        "model.arch.positions=learned",
        switch=True,
    ),
    Rule(
        ("model.arch.rotary_fraction", "model.arch.rope_*", "model.rope_base"),
        _nothing_rotated,
        "rotary positions",
        switch=True,
    ),
    Rule(("train.rpo",), _no_rotation, "rotary positions", switch=True),
    Rule(
        ("model.arch.rope_*", "model.rope_base", "train.rpo"),
        _no_rotated_elements,
        "model.arch.rotary_fraction=1",
        switch=True,
    ),
    Rule(
        ("model.arch.rope_scaling",),
        _unused_unless(lambda c: c.model.arch.rope_factor != 1, "model.arch.rope_factor"),
        "model.arch.rope_factor=8",
        switch=True,
    ),
    Rule(
        ("model.arch.rope_factor",),
        _unused_unless(lambda c: c.model.arch.rope_scaling != "none", "model.arch.rope_scaling"),
        "model.arch.rope_scaling=linear or llama3",
    ),
    Rule(
        ("model.arch.rope_low", "model.arch.rope_high", "model.arch.rope_length"),
        _unused_unless(lambda c: c.model.arch.rope_scaling == "llama3", "model.arch.rope_scaling"),
        "model.arch.rope_scaling=llama3",
    ),
    # feedback
    Rule(("model.feedback.*",), _requires_stack("feedback", "transformer"), "model.stack=feedback"),
    Rule(
        ("model.feedback.layer",),
        _unused_unless(
            lambda c: c.model.feedback.composition == "layer" and c.model.stack == "feedback",
            "model.feedback.composition",
        ),
        "model.feedback.composition=layer",
    ),
    Rule(
        ("model.feedback.span_ramp", "model.feedback.span_start", "model.feedback.span_loss"),
        _unused_unless(lambda c: c.model.feedback.adaptive_span, "model.feedback.adaptive_span"),
        "model.feedback.adaptive_span=true",
        switch=True,
    ),
    Rule(
        ("model.feedback.tolerance",),
        _unused_unless(lambda c: c.model.feedback.sweeps > 0, "model.feedback.sweeps"),
        "model.feedback.sweeps=2",
    ),
    # encoder
    Rule(
        ("model.encoder.cross", "model.encoder.shared", "data.source_length"),
        _unused_unless(lambda c: c.model.encoder.layers > 0, "model.encoder.layers"),
        "model.encoder.layers=2",
        switch=True,
    ),
    Rule(
        ("model.encoder.features",),
        _unused_unless(lambda c: c.model.encoder.cross == "linear", "model.encoder.cross"),
        "model.encoder.cross=linear",
    ),
    Rule(("model.encoder.features",), _elu_map, "another map"),
    # attention to an encoder uses `map` of linear layers, but none of these keys
    Rule(
        ("model.linear.features", "model.linear.rope", "model.linear.chunk"),
        _requires_mixer("linear"),
        "model.mixer=linear",
    ),
    # adapters and adaptive softmax
    Rule(
        ("model.lora.alpha", "model.lora.rs", "model.lora.dropout", "model.lora.on"),
        _unused_unless(lambda c: c.model.lora.rank > 0, "model.lora.rank"),
        "model.lora.rank=16",
        switch=True,
    ),
    Rule(
        ("model.lora.base",),
        _unused_unless(
            lambda c: c.model.lora.rank > 0 or c.train.only != "all",
            "model.lora.rank",
            "train.only",
        ),
        "model.lora.rank=16",
    ),
    Rule(
        ("model.adaptive.factor",),
        _unused_unless(lambda c: c.model.adaptive.cutoffs != "", "model.adaptive.cutoffs"),
        "model.adaptive.cutoffs=20000,60000",
    ),
    # data
    Rule(
        ("data.feature",),
        _unused_unless(
            lambda c: (c.data.task == "text" or c.data.text_rows > 0) and bool(c.data.tfds),
            "data.task",
            "data.tfds",
        ),
        "data.tfds",
    ),
    Rule(
        ("data.holdout", "data.part_bytes"),
        lambda c: next(
            (f"data.{k}={v}" for k in ("seqio", "tfds") if (v := getattr(c.data, k))), ""
        ),
        "data.files",
        switch=True,
    ),
    Rule(
        ("data.keep_whole",),
        _unused_unless(lambda c: c.data.layout == "lanes", "data.layout"),
        "data.layout=lanes",
        switch=True,
    ),
    Rule(
        ("data.repeat_weight",),
        _unused_unless(lambda c: c.data.repeat_len > 0, "data.repeat_len"),
        "data.repeat_len=256",
    ),
    Rule(
        ("data.text_weight",),
        _unused_unless(lambda c: c.data.text_rows > 0, "data.text_rows"),
        "data.text_rows=1",
    ),
    # evaluated documents depend on the other keys of `data.passkey`
    Rule(
        (
            "data.passkey.min_length",
            "data.passkey.lengths",
            "data.passkey.start_length",
            "data.passkey.max_length",
            "data.passkey.threshold",
            "data.passkey.ask_every",
            "data.passkey.hard_keys",
            "data.passkey.other_weight",
        ),
        _requires_training("passkey"),
        "data.task=passkey",
    ),
    Rule(
        ("data.toy.threshold",),
        _unused_unless(lambda c: c.data.toy.start_steps > 0, "data.toy.start_steps"),
        "data.toy.start_steps=10",
    ),
    Rule(
        ("eval.batches", "eval.tasks", "eval.best"),
        _unused_unless(lambda c: c.eval.every > 0, "eval.every"),
        "eval.every=100",
    ),
    Rule(("eval.batches",), _nothing_held_out, "data.task=text with data.holdout=20"),
    Rule(
        ("eval.lengths", "eval.examples"),
        _unused_unless(lambda c: bool(c.eval.tasks), "eval.tasks"),
        "eval.tasks=passkey",
    ),
    Rule(
        ("eval.beam", "eval.no_repeat_ngram"),
        _unused_unless(lambda c: bool(_evaluated(c) & {"translate", "summarize"}), "eval.tasks"),
        "eval.tasks=translate:SOURCES=TARGETS",
    ),
    Rule(
        ("eval.length_penalty",),
        _unused_unless(lambda c: c.eval.beam > 1, "eval.beam"),
        "eval.beam=5",
    ),
    Rule(
        ("eval.tokenized",),
        _unused_unless(lambda c: "translate" in _evaluated(c), "eval.tasks"),
        "eval.tasks=translate:SOURCES=TARGETS",
    ),
    # optimizer and training
    Rule(
        ("optimizer.decay_fraction",),
        _unused_unless(lambda c: c.optimizer.schedule == "wsd", "optimizer.schedule"),
        "optimizer.schedule=wsd",
    ),
    Rule(
        ("optimizer.final_fraction",),
        _unused_unless(lambda c: c.optimizer.schedule == "cosine", "optimizer.schedule"),
        "optimizer.schedule=cosine",
    ),
    Rule(
        ("train.rsp_ramp",),
        _unused_unless(lambda c: c.train.rsp > 0, "train.rsp"),
        "train.rsp=0.8",
        switch=True,
    ),
)

"""Config validation: sizes and combinations that cannot work.

Each check yields error lines that name the key, its value and the fix. The first error is raised,
since later checks rely on earlier ones.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Callable, Iterator, Sequence

from famjax.config.derived import (
    cutoffs,
    has_blocks,
    has_linear_cross,
    is_segmented,
    mixer_pattern,
)
from famjax.config.keys import check_types
from famjax.config.resolved import resolve_model
from famjax.config.schema import AXES, Config, DataConfig, ModelConfig
from famjax.core.errors import UserError, did_you_mean, format_divisors, format_multiples
from famjax.core.json_files import shorten
from famjax.core.paths import url_message
from famjax.experiment.encoder_checks import check_encoder, check_encoder_task
from famjax.experiment.eval_checks import check_eval
from famjax.experiment.hints import translate_projections
from famjax.experiment.ranges import check_ranges
from famjax.mixers import MIXERS, mixer_specs
from famjax.mixers.other_names import suggest_mixer
from famjax.optimizers import OPTIMIZERS
from famjax.tasks import TASKS

# maximum number of clusters of an adaptive softmax, one table each; WikiText-103 uses 4
_MAX_CLUSTERS = 64
# minimum of data.part_bytes
_SHORTEST_PART = 256
# maximum number of layers unrolled in one program
_MAX_UNROLLED_LAYERS = 1000

# projections that can have adapters
ADAPTABLE_MAPS = (
    *(f"attention.{name}" for name in ("q", "k", "v", "out")),
    *(f"mlp.{name}" for name in ("gate", "up", "down")),
)


def validate(config: Config) -> None:
    """Raise a `UserError` for the first value of the config that cannot work."""
    _raise_first(
        config,
        (
            *_FIRST_CHECKS,
            # before other checks of the row length, whose fixes might not be whole blocks
            _check_blocks,
            *_OTHER_MODEL_CHECKS,
            check_encoder_task,
            _check_paths,
            _check_data,
            _check_train,
            _check_optimizer,
            _check_bptt_warmup,
            check_eval,
            _check_profile,
            _check_mesh,
        ),
    )


def validate_model(model: ModelConfig) -> None:
    """Raise a `UserError` for the first value of a model that cannot work with any data."""
    config = Config(model=model, data=DataConfig(length=1))
    _raise_first(config, (*_FIRST_CHECKS, *_OTHER_MODEL_CHECKS))


def _raise_first(config: Config, checks: Sequence[Callable[[Config], Iterator[str]]]) -> None:
    for check in checks:
        for problem in check(config):
            raise UserError(problem)


def _check_model(config: Config) -> Iterator[str]:
    m = config.model
    if not m.head_dim and m.width % m.heads:
        yield (
            f"model.width={m.width} is not a multiple of model.heads={m.heads}; "
            f"take {format_multiples(m.width, m.heads)}, or set model.head_dim"
        )
    head_dim, key = resolve_model(m).head_dim, "model.head_dim"
    if head_dim % 2:
        source = "" if m.head_dim else " (model.width / model.heads)"
        yield f"{key}={head_dim}{source} is odd; rotary positions rotate pairs, take an even number"
    rotated = int(head_dim * m.arch.rotary_fraction)
    if not 0 <= rotated <= head_dim or rotated % 2:
        yield (
            f"model.arch.rotary_fraction={m.arch.rotary_fraction}: must leave an even number of "
            f"the {head_dim} elements of a head"
        )
    if m.arch.positions.startswith("sinusoidal") and m.width % 2:
        yield (
            f"model.width={m.width} is odd; sinusoidal positions are pairs of a sine and a cosine, "
            "take an even number"
        )
    if m.arch.rope_low >= m.arch.rope_high:
        yield (
            f"model.arch.rope_low={m.arch.rope_low} is not below "
            f"model.arch.rope_high={m.arch.rope_high}; Llama 3 has 1 and 4"
        )
    if m.short_conv == 1:
        yield "model.short_conv=1 spans each token alone, which adds nothing; set 4, or 0 for none"
    if m.lora.rank:
        yield from _check_adapters(m)
    if m.kv_heads and m.heads % m.kv_heads:
        yield (
            f"model.kv_heads={m.kv_heads} does not divide model.heads={m.heads}; "
            f"take one of {format_divisors(m.heads)}"
        )


def _check_adapters(model: ModelConfig) -> Iterator[str]:
    gated = model.mlp in ("swiglu", "geglu")
    maps = [name for name in ADAPTABLE_MAPS if gated or name != "mlp.gate"]
    for pattern in model.lora.on.split(","):
        if not fnmatch.filter(maps, pattern):
            ours = translate_projections(model.lora.on)
            hint = f"; write model.lora.on={ours}" if ours else did_you_mean(pattern, maps)
            yield (
                f"model.lora.on={model.lora.on}: {pattern!r} names no projection{hint} "
                f"(known: {', '.join(maps)})"
            )


def _check_adaptive(config: Config) -> Iterator[str]:
    m = config.model
    text = m.adaptive.cutoffs
    if not text:
        return
    named = f"model.adaptive.cutoffs={shorten(text)}"
    parts = text.split(",")
    if len(parts) > _MAX_CLUSTERS:
        yield f"model.adaptive.cutoffs: has {len(parts):,}; give at most {_MAX_CLUSTERS}"
    if not all(part.isascii() and part.isdigit() and len(part) < 12 for part in parts):
        yield f"{named}: give whole numbers separated by commas, such as 20000,60000"
    cuts = cutoffs(m)
    if cuts[0] < 1 or any(a >= b for a, b in itertools.pairwise(cuts)):
        yield f"{named}: each must be more than the one before it, and the first at least 1"
    if m.vocab_size and cuts[-1] >= m.vocab_size:
        yield (
            f"{named}: the cluster from {cuts[-1]} on is empty in a vocabulary of {m.vocab_size}; "
            "take smaller cutoffs, or fewer"
        )
    narrow = m.adaptive.factor ** len(cuts)
    if m.width % narrow:
        yield (
            f"model.width={m.width} is not a multiple of model.adaptive.factor^{len(cuts)}="
            f"{narrow}, by which the last cluster is narrower; take "
            f"{format_multiples(m.width, narrow)}"
        )
    if m.arch.logit_cap:
        yield (
            f"model.arch.logit_cap={m.arch.logit_cap}: an adaptive softmax has no logits of all "
            "words to cap; set it to 0"
        )
    if m.arch.logit_bias:
        yield (
            "model.arch.logit_bias=true: an adaptive softmax has no logits of all words; set false"
        )
    if smoothing := config.train.label_smoothing:
        yield (
            f"train.label_smoothing={smoothing:g}: an adaptive softmax has no log p of all words "
            "to smooth; set it to 0"
        )


def _check_mixers(config: Config) -> Iterator[str]:
    m = config.model
    pattern = mixer_pattern(m)
    for name in pattern:
        if name not in MIXERS:
            yield (
                f"model.mixer={m.mixer!r}: unknown mixer {name!r}{suggest_mixer(name, MIXERS)} "
                f"(known: {', '.join(MIXERS)})"
            )
    if pattern and m.layers % len(pattern):
        yield (
            f"model.layers={m.layers} is not a multiple of the {len(pattern)} mixers of "
            f"model.mixer={m.mixer!r}; take {format_multiples(m.layers, len(pattern))}"
        )
    if "fam" in pattern and m.fam_position == "last" and m.fam_len > m.block_len:
        yield (
            f"model.fam_len={m.fam_len} is longer than model.block_len={m.block_len}; a memory has "
            f"the positions of its block's last tokens, take at most {m.block_len}"
        )
    for spec in mixer_specs(m):
        yield from spec.check(config)
    if config.train.only != "all":
        yield from _check_only(config)
    if config.train.match:
        yield from _check_match(config)
    yield from _check_reconstruction(config)


def _check_only(config: Config) -> Iterator[str]:
    m, named, off = config.model, f"train.only={config.train.only}", "or set train.only=all"
    if not (any(spec.has_feature_map for spec in mixer_specs(m)) or has_linear_cross(m)):
        where = f"model.mixer={m.mixer}" if m.stack == "residual" else f"model.stack={m.stack}"
        yield f"{named}: {where} has no feature maps; give layers the mixer linear, {off}"
    if m.linear.map in ("elu", "performer"):
        yield f"{named}: model.linear.map={m.linear.map} has no weights; take a learned map, {off}"
    if config.train.only == "maps" and m.lora.rank:
        yield (
            f"{named} does not train adapters, model.lora.rank={m.lora.rank}; set "
            f"model.lora.rank=0, {off}"
        )


def _check_match(config: Config) -> Iterator[str]:
    t, named, off = config.train, "train.match=true", "or train.match=false"
    if layers := config.model.encoder.layers:
        yield f"{named} does not support an encoder, model.encoder.layers={layers}; set false"
    if t.only != "maps":
        yield f"{named} trains feature maps alone, train.only={t.only}; set train.only=maps, {off}"
    if not config.init:
        yield (
            f"{named}: random weights have no attention to match; give init=FOLDER, a run or the "
            f"output of famjax convert --to t2r, {off}"
        )
    # the softmax attention to match would need a KV cache to attend to tokens of earlier steps
    if config.data.layout != "packed":
        yield (
            f"{named} starts each row with an empty memory, data.layout={config.data.layout} "
            f"carries it over; set data.layout=packed, {off}"
        )
    if t.rsp:
        yield f"{named} starts each row with an empty memory, train.rsp={t.rsp}; set 0, {off}"
    for name in ("diversity_loss", "reconstruction_loss", "write_loss"):
        if value := getattr(t, name):
            yield f"{named} does not train a memory, train.{name}={value:g}; set 0, {off}"
    if t.label_smoothing:
        yield f"{named} has no targets, train.label_smoothing={t.label_smoothing:g}; set 0, {off}"
    if t.bptt_segments > 1:
        yield (f"{named} reads each row whole, train.bptt_segments={t.bptt_segments}; set 1, {off}")


def _check_reconstruction(config: Config) -> Iterator[str]:
    """Yield an error line for each setting with which outputs cannot be rebuilt from a memory."""
    named, m = f"train.reconstruction_loss={config.train.reconstruction_loss:g}", config.model
    if not config.train.reconstruction_loss:
        return
    if m.dropout.layer:
        yield (
            f"{named} compares with a layer's output, which model.dropout.layer="
            f"{m.dropout.layer:g} leaves out at random; set one of them to 0"
        )
    if m.encoder.layers:
        yield (
            f"{named} compares with a layer's output, which has attention to an encoder in it, "
            f"model.encoder.layers={m.encoder.layers}; set one of them to 0"
        )


def _check_stack(config: Config) -> Iterator[str]:
    m = config.model
    is_feedback_stack = m.stack in ("feedback", "transformer")
    named = f"model.stack={m.stack}"
    if m.block_len != 1 and not has_blocks(m):
        yield f"{named} has no blocks, model.block_len={m.block_len}; set model.block_len=1"
    if m.stack != "residual":
        yield from _check_other_stacks(config)
    if is_segmented(m):
        yield from _check_segmented(config)
    if not is_feedback_stack:
        for name in ("adaptive_span", "sweeps"):
            if value := getattr(m.feedback, name):
                yield f"model.feedback.{name}={value}: {named} has none; set model.stack=feedback"
        if not m.arch.pre_norm:
            yield from _check_post_norm(m)
        return
    yield from _check_feedback(config)


def _check_post_norm(m: ModelConfig) -> Iterator[str]:
    """Yield an error line for each part of a stack that has norms before its sublayers only."""
    named, fix = "model.arch.pre_norm=false", "or model.arch.pre_norm=true"
    if m.stack != "residual":
        yield (
            f"{named}: model.stack={m.stack} is pre-norm; set model.stack=feedback or transformer, "
            f"{fix}"
        )
    able = [name for name, spec in MIXERS.items() if spec.allows_post_norm]
    for spec in mixer_specs(m):
        if not spec.allows_post_norm:
            yield f"{named}: {spec.title} is pre-norm; take one of {', '.join(able)}, {fix}"


def _check_other_stacks(config: Config) -> Iterator[str]:
    """Yield an error line for each setting that stacks other than `residual` would ignore."""
    m, t = config.model, config.train
    named = f"model.stack={m.stack}"
    for name, rate in vars(m.dropout).items():
        if rate and (m.stack == "lstm" or is_segmented(m)):
            yield f"model.dropout.{name}={rate}: {named} has no such dropout; set 0"
    if t.rsp:
        yield f"train.rsp={t.rsp} passes memories between steps, which {named} does not do; set 0"
    if t.rpo:
        yield f"train.rpo=true: {named} has relative positions, an offset does nothing; set false"
    if m.remat != "none" and m.stack != "transformer" and not is_segmented(m):
        yield f"model.remat={m.remat}: {named} already saves only matrix products; set none"
    if m.lora.rank and m.stack == "lstm":
        yield f"model.lora.rank={m.lora.rank}: {named} has no maps that take adapters; set 0"
    if m.lora.dropout:
        yield f"model.lora.dropout={m.lora.dropout}: {named} has none; set 0"
    # sinusoids of the encoder do not reach the decoder
    if m.arch.positions == "learned" or (m.arch.positions != "none" and not m.encoder.layers):
        able = "none or, for the encoder, sinusoidal" if m.encoder.layers else "none"
        yield (
            f"model.arch.positions={m.arch.positions}: {named} has relative positions only; set "
            f"{able}"
        )
    if m.short_conv:
        yield f"model.short_conv={m.short_conv}: {named} has no short convolution; set 0"
    if m.ngram_memory:
        yield f"model.ngram_memory={m.ngram_memory}: {named} has no n-gram memory; set 0"
    if m.arch.embed_norm:
        yield f"model.arch.embed_norm=true: {named} has no such norm; set false"
    if m.arch.local_rope_base:
        yield (
            f"model.arch.local_rope_base={m.arch.local_rope_base:g}: {named} rotates the keys of "
            "all layers alike; this family's local layers (Gemma 3) cannot become its layers"
        )


def _check_segmented(config: Config) -> Iterator[str]:
    m, length = config.model, config.data.length
    if m.stack != "autocompressor":
        return
    if m.capacity % m.block_len:
        yield (
            f"model.capacity={m.capacity} is not a multiple of model.block_len={m.block_len}, a "
            f"segment; take {format_multiples(m.capacity, m.block_len)}"
        )
    if length > m.capacity:
        yield (
            f"data.length={length} is longer than model.capacity={m.capacity}, all that "
            f"model.stack={m.stack} reads of a document; set model.capacity={length}"
        )


def _check_feedback(config: Config) -> Iterator[str]:
    m, c, d = config.model, config.model.feedback, config.data
    if c.layer > m.layers:
        yield (
            f"model.feedback.layer={c.layer}: states exist after 0 (the embedding) to "
            f"model.layers={m.layers} layers"
        )
    if m.stack == "transformer" and c.composition not in ("all", "previous"):
        yield (
            f"model.feedback.composition={c.composition}: in model.stack=transformer each layer "
            "attends to its own inputs; set model.stack=feedback"
        )
    if m.stack == "transformer" and c.sweeps:
        yield f"model.feedback.sweeps={c.sweeps}: a Transformer needs none; set 0"
    if c.span_loss and not c.adaptive_span:
        yield (
            f"model.feedback.span_loss={c.span_loss} needs learned spans; set "
            "model.feedback.adaptive_span=true, or 0"
        )
    if d.layout != "lanes" and c.span > d.length > 1:
        lanes = ", or data.layout=lanes" if d.layout == "packed" else ""
        yield (
            f"model.feedback.span={c.span} is longer than data.length={d.length}, and "
            f"data.layout={d.layout} limits attention to a row; take at most {d.length}{lanes}"
        )


def _check_paths(config: Config) -> Iterator[str]:
    d = config.data
    paths = {"init": config.init, "eval.tasks": config.eval.tasks}
    paths |= {f"data.{k}": getattr(d, k) for k in ("files", "source", "target", "tokenizer")}
    for key, value in paths.items():
        if message := url_message(value):
            yield f"{key}={message}"


def _check_data(config: Config) -> Iterator[str]:
    d = config.data
    sources = [f"data.{k}={v!r}" for k in ("files", "seqio", "tfds") if (v := getattr(d, k))]
    if len(sources) > 1:
        yield f"{' and '.join(sources)}: documents come from one source; keep one of them"
    if not d.tokenizer:
        yield (
            "data.tokenizer='': give 'bytes', the path of a SentencePiece model, of a "
            "tokenizer.json or of a list of words, or a folder with one of them"
        )
    if 0 < d.part_bytes < _SHORTEST_PART:
        yield (
            f"data.part_bytes={d.part_bytes}: such parts are a few words; take 0 (whole documents) "
            f"or at least {_SHORTEST_PART}"
        )
    if d.holdout == 1:
        yield "data.holdout=1 keeps every document from training; take 0 or at least 2"
    if d.layout == "pairs" and d.task != "translate":
        yield (
            f"data.layout=pairs is of data.task=translate, not of {d.task}; set data.layout=lanes "
            "or packed"
        )
    if d.layout != "packed" and d.repeat_len:
        yield (
            f"data.repeat_len={d.repeat_len} is for packed rows; "
            "set data.layout=packed or data.repeat_len=0"
        )
    if 2 * d.repeat_len >= d.length:
        yield (
            f"data.repeat_len={d.repeat_len} must be less than half of data.length={d.length}; "
            "take longer rows or repeat less"
        )
    name = config.optimizer.name
    for key, value, known in (("data.task", d.task, TASKS), ("optimizer.name", name, OPTIMIZERS)):
        if value not in known:
            yield f"{key}={value}: must be one of {', '.join(known)}{did_you_mean(value, known)}"
    if d.tokenizer == "task" and not TASKS[d.task].has_own_words:
        yield f"data.tokenizer=task: data.task={d.task} has no vocabulary of its own; give 'bytes'"
    if d.text_rows:
        yield from _check_text_rows(config)
    yield from TASKS[d.task].check(config)


def _check_text_rows(config: Config) -> Iterator[str]:
    d, t = config.data, config.train
    named, off = f"data.text_rows={d.text_rows}", "or set data.text_rows=0"
    if d.task == "text":
        yield f"{named}: all rows of data.task=text are text; set data.text_rows=0"
    if TASKS[d.task].has_own_words:
        yield (
            f"{named}: data.task={d.task} has its own vocabulary, which cannot encode text; "
            "set data.text_rows=0"
        )
    if t.rsp:
        yield (
            f"{named}: train.rsp={t.rsp} would start rows of text with the memory of "
            f"data.task={d.task}; set train.rsp=0, {off}"
        )
    if d.text_rows >= d.batch:
        yield (
            f"{named} leaves none of data.batch={d.batch} rows for data.task={d.task}; take fewer, "
            "or a larger batch"
        )
    if d.text_weight >= 1:
        yield (
            f"data.text_weight={d.text_weight}: must be less than 1, since tokens of weight 1 "
            "count as answers of the task in its accuracy; take 0.02"
        )
    if t.bptt_double_every:
        yield (
            f"{named} needs a constant number of rows, train.bptt_double_every="
            f"{t.bptt_double_every} halves it; set train.bptt_double_every=0, {off}"
        )


def _check_blocks(config: Config) -> Iterator[str]:
    length, block = config.data.length, config.model.block_len
    if length % block:
        yield (
            f"data.length={length} is not a multiple of model.block_len={block}; "
            f"take {format_multiples(length, block)}"
        )


def _check_train(config: Config) -> Iterator[str]:
    m, d, t = config.model, config.data, config.train
    if d.length % (t.bptt_segments * m.block_len):
        yield (
            f"train.bptt_segments={t.bptt_segments} does not divide the {d.length // m.block_len} "
            f"blocks of data.length={d.length}; take one of "
            f"{format_divisors(d.length // m.block_len)}"
        )
    if d.batch % t.accumulate:
        yield (
            f"train.accumulate={t.accumulate} does not divide data.batch={d.batch}; "
            f"take one of {format_divisors(d.batch)}"
        )
    if t.rsp and d.layout != "packed":
        always = ", lanes always carry their memory" if d.layout == "lanes" else ""
        yield (
            f"train.rsp={t.rsp} is for packed rows{always}; set data.layout=packed or train.rsp=0"
        )


def _check_optimizer(config: Config) -> Iterator[str]:
    o = config.optimizer
    if o.schedule == "inverse_sqrt" and not o.warmup_steps:
        yield (
            "optimizer.warmup_steps=0: optimizer.schedule=inverse_sqrt falls with the square root "
            "of warmup_steps / step; take at least 1, or another schedule"
        )


def _check_bptt_warmup(config: Config) -> Iterator[str]:
    """Yield an error line for what prevents rows from doubling in length up to data.length."""
    m, d, t = config.model, config.data, config.train
    start, off = f"train.bptt_start={t.bptt_start}", "or train.bptt_start=0"
    if t.bptt_start == d.length and not t.bptt_double_every:
        return  # as in a resolved config
    if bool(t.bptt_start) != bool(t.bptt_double_every):
        yield (
            f"{start} and train.bptt_double_every={t.bptt_double_every}: the length at first and "
            "the steps after which it doubles; set both or neither"
        )
    if not t.bptt_start:
        return
    if d.layout != "lanes":
        yield (
            f"{start} is for lanes, {d.layout} rows carry no memory from step to step; "
            f"set data.layout=lanes {off}"
        )
    divisor = m.block_len * t.bptt_segments
    fitting = [n for n in _doubling_lengths(d.length) if n % divisor == 0]
    if t.bptt_start not in fitting:
        yield (
            f"{start} does not double to data.length={d.length} in multiples of model.block_len="
            f"{m.block_len} times train.bptt_segments={t.bptt_segments}; "
            f"take one of {', '.join(map(str, fitting))}, {off}"
        )


def _check_profile(config: Config) -> Iterator[str]:
    p, steps = config.profile, config.train.steps
    if p.steps:
        named = f"profile.steps={p.steps}"
        match = re.fullmatch(r"(\d{1,10}):(\d{1,10})", p.steps, re.ASCII)
        if not match:
            yield f"{named}: give two step counts, such as profile.steps=10:15"
            return
        first, last = int(match[1]), int(match[2])
        if first >= last:
            yield f"{named}: must begin before it ends; give the smaller number first"
        if last > steps:
            yield f"{named}: ends beyond train.steps={steps}; take at most {steps}"
    if p.memory > steps:
        yield f"profile.memory={p.memory}: is beyond train.steps={steps}; take at most {steps}"


def _check_mesh(config: Config) -> Iterator[str]:
    for axis in AXES:
        key, size = f"mesh.{axis}", getattr(config.mesh, axis)
        if size < 1 and size != -1:
            yield f"{key}={size}: must be at least 1, or -1 for the remaining devices"


def _check_unrolled(config: Config) -> Iterator[str]:
    m = config.model
    pattern = 1 if is_segmented(m) else len(mixer_pattern(m))
    if not pattern:
        count, named = m.layers * max(m.feedback.sweeps, 1), f"model.layers={m.layers}"
        named += f" times model.feedback.sweeps={m.feedback.sweeps}" if m.feedback.sweeps else ""
        fewer = "take fewer"
    elif m.scan_layers:
        count, named = pattern, "model.mixer"
        fewer = "take a shorter pattern"
    else:
        count, named = m.layers, f"model.layers={m.layers} with model.scan_layers=false"
        fewer = "set model.scan_layers=true"
    if count > _MAX_UNROLLED_LAYERS:
        yield (
            f"{named}: {count:,} unrolled layers would take hours to compile; {fewer} "
            f"(at most {_MAX_UNROLLED_LAYERS:,})"
        )


_FIRST_CHECKS = (check_types, check_ranges, _check_stack)
_OTHER_MODEL_CHECKS = (
    _check_model,
    _check_adaptive,
    _check_mixers,
    check_encoder,
    _check_unrolled,
)


def _doubling_lengths(value: int) -> list[int]:
    """Return the lengths from which repeated doubling gives `value`, in ascending order."""
    return [value // 2**n for n in reversed(range(value.bit_length())) if value % 2**n == 0]

"""`famjax convert`: writes a converted model as a run folder, for all verbs and for `init=`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from famjax.config.resolved import resolve_model
from famjax.config.schema import Config, ModelConfig
from famjax.convert.families import find_family
from famjax.convert.load import describe_ignored_keys, load_weights, parse_model, read_hf_config
from famjax.convert.selfcheck import compare_with_transformers, describe, skip_reason
from famjax.convert.surgery import describe_window, replace_attention
from famjax.convert.teacher import (
    Teacher,
    check_given_tokenizer,
    is_run,
    open_run_teacher,
    text_data,
)
from famjax.core.atomic import fill_folder
from famjax.core.errors import UserError
from famjax.experiment.checks import validate, validate_model
from famjax.experiment.load import TRAINING_KEYS, override, to_json
from famjax.experiment.unused_keys import check_unused_keys
from famjax.mixers import mixer_constants, mixer_specs
from famjax.models.language_model import LanguageModel
from famjax.models.remap_checks import check_compatible
from famjax.models.remap_params import canonical_name, is_feature_map
from famjax.tokenizers.load import WORDS, load_tokenizer, save_tokenizer
from famjax.tokenizers.marian import MARIAN_FILES
from famjax.tokenizers.tokenizer import Tokenizer
from famjax.train.checkpoint import Checkpoints
from famjax.train.run_folder import CHECKPOINTS, CONFIG, SOURCE, with_vocab_size

_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
# largest accepted difference of logits, as a fraction of their range
_TOLERANCE = 1e-4


def convert(
    source: Path,
    target: Path,
    to: str = "keep",
    layers: str = "",
    tokenizer: str = "",
    overrides: tuple[str, ...] = (),
    report: Callable[[str], None] = print,
    keep_every: int | None = None,
) -> Config:
    """Write a pretrained model as a famjax run at step 0, and compare it with its source.

    Args:
      source: folder with config.json, *.safetensors and a tokenizer, or folder of a famjax run.
      target: folder to write. It must not exist, and appears only after everything is written and
        checked.
      to, layers, keep_every: see `famjax.convert.surgery.replace_attention`.
      tokenizer: tokenizer that replaces the one in `source`; "" keeps that one.
      overrides: config overrides, such as "model.block_len=512".
      report: called with lines about the progress.

    Returns:
      The config of the new run.

    Raises:
      UserError: the source cannot be read, or the logits differ from Hugging Face's code.
    """
    if target.exists():
        raise UserError(f"{target}: exists already; give another folder or remove it")
    teacher = (open_run_teacher if is_run(source) else open_hugging_face)(source, tokenizer)
    if teacher.ignored_keys:
        report(teacher.ignored_keys)
    student = replace_attention(teacher.model, to, layers, keep_every)
    config = run_config(teacher, student, target, overrides)
    model = teacher.student(config.model)
    report(_parameter_summary(teacher, config.model, model))
    given = {assignment.partition("=")[0] for assignment in overrides}
    for line in describe_window(teacher.model, config.model, given):
        report(line)
    report(teacher.compare(model, config.model))
    with new_folder(target) as folder:
        save_tokenizer(teacher.tokenizer, folder)
        if teacher.hf:
            (folder / SOURCE).write_bytes(teacher.hf)
        write_model(folder, config, model)
    return config


def open_hugging_face(source: Path, tokenizer: str = "", mesh: Mesh | None = None) -> Teacher:
    """Open a Hugging Face model, with its tokenizer if no other is given.

    Args:
      mesh: devices to shard a student's parameters over; None uses the first device only.
    """
    hf = read_hf_config(source)
    known = (*_TOKENIZERS, MARIAN_FILES[0])
    if not tokenizer and not any((source / name).is_file() for name in known):
        raise UserError(
            f"{source}: has no {' and no '.join(_TOKENIZERS)}; copy the tokenizer there, or give "
            "famjax convert --tokenizer PATH (or bytes)"
        )
    # an exported run with a word list includes it; its tokenizer.json is for other libraries
    own = str(source / WORDS if (source / WORDS).is_file() else source)
    if tokenizer:
        check_given_tokenizer(tokenizer, _load_if_readable(own), source)
    native, tokenizer = parse_model(hf, source), tokenizer or own
    tensors = find_family(hf).tensors(resolve_model(native))
    return Teacher(
        hf["model_type"],
        native,
        tokenizer,
        text_data(native, tokenizer),
        lambda model: load_weights(model, native, tensors, source, mesh),
        lambda model, to: _compare_logits(source, hf["model_type"], native, model, to),
        (source / "config.json").read_bytes(),
        describe_ignored_keys(hf),
    )


def _load_if_readable(spec: str) -> Tokenizer | None:
    try:
        return load_tokenizer(spec)
    except UserError:
        # missing, or of a kind that famjax rejects: reasons to give another one
        return None


def _parameter_summary(teacher: Teacher, config: ModelConfig, model: LanguageModel) -> str:
    paths = jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))
    count = sum(leaf.size for _, leaf in paths)
    maps = sum(leaf.size for path, leaf in paths if is_feature_map(canonical_name(path)[0]))
    of_maps = f", {maps:,} of them feature maps" if maps else ""
    layers = f"model.stack={config.stack}"
    if config.stack == "residual":
        layers = f"attention by layer: {config.mixer}"
    return f"{count:,} parameters of {teacher.name}{of_maps}; {layers}"


def write_model(folder: Path, config: Config, model: LanguageModel, step: int = 0) -> None:
    """Write config and parameters in the layout of `famjax.train.run.open_run`."""
    (folder / CONFIG).write_text(to_json(config), encoding="utf-8")
    checkpoints = Checkpoints(folder / CHECKPOINTS, keep=1)
    try:
        constants = mixer_constants(config.model)
        extra = {"config": dataclasses.asdict(config), "constants": constants}
        checkpoints.save(step, {"params": nnx.state(model, nnx.Param)}, extra, copy=False)
    finally:
        # the folder may be removed on an error, so finish writing first
        checkpoints.wait()


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder that gets the name `target` when it is full, or is removed on an error.

    Raises:
      UserError: it cannot be written.
    """
    try:
        with fill_folder(target.absolute()) as folder:
            yield folder
    except OSError as error:
        raise UserError(
            f"cannot write {target}: {error.strerror}; free some space or check its permissions"
        ) from None


def run_config(
    teacher: Teacher, model: ModelConfig, target: Path, overrides: tuple[str, ...] = ()
) -> Config:
    """Return the config of a run at step 0, named after its folder."""
    for assignment in overrides:
        is_pairs = model.encoder.layers > 0 and assignment.startswith("data.source_words=")
        if not assignment.startswith("model.") and not is_pairs:
            also = " and data.source_words" if model.encoder.layers else ""
            raise UserError(
                f"{assignment}: only model.*{also} can be set here; give the rest to famjax train"
            )
        if assignment.startswith("model.lora."):
            raise UserError(
                f"{assignment}: adapters are added by famjax train: famjax train ... "
                f"init={target} {assignment}"
            )
        # of these keys, evaluation and export of the folder itself depend on two
        if assignment.startswith(TRAINING_KEYS) and not assignment.startswith(
            ("model.dtype", "model.scan_layers")
        ):
            raise UserError(
                f"{assignment}: is set in famjax train: famjax train ... init={target} {assignment}"
            )
    # the name of ".." is no name of a run
    name = target.resolve().name or "converted"
    config = override(Config(name=name, model=model, data=teacher.data), overrides)
    validate_model(config.model)
    check_unused_keys(config, (assignment.partition("=")[0] for assignment in overrides))
    check_compatible(teacher.model, config.model)
    model, rows = config.model, 1024
    # a table of positions limits rows as well
    if model.arch.positions == "learned" or any(s.is_bounded for s in mixer_specs(model)):
        rows = min(max(rows, model.block_len), model.capacity)
        if model.block_len > rows:
            if any(assignment.startswith("model.block_len=") for assignment in overrides):
                raise UserError(
                    f"model.block_len={model.block_len}: the model holds {model.capacity} tokens "
                    "of a document (model.capacity); give at most that many"
                )
            model = replace(model, block_len=rows)  # from the default
    length = max(rows // model.block_len, 1) * model.block_len
    source = config.data.source_length
    if model.arch.positions == "learned":
        source = min(source, model.capacity)
    data = replace(config.data, length=length, source_length=source)
    config = replace(config, model=model, data=data)
    validate(config)
    return with_vocab_size(config, load_tokenizer(teacher.tokenizer))


def _compare_logits(
    source: Path, kind: str, native: ModelConfig, model: LanguageModel, to: ModelConfig
) -> str:
    if kind == "famjax":
        # transformers would run code in the folder
        return "not compared with Hugging Face's code: the folder has its own, which is not run"
    if reason := skip_reason(native):
        return f"not compared with Hugging Face's code: {reason}"
    deviation = compare_with_transformers(source, native, model, to)
    if not deviation.relative < _TOLERANCE:
        raise UserError(
            f"{source}: the logits differ from Hugging Face's by {deviation.relative:.1e} of their "
            f"range, more than {_TOLERANCE:.0e}; this is a bug of famjax or a config.json of "
            "another model: please report it"
        )
    return (
        f"logits with the source's attention equal Hugging Face's to {deviation.absolute:.1e}, "
        f"{deviation.relative:.1e} of their range (float32, {describe(native)})"
    )

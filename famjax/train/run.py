"""The run folder (config, tokenizer, metrics, checkpoints, plots), and opening it for inference."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from famjax.config.keys import values
from famjax.config.schema import Config, LoraConfig, ModelConfig
from famjax.core.errors import UserError, nearest_path
from famjax.core.json_files import read_whole
from famjax.core.types import Params, PyTree
from famjax.experiment.checks import validate, validate_model
from famjax.experiment.load import difference, from_json, to_json
from famjax.experiment.memory import check_model_fits, check_training_fits
from famjax.mixers import mixer_constants
from famjax.models.fold_feature_maps import fold_feature_maps, why_not_foldable
from famjax.models.language_model import LanguageModel
from famjax.models.remap_params import (
    abstract_inference_model,
    check_compatible,
    merge_adapters,
    remap_params,
)
from famjax.models.seq2seq import make_model
from famjax.parallel import sharding
from famjax.pipeline import make_tokenizer
from famjax.processes.collective import broadcast_from_first, process_index
from famjax.stacks.feedback import Feedback
from famjax.tokenizers.load import (
    HUGGING_FACE_FOLDER,
    WITHOUT_FILE,
    load_saved_tokenizer,
    save_tokenizer,
    save_words,
)
from famjax.tokenizers.tokenizer import Tokenizer, check_same_ids
from famjax.tokenizers.words import WordTokenizer
from famjax.train.checkpoint import Checkpoints, wrap_extra_errors
from famjax.train.lock import LOCK
from famjax.train.manifest import EXTRA
from famjax.train.metrics import METRICS
from famjax.train.partition import (
    Frozen,
    check_base,
    combine_fingerprints,
    fingerprint,
    has_frozen_params,
    inference_config,
    partition_trainable,
)

CONFIG, CHECKPOINTS = "config.json", "checkpoints"
# record of the JSON-lines files that were checked and need no check when the run resumes
CHECKED = "data_checked.json"
# files of RUN that are needed for training only
_TRAINING_ONLY = (METRICS, LOCK)

# Keys that a resumed run may change: duration, intervals, names, evaluation, profiles, mesh, rows.
# With more steps a cosine or wsd schedule continues at another learning rate, which is reported.
_RESUMABLE: tuple[str, ...] = (
    "name",
    "init",
    "train.steps",
    "train.log_every",
    "train.checkpoint_every",
    "train.keep",
    "eval.",
    "profile.",
    "mesh.",
)


# Keys that determine the outputs of an opened model and its held-out documents; and exceptions
# among them that do not: paths of data, details of the computation, training-only settings.
_MODEL_KEYS = ("seed", "model.", "data.", "train.only", "train.match")
_UNCHECKED = (
    "model.dtype",
    "model.scan_layers",
    "model.remat",
    "model.capacity",
    "model.linear.chunk",
    "model.dropout.",
    "model.lora.dropout",
    *(f"model.feedback.{name}" for name in ("cache", "sweeps", "tolerance", "span_")),
    *(f"data.{name}" for name in ("files", "seqio", "tfds", "tokenizer")),
    *(f"data.{name}" for name in ("batch", "length", "layout")),
)


@dataclass(frozen=True)
class Run:
    """A trained model with everything needed to use it.

    Attributes:
      config: the config as it was given, with the vocabulary size filled in.
      tokenizer: the tokenizer it was trained with.
      model: NNX module with restored parameters.
      step: step of the checkpoint.
      base: fingerprint of the model that the frozen weights come from; "" if nothing is frozen.
    """

    config: Config
    tokenizer: Tokenizer
    model: LanguageModel
    step: int
    base: str = ""

    def fingerprint(self) -> str:
        """Return a hash of the run's weights, the same on all devices."""
        _, trained, _ = partition_trainable(
            inference_config(self.config.model), self.model, self.config.train.only
        )
        return combine_fingerprints(fingerprint(trained), self.base)

    def merge_adapters(self) -> Run:
        """Return the run with its adapters merged into the weights; it no longer needs `init`."""
        params, model = merge_adapters(nnx.state(self.model, nnx.Param), self.config.model)
        model = inference_config(model)
        train = replace(self.config.train, only="all", match=False)
        config = replace(self.config, model=model, train=train, init="")
        return replace(
            self,
            config=config,
            model=nnx.merge(abstract_inference_model(model)[0], params),
            base="",
        )

    def with_folded_maps(self) -> Run:
        """Return the run with folded feature maps, for inference; itself if none can be folded."""
        model = replace(self.config.model, lora=LoraConfig())
        if all(why_not_foldable(model).values()):
            return self
        run = self.merge_adapters() if self.config.model.lora.rank else self
        return replace(run, model=fold_feature_maps(run.model, model))

    def with_small_cache(self) -> Run:
        """Return the run with a model that caches memories, not keys and values (FT v1 5.3)."""
        stack = self.model.stack
        if not isinstance(stack, Feedback):
            raise UserError(
                f"model.stack={self.config.model.stack}: has no memory of one vector a token; "
                "leave out --small-cache"
            )
        stack.use_memory_cache()
        feedback = replace(self.config.model.feedback, cache="memory")
        model = replace(self.config.model, feedback=feedback)
        return replace(self, config=replace(self.config, model=model))


def open_run(
    run_dir: str | Path,
    step: int | None = None,
    report: Callable[[str], None] | None = None,
    mesh: Mesh | None = None,
) -> Run:
    """Return the run in a folder, with the parameters of its newest valid checkpoint.

    Args:
      run_dir: RUN.
      step: use the checkpoint of this step instead of the newest valid one.
      report: called with a line for each damaged checkpoint that is skipped; None writes to
        standard error.
      mesh: devices to shard the parameters over; None uses the first device only.

    Raises:
      UserError: the folder has no run, or no valid checkpoint.
    """
    folder = Path(run_dir)
    config = read_config(folder)
    if config is None:
        if not folder.is_dir():
            raise UserError(f"{folder}: there is no such folder{nearest_path(str(folder))}")
        within = sorted(str(path.parent) for path in folder.glob(f"*/{CHECKPOINTS}"))
        hint = f"give one of {', '.join(within)}" if within else "train one with famjax train"
        raise UserError(f"{folder} is not a run: it has no {CONFIG}; {hint}")
    try:
        validate(config)  # it may have been edited by hand
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from None
    tokenizer = run_tokenizer(folder, config)
    model, only = inference_config(config.model), config.train.only
    check_model_fits(model, mesh.size if mesh else 1)
    graph, shapes, _ = abstract_model(model, only=only)
    template = _with_shardings(shapes, mesh)
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    check_not_edited(config, checkpoints, step, folder)
    restored, tree, extra = checkpoints.restore({"params": template}, step, report)
    check_not_edited(config, checkpoints, restored, folder)
    with wrap_extra_errors(checkpoints.path(restored)):
        check_constants(extra, model, checkpoints.path(restored))
    frozen: Frozen = ()
    base = ""
    if has_frozen_params(config):
        weights, base, _ = initial_weights(config, folder, report, mesh)
        check_base(extra.get("base", ""), base, config.init, folder)
        frozen = freeze(model, weights, only)
    module = nnx.merge(graph, tree["params"], *frozen)
    if config.model.feedback.adaptive_span:
        module.stack.set_attention_span(module.stack.attention_span())
    return Run(config, tokenizer, module, restored, base)


def _with_shardings(shapes: PyTree, mesh: Mesh | None) -> PyTree:
    """Return the shapes of parameters with shardings on the mesh, or on the first device."""
    if mesh is None:
        first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: first, shapes)
    else:
        shardings = sharding.parameter_shardings(mesh, shapes)
    return jax.tree.map(
        lambda a, sharding_: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding_),
        shapes,
        shardings,
    )


def initial_weights(
    config: Config,
    folder: Path,
    report: Callable[[str], None] | None = None,
    mesh: Mesh | None = None,
) -> tuple[Any, str, int]:
    """Return the parameters of the model in `config.init`, in the layout of `config.model`.

    Adapters of the model in `config.init` are merged; the result has no adapters.

    Args:
      folder: folder of the run that starts from these parameters.

    Returns:
      The parameters, the fingerprint of the model in `config.init`, and the step of its checkpoint.

    Raises:
      UserError: there is no usable model, or its sizes differ from those of `config.model`.
    """
    if not Path(config.init).is_dir():
        raise UserError(
            f"init={config.init}: there is no such folder; if it was moved, set init in "
            f"{folder / CONFIG} to its new path"
        )
    run = open_run(config.init, report=report, mesh=mesh)
    name = run.fingerprint()
    params, model = merge_adapters(nnx.state(run.model, nnx.Param), run.config.model)
    return remap_params(params, model, config.model), name, run.step


def check_initial_model(config: Config) -> None:
    """Raise a `UserError` if the model in `config.init` has other sizes, before it is loaded."""
    there = read_config(Path(config.init))
    if there is not None:
        check_compatible(there.model, config.model)


@functools.partial(jax.jit, static_argnums=(0, 2), donate_argnums=1)
def freeze(config: ModelConfig, weights: Params, only: str = "all") -> Frozen:
    """Return the frozen part of a model with these weights, see `partition_trainable`.

    The weights are donated.
    """
    # XLA removes this initialisation, since all of its values are replaced
    model = make_model(config, rngs=nnx.Rngs(0))
    nnx.update(model, weights)
    return partition_trainable(config, model, only)[2]


def abstract_model(
    model: ModelConfig, attention_span: tuple[int, ...] = (), only: str = "all"
) -> tuple[Any, Any, Frozen]:
    """Return `partition_trainable` of an abstract model, whose arrays are `jax.ShapeDtypeStruct`.

    Args:
      attention_span: see `Feedback.set_attention_span`; () means all.
      only: `train.only`, which parameters are trained.
    """
    module = nnx.eval_shape(lambda: make_model(model, rngs=nnx.Rngs(0)))
    if attention_span:
        module.stack.set_attention_span(attention_span)
    return partition_trainable(model, module, only)


def read_config(folder: Path) -> Config | None:
    """Return the config of the run in a folder; None if there is no run."""
    path = folder / CONFIG
    try:
        content = read_whole(path, "restore it from a copy")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give --run another folder") from None
    try:
        return from_json(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file; restore it from a copy") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def run_tokenizer(folder: Path, config: Config) -> Tokenizer:
    """Return the tokenizer of a run, from the copy in its folder."""
    return load_saved_tokenizer(folder, config.data.tokenizer)


def prepare_run(folder: Path, config: Config, has_checkpoint: bool) -> tuple[Config, Tokenizer]:
    """Create the run folder, or check that an existing one belongs to the same experiment.

    In a folder without a checkpoint, a run may start with another config: the first attempt may
    have failed, for example because of a misspelt file name.

    Args:
      has_checkpoint: whether the folder has a checkpoint.

    Returns:
      The config with the vocabulary size filled in, and the tokenizer.

    Raises:
      UserError: the vocabulary is too small for the tokenizer, or the folder has another experiment
        (the message lists the differences), or cannot be written.
    """
    before = read_config(folder)  # raises if `folder` is not a folder
    if not has_checkpoint:
        before = None
    if before is not None:
        # compared first: with another data.tokenizer the run's copy may not be found
        check_resumable(before, _with_same_vocab_size(config, before), folder)
        tokenizer = run_tokenizer(folder, config)
    else:
        tokenizer = make_tokenizer(config.data)
        _check_same_ids(config, tokenizer)
    config = with_vocab_size(config, tokenizer)
    check_training_fits(config)
    if process_index():  # process 0 writes for all
        return config, tokenizer
    try:
        _write_run(folder, config, None if before else tokenizer)
    except OSError as error:
        raise UserError(
            f"cannot write the run folder {folder}: {error.strerror}; free some space, check its "
            "permissions, or give --run another folder"
        ) from None
    return config, tokenizer


def _with_same_vocab_size(config: Config, before: Config) -> Config:
    """Return the config with the vocabulary size of `before` if it has none yet."""
    size = config.model.vocab_size or before.model.vocab_size
    return replace(config, model=replace(config.model, vocab_size=size))


def _check_same_ids(config: Config, tokenizer: Tokenizer) -> None:
    """Raise a `UserError` if the tokenizer's ids are other texts than in the model in `init`."""
    folder = Path(config.init)
    there = read_config(folder) if config.init else None
    # a missing model is reported when its weights are read; the usual tokenizer is the folder's own
    if there is not None and Path(config.data.tokenizer).parent != folder:
        given = f"data.tokenizer={tokenizer.name}"
        check_same_ids(tokenizer, run_tokenizer(folder, there), given, f"init={folder}")


def check_not_edited(
    config: Config, checkpoints: Checkpoints, step: int | None, folder: Path
) -> None:
    """Raise a `UserError` if config.json describes another model than the checkpoint does.

    Most keys do not change the shapes in a checkpoint, so that after an edit of config.json by hand
    the checkpoint would silently run as another model. A checkpoint without a config, from an older
    famjax, is accepted.

    Args:
      step: step of the checkpoint; None means the newest.
    """
    step, saved = broadcast_from_first("config", lambda: _saved_config(checkpoints, step))
    if not saved:
        return
    try:
        before = values(from_json(json.dumps(saved), report=lambda line: None))
    except UserError as error:
        raise UserError(
            f"{checkpoints.path(step or 0) / EXTRA}: damaged ({error}); restore it from a copy"
        ) from None
    now = values(config)
    changed = [
        key
        for key in now
        if now[key] != before[key]
        and key.startswith(_MODEL_KEYS)
        and not key.startswith(_UNCHECKED)
    ]
    if changed:
        edits = ", ".join(f"{key}={now[key]!r} (was {before[key]!r})" for key in changed)
        raise UserError(
            f"{folder / CONFIG}: was edited, and no longer matches the checkpoint of step {step}: "
            f"{edits}; undo the edit, or change the model with famjax convert"
        )


def check_constants(extra: dict[str, Any], model: ModelConfig, where: Path) -> None:
    """Raise a `UserError` for a checkpoint of a famjax version with other `MixerSpec.constants`.

    With the constants of this version the same parameters would compute another function. A
    checkpoint without constants is accepted: it is from 0.1.0, before they were recorded.

    Args:
      extra: the checkpoint's `extra`.
      where: the checkpoint's folder.
    """
    if "constants" not in extra:
        return
    saved, now = extra["constants"], mixer_constants(model)
    changed = [name for name, value in now.items() if saved.get(name) != value]
    if changed:
        differences = ", ".join(f"{name} {saved.get(name)} -> {now[name]}" for name in changed)
        raise UserError(
            f"{where}: is of another version of famjax, with which its weights are another model "
            f"({differences}); open it with that version, or train again"
        )


def _saved_config(checkpoints: Checkpoints, step: int | None) -> tuple[int | None, Any]:
    """Return the step (None means the newest), and the config in its checkpoint, if any."""
    step = checkpoints.latest() if step is None else step
    return step, None if step is None else checkpoints.extra(step).get("config")


def check_resumable(before: Config, config: Config, where: Path) -> None:
    """Raise a `UserError` if the run in `where` cannot resume with `config`."""
    free = _RESUMABLE
    if config.init and not {before.data.tokenizer, config.data.tokenizer} & set(WITHOUT_FILE):
        # the tokenizer comes from that folder, which may have been moved; the run has a copy
        free = (*free, "data.tokenizer")
    if not config.train.bptt_double_every:
        # BPTT warm-up assigns documents permanently to the initial lanes
        free = (*free, "data.batch")
    changed = [line for line in difference(before, config) if not line.startswith(free)]
    if changed:
        raise UserError(
            f"{where} holds a run with another config ({'; '.join(changed)}); "
            "give --run another folder, or the same values"
        )


def _write_run(folder: Path, config: Config, tokenizer: Tokenizer | None) -> None:
    """Write the tokenizer, if given, and then the config, which marks the folder as a run."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, WordTokenizer):
        save_words(tokenizer.text(), folder)
    elif tokenizer is not None:
        save_tokenizer(config.data.tokenizer, folder)
    temporary = folder / (CONFIG + ".new")
    temporary.write_text(to_json(config), encoding="utf-8")
    temporary.replace(folder / CONFIG)


def copy_run_files(run: Path, folder: Path) -> None:
    """Copy what a run needs besides checkpoints (config and tokenizer) into another folder."""
    for path in run.iterdir():
        if path.is_file() and path.name not in _TRAINING_ONLY:
            shutil.copyfile(path, folder / path.name)
    if (run / HUGGING_FACE_FOLDER).is_dir():
        shutil.copytree(run / HUGGING_FACE_FOLDER, folder / HUGGING_FACE_FOLDER)


def with_vocab_size(config: Config, tokenizer: Tokenizer) -> Config:
    """Fill in `model.vocab_size`."""
    size = config.model.vocab_size
    if size == 0:
        model = replace(config.model, vocab_size=tokenizer.vocab_size)
        validate_model(model)  # model.adaptive.cutoffs may exceed the size
        return replace(config, model=model)
    # a pretrained embedding may lack the last tokens if they have no text (Gemma 3)
    needs_more = (
        tokenizer.token_bytes[size:].any() or max(tokenizer.bos_id, *tokenizer.stop_ids) >= size
    )
    if size < tokenizer.vocab_size and needs_more:
        raise UserError(
            f"model.vocab_size={size}: tokenizer {tokenizer.name} has {tokenizer.vocab_size} "
            "tokens; set 0 to use its size, or give the tokenizer that the weights came with"
        )
    return config

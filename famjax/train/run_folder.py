"""The files of a run's folder besides its checkpoints: config and tokenizer."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from famjax.config.schema import Config
from famjax.core.atomic import write_file
from famjax.core.errors import UserError
from famjax.core.json_files import read_whole
from famjax.core.paths import expanded
from famjax.experiment.checks import validate_model
from famjax.experiment.load import difference, from_json, to_json
from famjax.experiment.memory import check_training_fits
from famjax.experiment.unused_keys import has_effect
from famjax.pipeline import make_tokenizer
from famjax.processes.collective import process_index
from famjax.tokenizers.load import (
    HUGGING_FACE_FOLDER,
    WITHOUT_FILE,
    load_saved_tokenizer,
    save_tokenizer,
    save_words,
)
from famjax.tokenizers.tokenizer import Tokenizer, check_same_ids
from famjax.tokenizers.words import WordTokenizer
from famjax.train.lock import LOCK
from famjax.train.metrics import METRICS
from famjax.train.partition import has_frozen_params

CONFIG, CHECKPOINTS = "config.json", "checkpoints"
# record of the files that were checked and need no check when the run resumes
CHECKED = "data_checked.json"
# config.json of the Hugging Face folder that a run's model comes from, by conversion or `init`
SOURCE = "hf_config.json"
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


def read_run_config(folder: Path) -> Config | None:
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
    have failed, for example because of a misspelt file name. The config of a run that continues is
    written later, by `update_config`.

    Args:
      has_checkpoint: whether the folder has a checkpoint.

    Returns:
      The config with the vocabulary size filled in, and the tokenizer.

    Raises:
      UserError: the vocabulary is too small for the tokenizer, or the folder has another experiment
        (the message lists the differences), or cannot be written.
    """
    before = read_run_config(folder)  # raises if `folder` is not a folder
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
    if before is None and not process_index():  # process 0 writes for all
        _write_run(folder, config, tokenizer)
    return config, tokenizer


def update_config(folder: Path, config: Config) -> None:
    """Write the config of a run that continues, after nothing has refused it."""
    if not process_index():
        _write_run(folder, config, None)


def check_resumable(before: Config, config: Config, where: Path) -> None:
    """Raise a `UserError` if the run in `where` cannot resume with `config`."""
    free = _RESUMABLE
    if config.init and _began_elsewhere(before, config):
        free = tuple(key for key in free if key != "init")
    elif config.init and not {before.data.tokenizer, config.data.tokenizer} & set(WITHOUT_FILE):
        # the tokenizer comes from that folder, which may have been moved; the run has a copy
        free = (*free, "data.tokenizer")
    if not config.train.bptt_double_every:
        # BPTT warm-up assigns documents permanently to the initial lanes
        free = (*free, "data.batch")
    changed = [
        line
        for line in difference(before, config)
        # the version that made the run may have another default of a key without effect
        if not line.startswith(free) and _has_effect(line.partition(":")[0], before, config)
    ]
    if changed:
        raise UserError(
            f"{where} holds a run with another config ({'; '.join(changed)}); "
            "give --run another folder, or the same values"
        )


def _began_elsewhere(before: Config, config: Config) -> bool:
    """Return whether a run's first weights were not those of `config.init`.

    A folder that was moved has another name, and then the old one is not there any more. Where
    weights are frozen, their fingerprint is compared later.
    """
    if not before.init:
        return True
    first, given = expanded(before.init), expanded(config.init)
    if has_frozen_params(config) or not (first.is_dir() and given.is_dir()):
        return False
    return not os.path.samefile(first, given)


def _has_effect(key: str, *configs: Config) -> bool:
    return any(has_effect(key, config) for config in configs)


def _with_same_vocab_size(config: Config, before: Config) -> Config:
    """Return the config with the vocabulary size of `before` if it has none yet."""
    size = config.model.vocab_size or before.model.vocab_size
    return replace(config, model=replace(config.model, vocab_size=size))


def _check_same_ids(config: Config, tokenizer: Tokenizer) -> None:
    """Raise a `UserError` if the tokenizer's ids are other texts than in the model in `init`."""
    folder = Path(config.init)
    init_config = read_run_config(folder) if config.init else None
    # a missing model is reported when its weights are read; the usual tokenizer is the folder's own
    if init_config is not None and Path(config.data.tokenizer).parent != folder:
        given = f"data.tokenizer={tokenizer.name}"
        check_same_ids(tokenizer, run_tokenizer(folder, init_config), given, f"init={folder}")


def _write_run(folder: Path, config: Config, tokenizer: Tokenizer | None) -> None:
    """Write the tokenizer, if given, and then the config, which marks the folder as a run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(tokenizer, WordTokenizer):
            save_words(tokenizer.text(), folder)
        elif tokenizer is not None:
            save_tokenizer(config.data.tokenizer, folder)
        if config.init:
            copy_source_config(expanded(config.init), "", folder)
        write_file(folder / CONFIG, to_json(config))
    except OSError as error:
        raise UserError(
            f"cannot write the run folder {folder}: {error.strerror}; free some space, check its "
            "permissions, or give --run another folder"
        ) from None


def find_source_config(run: Path, init: str) -> Path | None:
    """Return the `SOURCE` of a run, or of its `init`; None if there is none.

    Runs from before 2026-11-28 have no copy of their `init`'s.
    """
    folders = [run, *([expanded(init)] if init else [])]
    return next((path for folder in folders if (path := folder / SOURCE).exists()), None)


def copy_source_config(run: Path, init: str, folder: Path) -> None:
    """Copy the `SOURCE` of a run, or of its `init`, into a folder, if there is one."""
    path = find_source_config(run, init)
    if path is not None and path.parent != folder:
        shutil.copyfile(path, folder / SOURCE)


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

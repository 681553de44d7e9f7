"""Resolves a config, once at the start of a program: a training, a plan or a benchmark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from famjax.config.resolved import ResolvedConfig, resolve_model
from famjax.config.schema import Config, DataConfig, TrainConfig
from famjax.core.atomic import write_file
from famjax.core.errors import UserError
from famjax.experiment.load import to_json
from famjax.parallel.mesh import MeshDemand, choose_mesh, is_auto
from famjax.tasks import TASKS
from famjax.tokenizers.tokenizer import Tokenizer
from famjax.train.program import mesh_demand
from famjax.train.run_folder import with_vocab_size

RESOLVED = "resolved.json"


def resolve(
    config: Config, tokenizer: Tokenizer | None, devices: int, device_bytes: int | None = None
) -> ResolvedConfig:
    """Return the config with every 0, or -1 of a mesh axis, replaced by the value it stands for.

    The vocabulary size follows from the tokenizer, the mesh from the devices, the model and the
    batch, and all other values from other keys. Idempotent.

    Args:
      tokenizer: tokenizer of the run; None if `model.vocab_size` is given.
      devices: number of devices in the mesh.
      device_bytes: bytes of memory of a device, used to choose mesh axes of -1; None takes that of
        a local device.

    Raises:
      UserError: the vocabulary does not fit the tokenizer, or the mesh does not fit the devices.
    """
    if tokenizer is not None:
        config = with_vocab_size(config, tokenizer)
    if not config.model.vocab_size:
        raise ValueError("vocab_size 0 stands for the tokenizer's: give the tokenizer")
    filled = {
        "model": resolve_model(config.model),
        "data": TASKS[config.data.task].resolve(config.data),
        "train": _resolve_train(config.train, config.data),
    }
    sized = ResolvedConfig(**(vars(config) | filled))
    demand = mesh_demand(sized, device_bytes) if is_auto(config.mesh) else MeshDemand()
    return replace(sized, mesh=choose_mesh(config.mesh, devices, demand))


def _resolve_train(train: TrainConfig, data: DataConfig) -> TrainConfig:
    return replace(train, bptt_start=train.bptt_start or data.length)


def save_resolved(folder: Path, config: ResolvedConfig) -> None:
    """Write RUN/resolved.json, for people and scripts; famjax itself reads config.json only."""
    try:
        write_file(folder / RESOLVED, to_json(config))
    except OSError as error:
        raise UserError(
            f"cannot write {folder / RESOLVED}: {error.strerror}; free some space or check its "
            "permissions"
        ) from None

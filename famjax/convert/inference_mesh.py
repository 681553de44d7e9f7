"""The devices over which `famjax eval` and `famjax generate` shard a model (`--mesh`)."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from famjax.config.resolved import resolve_model
from famjax.config.schema import Config, ModelConfig
from famjax.convert.load import parse_model, read_hf_config
from famjax.convert.open import is_hugging_face
from famjax.core.errors import UserError, format_divisors
from famjax.core.paths import expanded
from famjax.experiment.checks import validate
from famjax.experiment.load import override
from famjax.experiment.mesh_checks import tensor_sizes
from famjax.experiment.size import state_bytes, weight_bytes
from famjax.parallel.mesh import MeshDemand, choose_mesh, describe, is_auto
from famjax.parallel.sharding import device_limit, make_mesh
from famjax.train.run_folder import read_run_config


def inference_mesh(folder: str, given: str, rows: int) -> Mesh | None:
    """Return the mesh that `--mesh` names, over the devices of this machine; None without one.

    Args:
      folder: the model's folder, as in `famjax.convert.open.open_model`.
      given: "auto", sizes of axes such as "data=2,tensor=4", or "".
      rows: number of documents that are read together.

    Raises:
      UserError: the mesh is not possible with the model or the devices.
    """
    if not given:
        return None
    parts = given.split(",")
    if given != "auto" and not all("=" in part for part in parts):
        raise UserError(f"--mesh {given}: must be auto, or sizes of axes, such as data=2,tensor=4")
    pairs = ["mesh=auto"] if given == "auto" else [f"mesh.{part}" for part in parts]
    config = override(Config(), pairs)
    if config.mesh.sequence > 1:
        raise UserError(
            f"--mesh {given}: documents are read in order, so that their tokens are not sharded; "
            "give sizes of data, fsdp and tensor"
        )
    if jax.process_count() > 1:
        raise UserError("--mesh: is for the devices of one process; start a single one")
    model = _model_config(folder)
    if model is None:
        return None  # opening it raises the error
    resolved = resolve_model(model)
    sizes, mesh = tensor_sizes(resolved), replace(config.mesh, sequence=1)
    demand = MeshDemand(
        weights=weight_bytes(model),
        state=rows * state_bytes(model),
        rows=rows,
        tensor=(*sizes.values(), resolved.kv_heads),
        limit=device_limit(),
    )
    chosen = choose_mesh(mesh, jax.device_count(), demand)
    if mesh.fsdp == mesh.tensor == -1:
        # weights that are sharded by heads are never gathered
        without_fsdp = choose_mesh(replace(mesh, fsdp=1), jax.device_count(), demand)
        if demand.bytes_on(without_fsdp) <= demand.limit:
            chosen = without_fsdp
    for key, size in sizes.items():
        if size % chosen.tensor:
            raise UserError(
                f"--mesh {given}: tensor={chosen.tensor} does not divide {key}={size}; take one "
                f"of {format_divisors(size)}"
            )
    if is_auto(mesh):
        print(describe(chosen, demand), file=sys.stderr)
    return make_mesh(chosen)


def _model_config(folder: str) -> ModelConfig | None:
    """Return the config of the model in a folder; None if there is none that can be opened."""
    path = expanded(folder)
    if is_hugging_face(path):
        return parse_model(read_hf_config(path), path)
    config = read_run_config(Path(path))
    if config is None:
        return None
    try:
        validate(config)
    except UserError:
        return None
    return config.model

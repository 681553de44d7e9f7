"""Writes a model's parameters as the tensors of a Hugging Face folder: the inverse of `load`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.config.derived import pattern_length
from famjax.config.schema import ModelConfig
from famjax.convert.tensors import Tensor, Tensors
from famjax.core.errors import UserError
from famjax.core.types import Array
from famjax.models.language_model import LanguageModel
from famjax.models.remap_params import canonical_name

# maximum size of a file with several tensors; a larger tensor has a file of its own
SHARD_BYTES = 4 << 30


class _Piece(NamedTuple):
    """A parameter, or one layer of it, that becomes a tensor or a part of one."""

    tensor: Tensor
    stacked: Array
    layer: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stacked.shape if self.layer is None else self.stacked.shape[1:]

    def value(self) -> np.ndarray:
        return np.asarray(self.stacked if self.layer is None else self.stacked[self.layer])


def save_tensors(
    model: LanguageModel, config: ModelConfig, tensors: Tensors, folder: Path, dtype: str
) -> None:
    """Write *.safetensors, and an index if there are several.

    Host memory holds the tensors of one file at a time.

    Args:
      model: has the parameters of `config`.
      config: config of the model.
      tensors: names and layouts of the tensors.
      folder: where to write them.
      dtype: dtype of the tensors, float32 or bfloat16.
    """
    sources = _pieces(model, config, tensors)
    kind = jnp.dtype(dtype)
    sizes = {name: kind.itemsize * _count_elements(pieces) for name, pieces in sources.items()}
    shards = list(_shards(sizes))
    where: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else file
        held = {name: _assemble(sources[name]).astype(kind) for name in names}
        save_file(held, folder / file)
        where |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def save_file(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file as write

    try:
        write(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise UserError(f"{path}: cannot be written ({error}); free some space") from None
    # the library creates files that only the owner can read
    path.chmod(path.parent.stat().st_mode & 0o666)


def _pieces(model: LanguageModel, config: ModelConfig, tensors: Tensors) -> dict[str, list[_Piece]]:
    """Return the pieces of each tensor, in the order of their parts."""
    pattern = pattern_length(config)
    pieces_by_tensor: dict[str, list[_Piece]] = {}
    paths, _ = jax.tree_util.tree_flatten_with_path(nnx.state(model, nnx.Param))
    for path, leaf in paths:
        name, first = canonical_name(path)
        tensor = tensors[name]
        if first is None:
            for tensor_name, number in tensor.names(leaf.shape).items():
                pieces_by_tensor.setdefault(tensor_name, []).append(_Piece(tensor, leaf, number))
            continue
        for layer in range(first, config.layers, pattern):
            piece = _Piece(tensor, leaf, layer // pattern)
            pieces_by_tensor.setdefault(tensor.name.format(layer), []).append(piece)
    for pieces in pieces_by_tensor.values():
        pieces.sort(key=lambda piece: piece.tensor.part.number if piece.tensor.part else 0)
    return dict(sorted(pieces_by_tensor.items()))


def _count_elements(pieces: list[_Piece]) -> int:
    return sum(math.prod(piece.shape) for piece in pieces)


def _shards(sizes: dict[str, int]) -> Iterator[list[str]]:
    held: list[str] = []
    total = 0
    for name, size in sizes.items():
        if held and total + size > SHARD_BYTES:
            yield held
            held, total = [], 0
        held.append(name)
        total += size
    yield held


def _assemble(pieces: list[_Piece]) -> np.ndarray:
    return pieces[0].tensor.to_checkpoint([piece.value() for piece in pieces])

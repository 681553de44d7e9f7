"""Read a Hugging Face folder into a model, every piece of a tensor straight into its place."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.convert.checkpoint import Checkpoint
from famjax.convert.families import family
from famjax.convert.families.common import HF
from famjax.convert.tensors import Tensor, Tensors
from famjax.core.checks import validate_model
from famjax.core.config import ModelConfig
from famjax.core.errors import UserError, nearest
from famjax.core.types import Array
from famjax.models.language_model import LanguageModel
from famjax.models.transplant import abstract, fam_prompt, parameter


def load_pretrained(folder: str | Path, **changes: Any) -> tuple[ModelConfig, LanguageModel]:
    """Return the model of a Hugging Face folder and its config, parameters in float32.

    Args:
      folder: config.json and *.safetensors, with or without model.safetensors.index.json.
      **changes: of the config, mixer="full" or capacity=1024.

    Raises:
      UserError: something is missing, damaged, of another shape, or not known.
    """
    folder = Path(folder)
    hf = read_config(folder)
    config = read_model(hf, folder)
    for name in set(changes) - set(vars(config)):
        raise UserError(f"a model's config has no {name!r}{nearest(name, vars(config))}")
    config = replace(config, **changes)
    validate_model(config)
    return config, fill(config, family(hf).tensors(config), folder)


def read_config(folder: Path) -> HF:
    """Return the config.json of a folder."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; give a Hugging Face model's")
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no config.json; give a Hugging Face model's folder"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged ({error}); copy or download it again") from None
    if not isinstance(hf, dict):
        raise UserError(f"{path}: not a table of keys; give a Hugging Face model's folder")
    return hf


def read_model(hf: HF, folder: Path) -> ModelConfig:
    """Return what a config.json says of the model."""
    try:
        return family(hf).read(hf)
    except KeyError as missing:
        raise UserError(f"{folder / 'config.json'}: has no {missing}; take a whole copy") from None


def fill(config: ModelConfig, tensors: Tensors, folder: Path) -> LanguageModel:
    """Return the model with the weights of a folder.

    Host memory: what the model keeps, and a few pieces of a tensor (famjax.convert.checkpoint).
    """
    graph, shapes = abstract(config)
    with Checkpoint(folder) as checkpoint:
        reader = Reader(config, tensors, checkpoint)
        params = jax.tree_util.tree_map_with_path(reader.value, shapes)
    return nnx.merge(graph, params)


class Reader:
    """Finds each parameter's tensors, those of the layers to be stacked as the stack keeps them."""

    def __init__(self, config: ModelConfig, tensors: Tensors, checkpoint: Checkpoint):
        self.config, self.tensors, self.checkpoint = config, tensors, checkpoint
        there = checkpoint.names()
        self.prefix = _prefix(tensors["embedding"].name, there)
        layers = range(config.layers)
        wanted = {self.named(tensor, i) for tensor in tensors.values() for i in layers}
        _compare(wanted, there)

    def named(self, tensor: Tensor, layer: int = 0) -> str:
        return tensor.name.format(layer).removeprefix(self.prefix)

    @functools.cached_property
    def embedding(self) -> Array:
        tensor, shape = self.tensors["embedding"], (self.config.vocab_size, self.config.width)
        return self.read(tensor, [self.named(tensor)], shape).reshape(shape)

    def value(self, path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> Array:
        name, first = parameter(path)
        if name == "stack.prompt" and name not in self.tensors:
            return fam_prompt(self.embedding, self.config)
        if name == "embedding":
            return self.embedding
        tensor = self.tensors[name]
        if first is None:
            return self.read(tensor, [self.named(tensor)], shape.shape).reshape(shape.shape)
        pattern = len(self.config.mixer.split(","))
        names = [self.named(tensor, i) for i in range(first, self.config.layers, pattern)]
        return self.read(tensor, names, shape.shape[1:]).reshape(shape.shape)

    def read(self, tensor: Tensor, names: list[str], shape: tuple[int, ...]) -> Array:
        """Return the tensors of these names, [names inputs outputs]."""
        inputs, outputs = tensor.flat(shape)
        found = jnp.zeros((len(names), inputs, outputs), jnp.float32)
        for i, name in enumerate(names):
            if (there := self.checkpoint.shape(name)) != tensor.there(shape):
                raise UserError(
                    f"{name} has shape {there} where config.json says {tensor.there(shape)}; "
                    "take both from one model"
                )
            row, column = 0, 0
            for _, piece in self.checkpoint.pieces(name, tensor.rows()):
                x = np.ascontiguousarray(tensor.read(piece))
                found = _put(found, x, i, row, column)
                if tensor.inputs and not tensor.turned:
                    row += x.shape[0]
                else:
                    column += x.shape[1]
        return found


@functools.partial(jax.jit, donate_argnums=0)
def _put(found: Array, piece: Array, layer: Array, row: Array, column: Array) -> Array:
    return jax.lax.dynamic_update_slice(
        found, piece.astype(found.dtype)[None], (layer, row, column)
    )


def _prefix(embedding: str, there: set[str]) -> str:
    """Return what names lack that were saved from a model without its head: "model."."""
    prefix = embedding.partition(".")[0] + "."
    return prefix if embedding not in there and embedding.removeprefix(prefix) in there else ""


def _compare(wanted: set[str], there: set[str]) -> None:
    missing, extra = sorted(wanted - there), sorted(there - wanted)
    if extra in (["lm_head.weight"], ["embed_out.weight"]):
        extra = []  # a copy of the embedding, which a tied head is
    if missing:
        raise UserError(f"the checkpoint lacks {_listed(missing, there)}")
    if extra:
        raise UserError(f"the checkpoint has too many: {_listed(extra, wanted)}")


def _listed(names: list[str], known: set[str]) -> str:
    first = ", ".join(f"{name}{_near(name, known)}" for name in names[:3])
    count = f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
    return f"{count}: {first}{', ...' if len(names) > 3 else ''}"


def _near(name: str, known: set[str]) -> str:
    near = nearest(name, known)
    return f" ({near.removeprefix('; ')})" if near else ""

"""Read a Hugging Face folder into a model, every piece of a tensor straight into its place."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from famjax.convert.checkpoint import Checkpoint
from famjax.convert.families import family
from famjax.convert.families.keys import HF, unknown
from famjax.convert.tensors import Tensor, Tensors
from famjax.core import sharding
from famjax.core.checks import validate_model
from famjax.core.config import ModelConfig
from famjax.core.errors import UserError, nearest
from famjax.core.json_files import read_json, shorten
from famjax.core.memory import check_model_fits
from famjax.core.ranges import HIGHEST
from famjax.core.types import Array
from famjax.models.language_model import LanguageModel
from famjax.models.remap_params import (
    abstract_inference_model,
    canonical_name,
    check_compatible,
    init_fam_prompt,
    init_feature_map,
    is_feature_map,
)


def load_pretrained(
    folder: str | Path, mesh: Mesh | None = None, **changes: Any
) -> tuple[ModelConfig, LanguageModel]:
    """Return the model of a Hugging Face folder and its config, parameters in float32.

    Args:
      folder: config.json and *.safetensors, with or without model.safetensors.index.json.
      mesh: of devices that share the parameters (`famjax.core.sharding.make_mesh`); none is held
        whole by one of them on the way. None is the first device.
      **changes: of the config, mixer="full" or capacity=1024.

    Raises:
      UserError: something is missing, damaged, of another shape, or not known.
    """
    folder = Path(folder)
    hf = read_config(folder)
    config = read_model(hf, folder)
    if line := ignored(hf):
        warnings.warn(line, stacklevel=2)
    for name in set(changes) - set(vars(config)):
        raise UserError(f"a model's config has no {name!r}{nearest(name, vars(config))}")
    new = replace(config, **changes)
    validate_model(new)
    check_compatible(config, new)
    if new.lora.rank:
        raise UserError("lora: adapters come by training; famjax.fit with init and model.lora.rank")
    config = new
    return config, fill(config, family(hf).tensors(config), folder, mesh)


def read_config(folder: Path) -> HF:
    """Return the config.json of a folder."""
    path, adapters = folder / "config.json", folder / "adapter_config.json"
    if not folder.is_dir():
        raise UserError(
            f"{folder}: there is no such folder; give that of a Hugging Face model or of a run"
        )
    if adapters.exists():
        # it names the model they stand beside, which transformers would fetch from there
        raise UserError(
            f"{adapters}: the folder holds adapters, which would be passed over; merge them first "
            "(peft's merge_and_unload, then save_pretrained), or remove that file"
        )
    try:
        hf = read_json(path, "copy or download it again")
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no config.json; give a Hugging Face model's folder"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; copy or download it again") from None
    if not isinstance(hf, dict):
        raise UserError(f"{path}: not a table of keys; give a Hugging Face model's folder")
    if {"model", "optimizer"} <= hf.keys():
        raise UserError(
            f"{folder} is a famjax run; famjax train CONFIG init={folder} model.mixer=fam goes on "
            "with its weights and another attention"
        )
    return hf


def read_model(hf: HF, folder: Path) -> ModelConfig:
    """Return what a config.json says of the model, every size checked."""
    path = folder / "config.json"
    most = HIGHEST["model.layers"]
    for key in ("num_hidden_layers", "n_layer", "layers"):
        if isinstance(hf.get(key), int) and hf[key] > most:
            raise UserError(f"{path}: {key}={shorten(hf[key])}: at most {most:,} layers are read")
    try:
        model = family(hf).model(hf)
    except KeyError as missing:
        raise UserError(f"{path}: has no {missing}; take a whole copy") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"{path}: a value of a kind that is not expected ({shorten(error, 200)}); take "
            "another copy"
        ) from None
    try:
        validate_model(model)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if not model.vocab_size:
        raise UserError(f"{path}: the vocabulary has no token; take another copy")
    return model


def ignored(hf: HF) -> str:
    """Return a line that names the keys of a config.json of which nothing is known; or nothing."""
    names = unknown(hf, family(hf).keys)
    if not names:
        return ""
    several = "they are" if len(names) > 1 else "it is"
    return f"config.json: {', '.join(names)}: unknown to famjax, {several} left out"


def fill(
    config: ModelConfig, tensors: Tensors, folder: Path, mesh: Mesh | None = None
) -> LanguageModel:
    """Return the model with the weights of a folder.

    Host memory: what the model keeps, and a few pieces of a tensor (famjax.convert.checkpoint).
    """
    if config.stack != "residual":
        raise UserError(
            f"model.stack={config.stack}: a folder is read with its own layers; leave it out here, "
            f"then famjax train CONFIG init=FOLDER model.stack={config.stack} "
            "model.feedback.positions=rotary model.block_len=1"
        )
    check_model_fits(config)
    graph, shapes = abstract_inference_model(config)
    with Checkpoint(folder) as checkpoint:
        reader = Reader(config, tensors, checkpoint, mesh)
        params = jax.tree_util.tree_map_with_path(reader.value, shapes)
    return nnx.merge(graph, params)


class Reader:
    """Finds each parameter's tensors, those of the layers to be stacked as the stack keeps them."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Tensors,
        checkpoint: Checkpoint,
        mesh: Mesh | None = None,
    ):
        self.config, self.tensors, self.checkpoint = config, tensors, checkpoint
        self.mesh = mesh
        self.embedding: Array | None = None  # read before the prompt, which is made of it
        there = checkpoint.names()
        self.prefix = _prefix(tensors["embedding"].name, there)
        layers = range(config.layers)
        wanted = {self.named(tensor, i) for tensor in tensors.values() for i in layers}
        for name in _HEADS & (there - wanted):
            # a copy of the embedding, which a tied head is
            self.refuse_other(name, self.named(tensors["embedding"]))
        _compare(wanted | _HEADS & there, there)

    def named(self, tensor: Tensor, layer: int = 0) -> str:
        return tensor.name.format(layer).removeprefix(self.prefix)

    def refuse_other(self, head: str, embedding: str) -> None:
        """Raise a `UserError` if a head that config.json says is the embedding is another."""
        both = (self.checkpoint.pieces(name, 1) for name in (head, embedding))
        same = self.checkpoint.shape(head) == self.checkpoint.shape(embedding)
        if not same or any((a != b).any() for (_, a), (_, b) in zip(*both, strict=True)):
            raise UserError(
                f"{head} is not the embedding, as config.json says; set tie_word_embeddings=false "
                "there"
            )

    def value(self, path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> Array:
        place = self.place(path, shape)
        name, first = canonical_name(path)
        if name == "stack.prompt" and name not in self.tensors:
            assert self.embedding is not None
            return jax.device_put(init_fam_prompt(self.embedding, self.config), place)
        pattern = len(self.config.mixer.split(","))
        if is_feature_map(name):
            assert first is not None
            layers = range(first, self.config.layers, pattern)
            begun = jnp.stack([init_feature_map(name, self.config, i) for i in layers])
            return jax.device_put(begun, place)
        tensor = self.tensors[name]
        if first is None:
            found = self.read(tensor, [self.named(tensor)], shape.shape, shape.shape, place)
            if name == "embedding":
                self.embedding = found
            return found
        names = [self.named(tensor, i) for i in range(first, self.config.layers, pattern)]
        return self.read(tensor, names, shape.shape[1:], shape.shape, place)

    def place(self, path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> Sharding:
        if self.mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        axes = sharding.parameter_axes(sharding.path_name(path), shape.ndim)
        return sharding.named_sharding(self.mesh, axes, shape.shape)

    def read(
        self,
        tensor: Tensor,
        names: list[str],
        of_layer: tuple[int, ...],
        shape: tuple[int, ...],
        place: Sharding,
    ) -> Array:
        """Return the tensors of these names, each of the shape `of_layer`, as one of `shape`."""
        put = _putter(place, (len(names), *tensor.flat(of_layer)))
        found = jnp.zeros(shape, jnp.float32, device=place)
        for i, name in enumerate(names):
            if (there := self.checkpoint.shape(name)) != tensor.there(of_layer):
                raise UserError(
                    f"{name} has shape {there} where config.json says {tensor.there(of_layer)}; "
                    "take both from one model"
                )
            row, column = 0, 0
            for _, piece in self.checkpoint.pieces(name, tensor.rows()):
                x = np.ascontiguousarray(tensor.read(piece))
                found = put(found, x, (i, row, column))
                if tensor.inputs and not tensor.turned:
                    row += x.shape[0]
                else:
                    column += x.shape[1]
        return found


@functools.cache
def _putter(place: Sharding, flat: tuple[int, int, int]) -> Any:
    """Return a function that writes a piece [inputs outputs] into an array, in its place.

    Args:
      place: of the array.
      flat: its layers, inputs and outputs.
    """

    def put(found: Array, piece: Array, at: tuple[Array, Array, Array]) -> Array:
        piece = piece.astype(found.dtype)[None]
        return jax.lax.dynamic_update_slice(found.reshape(flat), piece, at).reshape(found.shape)

    return jax.jit(put, donate_argnums=0, out_shardings=place)


_HEADS = {"lm_head.weight", "embed_out.weight"}


def _prefix(embedding: str, there: set[str]) -> str:
    """Return what names lack that were saved from a model without its head: "model."."""
    prefix = embedding.partition(".")[0] + "."
    return prefix if embedding not in there and embedding.removeprefix(prefix) in there else ""


def _compare(wanted: set[str], there: set[str]) -> None:
    missing, extra = sorted(wanted - there), sorted(there - wanted)
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

"""Loads a Hugging Face folder into a model, slice by slice into (sharded) parameters."""

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

from famjax.config.derived import pattern_length
from famjax.config.resolved import resolve_model
from famjax.config.schema import ModelConfig
from famjax.convert.checkpoint import SafetensorsFolder
from famjax.convert.families import find_family
from famjax.convert.families.keys import HF, find_unknown_keys
from famjax.convert.tensors import Tensor, Tensors
from famjax.core.errors import UserError, did_you_mean
from famjax.core.json_files import read_json, shorten
from famjax.core.paths import expanded
from famjax.core.types import Array
from famjax.core.units import counted
from famjax.experiment.checks import validate_model
from famjax.experiment.memory import check_model_fits
from famjax.experiment.ranges import HIGHEST
from famjax.layers.positions import sinusoids
from famjax.mixers import convert_settings
from famjax.models.language_model import LanguageModel
from famjax.models.remap_checks import check_compatible
from famjax.models.remap_params import (
    AT_INPUT,
    abstract_inference_model,
    canonical_name,
    extend_with_zeros,
    init_fam_prompt,
    init_mixer_param,
    is_of_mixer,
)
from famjax.parallel import sharding


def load_pretrained(
    folder: str | Path, mesh: Mesh | None = None, **changes: Any
) -> tuple[ModelConfig, LanguageModel]:
    """Return the config and the model of a Hugging Face folder, parameters in float32.

    Args:
      folder: has config.json and *.safetensors, with or without model.safetensors.index.json.
      mesh: devices that shard the parameters (`famjax.parallel.sharding.make_mesh`); no device ever
        holds a whole sharded parameter. None means the first device.
      **changes: changes to the model's config, such as mixer="full" or capacity=1024. A new mixer
        has its `MixerSpec.convert_settings`, as in `famjax convert`, unless others are given.

    Raises:
      UserError: something is missing, damaged, of another shape, or unknown.
    """
    folder = expanded(folder)
    hf = read_hf_config(folder)
    config = parse_model(hf, folder)
    if line := describe_ignored_keys(hf):
        warnings.warn(line, stacklevel=2)
    for name in set(changes) - set(vars(config)):
        raise UserError(f"a model's config has no {name!r}{did_you_mean(name, vars(config))}")
    new = replace(config, **changes)
    validate_model(new)
    new = replace(new, **{**convert_settings(config, new), **changes})
    check_compatible(config, new)
    if new.lora.rank:
        raise UserError("lora: adapters need training: famjax.fit with init and model.lora.rank")
    return new, load_weights(
        new, config, find_family(hf).tensors(resolve_model(config)), folder, mesh
    )


def read_hf_config(folder: Path) -> HF:
    """Return the config.json of a folder."""
    path, adapters = folder / "config.json", folder / "adapter_config.json"
    if not folder.is_dir():
        raise UserError(
            f"{folder}: there is no such folder; give that of a Hugging Face model or of a run"
        )
    if adapters.exists():
        # it names the base model, which transformers would download
        raise UserError(
            f"{adapters}: the folder has adapters, which would be ignored; merge them first "
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
            f"{folder} is a famjax run; famjax train CONFIG init={folder} model.mixer=fam "
            "continues with its weights and another attention"
        )
    return hf


def parse_model(hf: HF, folder: Path) -> ModelConfig:
    """Return the validated `ModelConfig` of a config.json."""
    path = folder / "config.json"
    max_layers = HIGHEST["model.layers"]
    for key in ("num_hidden_layers", "n_layer", "layers", "encoder_layers", "decoder_layers"):
        if isinstance(hf.get(key), int) and hf[key] > max_layers:
            raise UserError(
                f"{path}: {key}={shorten(hf[key])}: at most {max_layers:,} layers are read"
            )
    try:
        model = find_family(hf).model(hf)
    except KeyError as missing:
        raise UserError(f"{path}: has no {missing}; take a complete copy") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"{path}: a value of an unexpected type ({shorten(error, 200)}); take another copy"
        ) from None
    try:
        validate_model(model)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if not model.vocab_size:
        raise UserError(f"{path}: the vocabulary is empty; take another copy")
    return model


def describe_ignored_keys(hf: HF) -> str:
    """Return a line that names the unknown keys of a config.json, or ""."""
    names = find_unknown_keys(hf, find_family(hf).keys)
    if not names:
        return ""
    return f"config.json: {', '.join(names)}: unknown to famjax, ignored"


def load_weights(
    config: ModelConfig,
    native: ModelConfig,
    tensors: Tensors,
    folder: Path,
    mesh: Mesh | None = None,
) -> LanguageModel:
    """Return a model with the weights of a folder.

    Parameters that the folder's own model lacks get their initial value: a FAM prompt, or a mixer's
    own parameters.

    Besides the model, host memory holds only a few slices of a tensor
    (`famjax.convert.checkpoint`).

    Args:
      config: config of the returned model.
      native: config of the folder's own model, with which `config` must be compatible
        (`check_compatible`).
      tensors: names and layouts of the tensors of the folder's own model.
      folder: see `load_pretrained`.
      mesh: see `load_pretrained`.
    """
    if config.stack != native.stack:
        further = " model.feedback.positions=rotary model.block_len=1"
        raise UserError(
            f"model.stack={config.stack}: the folder's model has model.stack={native.stack}; "
            "remove the setting here, then run famjax train CONFIG init=FOLDER "
            f"model.stack={config.stack}"
            f"{further if native.stack == 'residual' else ''}"
        )
    if config.feedback != native.feedback and layer_shapes(config) != layer_shapes(native):
        raise UserError(
            "model.feedback: these settings need parameters that the folder does not have; remove "
            "them here, then run famjax train CONFIG init=FOLDER with them"
        )
    check_model_fits(config, sharding.weight_shards(mesh))
    graph, shapes = abstract_inference_model(config)
    with SafetensorsFolder(folder) as checkpoint:
        loader = ParameterLoader(config, native, tensors, checkpoint, mesh)
        params = jax.tree_util.tree_map_with_path(loader.load, shapes)
    return nnx.merge(graph, params)


class ParameterLoader:
    """Loads each parameter from its tensors, and stacks the tensors of layers."""

    def __init__(
        self,
        config: ModelConfig,
        native: ModelConfig,
        tensors: Tensors,
        checkpoint: SafetensorsFolder,
        mesh: Mesh | None = None,
    ):
        self.config, self.tensors, self.checkpoint = config, tensors, checkpoint
        self.mesh = mesh
        self.embedding: Array | None = None  # loaded before the prompt, which is derived from it
        names_in_folder = checkpoint.names()
        self.prefix = _prefix(tensors["embedding"].name, names_in_folder)
        self.native = layer_shapes(native)
        wanted = {
            tensor_name.removeprefix(self.prefix)
            for (name, i), shape in self.native.items()
            for tensor_name in (
                tensors[name].names(shape) if i is None else [tensors[name].name.format(i)]
            )
        }
        self.has_logit_bias = ("logit_bias", None) in self.native
        if _LOGIT_BIAS in wanted - names_in_folder:
            # zeros, since it is missing from a Marian or BART without a head
            self.has_logit_bias = False
            wanted.discard(_LOGIT_BIAS)
        extra = {self.prefix + name for name in names_in_folder - wanted}
        copies = extra & _COPIES
        for name in copies:
            self.check_copy(name.removeprefix(self.prefix), self.tensor_name(tensors["embedding"]))
        fixed = extra & _SINUSOIDS if native.arch.positions == "sinusoidal_halves" else set()
        for name in fixed:
            self.check_sinusoids(name.removeprefix(self.prefix))
        checked = {name.removeprefix(self.prefix) for name in copies | fixed}
        _check_names(wanted | checked, names_in_folder)

    def tensor_name(self, tensor: Tensor, layer: int = 0) -> str:
        return tensor.name.format(layer).removeprefix(self.prefix)

    def check_copy(self, name: str, embedding: str) -> None:
        """Raise a `UserError` if a tensor that config.json ties to the embedding differs from it.

        It is the head, or the embedding of an encoder or decoder that share one.
        """
        both = (self.checkpoint.pieces(tensor, 1) for tensor in (name, embedding))
        same = self.checkpoint.shape(name) == self.checkpoint.shape(embedding)
        if not same or any((a != b).any() for (_, a), (_, b) in zip(*both, strict=True)):
            raise UserError(
                f"{name} differs from the embedding, to which config.json ties it; set "
                "tie_word_embeddings=false there"
            )

    def check_sinusoids(self, name: str) -> None:
        """Raise a `UserError` if a tensor of fixed positions holds others than the sinusoids."""
        for first, rows in self.checkpoint.pieces(name, 1):
            position = first + jnp.arange(len(rows))
            expected = np.asarray(sinusoids(position, rows.shape[1], halves=True))
            # some folders are in half precision
            if np.abs(rows.astype(np.float32) - expected).max() > 1e-2:
                raise UserError(f"{name}: holds no sinusoids; take the tensors from another copy")

    def load(self, path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> Array:
        placement = self.parameter_sharding(path, shape)
        name, first = canonical_name(path)
        if name == "stack.prompt" and self.native.get((name, None)) != shape.shape:
            assert self.embedding is not None
            return jax.device_put(init_fam_prompt(self.embedding, self.config), placement)
        if name.startswith(AT_INPUT):
            native_shape = self.native.get((name, None))
            given = None
            if native_shape is not None:
                tensor = self.tensors[name]
                given = self.load_tensors(
                    tensor, [tensor.name], native_shape, native_shape, placement
                )
            return jax.device_put(extend_with_zeros(given, shape), placement)
        if name == "logit_bias" and not self.has_logit_bias:
            return jnp.zeros(shape.shape, jnp.float32, device=placement)
        if first is None:
            tensor = self.tensors[name]
            numbers = tensor.names(shape.shape)
            names = [name.removeprefix(self.prefix) for name in numbers]
            of_one = shape.shape if None in numbers.values() else shape.shape[1:]
            array = self.load_tensors(tensor, names, of_one, shape.shape, placement)
            if name == "embedding":
                self.embedding = array
            return array
        layers = range(first, self.config.layers, pattern_length(self.config))
        if is_of_mixer(name):
            params = [self.load_mixer_param(name, i, shape.shape[1:], placement) for i in layers]
            return jax.device_put(jnp.concatenate(params), placement)
        tensor = self.tensors[name]
        names = [self.tensor_name(tensor, i) for i in layers]
        return self.load_tensors(tensor, names, shape.shape[1:], shape.shape, placement)

    def load_mixer_param(
        self, name: str, layer: int, shape: tuple[int, ...], placement: Sharding
    ) -> Array:
        """Return a layer's parameter that other mixers lack or have in another shape: [1 ...]."""
        if self.native.get((name, layer)) != shape:
            return init_mixer_param(name, self.config, layer)[None]
        tensor = self.tensors[name]
        return self.load_tensors(
            tensor, [self.tensor_name(tensor, layer)], shape, (1, *shape), placement
        )

    def parameter_sharding(self, path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> Sharding:
        if self.mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        axes = sharding.parameter_axes(sharding.path_name(path), shape.ndim)
        return sharding.named_sharding(self.mesh, axes, shape.shape)

    def load_tensors(
        self,
        tensor: Tensor,
        names: list[str],
        layer_shape: tuple[int, ...],
        shape: tuple[int, ...],
        placement: Sharding,
    ) -> Array:
        """Return an array of `shape` that stacks tensors, each of the shape `layer_shape`."""
        put = _make_writer(placement, (len(names), *tensor.flat_shape(layer_shape)))
        array = jnp.zeros(shape, jnp.float32, device=placement)
        for i, name in enumerate(names):
            if (shape_there := self.checkpoint.shape(name)) != tensor.checkpoint_shape(layer_shape):
                raise UserError(
                    f"{name} has shape {shape_there}, but config.json implies "
                    f"{tensor.checkpoint_shape(layer_shape)}; use both from the same model"
                )
            row, column = 0, 0
            for _, piece in self.checkpoint.pieces(name, tensor.row_multiple()):
                x = np.ascontiguousarray(tensor.from_checkpoint(piece))
                array = put(array, x, (i, row, column))
                if tensor.inputs and not tensor.transposed:
                    row += x.shape[0]
                else:
                    column += x.shape[1]
        return array


def layer_shapes(model: ModelConfig) -> dict[tuple[str, int | None], tuple[int, ...]]:
    """Return the shapes of a model's parameters by canonical name and layer.

    The layer is None for parameters outside of the layers.
    """
    _, shapes = abstract_inference_model(model)
    shapes_by_layer: dict[tuple[str, int | None], tuple[int, ...]] = {}
    for path, shape in jax.tree_util.tree_leaves_with_path(shapes):
        name, first = canonical_name(path)
        if first is None:
            shapes_by_layer[name, None] = shape.shape
        else:
            for layer in range(first, model.layers, pattern_length(model)):
                shapes_by_layer[name, layer] = shape.shape[1:]
    return shapes_by_layer


@functools.cache
def _make_writer(placement: Sharding, flat: tuple[int, int, int]) -> Any:
    """Return a jitted function that writes a slice [inputs outputs] into an array in place.

    Args:
      placement: sharding of the array.
      flat: shape of the array as layers, inputs and outputs.
    """

    def put(array: Array, piece: Array, at: tuple[Array, Array, Array]) -> Array:
        piece = piece.astype(array.dtype)[None]
        return jax.lax.dynamic_update_slice(array.reshape(flat), piece, at).reshape(array.shape)

    return jax.jit(put, donate_argnums=0, out_shardings=placement)


# bias of the logits of Marian and BART
_LOGIT_BIAS = "final_logits_bias"
# tensors that must equal the embedding, if config.json ties them to it
_COPIES = {
    *("lm_head.weight", "embed_out.weight"),
    *(f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")),
}
# tensors that follow from the config
_SINUSOIDS = {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}


def _prefix(embedding: str, names_in_folder: set[str]) -> str:
    """Return the prefix "model." if the checkpoint was saved without it, from a headless model."""
    prefix = embedding.partition(".")[0] + "."
    return (
        prefix
        if embedding not in names_in_folder and embedding.removeprefix(prefix) in names_in_folder
        else ""
    )


def _check_names(wanted: set[str], names_in_folder: set[str]) -> None:
    missing, extra = sorted(wanted - names_in_folder), sorted(names_in_folder - wanted)
    if missing:
        raise UserError(f"the checkpoint lacks {_list_names(missing, names_in_folder)}")
    if extra:
        raise UserError(f"the checkpoint has unexpected tensors: {_list_names(extra, wanted)}")


def _list_names(names: list[str], known: set[str]) -> str:
    first = ", ".join(f"{name}{_suggest(name, known)}" for name in names[:3])
    return f"{counted(len(names), 'tensor')}: {first}{', ...' if len(names) > 3 else ''}"


def _suggest(name: str, known: set[str]) -> str:
    near = did_you_mean(name, known)
    return f" ({near.removeprefix('; ')})" if near else ""

"""Read a Hugging Face folder: config.json and safetensors files, one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.convert.families import family
from famjax.convert.tensors import Tensor, Tensors
from famjax.core.config import ModelConfig
from famjax.core.errors import UserError, nearest
from famjax.models.language_model import LanguageModel

# what a checkpoint may hold besides parameters: they follow from the config
_DERIVED = ("rotary_emb.inv_freq", "masked_bias")


def load_pretrained(folder: str | Path, **changes: Any) -> tuple[ModelConfig, LanguageModel]:
    """Return the model of a Hugging Face folder and its config, parameters in float32.

    Args:
      folder: config.json and *.safetensors, with or without model.safetensors.index.json.
      **changes: of the config, mixer="full" or capacity=1024.

    Raises:
      UserError: something is missing, damaged, of another shape, or not known.
    """
    folder = Path(folder)
    hf = _read_config(folder)
    kind = family(hf)
    try:
        config = replace(kind.model(hf), **changes)
    except KeyError as missing:
        raise UserError(f"{folder / 'config.json'}: has no {missing}; take a whole copy") from None
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    graph, shapes = nnx.split(model)
    with Checkpoint(folder) as checkpoint:
        params = _fill(shapes, kind.tensors(config), config, checkpoint)
    return config, nnx.merge(graph, params)


class Checkpoint:
    """The tensors of a folder by name, read when asked for."""

    def __init__(self, folder: Path):
        self._files = sorted(folder.glob("*.safetensors"))
        if not self._files:
            raise UserError(_no_tensors(folder))
        _refuse_gaps(folder, {path.name for path in self._files})
        self._open = ExitStack()
        self._at: dict[str, tuple[Any, Path]] = {}

    def __enter__(self) -> Checkpoint:
        from safetensors import SafetensorError, safe_open

        for path in self._files:
            try:
                file = self._open.enter_context(safe_open(path, framework="flax"))
            except (SafetensorError, OSError) as error:
                self._open.close()
                raise UserError(f"{path}: damaged ({error}); copy or download it again") from None
            self._at |= dict.fromkeys(file.keys(), (file, path))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def names(self) -> set[str]:
        return {name for name in self._at if not name.endswith(_DERIVED)}

    def read(self, name: str) -> jax.Array:
        file, path = self._at[name]
        tensor = file.get_tensor(name).astype(jnp.float32)
        if not bool(jnp.isfinite(tensor).all()):
            raise UserError(f"{path}: {name} holds numbers that are not finite; take another copy")
        return tensor


def _fill(shapes: Any, tensors: Tensors, config: ModelConfig, checkpoint: Checkpoint) -> Any:
    """Return the parameters, those of the layers stacked as the stack keeps them."""
    layers, pattern = config.layers, len(config.mixer.split(","))
    wanted = {name for tensor in tensors.values() for name in _names(tensor.name, layers)}
    _compare(wanted, checkpoint.names())

    def value(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> jax.Array:
        parts = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        # fam and bswa keep the same projections, fam in the window that it owns
        parts = [part for part in parts if part not in ("value", "window")]
        if parts == ["stack", "prompt"]:
            return _prompt(checkpoint.read(tensors["embedding"].name), config)
        if parts[:2] != ["stack", "layers"]:
            tensor = tensors[".".join(parts)]
            return _read(checkpoint, tensor, tensor.name, shape.shape)
        tensor = tensors[".".join(["layer", *parts[3:]])]
        repeats = (tensor.name.format(i) for i in range(int(parts[2]), layers, pattern))
        return jnp.stack([_read(checkpoint, tensor, name, shape.shape[1:]) for name in repeats])

    return jax.tree_util.tree_map_with_path(value, shapes)


def _read(checkpoint: Checkpoint, tensor: Tensor, name: str, shape: tuple[int, ...]) -> jax.Array:
    there = checkpoint.read(name)
    if there.size != math.prod(shape):
        raise UserError(
            f"{name} has shape {there.shape}, which config.json does not say; take both from one "
            "model"
        )
    return tensor.read(there, shape)


def _prompt(embedding: jax.Array, config: ModelConfig) -> jax.Array:
    """Return where the FAM begins, which no checkpoint has: tokens as they enter the stack."""
    rows = jax.random.randint(jax.random.key(0), (config.fam_len,), 0, len(embedding))
    return embedding[rows] * (config.arch.embed_scale or config.width**0.5)


def _names(name: str, layers: int) -> Iterator[str]:
    return (name.format(i) for i in range(layers)) if "{}" in name else iter([name])


def _compare(wanted: set[str], there: set[str]) -> None:
    missing, extra = sorted(wanted - there), sorted(there - wanted)
    if extra == ["lm_head.weight"]:
        extra = []  # a copy of the embedding, which a tied head is
    if missing:
        raise UserError(
            f"the checkpoint lacks {len(missing)} tensors, first {missing[0]}"
            f"{nearest(missing[0], there)}"
        )
    if extra:
        raise UserError(
            f"the checkpoint has {len(extra)} tensors too many, first {extra[0]}"
            f"{nearest(extra[0], wanted)}"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no config.json; give a Hugging Face model's folder"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged ({error}); copy or download it again") from None


def _refuse_gaps(folder: Path, there: set[str]) -> None:
    """Raise a `UserError` where the index of a checkpoint in parts names a part that is missing."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return
    try:
        named = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); copy or download it again") from None
    if missing := sorted(named - there):
        raise UserError(f"{folder / missing[0]} is missing, which {path.name} names; copy it too")


def _no_tensors(folder: Path) -> str:
    if any(folder.glob("*.bin")):
        return (
            f"{folder} has its tensors in .bin files: those are pickles, which run code when they "
            "are read; save them as safetensors: "
            "transformers' AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
        )
    return f"{folder} has no *.safetensors; give a Hugging Face model's folder"

"""Reads the tensors of a Hugging Face folder, a slice of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from famjax.core.errors import UserError
from famjax.core.json_files import read_json, regular_file_size
from famjax.core.names import is_file_name

# buffers in a checkpoint that can be computed from the config
_DERIVED = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias", ".attention.bias")
_INDEX, _SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("F32", "BF16", "F16")
# approximate size of one slice
_PIECE_BYTES = 32 << 20


class SafetensorsFolder:
    """The tensors of a folder by name; a context manager.

    Args:
      folder: has model.safetensors, or the files that model.safetensors.index.json names, or,
        without either, any *.safetensors.
    """

    def __init__(self, folder: Path):
        self._files = _files(folder)
        self._open = ExitStack()
        self._locations: dict[str, tuple[Any, Path]] = {}

    def __enter__(self) -> SafetensorsFolder:
        from safetensors import SafetensorError, safe_open

        for path in self._files:
            try:
                regular_file_size(path)
                file = self._open.enter_context(safe_open(path, framework="numpy"))
            except (SafetensorError, OSError) as error:
                self._open.close()
                raise UserError(f"{path}: damaged ({error}); copy or download it again") from None
            self._locations |= dict.fromkeys(file.keys(), (file, path))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def names(self) -> set[str]:
        return {name for name in self._locations if not name.endswith(_DERIVED)}

    def shape(self, name: str) -> tuple[int, ...]:
        file, _ = self._locations[name]
        return tuple(file.get_slice(name).get_shape())

    def pieces(self, name: str, rows: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first row, rows) of a tensor in slices, in the file's dtype.

        Args:
          rows: every slice has a multiple of this many rows.

        Raises:
          UserError: the tensor has values that are not finite, or an unsupported dtype.
        """
        file, path = self._locations[name]
        tensor = file.get_slice(name)
        if (kind := tensor.get_dtype()) not in _FLOATS:
            raise UserError(
                f"{path}: {name} has dtype {kind}; quantized weights are not supported, take a "
                f"copy in {', '.join(_FLOATS)}"
            )
        shape = tensor.get_shape()
        width = 4 * int(np.prod(shape[1:], dtype=np.int64))
        step = max(_PIECE_BYTES // (width * rows), 1) * rows
        for row in range(0, shape[0], step):
            piece = tensor[row : min(row + step, shape[0])]
            if not np.isfinite(piece.astype(np.float32)).all():
                raise UserError(f"{path}: {name} has values that are not finite; take another copy")
            yield row, piece


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.exists():
        try:
            names = set(read_json(index, "copy or download it again")["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{index}: damaged ({error}); copy or download it again") from None
        except OSError as error:
            raise UserError(f"{index}: {error.strerror}; copy or download it again") from None
        for name in names:
            _check_file_name(index, name)
        if (folder / _SINGLE_FILE).exists() and _SINGLE_FILE not in names:
            # as transformers leaves it when it saves a model in other pieces
            raise UserError(
                f"{folder}: has {_SINGLE_FILE} and {_INDEX}, which does not list it; they may be "
                "different models, so remove the one that is not wanted, with its files"
            )
        named = [folder / name for name in names]
        if missing := sorted(path for path in named if not path.exists()):
            raise UserError(f"{missing[0]} is missing, but {index.name} lists it; copy it too")
        return sorted(named)
    if (folder / _SINGLE_FILE).exists():
        return [folder / _SINGLE_FILE]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(_explain_missing(folder))
    return files


def _check_file_name(index: Path, name: object) -> None:
    """Raise a `UserError` unless an index entry is a safetensors file in its own folder."""
    if not isinstance(name, str):
        raise UserError(f"{index}: damaged (a file's name is {name!r}); copy or download it again")
    if not is_file_name(name):
        raise UserError(
            f"{index}: names the file {name!r} outside its folder, which is not opened; take the "
            "model from a source you trust"
        )
    if not name.endswith(".safetensors"):
        raise UserError(f"{index}: names the file {name!r}; only *.safetensors are read")


def _explain_missing(folder: Path) -> str:
    if any(folder.glob("*.bin")):
        return (
            f"{folder} has its tensors in .bin files: those are pickles, which run code when they "
            "are loaded; save them as safetensors: "
            "transformers' AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW) (with an "
            "encoder, AutoModelForSeq2SeqLM)"
        )
    return f"{folder} has no *.safetensors; give a Hugging Face model's folder"

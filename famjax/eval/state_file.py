"""State files: the memory of a document on disk, of constant size.

A state file is a safetensors file: eight bytes with the length of the header, the header in JSON,
then the arrays. The header's metadata identifies the model, its parameters and the tokenizer, and
has a sha256 of the whole file, computed with zeros in place of the digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.config.keys import key_values
from famjax.config.schema import ModelConfig
from famjax.core.atomic import write_file
from famjax.core.errors import UserError
from famjax.core.json_files import parse_json, regular_file_size
from famjax.core.types import PyTree
from famjax.eval.streaming import StreamState
from famjax.mixers import mixer_constants
from famjax.parallel.sharding import path_name
from famjax.train.run import Run

_FORMAT, _VERSION = "famjax-state", "1"
_READ_AGAIN = "read the document again: famjax generate RUN --read DOCUMENT --state-out FILE"
_BLANK = "0" * 64
# keys that inference changes (merged adapters, --small-cache)
_NOT_NAMED = ("model.lora.", "model.feedback.cache")
# maximum size of the header
_HEADER_BYTES = 1 << 24
_TYPES = {
    "bool": "BOOL",
    "int32": "I32",
    "uint32": "U32",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}


class _CorruptFile(Exception):
    """The file differs from what was written."""


def save_state(path: str | Path, state: StreamState, run: Run) -> None:
    """Write the memory of one lane; an existing file is replaced atomically.

    Args:
      path: path of the file.
      state: state of a one-lane `Streamer` over the run's model.
      run: the run of that model.

    Raises:
      UserError: the file cannot be written, or is a device or a pipe.
      OSError: the disk is full.
    """
    refuse_special(Path(path))
    names, leaves = _flatten(state.memory)
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
    if shapes != [(leaf.shape, leaf.dtype) for leaf in _flatten(run.model.state_shapes())[1]]:
        raise ValueError("the state is not that of one lane of the run's model")
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        **_fingerprints(run),
        "config": _describe_config(run),
        "tokens": str(state.tokens),
    }
    content = _pack(names, [np.asarray(leaf) for leaf in jax.device_get(leaves)], metadata)
    try:
        write_file(Path(path), content)
    except (FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError) as error:
        raise UserError(f"{path}: {error.strerror}; give a file that can be written") from None


def refuse_special(path: Path) -> None:
    """Raise a `UserError` for a device or a pipe: replacing it by a file would destroy it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: is a device or a pipe; give a file that can be written")


def load_state(path: str | Path, run: Run) -> StreamState:
    """Return the saved memory, bit for bit, for a one-lane `Streamer` over the run's model.

    Raises:
      UserError: the file does not exist, is not a state file, is damaged, or belongs to another
        model, checkpoint or tokenizer.
    """
    try:
        max_bytes = run.model.state_bytes() + _HEADER_BYTES
        if regular_file_size(path) > max_bytes:
            raise UserError(f"{path}: not a famjax state of this model; {_READ_AGAIN}")
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a file made with --state-out") from None
    try:
        arrays, metadata = _unpack(content)
        tokens, written = _tokens(metadata), _config(metadata)
    except _CorruptFile as error:
        raise UserError(f"{path}: {error}; {_READ_AGAIN}") from None
    if metadata["version"] != _VERSION:
        raise UserError(
            f"{path}: written by another version of famjax (format {metadata['version']}, this one "
            f"reads {_VERSION}); {_READ_AGAIN}"
        )
    for name, mine in _fingerprints(run).items():
        if metadata[name] != mine:
            other = _describe_model(written, run) if name == "model" else f"another {name}"
            raise UserError(f"{path}: belongs to {other}; {_READ_AGAIN}")
    return StreamState(_restore(path, arrays, run.model.state_shapes()), tokens)


def _describe_model(written: dict[str, Any], run: Run) -> str:
    """Return how the run's model differs from that of a file with these keys of the config."""
    mine = parse_json(_describe_config(run))
    # files of older versions lack the keys that came later, and were made with their defaults
    written = key_values(ModelConfig(), "model.") | written if written else {}
    for key in sorted(written.keys() & mine.keys()):
        if written[key] != mine[key]:
            return f"a model with {key}={written[key]}, and the run has {mine[key]}"
    since = ", or only one of both used --small-cache"
    is_residual = run.config.model.stack == "residual"
    return f"another model, or the run has been trained further{'' if is_residual else since}"


def _describe_config(run: Run) -> str:
    """Return the keys of the model's config with their values, as JSON."""
    config = key_values(run.config.model, "model.")
    return json.dumps({k: v for k, v in config.items() if not k.startswith(_NOT_NAMED)})


def _config(metadata: dict[str, str]) -> dict[str, Any]:
    """Return what `_describe_config` wrote; older files have none."""
    try:
        config = parse_json(metadata.get("config", "{}"))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise _CorruptFile("its header is invalid")
    return config


def _tokens(metadata: dict[str, str]) -> int:
    missing = {"version", "model", "tokenizer", "tokens"} - metadata.keys()
    text = str(metadata.get("tokens"))
    if missing or not (text.isascii() and text.isdigit() and len(text) < 20):
        raise _CorruptFile("its header is invalid")
    return int(text)


def _restore(path: str | Path, arrays: dict[str, np.ndarray], template: PyTree) -> PyTree:
    names, leaves = _flatten(template)
    layout = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    if layout != {n: (leaf.shape, leaf.dtype) for n, leaf in zip(names, leaves, strict=True)}:
        raise UserError(
            f"{path}: written by another version of famjax with another layout; {_READ_AGAIN}"
        )
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[name] for name in names])


def _flatten(tree: PyTree) -> tuple[list[str], list[Any]]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [path_name(path) for path, _ in paths], [leaf for _, leaf in paths]


def _fingerprints(run: Run) -> dict[str, str]:
    """Return the fingerprints of the model and the tokenizer that the memory belongs to."""
    return {"model": model_fingerprint(run), "tokenizer": run.tokenizer.fingerprint}


def model_fingerprint(run: Run) -> str:
    """Return the sha256, in hex, of the model's config, mixer constants and parameters.

    Default values of the config are excluded, so that new keys do not invalidate old memories.
    """
    if run.original_fingerprint:
        return run.original_fingerprint
    values = _non_defaults(run.config.model)
    if not run.config.model.ngram_memory:  # without effect; older configs have another default
        values.pop("ngram_slots", None)
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    if constants := mixer_constants(run.config.model):
        digest.update(json.dumps(constants, sort_keys=True).encode())
    for name, leaf in zip(*_flatten(nnx.state(run.model, nnx.Param)), strict=True):
        digest.update(f"{name} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.ascontiguousarray(jax.device_get(leaf)).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _non_defaults(config: Any) -> dict[str, Any]:
    """Return the values of a config that differ from the defaults, by name."""
    values, defaults = vars(config), vars(type(config)())
    return {
        name: _non_defaults(value) if dataclasses.is_dataclass(value) else value
        for name, value in values.items()
        if value != defaults[name]
    }


def _pack(names: Sequence[str], arrays: Sequence[np.ndarray], metadata: dict[str, str]) -> bytes:
    tensors, at = {}, 0
    for name, array in zip(names, arrays, strict=True):
        tensors[name] = {
            "dtype": _TYPES[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    header = json.dumps({"__metadata__": {**metadata, "sha256": _BLANK}, **tensors}).encode()
    # arrays start at a multiple of eight bytes, as in safetensors' own writer
    header += b" " * (-len(header) % 8)
    payload = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    blank = len(header).to_bytes(8, "little") + header + payload
    digest = hashlib.sha256(blank).hexdigest()
    return blank.replace(_BLANK.encode(), digest.encode(), 1)


def _unpack(content: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays by name, and the metadata.

    Raises:
      _CorruptFile: the file is not one that `_pack` wrote.
    """
    begin = 8 + int.from_bytes(content[:8], "little")
    try:
        header = parse_json(content[8:begin])
        metadata = header.pop("__metadata__")
        written = metadata["sha256"]
        known = metadata["format"] == _FORMAT and type(written) is str and len(written) == 64
    except (ValueError, KeyError, TypeError, AttributeError):
        known = False
    if not known:
        raise _CorruptFile("not a famjax state, or damaged")
    blank = content[:begin].replace(str(written).encode(), _BLANK.encode(), 1) + content[begin:]
    if hashlib.sha256(blank).hexdigest() != written:
        raise _CorruptFile("damaged, its checksum is wrong")
    types = {short: jnp.dtype(name) for name, short in _TYPES.items()}
    arrays = {}
    try:
        for name, entry in header.items():
            first, last = (begin + offset for offset in entry["data_offsets"])
            flat = np.frombuffer(content[first:last], types[entry["dtype"]])
            arrays[name] = flat.reshape(entry["shape"])
    except (ValueError, LookupError, TypeError, OverflowError):
        raise _CorruptFile("its header is invalid") from None
    return arrays, metadata

"""Exports StableHLO with `jax.export`: programs that run without famjax, on CPU, CUDA and TPU.

The programs are two pure functions of parameters and state: `prefill` processes a chunk of whole
blocks, `step` one token. The parameters are arguments, and are saved next to the programs, so that
the programs are small.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from famjax.convert.save import save_file
from famjax.core.errors import UserError
from famjax.core.types import Context, PyTree
from famjax.eval.streaming import CHUNK
from famjax.experiment.load import to_json
from famjax.export import check
from famjax.export.source import ExportSource
from famjax.export.tokenizer import write_tokenizer
from famjax.models.fold_feature_maps import (
    fold_feature_maps,
    folding_notes,
    why_not_foldable,
)
from famjax.models.language_model import LanguageModel
from famjax.parallel.sharding import path_name
from famjax.train.run_folder import CONFIG

PLATFORMS = ("cpu", "cuda", "tpu")
# arrays by name: plain dicts need no famjax classes when the program is loaded
NamedArrays = dict[str, Any]

# start of the code in a README: loads the programs of FOLDER
LOADING = """\
```
pip install jax flatbuffers safetensors
```

```python
import jax.export
import numpy as np
from safetensors.numpy import load_file

def program(name):
    content = open(f"{FOLDER}/{name}.stablehlo", "rb").read()
    return jax.jit(jax.export.deserialize(bytearray(content)).call)
"""

_README = """\
# {name}

A language model as StableHLO, for {platforms}; JAX runs it without famjax, with any batch size.
`prefill` processes {chunk:,} tokens, with right padding marked in `valid`; `step` processes one, at
any position. `prefill` can continue only from a multiple of {block}.

{loading}
prefill, step = program("prefill"), program("step")
params = load_file(f"{{FOLDER}}/params.safetensors")
state = load_file(f"{{FOLDER}}/state.safetensors")  # initial state of one text

ids = [{bos}, 1, 2]  # begins with bos
batch = 2
state = {{name: np.repeat(a, batch, axis=1) for name, a in state.items()}}
tokens = np.zeros((batch, {chunk}), np.int32)
tokens[:, : len(ids)] = ids
valid = np.broadcast_to(np.arange({chunk}) < len(ids), tokens.shape)
logits, state = prefill(params, state, tokens, valid)
likeliest = np.asarray(logits[:, len(ids) - 1]).argmax(-1)
for _ in range(20):
    logits, state = step(params, state, likeliest[:, None].astype(np.int32))
    likeliest = np.asarray(logits[:, 0]).argmax(-1)
```
"""


def write(source: ExportSource, folder: Path) -> list[str]:
    """Write the folder and return lines about the comparison with the run."""
    source = source.merge_adapters()
    model = fold_feature_maps(source.run.model, source.model)
    chunk = _chunk_length(model)
    _, params = nnx.split(model)
    held = {name: np.asarray(a) for name, a in name_arrays(params).items()}
    save_file(held, folder / "params.safetensors")
    state = {name: np.asarray(a) for name, a in name_arrays(model.init_state(1)).items()}
    save_file(state, folder / "state.safetensors")
    write_programs(_programs(model, chunk), folder)
    (folder / CONFIG).write_text(to_json(source.run.config), encoding="utf-8")
    notes = write_tokenizer(source.run.tokenizer, folder)
    readme = _README.format(
        name=source.run.config.name,
        loading=LOADING,
        platforms=", ".join(PLATFORMS),
        chunk=chunk,
        block=model.block_len,
        bos=source.run.tokenizer.bos_id,
    )
    (folder / "README.md").write_text(readme, encoding="utf-8")
    return [*compare_folded(source), *_compare(source, model, folder, chunk), *notes]


def write_programs(programs: dict[str, tuple[Any, ...]], folder: Path) -> None:
    """Write functions as StableHLO files.

    Args:
      programs: by name, each function followed by the shapes of its arguments.
      folder: where to write NAME.stablehlo.
    """
    for name, (program, *shapes) in programs.items():
        exported = jax.export.export(jax.jit(program), platforms=PLATFORMS)(*shapes)
        (folder / f"{name}.stablehlo").write_bytes(exported.serialize())


def read_program(folder: Path, name: str) -> Any:
    """Return a function that `write_programs` wrote."""
    content = (folder / f"{name}.stablehlo").read_bytes()
    return jax.jit(jax.export.deserialize(bytearray(content)).call)


def compare_folded(source: ExportSource) -> list[str]:
    """Compare the model with and without folded feature maps, in float32."""
    if all(why_not_foldable(source.model).values()):
        return folding_notes(source.model)
    tokens, last = check.sample_tokens(source.model)
    reference = source.reference_model()
    folded = fold_feature_maps(reference, source.model)
    ours, run = (check.compute_logits(m, tokens, last) for m in (folded, reference))
    compared = check.compare_logits("feature maps folded into the projections", ours, run)
    return [*folding_notes(source.model), compared]


def _chunk_length(model: LanguageModel) -> int:
    chunk = max(CHUNK // model.block_len, 1) * model.block_len
    capacity = model.stack.capacity
    if capacity is None or capacity >= chunk:
        return chunk
    if capacity < model.block_len:
        raise UserError(
            f"model.capacity={capacity}: less than a block of {model.block_len}, the least chunk "
            "of a program; take --format hf"
        )
    return capacity // model.block_len * model.block_len


def _programs(model: LanguageModel, chunk: int) -> dict[str, tuple[Any, ...]]:
    """Return each function and the shapes of its arguments, with a symbolic batch size."""
    graph, params = nnx.split(model)
    state = model.state_shapes()
    trees = jax.tree.structure(params), jax.tree.structure(state)
    orders = list(name_arrays(params)), list(name_arrays(state))
    (batch,) = jax.export.symbolic_shape("b")

    def rebuild(named: NamedArrays, which: int) -> Any:
        return jax.tree.unflatten(trees[which], [named[name] for name in orders[which]])

    def prefill(
        params: NamedArrays, state: NamedArrays, tokens: Any, valid: Any
    ) -> tuple[Any, NamedArrays]:
        model = nnx.merge(graph, rebuild(params, 0))
        logits, new = model(tokens, rebuild(state, 1), Context(valid=valid))
        return logits, name_arrays(new)

    def step(params: NamedArrays, state: NamedArrays, tokens: Any) -> tuple[Any, NamedArrays]:
        model = nnx.merge(graph, rebuild(params, 0))
        logits, new = model.step(tokens, rebuild(state, 1))
        return logits, name_arrays(new)

    def lanes(a: Any) -> Any:
        return jax.ShapeDtypeStruct((a.shape[0], batch, *a.shape[2:]), a.dtype)

    # every array of a state is [repeats b ...]
    inputs = name_arrays(params), {name: lanes(a) for name, a in name_arrays(state).items()}
    many = jax.ShapeDtypeStruct((batch, chunk), jnp.int32)
    one = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    return {
        "prefill": (prefill, *inputs, many, jax.ShapeDtypeStruct((batch, chunk), bool)),
        "step": (step, *inputs, one),
    }


def name_arrays(tree: PyTree) -> NamedArrays:
    """Return the arrays of a tree by the names of their paths."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _compare(source: ExportSource, model: LanguageModel, folder: Path, chunk: int) -> list[str]:
    """Load the folder as in its README, and compare the logits of whole blocks, then of steps."""
    tokens, last = check.sample_tokens(source.model)
    state = load_file(folder / "state.safetensors")
    state = {name: np.repeat(a, len(tokens), axis=1) for name, a in state.items()}
    whole = (tokens.shape[1] - 1) // model.block_len * model.block_len

    def read(prefill: Any, step: Any, params: NamedArrays) -> np.ndarray:
        held, logits = state, []
        for at in range(0, whole, chunk):
            size = min(chunk, whole - at)
            valid = np.broadcast_to(np.arange(chunk) < size, (len(tokens), chunk))
            piece = np.zeros((len(tokens), chunk), np.int32)
            piece[:, :size] = tokens[:, at : at + size]
            logits_read, held = prefill(params, held, piece, valid)
            logits.append(np.asarray(logits_read[:, max(size - last, 0) : size]))
        for at in range(whole, tokens.shape[1]):
            logits_read, held = step(params, held, tokens[:, at : at + 1].astype(np.int32))
            logits.append(np.asarray(logits_read))
        return np.concatenate(logits, 1)

    prefill, step = (read_program(folder, name) for name in ("prefill", "step"))
    ours = [jax.jit(program) for program, *_ in _programs(model, chunk).values()]
    logits_read = read(prefill, step, load_file(folder / "params.safetensors"))
    expected = read(ours[0], ours[1], name_arrays(nnx.split(model)[1]))
    by = f"the programs read back, on {jax.default_backend()}"
    return [check.compare_logits(by, logits_read, expected)]

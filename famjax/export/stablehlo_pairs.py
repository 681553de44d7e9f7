"""Exports an encoder-decoder as StableHLO, with two functions of parameters.

`encode` reads the sources once, and returns every layer's keys and values, or the sums of linear
attention. `step` reads one token of each target, after those in a state.
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
from famjax.core.types import Context
from famjax.eval.translator import longest_source
from famjax.experiment.load import to_json
from famjax.export import check, stablehlo
from famjax.export.card import describe_cut
from famjax.export.source import ExportSource
from famjax.export.tokenizer import write_tokenizer
from famjax.models.fold_feature_maps import fold_feature_maps
from famjax.models.seq2seq import Seq2Seq
from famjax.train.run_folder import CONFIG

_README = """\
# {name}

An encoder-decoder as StableHLO, for {platforms}; JAX runs it without famjax, with any batch size.
`encode` reads sources of at most {length} tokens, with padding marked in `valid`; `step` reads one
token of each target.{cut}

{loading}
encode, step = program("encode"), program("step")
params = load_file(f"{{FOLDER}}/params.safetensors")
state = load_file(f"{{FOLDER}}/state.safetensors")  # initial state of one target

ids = [{around}]  # one source: replace 1, 2 by the ids of its text
batch = 2
state = {{name: np.repeat(a, batch, axis=1) for name, a in state.items()}}
tokens = np.zeros((batch, {length}), np.int32)
tokens[:, : len(ids)] = ids
valid = np.broadcast_to(np.arange({length}) < len(ids), tokens.shape)
source = encode(params, tokens, valid)
for token in {start}:  # what every target begins with
    logits, state = step(params, source, state, np.full((batch, 1), token, np.int32))
targets = []  # each ends at its first {ends}
for _ in range(20):
    token = np.asarray(logits[:, 0, :{size}]).argmax(-1).astype(np.int32)
    targets.append(token)
    logits, state = step(params, source, state, token[:, None])
```
"""


def write(source: ExportSource, folder: Path) -> list[str]:
    """Write the folder and return lines about the comparison with the run."""
    source = source.merge_adapters()
    model = fold_feature_maps(source.run.model, source.model)
    assert isinstance(model, Seq2Seq)
    data, named = source.run.config.data, stablehlo.name_arrays
    length = longest_source(source.run) or data.source_length or data.length
    for file, tree in (("params", nnx.split(model)[1]), ("state", model.init_state(1))):
        arrays = {name: np.asarray(a) for name, a in named(tree).items()}
        save_file(arrays, folder / f"{file}.safetensors")
    stablehlo.write_programs(_programs(model, length), folder)
    (folder / CONFIG).write_text(to_json(source.run.config), encoding="utf-8")
    notes = write_tokenizer(source.run.tokenizer, folder)
    tokenizer = source.run.tokenizer
    *before, eos = tokenizer.encode_source("").tolist()
    start = [tokenizer.start_id, tokenizer.first_id]
    readme = _README.format(
        name=source.run.config.name,
        loading=stablehlo.LOADING,
        platforms=", ".join(stablehlo.PLATFORMS),
        length=length,
        cut=describe_cut(source).rstrip(),
        around=", ".join(map(str, [*before, 1, 2, eos])),
        start=[token for token in start if token is not None],
        ends=" or ".join(map(str, sorted(tokenizer.stop_ids))),
        size=tokenizer.output_size,
    )
    (folder / "README.md").write_text(readme, encoding="utf-8")
    return [*stablehlo.compare_folded(source), _compare(source, model, folder, length), *notes]


def _programs(model: Seq2Seq, length: int) -> dict[str, tuple[Any, ...]]:
    """Return each function and the shapes of its arguments, with a symbolic batch size."""
    named = stablehlo.name_arrays
    graph, params = nnx.split(model)
    (batch,) = jax.export.symbolic_shape("b")
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    valid = jax.ShapeDtypeStruct((batch, length), bool)

    def read(params: Any, tokens: Any, valid: Any) -> Any:
        return nnx.merge(graph, params).read_source(tokens, valid.astype(jnp.int32))

    of_one = jax.ShapeDtypeStruct((1, length), jnp.int32)
    sources = jax.eval_shape(read, params, of_one, of_one)
    trees = [params, model.state_shapes(), sources]

    def rebuild(arrays: stablehlo.NamedArrays, which: int) -> Any:
        order = [arrays[name] for name in named(trees[which])]
        return jax.tree.unflatten(jax.tree.structure(trees[which]), order)

    def encode(params: stablehlo.NamedArrays, tokens: Any, valid: Any) -> stablehlo.NamedArrays:
        return named(read(rebuild(params, 0), tokens, valid))

    def step(
        params: stablehlo.NamedArrays,
        source: stablehlo.NamedArrays,
        state: stablehlo.NamedArrays,
        tokens: Any,
    ) -> tuple[Any, stablehlo.NamedArrays]:
        model = nnx.merge(graph, rebuild(params, 0))
        ctx = Context(source=rebuild(source, 2))
        logits, new = model.step(tokens, rebuild(state, 1), ctx)
        return logits, named(new)

    def with_batch(a: Any, axis: int) -> Any:
        return jax.ShapeDtypeStruct((*a.shape[:axis], batch, *a.shape[axis + 1 :]), a.dtype)

    arrays = {name: with_batch(a, 1) for name, a in named(trees[1]).items()}
    # the mask is [b 1 s], the keys of the layers [repeats b ..]
    read_arrays = {
        name: with_batch(a, 0 if name == "mask" else 1) for name, a in named(sources).items()
    }
    one = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    return {
        "encode": (encode, named(params), tokens, valid),
        "step": (step, named(params), read_arrays, arrays, one),
    }


def _compare(source: ExportSource, model: Seq2Seq, folder: Path, length: int) -> str:
    """Load the folder as in its README, and compare its logits with those of the run's model.

    On accelerators and in bfloat16 they are compared with those of the same programs before the
    export, since `check.compute_logits` multiplies in a higher precision or in another order.
    """
    tokens, last = check.sample_tokens(source.model)
    tokens, last = tokens[:, :length], min(last, length)
    state = load_file(folder / "state.safetensors")
    state = {name: np.repeat(a, len(tokens), axis=1) for name, a in state.items()}
    padded = np.pad(tokens, ((0, 0), (0, length - tokens.shape[1]))).astype(np.int32)
    valid = np.broadcast_to(np.arange(length) < tokens.shape[1], padded.shape)

    def compute(programs: dict[str, Any], params: stablehlo.NamedArrays) -> np.ndarray:
        held, logits = state, []
        read = programs["encode"](params, padded, valid)
        for at in range(tokens.shape[1]):
            token = tokens[:, at : at + 1].astype(np.int32)
            found, held = programs["step"](params, read, held, token)
            logits.append(np.asarray(found))
        return np.concatenate(logits, 1)[:, -last:]

    written = {name: stablehlo.read_program(folder, name) for name in ("encode", "step")}
    logits_read = compute(written, load_file(folder / "params.safetensors"))
    if jax.default_backend() == "cpu" and source.model.dtype == "float32":
        expected = check.run_logits(source.run.model, tokens, last)
    else:
        ours = {name: jax.jit(program) for name, (program, *_) in _programs(model, length).items()}
        expected = compute(ours, stablehlo.name_arrays(nnx.split(model)[1]))
    by = f"the programs read back, on {jax.default_backend()}"
    return check.compare_logits(by, logits_read, expected)

"""Exports only the adapters, in peft's format, for models of Hugging Face families."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from famjax.config.keys import key_values
from famjax.config.resolved import resolve_model
from famjax.config.schema import Config, DropoutConfig, LoraConfig, ModelConfig
from famjax.convert.families import find_family, native_family, normalize_model
from famjax.convert.families.common import Family
from famjax.convert.save import save_file, save_tensors
from famjax.convert.tensors import Tensor, Tensors
from famjax.core.errors import UserError
from famjax.core.json_files import read_json
from famjax.core.optional import missing_message, missing_modules
from famjax.core.paths import expanded
from famjax.experiment.load import TRAINING_KEYS
from famjax.export import check
from famjax.export.source import ExportSource
from famjax.models.language_model import LanguageModel
from famjax.models.remap_params import abstract_inference_model, canonical_name
from famjax.train.checkpoint import Checkpoints
from famjax.train.run_folder import CHECKPOINTS, SOURCE, read_run_config

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_NEEDED = ("torch", "transformers", "peft")

_README = """\
# {name}

LoRA adapters of rank {rank}, trained by famjax in {step:,} steps.

```
pip install torch transformers peft
```

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained(BASE)  # {base}
model = PeftModel.from_pretrained(base, FOLDER)
```
"""


class _Adapter(NamedTuple):
    """The adapter of a linear map: a [inputs... rank], b [rank outputs...], and its tensor."""

    tensor: Tensor
    a: np.ndarray
    b: np.ndarray


def write(source: ExportSource, folder: Path) -> list[str]:
    """Write the folder and return lines about the comparison with the run."""
    model = source.model
    if not model.lora.rank:
        raise UserError(f"{source.folder}: has no adapters; take --format hf for the whole model")
    plain = replace(model, lora=LoraConfig(), dropout=DropoutConfig())
    family = native_family(plain)
    if family is None:
        raise UserError(
            f"{source.folder}: peft needs a model of a Hugging Face family, none of which has "
            f"model.mixer={model.mixer}; take --format hf, which merges the adapters"
        )
    tensors = family.tensors(normalize_model(plain))
    weights, config = adapter_files(source, tensors)
    save_file(weights, folder / _WEIGHTS)
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    name, step = source.run.config.name, source.run.step
    base = _describe_base(source, plain)
    readme = _README.format(name=name, rank=model.lora.rank, step=step, base=base)
    (folder / "README.md").write_text(readme, encoding="utf-8")
    notes = [_check_read_back(source, tensors, folder)]
    if missing := missing_modules(_NEEDED):
        return [*notes, f"not compared with peft: {missing_message(missing)}"]
    return [*notes, _compare(source, family, tensors, folder)]


def _check_read_back(source: ExportSource, tensors: Tensors, folder: Path) -> str:
    """Compare the written adapters' update of each Hugging Face tensor with that of ours."""
    written = load_file(folder / _WEIGHTS)
    worst = 0.0
    for module, pairs in _modules(source, tensors).items():
        name = f"base_model.model.{module}.lora_"
        added = written[f"{name}B.weight"] @ written[f"{name}A.weight"]
        tensor = pairs[0].tensor
        count = tensor.part.total if tensor.part else 1
        rank = source.model.lora.rank
        maps = [np.zeros(1, np.float32)] * count
        for pair in pairs:
            index = pair.tensor.part.number if pair.tensor.part else 0
            maps[index] = pair.a.reshape(-1, rank) @ pair.b.reshape(rank, -1)
        size = max(x.shape for x in maps if x.ndim == 2)
        maps = [x if x.ndim == 2 else np.zeros(size, np.float32) for x in maps]
        ours = replace(tensor, inputs=1).to_checkpoint(maps)
        difference = np.abs(added - (ours if tensor.transposed else ours.T)).max()
        worst = max(worst, float(difference / max(np.abs(ours).max(), 1e-30)))
    if not worst < 1e-5:
        raise UserError(
            f"{folder}: the updates of the adapters read back differ by {worst:.1e}; export "
            "removed; please report it"
        )
    return f"compared with the adapters read back: their updates differ by {worst:.1e}"


def _describe_base(source: ExportSource, plain: ModelConfig) -> str:
    """Describe the base model: the weights of `init`, under the attention of the run.

    Args:
      plain: the run's model without adapters.
    """
    init = source.run.config.init
    folder = expanded(init)
    before = read_run_config(folder)
    changed = _changed_keys(before, source.run.config) if before else ""
    if changed:
        return f"`famjax convert {init} NEW{changed}`, then `famjax export NEW BASE --format hf`"
    exported = f"what `famjax export {init} BASE --format hf` writes"
    path = folder / SOURCE
    if Checkpoints(folder / CHECKPOINTS).latest() == 0 and path.exists():
        hf = read_json(path, "remove it, or restore it")
        if normalize_model(find_family(hf).model(hf)) == normalize_model(plain):
            return f"the model that famjax convert read, or {exported}"
    return exported


def _changed_keys(before: Config, after: Config) -> str:
    """Return the overrides that give the model of `before` the attention of `after`."""
    old, new = key_values(before), key_values(after)
    return "".join(
        f" {key}={value}"
        for key, value in new.items()
        if key.startswith("model.") and not key.startswith(TRAINING_KEYS) and value != old[key]
    )


def adapter_files(
    source: ExportSource, tensors: Tensors
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the tensors of the adapters, and their peft config."""
    lora = resolve_model(source.model).lora
    weights: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    transposed = True
    for module, pairs in _modules(source, tensors).items():
        count = pairs[0].tensor.part.total if pairs[0].tensor.part else 1
        a, b = _join_adapters(pairs, count, lora.rank)
        weights[f"base_model.model.{module}.lora_A.weight"] = a
        weights[f"base_model.model.{module}.lora_B.weight"] = b
        # without the layer number: "self_attn.q_proj"
        ranks[".".join(module.split(".")[-2:])] = count
        transposed = pairs[0].tensor.transposed
    alpha = lora.alpha
    fused = {name: count for name, count in ranks.items() if count > 1}
    return weights, {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": alpha,
        "use_rslora": lora.rs,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(ranks),
        # a fused tensor has one adapter per map, stacked: the scale of each must stay the same
        "rank_pattern": {name: count * lora.rank for name, count in fused.items()},
        "alpha_pattern": {
            name: alpha * (count**0.5 if lora.rs else count) for name, count in fused.items()
        },
        "fan_in_fan_out": not transposed,
        "bias": "none",
        "inference_mode": True,
    }


def _join_adapters(pairs: list[_Adapter], count: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return A [count*r inputs] and B [outputs count*r] of a fused tensor."""
    tensor = pairs[0].tensor
    inputs = tensor.flat_shape((*pairs[0].a.shape[:-1], 1))[0]
    a = np.zeros((count * rank, inputs), np.float32)
    outs = [np.zeros((count * rank, *pairs[0].b.shape[1:]), np.float32) for _ in range(count)]
    for pair in pairs:
        index = pair.tensor.part.number if pair.tensor.part else 0
        rows = slice(index * rank, (index + 1) * rank)
        a[rows] = pair.a.reshape(inputs, rank).T
        outs[index][rows] = pair.b
    b = replace(tensor, inputs=1).to_checkpoint(outs)
    return a, np.ascontiguousarray(b if tensor.transposed else b.T)


def _modules(source: ExportSource, tensors: Tensors) -> dict[str, list[_Adapter]]:
    """Return the adapters of each of Hugging Face's modules."""
    modules: dict[str, list[_Adapter]] = {}
    for name, layer, a, b in _named_adapters(source):
        tensor = tensors[name]
        module = tensor.name.format(layer).removesuffix(".weight")
        modules.setdefault(module, []).append(_Adapter(tensor, a, b))
    return modules


def _named_adapters(source: ExportSource) -> Iterator[tuple[str, int, np.ndarray, np.ndarray]]:
    """Yield each kernel's name, layer, and adapter."""
    pattern = len(source.model.mixer.split(","))
    paths, _ = jax.tree_util.tree_flatten_with_path(nnx.state(source.run.model, nnx.Param))
    params = {canonical_name(path): np.asarray(leaf) for path, leaf in paths}
    for (name, first), a in params.items():
        if first is None or not name.endswith(".lora.a"):
            continue
        b = params[name.removesuffix("a") + "b", first]
        kernel = name.removesuffix("lora.a") + "kernel"
        for repeat in range(len(a)):
            yield kernel, first + repeat * pattern, a[repeat], b[repeat]


def _compare(source: ExportSource, family: Family, tensors: Tensors, folder: Path) -> str:
    """Load the written adapters in peft and compare the logits."""
    import peft
    import torch
    import transformers

    plain = replace(source.model, lora=LoraConfig(), dropout=DropoutConfig())
    graph, shapes = abstract_inference_model(plain)
    paths, _ = jax.tree_util.tree_flatten_with_path(nnx.state(source.run.model, nnx.Param))
    params = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
    weights = jax.tree_util.tree_map_with_path(
        lambda path, _: params[jax.tree_util.keystr(path)].astype(np.float32), shapes
    )
    base: LanguageModel = nnx.merge(graph, weights)
    tokens, last = check.sample_tokens(source.model)
    with tempfile.TemporaryDirectory() as scratch, check.silence_transformers():
        save_tensors(base, plain, tensors, Path(scratch), "float32")
        hf = family.serialize(normalize_model(plain)) | {"architectures": [family.architecture]}
        (Path(scratch) / "config.json").write_text(json.dumps(hf))
        kind: Any = transformers.AutoModelForCausalLM
        model = peft.PeftModel.from_pretrained(kind.from_pretrained(scratch), str(folder)).eval()
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor(tokens)).logits[:, -last:].float().numpy()
    ours = check.run_logits(source.reference_model(), tokens, last)
    return check.compare_logits(f"peft {peft.__version__}", theirs, ours)

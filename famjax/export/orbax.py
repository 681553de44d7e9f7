"""Exports only the parameters, as an Orbax checkpoint that famjax opens as a run for inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from famjax.convert.folder import write_model
from famjax.core.types import PyTree
from famjax.export import check
from famjax.export.source import ExportSource
from famjax.parallel.sharding import path_name
from famjax.tokenizers.load import save_tokenizer
from famjax.train.checkpoint import Checkpoints
from famjax.train.run import open_run
from famjax.train.run_folder import CHECKPOINTS, copy_source_config

_README = """\
# {name}

The parameters of a famjax run at step {step:,}, without the optimizer state. For famjax the folder
is a run: `famjax generate`, `famjax eval`, `famjax.open_run`. Otherwise load them with Orbax
(`pip install orbax-checkpoint`):

```python
import orbax.checkpoint

params = orbax.checkpoint.PyTreeCheckpointer().restore(FOLDER + "/{params}")
```

FOLDER is an absolute path. Layers at the same position of the pattern `{mixer}` are stacked on the
first axis; config.json has the shape of the model.
"""


def write(source: ExportSource, folder: Path) -> list[str]:
    """Write the folder and return lines about the comparison with the run."""
    source = source.merge_adapters()
    save_tokenizer(source.run.tokenizer.name, folder)
    write_model(folder, source.run.config, source.run.model, source.run.step)
    copy_source_config(source.folder, source.run.config.init, folder)
    at = Checkpoints(folder / CHECKPOINTS).path(source.run.step) / "params"
    readme = _README.format(
        name=source.run.config.name,
        step=source.run.step,
        params=at.relative_to(folder.absolute()),
        mixer=source.model.mixer,
    )
    (folder / "README.md").write_text(readme, encoding="utf-8")
    return _compare(source, folder, at)


def _compare(source: ExportSource, folder: Path, at: Path) -> list[str]:
    with ocp.PyTreeCheckpointer() as orbax:
        plain = orbax.restore(at)
    ours = dict(_name_arrays(nnx.split(source.run.model)[1]))
    theirs = dict(_name_arrays(plain))
    same = all(np.array_equal(theirs[name], ours[name]) for name in ours)
    if not same or theirs.keys() != ours.keys():
        raise ValueError("Orbax restored parameters that differ from those written")
    tokens, last = check.sample_tokens(source.model)
    run = check.run_logits(source.run.model, tokens, last)
    again = check.compute_logits(open_run(folder).model, tokens, last)
    return [
        f"compared with Orbax {ocp.__version__}: the same {len(ours)} arrays",
        check.compare_logits("famjax opening it as a run", again, run),
    ]


def _name_arrays(tree: PyTree) -> list[tuple[str, Any]]:
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]

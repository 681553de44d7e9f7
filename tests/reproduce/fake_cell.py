"""In place of a training: writes a result, or fails."""

import json
import os
import sys
import time
from pathlib import Path

from famjax.reproduce.cell import RESULT, Cell
from famjax.reproduce.experiments import EXPERIMENTS
from famjax.reproduce.measures import CodeMeasure

CodeMeasure.prepare = lambda *_: ()
spec = json.loads(sys.argv[1])
cell = Cell(**{**spec, "given": tuple(spec["given"])})
experiment = EXPERIMENTS[cell.experiment].at(cell.size, cell.test)
if cell.variant and cell.variant == os.environ.get("FAKE_FAILS"):
    print("famjax: out of memory; take less", file=sys.stderr)
    sys.exit(1)
if (base := cell.base(experiment)) is not None:
    assert (base.training_folder(experiment) / RESULT).exists()
# cells beside it are on the same GPU
assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
scores = {score.name: 0.5 + 0.01 * cell.seed for score in experiment.measure.scores}
if cell.variant == experiment.variants[-1].name:
    scores = {name: value + 0.3 for name, value in scores.items()}
result = {
    "scores": scores,
    "baselines": {"guessing": dict.fromkeys(scores, 0.1)},
    "seed": cell.seed,
}
result |= {"train_seconds": 1.0, "evaluation_seconds": 1.0, "parameters": 10, "tokens": 20}
if cell.variant:
    result["settings"] = cell.settings(experiment)
result |= {"device": "fake", "code": cell.code, "at": time.time()}
for folder in (cell.training_folder(experiment), cell.folder(experiment)):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).write_text(json.dumps(result))
assert Path(cell.root).is_dir()

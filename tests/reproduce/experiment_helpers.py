"""Small experiments, and commands on them."""

import json

from famjax.cli.main import main
from famjax.reproduce.cell import RESULT
from famjax.reproduce.experiment import (
    Experiment,
    Variant,
)
from famjax.reproduce.measures import ToyMeasure

COPY = "ft-table-1-copy"
TINY = (
    *("train.steps=2", "model.width=16", "model.heads=2", "model.head_dim=8"),
    *("model.mlp_width=16", "data.batch=2", "model.layers=1", "data.toy.steps=4"),
    *("data.toy.start_steps=0", "data.length=16", "data.toy.episodes=8"),
)


def reproduce(folder, *arguments):
    where = ["--folder", str(folder / "runs"), "--pages", str(folder / "pages")]
    return main(["reproduce", *arguments, *where])


def age(folder, name, code="older"):
    """Have the results of an experiment be of another version of the code."""
    for file in (folder / "runs" / name).rglob(RESULT):
        file.write_text(json.dumps({**json.loads(file.read_text()), "code": code}))


def tiny_experiment(name, **more):
    measure = ToyMeasure("copy", (4,), 8)
    return Experiment(name, "", "", "copy_feedback", (Variant("one"),), measure, (), TINY, **more)

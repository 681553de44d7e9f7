"""`model.fam_update=gated` in training, adapters, conversion, memory files and exports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from famjax import load_pretrained
from famjax.cli.main import main
from famjax.config.resolved import resolve_model
from famjax.config.schema import Config
from famjax.convert.open import open_model
from famjax.eval.state_file import model_fingerprint
from famjax.experiment.load import load_config
from famjax.layers.memory_gate import MemoryGate
from famjax.parallel.sharding import path_name
from famjax.train.loop import train
from famjax.train.run import Run, open_run

# nearly all tests need two runs; the contracts have the layers
pytestmark = [pytest.mark.usefixtures("one_device"), pytest.mark.long]
SMALL = [
    *("model.layers=2", "model.width=16", "model.heads=2", "model.mlp_width=32"),
    *("model.block_len=8", "model.fam_len=3", "model.memory_segments=1"),
    # one body is compiled for both layers
    "model.scan_layers=true",
    *("data.batch=2", "data.length=32", "train.steps=2", "optimizer.warmup_steps=0"),
]
GATED, SUM = "model.fam_update=gated", "model.fam_update=sum"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of each memory update, and their training text."""
    folder = tmp_path_factory.mktemp("gated")
    (folder / "train.txt").write_text(tiny.TEXT * 40)
    train(config(folder, "text_fam", GATED), folder / "gated", quiet=True)
    train(config(folder, "text_fam", SUM), folder / "sum", quiet=True)
    return folder


def config(folder: Path, name: str, *more: str) -> Config:
    return load_config(name, [*SMALL, f"data.files={folder / 'train.txt'}", *more])


def gates(run: Run) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(run.model, nnx.Param))
    named = {path_name(path): np.asarray(leaf) for path, leaf in leaves}
    return {name: a for name, a in named.items() if "memory_gate" in name}


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_gates_are_trained(folder: Path) -> None:
    found = gates(open_run(folder / "gated"))
    assert len(found) == 2
    assert not gates(open_run(folder / "sum"))
    fresh = MemoryGate(resolve_model(config(folder, "text_fam", GATED).model))
    for name, a in found.items():
        initial = getattr(fresh, name.rpartition("/")[2])[...]
        assert (a != initial).all(), name


def test_gates_are_trained_together_with_adapters(folder: Path, tmp_path: Path) -> None:
    main(["convert", str(folder / "sum"), str(tmp_path / "new"), "--to", "keep", GATED])
    new = open_run(tmp_path / "new")
    lora = [f"init={tmp_path / 'new'}", "model.lora.rank=2", GATED]
    adapted = train(config(folder, "text_fam", *lora), tmp_path / "adapted", quiet=True)
    for name, a in gates(adapted).items():
        assert (a != gates(new)[name]).any(), name


def test_a_memory_of_the_other_update_is_rejected(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, memory = str(folder / "train.txt"), str(tmp_path / "x.memory")
    assert main(["generate", str(folder / "sum"), "--read", text, "--state-out", memory]) == 0
    to_gated = ["convert", str(folder / "sum"), str(tmp_path / "new"), "--to", "keep", GATED]
    assert main(to_gated) == 0
    for run in (folder / "gated", tmp_path / "new"):
        arguments = ["generate", str(run), "--state-in", memory, "--prompt", "a"]
        assert main(arguments) == 2
        told = "belongs to a model with model.fam_update=sum, and the run has gated"
        assert told in last_line(capsys)


@pytest.mark.parametrize("other", ["sum", "static"])
def test_a_gated_memory_is_rejected_by_other_updates(
    other: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, memory = str(folder / "train.txt"), str(tmp_path / "x.memory")
    assert main(["generate", str(folder / "gated"), "--read", text, "--state-out", memory]) == 0
    given = [str(folder / "sum"), str(tmp_path / "new"), "--to", "keep"]
    assert main(["convert", *given, f"model.fam_update={other}"]) == 0
    arguments = ["generate", str(tmp_path / "new"), "--state-in", memory, "--prompt", "a"]
    assert main(arguments) == 2
    told = f"belongs to a model with model.fam_update=gated, and the run has {other}"
    assert told in last_line(capsys)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--to fam model.fam_max_timescale=100", "such a gate would never open"),
        (
            "--to keep model.fam_gate_threshold=0.001",
            "the given gates are trained with 0.01; keep",
        ),
        ("--to bswa model.fam_update=gated", "model.fam_update: has no effect with"),
    ],
)
def test_conversions_reject_what_no_model_can_use(
    given: str, said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "new"
    assert main(["convert", str(folder / "gated"), str(made), *given.split()]) == 2
    assert said in last_line(capsys)
    assert not made.exists()


def test_a_memory_of_another_threshold_is_refused(folder: Path) -> None:
    """Gates with it are another function of equal parameters."""
    run = open_run(folder / "gated")
    model = replace(run.config.model, fam_gate_threshold=0.001)
    other = replace(run, config=replace(run.config, model=model))
    assert model_fingerprint(other) != model_fingerprint(run)


@pytest.mark.slow
def test_programs_have_equal_logits(folder: Path, tmp_path: Path) -> None:
    """Those of tests/export/test_export.py have a FAM without gates."""
    form = ["--format", "stablehlo"]
    assert main(["export", str(folder / "gated"), str(tmp_path / "out"), *form]) == 0


def test_exports_have_equal_logits(folder: Path, tmp_path: Path) -> None:
    for form in ("hf", "orbax"):
        # each format is compared with the run when it is written
        assert main(["export", str(folder / "gated"), str(tmp_path / form), "--format", form]) == 0
    after = gates(open_model(str(tmp_path / "hf")))
    for name, a in gates(open_run(folder / "gated")).items():
        np.testing.assert_array_equal(a, after[name])


@pytest.mark.parametrize("threshold", ["0.0", "0.4"])
def test_exports_have_the_threshold(threshold: str, folder: Path, tmp_path: Path) -> None:
    gated = [GATED, "model.fam_max_timescale=2", f"model.fam_gate_threshold={threshold}"]
    assert (
        main(["convert", str(folder / "sum"), str(tmp_path / "new"), "--to", "keep", *gated]) == 0
    )
    # logits are compared
    assert main(["export", str(tmp_path / "new"), str(tmp_path / "hf")]) == 0
    model = open_model(str(tmp_path / "hf")).config.model
    assert model.fam_gate_threshold == float(threshold)


def test_a_folder_without_the_key_uses_the_update_of_the_paper(
    folder: Path, tmp_path: Path
) -> None:
    """As folders exported before the key existed."""
    assert main(["export", str(folder / "sum"), str(tmp_path / "hf")]) == 0
    path = tmp_path / "hf" / "config.json"
    hf = json.loads(path.read_text())
    for name in ("fam_update", "fam_min_timescale", "fam_max_timescale", "fam_gate_threshold"):
        del hf[name]
    path.write_text(json.dumps(hf))
    assert open_model(str(tmp_path / "hf")).config.model.fam_update == "sum"


def test_a_new_fam_is_gated_when_loading_a_folder(folder: Path, tmp_path: Path) -> None:
    """As in `famjax convert --to fam`."""
    assert main(["export", str(folder / "sum"), str(tmp_path / "sum")]) == 0
    window = tmp_path / "window"
    assert main(["convert", str(folder / "sum"), str(window), "--to", "bswa"]) == 0
    assert main(["export", str(window), str(tmp_path / "bswa")]) == 0
    updates = [
        load_pretrained(tmp_path / name, **changes)[0].fam_update
        for name, changes in (
            ("bswa", {"mixer": "bswa,fam"}),
            ("bswa", {"mixer": "fam", "fam_update": "sum"}),
            ("sum", {"mixer": "bswa,fam"}),
        )
    ]
    assert updates == ["gated", "sum", "sum"]


def test_the_update_can_be_changed_when_loading_a_folder(folder: Path, tmp_path: Path) -> None:
    assert main(["export", str(folder / "gated"), str(tmp_path / "hf")]) == 0
    _, same = load_pretrained(tmp_path / "hf", memory_segments=2)
    _, longer = load_pretrained(tmp_path / "hf", fam_len=5)
    _, bswa = load_pretrained(tmp_path / "hf", mixer="bswa", fam_update="sum")
    assert main(["export", str(folder / "sum"), str(tmp_path / "sum")]) == 0
    _, mixed = load_pretrained(tmp_path / "sum", mixer="bswa,fam", fam_update="gated")
    gate = same.stack.layers[0].mixer.memory_gate
    assert gate.weight[...].any()
    assert (longer.stack.layers[0].mixer.memory_gate.weight[...] == gate.weight[...]).all()
    assert longer.stack.layers[0].mixer.memory_gate.bias[...].shape == (2, 5)
    assert longer.stack.prompt[...].shape == (5, 16)
    assert bswa.stack.prompt is None
    assert not mixed.stack.layers[1].mixer.memory_gate.weight[...].any()

"""`famjax eval` and `famjax generate` on several devices (`--mesh`)."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import jax
import pytest
import small
import tiny
from flax import nnx

from famjax.cli.main import main
from famjax.config.schema import Config, MeshConfig
from famjax.convert.inference_mesh import inference_mesh
from famjax.convert.open import open_model
from famjax.experiment.load import override
from famjax.parallel.sharding import make_mesh, mesh_of
from famjax.train.loop import train


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(shutil.copytree(tiny.folder(), tmp_path / "run"))


def evaluate(run: str, mesh: str, capsys: pytest.CaptureFixture[str]) -> dict:
    shutil.rmtree(Path(run) / "eval", ignore_errors=True)  # answers there are not asked again
    argv = ["eval", run, "--tasks", "passkey,text:holdout", "--lengths", "420", "--batch", "4"]
    assert main([*argv, "--examples", "4", "--mesh", mesh, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.long
def test_results_do_not_depend_on_the_mesh(run, capsys) -> None:
    one = evaluate(run, "", capsys)
    for mesh in ("auto", "data=2,fsdp=2,tensor=2"):
        other = evaluate(run, mesh, capsys)
        assert other["passkey"][0]["token_accuracy"] == one["passkey"][0]["token_accuracy"]
        assert other["text"][0]["loss"] == pytest.approx(one["text"][0]["loss"], rel=1e-5)


@pytest.mark.long
def test_the_same_text_is_generated_on_any_mesh(run, capsys, tmp_path) -> None:
    (tmp_path / "prompts.txt").write_text("some\nprompts\n")
    for more in (["--prompt", "a"], ["--prompt", "a", "--beam", "2"]):
        texts = set()
        for mesh in ("", "tensor=2", "data=1,fsdp=4,tensor=2"):
            assert main(["generate", run, *more, "--max-tokens", "5", "--mesh", mesh]) == 0
            texts.add(capsys.readouterr().out)
        assert len(texts) == 1
    prompts = str(tmp_path / "prompts.txt")
    texts = set()
    for mesh in ("", "auto"):
        argv = ["generate", run, "--prompts", prompts, "--max-tokens", "5", "--mesh", mesh]
        assert main(argv) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


@pytest.mark.long
def test_the_same_target_is_written_on_any_mesh(capsys, tmp_path) -> None:
    (tmp_path / "words").write_text("abc\nd\nef\n")
    shape = [given for given in small.COMMAND if "block_len" not in given]
    keys = [
        *("model.block_len=1", "model.mixer=full", "model.capacity=32", "model.encoder.layers=1"),
        *("data.task=translate", "data.layout=pairs", f"data.source={tmp_path / 'words'}"),
        *(f"data.target={tmp_path / 'words'}", "data.length=32", "train.steps=1"),
    ]
    with small.shared_programs():  # on one device
        train(override(Config(), [*shape, *keys]), tmp_path / "run", quiet=True)
    argv = ["generate", str(tmp_path / "run"), "--prompts", str(tmp_path / "words")]
    for more in ([], ["--beam", "3"], ["--temperature", "1"]):
        texts = set()
        for mesh in ("", "data=2,fsdp=2,tensor=2"):
            assert main([*argv, *more, "--max-tokens", "6", "--mesh", mesh]) == 0
            texts.add(capsys.readouterr().out)
        assert len(texts) == 1


@pytest.mark.long
def test_a_hugging_face_folder_is_read_on_a_mesh(run, capsys, tmp_path) -> None:
    folder = str(tmp_path / "hf")
    assert main(["export", run, folder]) == 0
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    assert mesh_of(nnx.state(open_model(folder, mesh=mesh).model, nnx.Param)) == mesh
    capsys.readouterr()
    texts = set()
    for given in ("", "data=1,fsdp=4,tensor=2"):
        argv = ["generate", folder, "--prompt", "a", "--max-tokens", "5", "--mesh", given]
        assert main(argv) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


def test_the_mesh_that_is_chosen(run, capsys) -> None:
    assert inference_mesh(run, "", 8) is None
    mesh = inference_mesh(run, "auto", 8)
    assert dict(mesh.shape) == {"data": 8, "fsdp": 1, "tensor": 1, "sequence": 1}
    assert "mesh=auto: data=8 x fsdp=1" in capsys.readouterr().err
    assert dict(inference_mesh(run, "tensor=2", 1).shape)["data"] == 4


def test_a_model_is_opened_on_the_mesh(run) -> None:
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    assert mesh_of(nnx.state(open_model(run, mesh=mesh).model, nnx.Param)) == mesh
    one = mesh_of(nnx.state(open_model(run).model, nnx.Param))
    assert list(one.devices.flat) == jax.devices()[:1]


@pytest.mark.parametrize(
    ("mesh", "error"),
    [
        ("all", "--mesh all: must be auto, or sizes of axes, such as data=2,tensor=4"),
        ("tensor=3", "mesh: .*tensor=3.* does not fit 8 devices; .*"),
        ("data=1,tensor=8", "--mesh data=1,tensor=8: tensor=8 does not divide model.heads=.*"),
        ("sequence=2", "--mesh sequence=2: documents are read in order.*"),
        ("tensor=many", "mesh.tensor=many: .*"),
    ],
)
@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_a_mesh_that_is_not_possible(verb, mesh, error, run, capsys) -> None:
    capsys.readouterr()
    more = ["--prompt", "a"] if verb == "generate" else []
    assert main([verb, run, *more, "--mesh", mesh]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert re.fullmatch(f"famjax: {error}\n", err), err

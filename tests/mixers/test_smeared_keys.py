"""`model.smeared_keys` in training, conversion and exports."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from famjax import load_pretrained
from famjax.cli.main import main
from famjax.config.schema import Config
from famjax.convert.families import native_family
from famjax.convert.open import open_model
from famjax.core.errors import UserError
from famjax.experiment.load import load_config
from famjax.parallel.sharding import path_name
from famjax.train.loop import train
from famjax.train.manifest import write_manifest
from famjax.train.metrics import read_metrics
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


def config(folder: Path, *more: str) -> Config:
    return load_config("text_fam", [*SMALL, f"data.files={folder / 'train.txt'}", *more])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run with smeared keys, one without, and their training text."""
    folder = tmp_path_factory.mktemp("smeared")
    (folder / "train.txt").write_text(tiny.TEXT * 40)
    train(config(folder, "model.smeared_keys=true"), folder / "smeared", quiet=True)
    train(config(folder, "model.smeared_keys=false"), folder / "plain", quiet=True)
    return folder


def smears(run: Run) -> list[np.ndarray]:
    """Return the shares of the windows' keys; a delta-rule memory has others, of its own."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(run.model, nnx.Param))
    named = ((path_name(path), leaf) for path, leaf in leaves)
    return [np.asarray(a) for name, a in named if "key_smear" in name and "delta" not in name]


def test_the_shares_are_trained(folder: Path) -> None:
    (found,) = smears(open_run(folder / "smeared"))
    assert found.shape == (2, 2)  # layers, heads
    assert (found != np.array([-2.0, 2.0])).all()
    assert not smears(open_run(folder / "plain"))


@pytest.mark.slow
def test_programs_have_equal_logits(folder: Path, tmp_path: Path) -> None:
    """Those of tests/mixers/test_delta.py have smeared keys too."""
    form = ["--format", "stablehlo"]
    assert main(["export", str(folder / "smeared"), str(tmp_path / "out"), *form]) == 0


def test_exports_have_equal_logits(folder: Path, tmp_path: Path) -> None:
    for form in ("hf", "orbax"):
        # each format is compared with the run when it is written
        assert (
            main(["export", str(folder / "smeared"), str(tmp_path / form), "--format", form]) == 0
        )
    np.testing.assert_array_equal(
        smears(open_model(str(tmp_path / "hf"))), smears(open_run(folder / "smeared"))
    )


def test_a_run_whose_smearing_ended_with_a_block_is_refused(folder: Path, tmp_path: Path) -> None:
    """As those of 2026-11-24, when a block's first key was smeared with 0."""
    run = Path(shutil.copytree(folder / "smeared", tmp_path / "old"))
    (path,) = run.glob("checkpoints/*/extra.json")
    extra = json.loads(path.read_text())
    del extra["constants"]["key_smear.across_blocks"]
    path.write_text(json.dumps(extra))
    write_manifest(path.parent)
    with pytest.raises(UserError, match=r"key_smear.across_blocks None -> 1.0"):
        open_run(run)


def test_a_folder_without_the_key_has_keys_of_their_own_tokens(
    folder: Path, tmp_path: Path
) -> None:
    """As folders exported before the key existed."""
    assert main(["export", str(folder / "plain"), str(tmp_path / "hf")]) == 0
    path = tmp_path / "hf" / "config.json"
    hf = json.loads(path.read_text())
    del hf["smeared_keys"]
    path.write_text(json.dumps(hf))
    assert not open_model(str(tmp_path / "hf")).config.model.smeared_keys


def test_mixers_change_with_smeared_keys(folder: Path, tmp_path: Path) -> None:
    shape = [key for key in SMALL if not key.startswith("model.")]
    data = f"data.files={folder / 'train.txt'}"
    bswa = ["model.mixer=bswa", f"init={folder / 'smeared'}", data]
    run = train(load_config("text_fam", [*shape, *bswa]), tmp_path / "bswa", quiet=True)
    assert smears(run)[0].shape == (2, 2)


def test_a_trained_model_gets_smeared_keys(folder: Path, tmp_path: Path) -> None:
    """Half of the heads begin nearly as they were; the new weights are trained with adapters."""
    assert main(["export", str(folder / "plain"), str(tmp_path / "hf")]) == 0
    for mixer in ("bswa", "fam", "delta"):
        argv = ["convert", str(tmp_path / "hf"), str(tmp_path / mixer), "--to", mixer]
        assert main([*argv, "model.smeared_keys=true"]) == 0
        np.testing.assert_array_equal(smears(open_run(tmp_path / mixer)), [[[-5, 2], [-5, 2]]])
    lora = [f"init={tmp_path / 'delta'}", "model.lora.rank=2", f"data.files={folder / 'train.txt'}"]
    shape = [key for key in SMALL if not key.startswith("model.")]
    run = train(load_config("text_fam", [*shape, *lora]), tmp_path / "tuned", quiet=True)
    (found,) = smears(run)
    assert found.shape == (2, 2)
    assert not np.array_equal(found, [[-5, 2], [-5, 2]])


def test_a_run_continues_with_smeared_keys(folder: Path, tmp_path: Path) -> None:
    shape = [key for key in SMALL if not key.startswith("model.")]
    keys = [f"init={folder / 'plain'}", "model.smeared_keys=true", "optimizer.learning_rate=1e-9"]
    given = load_config("text_fam", [*shape, *keys, f"data.files={folder / 'train.txt'}"])
    (found,) = smears(train(given, tmp_path / "run", quiet=True))
    np.testing.assert_allclose(found, [[-5, 2], [-5, 2]], atol=1e-6)


def test_smeared_keys_cannot_be_taken_away(folder: Path, tmp_path: Path) -> None:
    assert main(["export", str(folder / "smeared"), str(tmp_path / "hf")]) == 0
    with pytest.raises(UserError, match="smeared_keys=false: the given weights have smeared keys"):
        load_pretrained(tmp_path / "hf", smeared_keys=False)


@pytest.mark.parametrize("to", ["fm", "full", "t2r"])
def test_layers_that_cannot_smear_keys_do_not_drop_the_weights(
    to: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(folder / "smeared"), str(tmp_path / "new"), "--to", to]) == 2
    assert "but the given weights have smeared keys" in capsys.readouterr().err


def test_a_model_that_cannot_smear_keys_does_not_keep_the_setting(
    folder: Path, tmp_path: Path
) -> None:
    """Else its exports would have no family, and layers that it is given later smeared keys."""
    keys = [key for key in SMALL if "fam_len" not in key and "segments" not in key]
    keys += ["model.mixer=full", "model.arch.embed_scale=1", f"data.files={folder / 'train.txt'}"]
    given = load_config("text_fam", keys)
    assert not given.model.smeared_keys
    assert native_family(replace(given.model, vocab_size=258)) is not None
    train(given, tmp_path / "full", quiet=True)
    assert main(["convert", str(tmp_path / "full"), str(tmp_path / "bswa"), "--to", "bswa"]) == 0
    assert not open_run(tmp_path / "bswa").config.model.smeared_keys
    assert config(folder).model.smeared_keys


def test_a_layer_of_a_hybrid_gets_smeared_keys(tmp_path: Path, folder: Path) -> None:
    """The others keep theirs."""
    keys = [key for key in SMALL if not key.startswith("model.fam_len")]
    keys += ["model.smeared_keys=true", "model.mixer=full,bswa", "train.steps=1"]
    hybrid = load_config("text_fam", [*keys, f"data.files={folder / 'train.txt'}"])
    (kept,) = smears(train(hybrid, tmp_path / "hybrid", quiet=True))
    for to in ("fam", "bswa", "delta"):
        argv = ["convert", str(tmp_path / "hybrid"), str(tmp_path / to), "--to", to]
        sizes = ["model.fam_len=4"] if to == "fam" else []
        assert main([*argv, *sizes]) == 0
        found = np.concatenate(smears(open_run(tmp_path / to)))
        np.testing.assert_array_equal(found[0], [-5, 2])
        np.testing.assert_array_equal(found[-1:], kept)
    # of one layer alone
    argv = ["convert", str(tmp_path / "hybrid"), str(tmp_path / "kept"), "--to", "delta"]
    assert main([*argv, "--layers", "1"]) == 0
    assert open_run(tmp_path / "kept").config.model.mixer == "full,delta"


REPEATS = (
    *("model.layers=1", "model.width=32", "model.heads=2", "model.mlp_width=32"),
    *("model.mixer=bswa", "model.memory_segments=0", "model.block_len=64"),
    *("data.batch=16", "data.length=64", "data.holdout=0", "train.steps=300", "train.log_every=50"),
    *("optimizer.learning_rate=0.01", "optimizer.warmup_steps=20"),
)


@pytest.mark.slow
def test_one_layer_learns_to_copy_with_smeared_keys_only(tmp_path: Path) -> None:
    """What followed the same letter before, in documents of 4 to 12 random letters, repeated."""
    rng = np.random.default_rng(0)
    with (tmp_path / "repeats.jsonl").open("w") as file:
        for _ in range(5000):
            letters = rng.choice(list("abcdefghijklmnopqrstuvwxyz"), rng.integers(4, 13), False)
            word = "".join(letters)
            file.write(json.dumps({"inputs": word, "targets": (word * 15)[:48]}) + "\n")
    accuracy = {}
    for smeared in ("true", "false"):
        overrides = [*REPEATS, f"data.files={tmp_path / 'repeats.jsonl'}"]
        made = load_config("text_fam", [*overrides, f"model.smeared_keys={smeared}"])
        train(made, tmp_path / smeared, quiet=True)
        accuracy[smeared] = read_metrics(tmp_path / smeared / "metrics.jsonl")[-1]["accuracy"]
    assert accuracy["true"] > 0.95
    assert accuracy["false"] < 0.6

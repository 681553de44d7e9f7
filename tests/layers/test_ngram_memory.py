"""The n-gram memory: given to trained models, trained, streamed, and what refuses it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from famjax.cli.main import main
from famjax.config.schema import Config
from famjax.convert.open import open_model
from famjax.core.errors import UserError
from famjax.eval.ablations import ablated_leaves
from famjax.experiment.checks import validate
from famjax.experiment.load import load_config
from famjax.models.remap_params import abstract_inference_model, remap_params
from famjax.parallel.sharding import path_name
from famjax.train.loop import train
from famjax.train.run import Run, open_run

# nearly all tests need two runs; the contracts have the memory's equations
pytestmark = [pytest.mark.usefixtures("one_device"), pytest.mark.long]
SMALL = [
    *("model.layers=2", "model.width=16", "model.heads=2", "model.mlp_width=32"),
    *("model.block_len=8", "model.memory_segments=1", "model.scan_layers=true"),
    *("data.batch=2", "data.length=32", "train.steps=2", "optimizer.warmup_steps=0"),
]


def config(folder: Path, *more: str) -> Config:
    return load_config("text_bswa", [*SMALL, f"data.files={folder / 'train.txt'}", *more])


def retrain(folder: Path, run: Path, init: str, *more: str) -> Run:
    """Return a run that continues another one's weights."""
    own = [key for key in SMALL if not key.startswith("model.")]
    keys = [*own, f"init={folder / init}", f"data.files={folder / 'train.txt'}", *more]
    return train(load_config("text_bswa", keys), run, quiet=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run with the memory, one without, and their training text."""
    folder = tmp_path_factory.mktemp("ngrams")
    (folder / "train.txt").write_text(tiny.TEXT * 40)
    train(config(folder, "model.ngram_memory=5"), folder / "ngrams", quiet=True)
    train(config(folder), folder / "plain", quiet=True)
    return folder


def kernels(run: Run) -> np.ndarray:
    """Return W [o d d]."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(run.model, nnx.Param))
    (found,) = (leaf for path, leaf in leaves if path_name(path).endswith("ngram_memory/kernel"))
    return np.asarray(found)


def read(run: Run, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(run.model(tokens, run.model.init_state(len(tokens)))[0])


TOKENS = np.random.default_rng(0).integers(4, size=(2, 32)).astype(np.int32)


def test_it_is_trained_and_read(folder: Path) -> None:
    run = open_run(folder / "ngrams")
    assert kernels(run).all(axis=(1, 2)).all()
    logits = read(run, TOKENS)
    other = TOKENS.copy()
    other[:, 0] += 1  # seven blocks of 8 tokens before, with one segment and two layers
    long = np.concatenate([other, np.tile(TOKENS[:, :8], 3)], 1)
    assert not np.array_equal(read(run, long)[:, -1], read(run, np.r_["1", TOKENS, long[:, 32:]]))
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("more", [(), ("model.lora.rank=2",)])
def test_a_trained_model_gets_the_memory(
    more: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    """It computes what it did before, and the memory is trained, with adapters too."""
    keys = ("model.ngram_memory=2", *more)
    begin = retrain(folder, tmp_path / "begin", "plain", *keys, "optimizer.learning_rate=1e-9")
    plain = open_run(folder / "plain")
    np.testing.assert_allclose(read(begin, TOKENS), read(plain, TOKENS), atol=1e-5)
    assert np.abs(kernels(retrain(folder, tmp_path / "run", "plain", *keys))).max() > 1e-4


def test_the_memory_is_ablated_without_the_window(folder: Path) -> None:
    model = open_run(folder / "ngrams").model
    ablated = ablated_leaves(model, "memory")
    # the table and the latest tokens, after the window's keys and values
    assert ablated == (False,) * (len(ablated) - 3) + (True,) * 3


def test_contexts_may_become_longer(folder: Path) -> None:
    run = open_run(folder / "ngrams")
    old, params = run.config.model, nnx.state(run.model, nnx.Param)
    new = replace(old, ngram_memory=6, ngram_slots=16)
    graph, _ = abstract_inference_model(new)
    model = nnx.merge(graph, remap_params(params, old, new))
    kernel = np.asarray(model.stack.ngram_memory.kernel[...])
    np.testing.assert_array_equal(kernel[:5], kernels(run))
    assert not kernel[5:].any()
    with pytest.raises(UserError, match=r"ngram_memory=2: .* 5 contexts, which cannot be"):
        remap_params(params, old, replace(old, ngram_memory=2))


def test_another_stack_does_not_drop_the_memory(folder: Path) -> None:
    given = [f"init={folder / 'ngrams'}", "model.stack=rmt", "data.files=x"]
    with pytest.raises(UserError, match=r"model\.stack=rmt has no n-gram memory; set 0"):
        validate(load_config("text_bswa", given))


def test_a_folder_is_given_the_memory(folder: Path, tmp_path: Path) -> None:
    assert main(["export", str(folder / "plain"), str(tmp_path / "hf")]) == 0
    keys = ["--to", "bswa", "model.ngram_memory=2"]
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "new"), *keys]) == 0
    run = open_model(str(tmp_path / "new"))
    assert not kernels(run).any()
    plain = open_run(folder / "plain")
    np.testing.assert_allclose(read(run, TOKENS), read(plain, TOKENS), atol=1e-5)


def test_exports_have_equal_logits(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for form in ("hf", "orbax", "stablehlo"):
        # each format is compared with the run when it is written
        argv = ["export", str(folder / "ngrams"), str(tmp_path / form), "--format", form]
        assert main(argv) == 0
    run = open_run(folder / "ngrams")
    np.testing.assert_array_equal(kernels(open_model(str(tmp_path / "hf"))), kernels(run))
    keys = ["--to", "bswa", "model.ngram_memory=6"]
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "more"), *keys]) == 0
    found = kernels(open_run(tmp_path / "more"))
    np.testing.assert_array_equal(found[:5], kernels(run))
    assert not found[5:].any()
    tuned = tmp_path / "tuned"
    retrain(folder, tuned, "ngrams", "model.lora.rank=2")
    assert main(["export", str(tuned), str(tmp_path / "peft"), "--format", "peft"]) == 2
    assert "--format peft: does not support model.ngram_memory=5" in capsys.readouterr().err


def test_a_document_is_read_once_and_asked_later(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The memory file has the table; generation continues with it, with beams too."""
    read_me, memory = folder / "train.txt", tmp_path / "text.memory"
    run = str(folder / "ngrams")
    assert main(["generate", run, "--read", str(read_me), "--state-out", str(memory)]) == 0
    capsys.readouterr()
    asked = ["generate", run, "--state-in", str(memory), "--prompt", "a", "--max-tokens", "4"]
    written = []
    for more in ([], ["--beam", "2"]):
        assert main([*asked, *more]) == 0
        written.append(capsys.readouterr().out)
    assert all(written)

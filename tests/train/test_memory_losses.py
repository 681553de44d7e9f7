"""`train.diversity_loss`, `.reconstruction_loss` and `.write_loss` in what training minimizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.experiment.load import load_config
from famjax.train.loop import train
from famjax.train.objective import NextToken

pytestmark = pytest.mark.usefixtures("one_device")
SMALL = [
    *("model.layers=2", "model.width=16", "model.heads=2", "model.mlp_width=32"),
    *("model.block_len=8", "model.memory_segments=0", "model.fam_len=3"),
    # one body is compiled for both layers
    "model.scan_layers=true",
    *("data.batch=2", "data.length=64", "train.log_every=1", "optimizer.warmup_steps=0"),
]


def test_weighted_losses_are_added_to_that_of_tokens() -> None:
    run = tiny.run_with("bswa,fam", layers=2, memory_segments=0, fam_len=3, fam_update="gated")
    tokens = np.random.default_rng(0).integers(1, 50, size=(2, 64))
    batch: Any = {"tokens": tokens, "targets": np.roll(tokens, -1, 1)}
    batch["weights"] = np.where(np.arange(64) < 40, 1.0, 0.0) * np.ones((2, 1))
    batch["valid"] = np.ones((2, 64), bool)
    bytes_of = jnp.ones(run.config.model.vocab_size or run.tokenizer.vocab_size)

    def read(**weights: float) -> Any:
        config = replace(run.config, train=replace(run.config.train, **weights))
        memory = run.model.init_state(2)
        share = jnp.asarray(batch["weights"].sum(), jnp.float32)
        return NextToken(config, bytes_of).forward(run.model, memory, batch, Context(), share)[1]

    embedded = run.model.embed(jnp.asarray(tokens))
    _, _, losses = run.model.stack.call_with_losses(embedded, run.model.init_state(2), Context())
    off, on = read(), read(diversity_loss=0.5, reconstruction_loss=2.0, write_loss=3.0)
    added = 0.5 * losses.diversity + 2 * losses.reconstruction + 3 * losses.writing
    np.testing.assert_allclose((on.loss - off.loss) / off.weight, added, rtol=1e-4)
    assert abs(added) > 0.01
    assert min(map(abs, losses)) > 0.01
    # bits per byte are those of the text
    np.testing.assert_allclose(on.nats, off.nats)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["lanes", pytest.param("packed", marks=pytest.mark.slow)])
def test_losses_are_logged_and_lowered(tmp_path: Path, layout: str) -> None:
    (tmp_path / "train.txt").write_text(tiny.TEXT * 40)
    given = [*SMALL, f"data.files={tmp_path / 'train.txt'}", f"data.layout={layout}"]
    given += ["train.reconstruction_loss=10", "train.diversity_loss=1", "train.steps=12"]
    train(load_config("text_fam", given), tmp_path / "run", quiet=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "reconstruction" in row]
    first, last = rows[0], rows[-1]
    assert last["reconstruction"] < 0.9 * first["reconstruction"]
    # entropies grow: the loss is their negative
    assert last["diversity"] < first["diversity"] < 0


@pytest.mark.long
@pytest.mark.parametrize(
    "keys", [("model.fam_len=3", "model.fam_update=gated"), ("model.mixer=delta",)]
)
def test_a_memory_learns_to_write_less(tmp_path: Path, keys: tuple[str, ...]) -> None:
    (tmp_path / "train.txt").write_text(tiny.TEXT * 40)
    given = [*(key for key in SMALL if "fam_len" not in key), *keys, "train.steps=12"]
    given += [f"data.files={tmp_path / 'train.txt'}", "train.write_loss=10"]
    train(load_config("text_fam", given), tmp_path / "run", quiet=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "writing" in row]
    assert rows[-1]["writing"] < 0.9 * rows[0]["writing"]


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ("text_bswa", ["train.diversity_loss=1"]),
        ("text_bswa", ["model.mixer=delta", "train.reconstruction_loss=1"]),
        ("text_bswa", ["train.write_loss=1"]),
        ("text_fam", ["model.fam_update=sum", "train.write_loss=1"]),
    ],
)
def test_models_without_the_memory_have_no_such_losses(config: str, keys: list[str]) -> None:
    with pytest.raises(UserError, match=r"train\.\w+_loss: has no effect with"):
        load_config(config, keys)


@pytest.mark.parametrize(
    ("config", "keys", "what"),
    [
        ("text_fam", ["model.dropout.layer=0.5"], r"model\.dropout\.layer=0\.5 leaves out"),
        (
            "multi30k",
            ["model.mixer=fam", "model.block_len=16", "data.length=128"],
            "attention to an encoder in it",
        ),
    ],
)
def test_what_a_memory_cannot_rebuild_is_refused(config: str, keys: list[str], what: str) -> None:
    with pytest.raises(UserError, match=r"train\.reconstruction_loss=1 compares .*" + what):
        load_config(config, [*keys, "train.reconstruction_loss=1"])

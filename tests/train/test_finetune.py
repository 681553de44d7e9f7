"""Finetuning a run at a lower rate (Feedback Transformer, B: "a 10x smaller learning rate")."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from small import compiled_once, config, rows  # noqa: F401

from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.experiment.load import load_config, override
from famjax.ops.losses import token_losses
from famjax.pipeline import make_batches, make_source
from famjax.train import loop
from famjax.train.run import Run, open_run

pytestmark = pytest.mark.usefixtures("compiled_once")


def loss(run: Run, batch: dict[str, np.ndarray]) -> float:
    """Return the mean loss of a batch with empty initial memory."""
    graph, params = nnx.split(run.model)

    @jax.jit
    def mean(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        model, weights = nnx.merge(graph, params), batch["weights"]
        ctx = Context(batch["reset"], batch["valid"], pass_state=batch["pass_state"])
        logits, _ = model(batch["tokens"], model.init_state(len(weights)), ctx)
        nats, _ = token_losses(logits, batch["targets"])
        return (nats * weights).sum() / weights.sum()

    return float(mean(params, batch))


def test_finetuning_starts_from_the_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All weights are finetuned from the newest checkpoint: the first loss equals the run's."""
    run, tuned = tmp_path / "run", tmp_path / "tuned"
    given = ["model.mixer=bswa", "train.steps=6", "train.log_every=1", "optimizer.warmup_steps=0"]
    small = config(tmp_path / "texts", "lanes", "text", *given)
    loop.train(small, run)
    said = capsys.readouterr().err
    assert "\ninitial weights: random\n" in said
    assert "warm-up" not in said
    rate = small.optimizer.learning_rate / 10
    more = [f"init={run}", f"optimizer.learning_rate={rate}", "train.steps=2"]
    tuning = load_config(str(run / "config.json"), [*more, "optimizer.schedule=constant"])
    loop.train(tuning, tuned)
    assert f"\ninitial weights: from {run}, step 6\n" in capsys.readouterr().err

    before = open_run(run)
    source = make_source(tuning, before.tokenizer)
    batches = make_batches(tuning, source, before.tokenizer, tuning.model.block_len)
    first = rows(tuned)[0]
    assert first["loss"] == pytest.approx(loss(before, next(batches)), rel=1e-5)
    batches.release()
    assert first["loss"] < rows(run)[0]["loss"] - 0.1
    assert [row["learning_rate"] for row in rows(tuned)] == pytest.approx([rate] * 2)
    # a model of other sizes is refused before anything is loaded
    with pytest.raises(
        UserError, match=r"model\.layers=2: the given weights have 1; keep that value"
    ):
        loop.train(override(tuning, ["model.layers=2"]), tmp_path / "other")
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "other").exists()
    # continue for more steps at the same rate
    loop.train(override(tuning, ["train.steps=4"]), tuned)
    assert "initial weights" not in capsys.readouterr().err
    assert [row["learning_rate"] for row in rows(tuned)] == pytest.approx([rate] * 4)
    ends = [nnx.state(run.model, nnx.Param) for run in (before, open_run(tuned))]
    moved = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), *ends)
    assert 0 < max(jax.tree.leaves(moved)) < 8 * rate

"""Held-out loss during training equals that of `famjax eval`, and does not change the run."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
from small import compiled_once  # noqa: F401

from famjax.core.errors import UserError
from famjax.eval.text import evaluate_text
from famjax.experiment.load import load_config, override
from famjax.pipeline import make_source
from famjax.train import heldout, hosts
from famjax.train.loop import train
from famjax.train.metrics import read_metrics

# as many tokens as the longest document, so that all are read to their end
EVAL = ["eval.every=4", "eval.batches=30", "data.holdout=3", "train.steps=8"]
FIELDS = [
    f"{split}_bits_per_byte{suffix}"
    for split in ("heldout", "training")
    for suffix in ("", "_without_memory")
]


def rows(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("layout", ["lanes", pytest.param("packed", marks=pytest.mark.long)])
def test_heldout_loss_equals_famjax_eval(tmp_path: Path, layout: str) -> None:
    config = small.config(tmp_path / "texts", layout, "text", *EVAL)
    run = train(config, tmp_path / "run", quiet=True)
    found = evaluate_text(run, quiet=True)
    last = rows(tmp_path / "run")[-1]
    assert last["heldout_bits_per_byte"] == pytest.approx(found["bits_per_byte"], rel=1e-5)
    without = found["without_memory"]["bits_per_byte"]
    assert last["heldout_bits_per_byte_without_memory"] == pytest.approx(without, rel=1e-5)
    assert last["training_bits_per_byte"] != last["heldout_bits_per_byte"]
    assert all(np.isfinite(last[name]) for name in FIELDS)


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_training_documents_are_read_whole_beside_the_held_out_ones(tmp_path: Path) -> None:
    """Not in parts, whose memory contributes less."""
    config = small.config(tmp_path / "texts", "lanes", "text", *EVAL, "data.part_bytes=256")
    run = train(config, tmp_path / "run", quiet=True)
    (tmp_path / "training").mkdir()
    source = make_source(override(config, ["data.part_bytes=0"]), run.tokenizer)
    for path in {source.key(0, 1, k)[0] for k in range(4)}:
        shutil.copy(path, tmp_path / "training")
    found = evaluate_text(run, files=str(tmp_path / "training"), quiet=True)
    last = rows(tmp_path / "run")[-1]
    assert last["training_bits_per_byte"] == pytest.approx(found["bits_per_byte"], rel=1e-5)


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_heldout_evaluation_does_not_change_a_bit_of_the_run(tmp_path: Path) -> None:
    config = small.config(tmp_path / "texts", "lanes", "text", *EVAL)
    train(config, tmp_path / "run", quiet=True)
    train(override(config, ["eval.every=0"]), tmp_path / "plain", quiet=True)
    (step, state, _), (plain_step, plain, _) = (
        small.final(tmp_path / name, config) for name in ("run", "plain")
    )
    assert (step, state[0]) == (plain_step, plain[0])
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("run", "plain")]
    assert losses[0] == losses[1]
    measured = [[name in row for name in FIELDS] for row in rows(tmp_path / "run")]
    assert measured == [[True] * 4] * 2
    # stopped after the first evaluation and resumed with another interval
    train(override(config, ["train.steps=4"]), tmp_path / "two", quiet=True)
    train(config, tmp_path / "two", quiet=True)
    last, resumed = rows(tmp_path / "run")[-1], rows(tmp_path / "two")[-1]
    assert [last[name] for name in FIELDS] == [resumed[name] for name in FIELDS]


@pytest.mark.usefixtures("compiled_once")
def test_all_steps_are_measured_on_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while rows are shorter at the beginning of the training."""
    found = []
    upload = hosts.upload_batch

    def spy(batch: Any, placement: Any, rows: int) -> Any:
        if rows == 2:  # those of the training are 8, and then 4
            found.append(batch["tokens"])
        return upload(batch, placement, rows)

    monkeypatch.setattr(heldout.hosts, "upload_batch", spy)
    warm = ["model.mixer=bswa", "train.bptt_start=16", "train.bptt_double_every=4"]
    config = small.config(tmp_path / "texts", "lanes", "text", *EVAL, *warm)
    train(config, tmp_path / "run", quiet=True)
    first, second = np.array_split(np.array(found), 2)  # after 4 and after 8 steps
    np.testing.assert_array_equal(first, second)
    assert first.shape[1:] == (config.data.batch, config.data.length)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["eval.every=6"], "eval.every=6 is not a multiple of train.log_every=4; take 4 or 8"),
        (["train.steps=2"], "eval.every=4 is beyond train.steps=2"),
        (["data.holdout=0"], "data.holdout=0 holds out no text"),
        (["model.mixer=full", "model.capacity=100"], "eval.batches=30: reading 1920 tokens"),
        (["eval.batches=0"], "eval.batches=0"),
        (["eval.every=0", "eval.batches=3"], "eval.batches: has no effect with eval.every=0"),
        (["data.task=passkey"], "data.task=passkey has none; name eval.tasks, or set eval.every=0"),
    ],
)
def test_mistakes_are_one_line_errors(given: list[str], message: str) -> None:
    config = [*small.COMMAND, *EVAL[:3], "train.log_every=4", *given]
    with pytest.raises(UserError, match=re.escape(message)):
        load_config("text_fam", config)

"""Text in some rows of a batch, with a task in the others: contents of rows, and exact resume."""

import re
from pathlib import Path

import numpy as np
import pytest
from small import SHAPE

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.data.sources import TextSource
from famjax.eval.text import evaluate_text
from famjax.experiment.load import load_config, override
from famjax.pipeline import Batches, make_batches, make_source
from famjax.tasks.passkey import PasskeySource
from famjax.tokenizers.load import load_tokenizer
from famjax.train.loop import train

PASSKEY = ["data.passkey.min_length=320", "data.passkey.start_length=320"]
TEXT = "A text that is no needle. " * 40


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.txt").write_text(f"{i}: {TEXT}")
    return folder


def config(files: Path, *more: str) -> Config:
    given = [*PASSKEY, "data.tokenizer=bytes", "data.batch=4", "data.length=512", "seed=3"]
    given += ["model.block_len=32", "data.passkey.ask_every=0", "data.passkey.multiple=1"]
    return load_config("passkey", [*given, f"data.files={files}", "data.text_rows=1", *more])


def batches(of: Config) -> Batches:
    tokenizer = load_tokenizer("bytes")
    return make_batches(of, make_source(of, tokenizer), tokenizer, of.model.block_len)


def decode(row: np.ndarray) -> str:
    return bytes(row[row < 256].astype(np.uint8)).decode()


@pytest.mark.parametrize("layout", ["lanes", "packed"])
def test_the_last_rows_are_text(files: Path, layout: str) -> None:
    of = config(files, f"data.layout={layout}", "data.text_weight=0.05")
    tokenizer = load_tokenizer("bytes")
    both = next(batches(of))
    task = next(batches(override(of, ["data.text_rows=0", "data.batch=3", "data.files="])))
    text = make_batches(
        override(of, ["data.batch=1"]),
        TextSource(str(files), tokenizer, of.seed, of.data.holdout),
        tokenizer,
        of.model.block_len,
    )
    alone = next(text)
    for name in ("tokens", "targets", "valid"):
        if layout == "lanes":  # packed rows are shuffled by their index
            np.testing.assert_array_equal(both[name][3:], alone[name])
        np.testing.assert_array_equal(both[name][:3], task[name])
    assert "no needle" in decode(both["tokens"][3])
    assert all("pass key" in decode(row) for row in both["tokens"][:3])
    np.testing.assert_array_equal(both["weights"][:3], task["weights"])
    weights = both["weights"][3]
    assert set(np.unique(weights)) <= {np.float32(0), np.float32(0.05)}
    assert weights.any()


def test_batches_resume_exactly(files: Path) -> None:
    first, again = batches(config(files)), batches(config(files))
    next(first)
    state = first.get_state()
    expected = [next(first) for _ in range(3)]
    again.set_state(state)
    for batch in expected:
        for name, value in next(again).items():
            np.testing.assert_array_equal(value, batch[name])


def test_the_curriculum_applies_to_task_rows(files: Path) -> None:
    source = make_source(config(files, "data.passkey.max_length=1280"), load_tokenizer("bytes"))
    state = source.get_state()
    assert source.advance(state, 0.0) == state
    grown = source.advance(state, 1.0)
    assert grown == {**state, "longest": 640}
    source.set_state(grown)
    assert isinstance(source.of_task(), PasskeySource)
    assert source.of_task().longest == 640


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["data.text_rows=4"], "data.text_rows=4 leaves none of data.batch=4 rows"),
        (["data.text_weight=1"], "data.text_weight=1.0: must be less than 1"),
        (["data.text_rows=-1"], "data.text_rows=-1"),
        (
            ["data.text_rows=0", "data.files=", "data.text_weight=0.1"],
            "data.text_weight: has no effect with",
        ),
        (["data.text_rows=0"], "data.files: has no effect with data.task=passkey"),
        (["data.task=text"], "data.text_rows=1: all rows of data.task=text are text"),
        (["data.layout=packed", "train.rsp=0.5"], "train.rsp=0.5 would start rows of text"),
        (["train.bptt_start=128", "train.bptt_double_every=5"], "needs a constant number of rows"),
    ],
)
def test_mistakes_are_one_line_errors(files: Path, more: list[str], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        config(files, *more)


@pytest.mark.long
def test_a_run_resumes_with_as_many_rows_and_is_evaluated_on_its_holdout(
    files: Path, tmp_path: Path
) -> None:
    small = [*SHAPE, "data.batch=4", "train.steps=1", "data.holdout=2"]
    of = override(config(files), small)
    run = train(of, tmp_path / "run", quiet=True)
    found = evaluate_text(run, quiet=True)
    assert found["documents"] > 0
    with pytest.raises(UserError, match=r"resume with data.batch=4"):
        train(override(of, ["data.batch=5", "train.steps=2"]), tmp_path / "run", quiet=True)


def test_toy_tasks_have_words_of_their_own(files: Path) -> None:
    given = [f"data.files={files}", "data.text_rows=1", "data.task=copy", "data.tokenizer=task"]
    with pytest.raises(UserError, match=r"data\.task=copy has its own vocabulary"):
        load_config("text_fam", given)

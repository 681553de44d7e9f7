"""`famjax average`: the mean of a run's last checkpoints is a run like any other."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
import tiny_tokenizers
from flax import nnx
from small import compiled_once  # noqa: F401

from famjax.cli.main import main
from famjax.cli.next_commands import eval_command
from famjax.config.schema import Config
from famjax.convert.open import open_model
from famjax.core.errors import UserError
from famjax.eval.generate import Generator
from famjax.experiment.load import load_config, override, to_json
from famjax.models.seq2seq import make_model
from famjax.parallel.sharding import path_name
from famjax.train.average import AVERAGED, average, open_average, save_average
from famjax.train.best import keep
from famjax.train.checkpoint import Checkpoints
from famjax.train.loop import train
from famjax.train.run import open_run

STEPS = [6, 9, 12]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with four checkpoints, of which three are kept, and a tokenizer in files."""
    folder = tmp_path_factory.mktemp("averaged")
    tokenizer = tiny_tokenizers.byte_level(folder / "tokenizer")
    keys = [f"data.tokenizer={tokenizer}", "train.steps=12", "train.keep=3"]
    config = small.config(folder / "texts", "lanes", "text", *keys)
    with small.shared_programs():
        train(config, folder / "run", quiet=True)
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of that run."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def arrays(run: Path, step: int | None = None) -> dict[str, np.ndarray]:
    params = nnx.state(open_run(run, step).model, nnx.Param)
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    return {path_name(path): np.asarray(a) for path, a in flat}


@pytest.mark.parametrize("last", [1, 2, 3])
def test_parameters_are_the_mean_of_the_last_checkpoints(run: Path, last: int) -> None:
    assert main(["average", str(run), "--last", str(last)]) == 0
    found, each = arrays(run / "average"), [arrays(run, step) for step in STEPS[-last:]]
    assert found.keys() == each[0].keys()
    for name, a in found.items():
        assert a.dtype == np.float32
        mean = sum(b[name].astype(np.float64) for b in each) / last
        np.testing.assert_array_equal(a, mean.astype(np.float32))
    changed = [name for name in found if (found[name] != each[-1][name]).any()]
    assert bool(changed) == (last > 1)


def test_checkpoints_of_other_steps_count_only_if_there_are_too_few(run: Path) -> None:
    """Such as those that `eval.best` saves."""
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "000000009", checkpoints / "000000010")
    assert average(run, 3).steps == STEPS
    assert average(run, 4).steps == [6, 9, 10, 12]


@pytest.mark.parametrize(("max_checkpoints", "last"), [(2, "2"), (3, "3"), (10, "3")])
def test_a_mean_is_opened_without_a_folder(run: Path, max_checkpoints: int, last: str) -> None:
    found = open_average(run, max_checkpoints)
    assert main(["average", str(run), "--last", last]) == 0
    params = nnx.state(found.model, nnx.Param)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(params)[0],
        arrays(run / "average").values(),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b, err_msg=path_name(path))
    assert found.step == 12


def test_the_mean_of_spans_may_be_longer_than_the_last(tmp_path: Path) -> None:
    shape = ["model.stack=feedback", "model.block_len=1", "model.layers=1", "model.width=8"]
    spans = ["span=256", "adaptive_span=true", "span_ramp=32", "shared_kv=false"]
    given = [*shape, *(f"model.feedback.{value}" for value in spans), "model.vocab_size=258"]
    config = load_config("text_fam", given)
    (tmp_path / "config.json").write_text(to_json(config))
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    model = make_model(config.model, rngs=nnx.Rngs(0))
    for step, share in ((1, 1.0), (2, 0.0)):
        model.stack.layers[0].span[...] = jnp.full((1, config.model.heads), share)
        params = nnx.state(model, nnx.Param)
        checkpoints.save(step, {"params": params}, {"config": dataclasses.asdict(config)})
    checkpoints.wait()
    assert open_run(tmp_path).model.stack.spec.spans == (64,)
    # half of 256 tokens, and the ramp
    assert open_average(tmp_path, 2).model.stack.spec.spans == (192,)


def test_it_opens_like_any_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its tokenizer, from another place, without the run that it is of."""
    out = run.parent / "mean of 3"
    assert main(["average", str(run), "--last", "3", "--out", str(out)]) == 0
    said = f"wrote {out}, the mean of steps 6, 9, 12; next: famjax eval '{out}'\n"
    assert capsys.readouterr().out == said
    shutil.rmtree(run)
    opened = open_model(out)
    assert opened.step == 12
    assert "".join(Generator(opened).generate("document", max_tokens=3))
    assert not [path.name for path in out.iterdir() if path.name in ("metrics.jsonl", "train.lock")]
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["000000012"]
    assert not list(run.parent.glob("*.partial"))


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ([], ""),
        (["data.holdout=0"], " --tasks text:FILE"),
        (["model.mixer=full", "model.capacity=64", "data.length=64"], " --window 64"),
    ],
)
def test_the_command_named_next_is_that_of_the_run(keys: list[str], options: str) -> None:
    config = override(Config(), [*small.COMMAND, "data.files=texts", *keys])
    assert eval_command(config, Path("a mean")) == f"famjax eval 'a mean'{options}"


def test_the_best_checkpoint_has_the_tokenizer_too(run: Path) -> None:
    keep(run, run / "checkpoints" / "000000009")
    shutil.rmtree(run / "tokenizer")
    assert open_run(run / "best").tokenizer.encode("document").size


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_it_is_the_start_of_other_runs_but_cannot_be_continued(run: Path) -> None:
    average_of(run, 3)
    config = load_config(str(run / "config.json"), ["train.steps=13"])
    with pytest.raises(UserError, match=r"average: is a mean of checkpoints, .* with init=.*ave"):
        train(config, run / "average", quiet=True)
    start = load_config(str(run / "config.json"), [f"init={run / 'average'}", "train.steps=1"])
    train(start, run.parent / "next", quiet=True)  # at the rate 0, with which the warm-up begins
    found, expected = arrays(run.parent / "next"), arrays(run / "average")
    assert all((found[name] == expected[name]).all() for name in expected)


def average_of(run: Path, last: int) -> None:
    (run / "average").mkdir()
    save_average(average(run, last), run, run / "average")


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_of_adapters_only_the_trained_parameters_are_averaged(run: Path) -> None:
    keys = [f"init={run}", "model.lora.rank=2", "optimizer.learning_rate=0.1", "train.steps=6"]
    adapted = run.parent / "adapted"
    train(load_config(str(run / "config.json"), keys), adapted, quiet=True)
    average_of(adapted, 2)
    found, each = arrays(adapted / "average"), [arrays(adapted, step) for step in (3, 6)]
    for name, a in found.items():
        mean = (each[0][name].astype(np.float64) + each[1][name]) / 2
        np.testing.assert_array_equal(a, mean.astype(np.float32))
    extra = Checkpoints(adapted / "average" / "checkpoints").extra(6)
    assert (extra[AVERAGED], extra["base"]) == ([3, 6], open_run(adapted).base)
    here, there = (
        saved_arrays(folder / "checkpoints") for folder in (adapted / "average", adapted)
    )
    assert here == {"params": there["params"]}
    assert 0 < len(here["params"]) < len(found)


def saved_arrays(checkpoints: Path) -> Any:
    """Return the shapes and types in the checkpoint of step 6, by name."""
    return json.loads((checkpoints / "000000006" / "tree.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize(
    ("every", "more"),
    [(1, "more train.steps"), (2, "more train.steps, or train.checkpoint_every less than 2")],
)
def test_a_run_that_keeps_enough_is_told_to_write_more(
    every: int, more: str, tmp_path: Path
) -> None:
    keys = [f"train.steps={2 * every}", f"train.checkpoint_every={every}", "train.keep=5"]
    with small.shared_programs():
        train(small.config(tmp_path / "texts", "lanes", "text", *keys), tmp_path, quiet=True)
    with pytest.raises(UserError) as error:
        average(tmp_path, 5)
    assert str(error.value) == (
        f"{tmp_path}: has 2 of the --last 5 checkpoints; train with {more}, or take --last 2"
    )


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["average", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removeprefix("famjax: ").rstrip("\n")


def test_too_few_checkpoints_are_an_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, str(run)) == (
        f"{run}: has 3 of the --last 10 checkpoints; train with train.keep=10 or more, or take "
        "--last 3"
    )
    assert not (run / "average").exists()


@pytest.mark.parametrize("step", [9, 12])
def test_a_damaged_checkpoint_is_named(
    run: Path, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = run / "checkpoints" / f"{step:09d}"
    files = [path for path in (damaged / "params").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    said = error_of(capsys, str(run), "--last", "3")
    assert said.startswith(f"checkpoint {damaged} is damaged: ")
    assert said.endswith("; restore it from a copy, or remove it")
    assert not (run / "average").exists()
    shutil.rmtree(damaged)
    assert main(["average", str(run), "--last", "2"]) == 0


def test_a_checkpoint_of_another_shape_is_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = Checkpoints(run / "checkpoints", keep=9)
    newest = run / "checkpoints" / "000000012"
    shutil.move(newest, run / "aside")
    checkpoints.save(9, {"params": {"embedding": np.zeros((3, 2), np.float32)}}, {})
    checkpoints.wait()
    shutil.move(run / "aside", newest)
    said = error_of(capsys, str(run), "--last", "3")
    assert said.startswith(f"checkpoint {run / 'checkpoints' / '000000009'} does not fit: params/")
    assert main(["average", str(run), "--last", "1"]) == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["RUN", "--last", "0"], "--last 0: must be at least 1"),
        (["RUN", "--last", "x"], "--last x: must be a whole number"),
        (["RUN", "--out", "RUN"], "RUN exists already; give another folder, or remove it"),
        (["RUN", "--out", "RUN/a/b"], "RUN/a/b: there is no folder RUN/a; create it first"),
        (["RUM"], "RUM: there is no such folder"),
        (["RUN/tokenizer"], "RUN/tokenizer is not a run: it has no config.json"),
        (["RUN", "-n", "3"], "unknown option -n; write --last 3; see famjax average --help"),
    ],
)
def test_mistakes_are_one_line(
    trained: Path, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def named(text: str) -> str:
        return text.replace("RUN", str(trained)).replace("RUM", f"{trained}m")

    assert error_of(capsys, *map(named, argv)).startswith(named(said))
    assert not (trained / "average").exists()
    assert not Path(f"{trained}m").exists()


def test_a_run_that_is_being_averaged_is_not_changed(run: Path) -> None:
    def content(folder: Path) -> dict[str, Any]:
        return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    before = content(run)
    assert main(["average", str(run), "--last", "3", "--out", str(run.parent / "out")]) == 0
    assert content(run) == before

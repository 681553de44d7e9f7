"""An edited config.json of another model is rejected: the checkpoint stores its own."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from famjax import replace_values
from famjax.cli.main import main
from famjax.config.schema import ModelConfig
from famjax.convert.folder import write_model
from famjax.core.errors import UserError
from famjax.eval.state_file import model_fingerprint
from famjax.experiment.load import load_config
from famjax.mixers import mixer_constants
from famjax.train.checkpoint import Checkpoints
from famjax.train.loop import train
from famjax.train.run import initial_weights, open_run
from famjax.train.run_folder import check_resumable


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny.folder(), tmp_path / "run"))


def edit(run: Path, key: str, value: Any) -> Any:
    """Change a key of a run's config.json and return its previous value."""
    path = run / "config.json"
    tree = json.loads(path.read_text())
    *sections, name = key.split(".")
    at = tree
    for section in sections:
        at = at[section]
    before, at[name] = at[name], value
    path.write_text(json.dumps(tree))
    return before


def test_edits_of_keys_without_effect_change_nothing(run: Path) -> None:
    """As the config of a run from a version with another default."""
    edit(run, "model.ngram_slots", 9)
    assert open_run(run).step == 2
    edit(run, "model.ngram_memory", 1)
    with pytest.raises(UserError, match=r"was edited, .*: model\.ngram_memory=1 \(was 0\)"):
        open_run(run)


def test_memory_files_do_not_depend_on_keys_without_effect() -> None:
    before = tiny.run()
    for changes, is_same in (({"ngram_slots": 9}, True), ({"memory_segments": 2}, False)):
        config = replace(before.config, model=replace(before.config.model, **changes))
        same = model_fingerprint(replace(before, config=config)) == model_fingerprint(before)
        assert same == is_same


def test_contexts_of_other_lengths_are_another_model() -> None:
    """Up to four contexts, the longest has as many tokens as in earlier versions."""
    found = [mixer_constants(ModelConfig(mixer="bswa", ngram_memory=n)) for n in (0, 4, 5)]
    assert found == [{}, {}, {"ngram_memory.longest": 6}]


def test_a_run_resumes_with_another_default_of_a_key_without_effect(run: Path) -> None:
    before = tiny.run().config
    check_resumable(before, replace_values(before, {"model.ngram_slots": 9}), run)
    used = replace_values(before, {"model.ngram_memory": 2})
    with pytest.raises(UserError, match=r"another config \(model\.ngram_slots: \d+ -> 9\)"):
        check_resumable(used, replace_values(used, {"model.ngram_slots": 9}), run)


def test_a_run_whose_continuation_is_refused_stays_as_it_was(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files() -> dict[str, bytes]:
        return {name: (run / name).read_bytes() for name in ("config.json", "resolved.json")}

    def refuse(*_: Any, **__: Any) -> None:
        raise UserError("the texts are gone")

    before = files()
    monkeypatch.setattr("famjax.train.session.make_source", refuse)
    with pytest.raises(UserError, match="the texts are gone"):
        train(replace_values(tiny.run().config, {"train.steps": 9}), run, quiet=True)
    monkeypatch.undo()
    assert files() == before
    # one that has nothing to do is not refused
    train(replace_values(tiny.run().config, {"train.steps": 1}), run, quiet=True)
    assert json.loads(files()["config.json"])["train"]["steps"] == 1


def test_a_run_with_random_weights_does_not_resume_with_others(run: Path) -> None:
    before = tiny.run().config
    given, moved = (
        replace_values(before, {"init": path}) for path in ("/models/base", "/elsewhere/base")
    )
    with pytest.raises(UserError, match=r"another config \(init: '' -> '/models/base'\); give"):
        check_resumable(before, given, run)
    check_resumable(given, moved, run)


def test_a_run_does_not_resume_with_another_model_in_init(run: Path, tmp_path: Path) -> None:
    first, other = tmp_path / "base", tmp_path / "other"
    first.mkdir()
    before, given = (
        replace_values(tiny.run().config, {"init": str(path)}) for path in (first, other)
    )
    check_resumable(before, given, run)  # it may have been moved, and its absence is told later
    other.mkdir()
    with pytest.raises(UserError, match=r"another config \(init: .*base'? -> .*other'?\); give"):
        check_resumable(before, given, run)
    # frozen weights are compared when they are read
    adapters = {"model.lora.rank": 2}
    check_resumable(replace_values(before, adapters), replace_values(given, adapters), run)
    first.rmdir()
    check_resumable(before, given, run)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.block_len", 4),
        ("model.rope_base", 500.0),
        ("model.fam_previous", 3),
        ("model.memory_segments", 2),
        ("model.arch.norm_eps", 1e-3),
        ("model.arch.rotary_fraction", 0.5),
        ("model.width", 32),
        ("seed", 5),
        ("data.holdout", 2),
    ],
)
def test_edits_that_change_results_are_rejected(run: Path, key: str, value: Any) -> None:
    before = edit(run, key, value)
    with pytest.raises(UserError) as caught:
        open_run(run)
    said = f"{run}/config.json: was edited, and no longer matches the checkpoint of step 2: "
    assert str(caught.value).startswith(f"{said}{key}={value!r} (was {before!r}); undo the edit")
    assert "\n" not in str(caught.value)
    edit(run, key, before)
    open_run(run)


def test_every_verb_rejects_an_edited_config(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run, "model.rope_base", 500.0)
    for argv in (
        ["generate", str(run), "--prompt", "a"],
        ["eval", str(run)],
        ["export", str(run), str(tmp_path / "out"), "--format", "orbax"],
        ["convert", str(run), str(tmp_path / "out")],
        [
            *("train", "text_fam", f"init={run}", "data.length=16", "data.batch=2"),
            *("--run", str(tmp_path / "new")),
        ],
        ["train", str(run / "config.json"), "train.steps=4", "--run", str(run)],
    ):
        assert main(argv) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        edited = "was edited" in said and "model.rope_base=500.0 (was 10000.0)" in said
        assert edited or "model.rope_base: 10000.0 -> 500.0" in said, (argv, said)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "moved"),
        ("data.files", "elsewhere.txt"),
        ("data.batch", 4),
        ("model.scan_layers", False),
        ("model.remat", "layer"),
        ("model.capacity", 128),
        ("mesh.fsdp", 2),
        ("optimizer.learning_rate", 1.0),
    ],
)
def test_keys_that_change_no_result_may_be_edited(run: Path, key: str, value: Any) -> None:
    edit(run, key, value)
    open_run(run)


def test_a_checkpoint_without_a_config_is_accepted(run: Path) -> None:
    opened = open_run(run)
    shutil.rmtree(run / "checkpoints")
    from flax import nnx

    checkpoints = Checkpoints(run / "checkpoints", keep=1)
    checkpoints.save(2, {"params": nnx.state(opened.model, nnx.Param)}, {})
    checkpoints.wait()
    edit(run, "model.rope_base", 500.0)
    assert open_run(run).config.model.rope_base == 500.0


@pytest.mark.parametrize("invalid", [5, [1], {"a": 1}])
def test_an_invalid_config_in_the_checkpoint_is_rejected(run: Path, invalid: Any) -> None:
    (path,) = (run / "checkpoints").glob("0*/extra.json")
    path.write_text(json.dumps({"config": invalid}))
    with pytest.raises(UserError, match=rf"{path}: damaged \(.*restore it from a copy"):
        open_run(run)


def test_written_models_store_their_config(run: Path, tmp_path: Path) -> None:
    opened, folder = open_run(run), tmp_path / "written"
    folder.mkdir()
    write_model(folder, opened.config, opened.model, 2)
    open_run(folder)
    edit(folder, "model.block_len", 4)
    with pytest.raises(UserError, match=r"model\.block_len=4 \(was 8\)"):
        open_run(folder)
    config = load_config("text_fam", [f"init={folder}", "data.length=16"])
    with pytest.raises(UserError, match=r"model\.block_len=4 \(was 8\)"):
        initial_weights(config, tmp_path / "new")

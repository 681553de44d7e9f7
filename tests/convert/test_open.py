"""A Hugging Face folder can be used like a run by generate, eval, analyze and export."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

import famjax
from famjax.cli.main import main
from famjax.convert.open import open_model
from famjax.core.errors import UserError
from famjax.export import hf, orbax
from famjax.export.source import ExportSource
from famjax.tokenizers.load import load_tokenizer
from famjax.tokenizers.words import WordTokenizer
from famjax.train.run import Run

MIXERS = ["fam", "full"]


def make_run(mixer: str) -> Run:
    """Return a FAM run, or one that a Hugging Face family can represent."""
    arch = replace(tiny.SHAPE.arch, embed_scale=1.0)
    return tiny.run() if mixer == "fam" else tiny.run_with(mixer, arch=arch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Return each model as a Hugging Face folder and as a run."""
    home = tmp_path_factory.mktemp("folders")
    found = {}
    for mixer in MIXERS:
        for kind, write in (("hf", hf.write), ("run", orbax.write)):
            folder = home / f"{mixer}-{kind}"
            folder.mkdir()
            write(ExportSource(make_run(mixer), home), folder)
            found[mixer, kind] = folder
    return found


def output_of(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main([str(word) for word in argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_folder_equals_its_run(mixer: str, folders: dict[tuple[str, str], Path]) -> None:
    run, opened = make_run(mixer), open_model(folders[mixer, "hf"])
    assert (opened.step, opened.config.name) == (0, f"{mixer}-hf")
    tokens = run.tokenizer.encode(tiny.TEXT)[None, :48]
    assert (opened.tokenizer.encode(tiny.TEXT)[:48] == tokens[0]).all()
    assert opened.tokenizer.bos_id == run.tokenizer.bos_id
    assert opened.tokenizer.stop_ids == run.tokenizer.stop_ids
    ours, theirs = (tiny.logits(model, tokens) for model in (run.model, opened.model))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("mixer", ["fam", pytest.param("full", marks=pytest.mark.long)])
def test_generate_and_eval_accept_a_folder(
    mixer: str,
    folders: dict[tuple[str, str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("the cat sat on the mat, the dog on the log")
    said, losses = set(), []
    for kind in ("hf", "run"):
        folder = folders[mixer, kind]
        said.add(output_of(capsys, "generate", folder, "--prompt", "the", "--max-tokens", 6))
        report = json.loads(output_of(capsys, "eval", folder, "--tasks", f"text:{text}", "--json"))
        losses.append(report["text"][0]["loss"])
    assert len(said) == 1
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_analyze_accepts_a_folder(
    folders: dict[tuple[str, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "a.txt"
    text.write_text(tiny.TEXT * 4)
    folder = folders["full", "hf"]
    sizes = ["--length", 32, "--examples", 1, "--json"]
    given = ["analyze", folder, "--teacher", folder, "--tasks", f"text:{text}", *sizes]
    report = json.loads(output_of(capsys, *given))
    assert abs(report["distance"]["mean"]) < 1e-5


def test_export_accepts_a_folder(folders: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    from famjax.export.export import export

    # other keys of its config.json are kept
    source = shutil.copytree(folders["full", "hf"], tmp_path / "source")
    said = json.loads((source / "config.json").read_text()) | {"attention_dropout": 0.25}
    (source / "config.json").write_text(json.dumps(said))
    export(source, tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (again["model_type"], again["attention_dropout"]) == ("llama", 0.25)
    export(folders["fam", "hf"], tmp_path / "orbax", "orbax")
    ours = famjax.open_run(tmp_path / "orbax").model.stack.prompt[...]
    assert (ours == tiny.run().model.stack.prompt[...]).all()


def test_attention_of_a_folder_with_memory_can_be_changed(
    folders: dict[tuple[str, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The FAM's prompt is a tensor that the new model does not use."""
    for kind in ("hf", "run"):
        argv = ("convert", folders["fam", kind], tmp_path / kind, "--to", "bswa")
        assert "wrote" in output_of(capsys, *argv)
    ours, theirs = (famjax.open_run(tmp_path / kind).model for kind in ("hf", "run"))
    _, loaded = famjax.load_pretrained(folders["fam", "hf"], mixer="bswa")
    tokens = np.arange(48)[None] % 250
    for model in (ours, loaded):
        assert (tiny.logits(model, tokens) == tiny.logits(theirs, tokens)).all()


def test_a_folder_may_be_given_relative_to_another(
    folders: dict[tuple[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folders["full", "hf"] / "inside").mkdir()
    monkeypatch.chdir(folders["full", "hf"] / "inside")
    assert open_model("..").config.name == "full-hf"


def test_open_model_accepts_a_run() -> None:
    assert famjax.open_run(tiny.folder()).step == 2


def test_a_word_tokenizer_is_exported(tmp_path: Path) -> None:
    words = WordTokenizer("words", [f"w{i}" for i in range(255)])
    run = replace(tiny.run(), tokenizer=words)
    folder = tmp_path / "out"
    folder.mkdir()
    hf.write(ExportSource(run, tmp_path), folder)
    opened = open_model(folder)
    assert isinstance(opened.tokenizer, WordTokenizer)
    assert opened.tokenizer.fingerprint == words.fingerprint
    assert load_tokenizer(str(folder / "words.txt")).words == words.words


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda f: [(f / name).unlink() for name in ("tokenizer.json",)],
            "has no tokenizer.json and no tokenizer.model; copy the tokenizer there, or give "
            "famjax convert --tokenizer PATH (or bytes)",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
        (
            lambda f: (f / "config.json").write_text('{"model_type": "mamba"}'),
            "model_type='mamba' is not supported",
        ),
        (lambda f: (f / "config.json").write_text("{"), "not a config"),
    ],
)
def test_missing_files_are_one_line_errors(
    spoil, said: str, folders: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["fam", "hf"], tmp_path / "folder")
    spoil(folder)
    with pytest.raises(UserError) as caught:
        open_model(folder)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)

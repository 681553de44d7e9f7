"""Results that are stored, and results of several versions of the code."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from experiment_helpers import COPY, age, reproduce, tiny_experiment

import famjax
from famjax.core.errors import UserError
from famjax.reproduce import cell as cell_module
from famjax.reproduce.cell import RESULT, TRAININGS, code_version, run_cell
from famjax.reproduce.experiments import EXPERIMENTS
from famjax.reproduce.runner import (
    make_cells,
)
from famjax.reproduce.stored_results import store_results


def test_stored_results_are_taken_and_what_they_lack_is_trained(fake, tmp_path, capsys):
    page, runs = tmp_path / "pages" / f"{COPY}.md", tmp_path / "runs"
    file = page.with_suffix(".json")

    def trained(*arguments):
        shutil.rmtree(runs, ignore_errors=True)
        capsys.readouterr()
        assert reproduce(tmp_path, COPY, *arguments) == 0
        error = capsys.readouterr().err
        return error.count("training "), error

    assert trained("--seeds", "1")[0] == 2
    text, stored = page.read_text(), json.loads(file.read_text())
    names = {(row["variant"], row["seed"]) for row in stored}
    assert names == {("Transformer", 0), ("Feedback", 0)}
    assert not any("training" in row for row in stored)
    page.unlink()
    count, error = trained("--seeds", "1", "--stored")
    assert (count, page.read_text()) == (0, text)
    assert f"{file}: 2 results taken" in error
    assert trained("--seeds", "2", "--stored")[0] == 2
    # of other settings, or damaged
    file.write_text(json.dumps([{**stored[0], "settings": "other"}, stored[1]]))
    assert trained("--seeds", "1", "--stored")[0] == 1
    file.write_text("{}")
    assert reproduce(tmp_path, COPY, "--seeds", "1", "--stored") == 2
    assert f"{file}: damaged; restore it" in capsys.readouterr().err
    file.unlink()
    count, error = trained("--seeds", "1", "--stored")
    assert count == 2
    assert f"{file}: 0 results taken" in error


def test_a_new_key_changes_no_settings_and_a_value_of_an_experiment_does(monkeypatch):
    experiment = EXPERIMENTS[COPY]
    cell, *_ = make_cells(experiment, Path("runs"), 1, (), "here", ())
    before = cell.settings(experiment)
    known = cell_module.key_values

    def with_another_key(config):
        return {**known(config), "eval.new": 0}

    monkeypatch.setattr(cell_module, "key_values", with_another_key)
    assert cell.settings(experiment) == before
    changed = replace(experiment, overrides=(*experiment.overrides, "train.steps=7"))
    assert cell.settings(changed) != before


def test_stored_results_of_older_code_are_shown_and_added_to_only_if_mixed(fake, tmp_path, capsys):
    file, runs = tmp_path / "pages" / f"{COPY}.json", tmp_path / "runs"
    experiment = EXPERIMENTS[COPY]
    cells = {c.variant: c for c in make_cells(experiment, runs, 1, (), "here", ())}
    scores = {score.name: 0.5 for score in experiment.scores}
    row = {"scores": scores, "baselines": {}, "parameters": 10, "tokens": 20, "device": "fake"}
    row |= {"train_seconds": 1.0, "evaluation_seconds": 1.0, "code": "older"}
    stored = {
        name: {0: {**row, "settings": cell.settings(experiment)}} for name, cell in cells.items()
    }
    store_results(file, stored)

    def stored_codes():
        return {(each["seed"], each["code"]) for each in json.loads(file.read_text())}

    # they are of one version, and nothing is trained beside them
    assert reproduce(tmp_path, COPY, "--seeds", "1", "--stored") == 0
    assert "training " not in capsys.readouterr().err
    assert stored_codes() == {(0, "older")}
    shutil.rmtree(runs)
    only = ("--seeds", "2", "--stored", "--only", "Feedback")
    assert reproduce(tmp_path, COPY, *only) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"{file}: 1 result taken" in error
    assert re.search(f"{COPY}: its results would be from .*older.*; --mixed", error)
    assert "training " not in error.replace("training runs", "")
    assert stored_codes() == {(0, "older")}
    # the page of two trainings is replaced by one of two
    assert reproduce(tmp_path, COPY, *only, "--mixed") == 0
    assert capsys.readouterr().err.count("training ") == 1
    assert stored_codes() == {(0, "older"), (1, code_version())}


@pytest.mark.long
def test_versions_are_not_mixed_and_this_is_told_before_anything_trains(fake, tmp_path, capsys):
    assert reproduce(tmp_path, COPY, "--seeds", "1") == 0
    age(tmp_path, COPY)
    before = set((tmp_path / "runs").rglob(RESULT))
    capsys.readouterr()
    assert reproduce(tmp_path, COPY, "--seeds", "2") == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(
        rf"{COPY}: its results would be from different versions of the code .*older.*; --mixed",
        error,
    )
    assert set((tmp_path / "runs").rglob(RESULT)) == before
    # all that is asked for is there, of one version
    assert reproduce(tmp_path, COPY, "--seeds", "1") == 0
    assert "--mixed" not in (tmp_path / "pages" / f"{COPY}.md").read_text()
    assert reproduce(tmp_path, COPY, "--seeds", "2", "--mixed") == 0
    # each row names the versions of its results
    page = (tmp_path / "pages" / f"{COPY}.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| Transformer |")]
    assert ", older |" in row
    assert f"    famjax reproduce {COPY} --seeds 2 --mixed\n" in page
    assert "| commit |" in page
    assert "older" in capsys.readouterr().out
    assert reproduce(tmp_path, COPY, "--seeds", "2") == 2
    assert f"{COPY}: its results are from" in capsys.readouterr().err


@pytest.mark.long
def test_an_experiment_of_several_versions_stops_no_other(fake, tmp_path, capsys):
    reverse = "ft-table-1-reverse"
    assert reproduce(tmp_path, COPY, "--seeds", "1") == 0
    age(tmp_path, COPY)
    capsys.readouterr()
    assert reproduce(tmp_path, COPY, reverse, "--seeds", "2", "--only", "Feedback") == 2
    out, err = capsys.readouterr()
    assert f"{COPY} is left out: its results would be from" in " ".join(err.split())
    assert "2/2" in err
    assert "Reverse digits" in out
    assert "Copy digits" not in out
    assert (tmp_path / "pages" / f"{reverse}.md").exists()
    # what does not fit into the time is said, too
    assert reproduce(tmp_path, COPY, reverse, "--seeds", "2", "--hours", "0.01") == 2
    assert "2 training runs are left" in capsys.readouterr().err


def test_code_that_changed_meanwhile_trains_nothing(tmp_path):
    experiment = tiny_experiment("tiny")
    cell = replace(make_cells(experiment, tmp_path, 1, (), "here", ())[-1], code="before")
    with pytest.raises(UserError, match="the code was before when this began, and is"):
        run_cell(cell, experiment)
    assert not (tmp_path / TRAININGS).exists()


def test_pages_and_experiments_are_no_change_of_the_code(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    code, page = tmp_path / "famjax" / "__init__.py", tmp_path / "docs" / "page.md"
    experiment = tmp_path / "famjax" / "reproduce" / "experiments" / "one.py"
    for file in (code, page, experiment):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(famjax, "__file__", str(code))
    clean = code_version.__wrapped__()
    assert re.fullmatch("[0-9a-f]{7,}", clean)
    page.write_text("changed")
    experiment.write_text("changed")
    experiment.with_name("new.py").write_text("new")
    assert code_version.__wrapped__() == clean
    changed = set()
    for number in range(2):  # another edit is another version
        code.write_text(f"changed = {number}")
        changed.add(code_version.__wrapped__())
    assert len(changed) == 2
    assert all(re.fullmatch(rf"{clean}\+[0-9a-f]+", version) for version in changed)
    # an installation within a repository that ignores it
    monkeypatch.setattr(famjax, "__file__", str(tmp_path / "docs" / "famjax" / "__init__.py"))
    (tmp_path / "docs" / "famjax").mkdir()
    assert code_version.__wrapped__() == famjax.__version__

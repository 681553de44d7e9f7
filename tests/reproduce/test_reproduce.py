"""Experiments: all can be run, they are run once, and their results are judged and shown."""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import famjax
from famjax.cli.main import VERBS, main
from famjax.cli.reproduce_figures import plot
from famjax.cli.reproduce_pages import _missing, make_page
from famjax.cli.reproduce_results import Results, collect
from famjax.cli.reproduce_tables import ordering_table
from famjax.core.errors import UserError
from famjax.experiment.load import load_config
from famjax.plan.chips import parse_topology
from famjax.reproduce import cell as cell_module
from famjax.reproduce.cell import RESULT, TRAININGS, Cell, code_version, run_cell
from famjax.reproduce.experiment import (
    ALL_SECONDS,
    OWN_SECONDS,
    Experiment,
    Ordering,
    Variant,
)
from famjax.reproduce.experiments import EXPERIMENTS
from famjax.reproduce.measures import ToyMeasure
from famjax.reproduce.papers import Entry, listed
from famjax.reproduce.penn_treebank import PennTreebankMeasure, to_characters
from famjax.reproduce.runner import (
    Runner,
    expected_seconds,
    make_cells,
    read_result,
    reason_of_failure,
    split_cores,
)
from famjax.reproduce.stored_results import store_results
from famjax.train.lock import hold

COPY = "ft-table-1-copy"


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda e: e.id)
def test_every_experiment_can_be_run(experiment):
    names = [variant.name for variant in experiment.variants]
    assert len({re.sub("[^a-z0-9]", "", name.lower()) for name in names}) == len(names)
    # --only separates them by commas, and KEY=VALUE is an override
    assert not [name for name in names if {",", "="} & set(name)]
    for variant in experiment.variants:
        config = experiment.make_config(variant, 3, "here")
        assert config.seed == 3
        if experiment.at_paper and experiment.at_paper.variants is None:
            assert experiment.make_config(variant, 0, "paper").train.steps > config.train.steps
    if experiment.at_paper and experiment.at_paper.variants is not None:
        here, paper = (
            [experiment.make_config(v, 0, size).train.steps for v in experiment.variants_at(size)]
            for size in ("here", "paper")
        )
        assert max(paper) > max(here)
    for size in ("here", "paper") if experiment.at_paper else ("here",):
        configs = {
            v.name: (v.continues, experiment.make_config(v, 0, size))
            for v in experiment.variants_at(size)
        }
        every = list(configs.values())
        assert not [name for name, config in configs.items() if every.count(config) > 1]
    if experiment.base is not None:
        assert experiment.make_base_config(0).train.steps > 0


def test_copies_are_tested_on_what_their_note_says():
    for name in (COPY, "ft-table-1-reverse"):
        assert EXPERIMENTS[name].measure.lengths == (40,)
        assert EXPERIMENTS[name].note.startswith("Tested on 40 digits")


def test_every_experiment_is_listed_and_every_command_exists():
    entries = [entry for paper in listed(EXPERIMENTS.values()).values() for entry in paper]
    assert {entry.experiment for entry in entries if entry.experiment} == set(EXPERIMENTS)
    for entry in entries:
        assert entry.experiment or entry.command or entry.state != Entry("", "").state
        assert "..." not in entry.command
        if entry.command:
            assert entry.command.split()[1] in VERBS
            verb, name, *overrides = entry.command.split()[1:]
            if verb == "plan":
                assert overrides[-2] == "--topology"
                assert parse_topology(overrides[-1])
                del overrides[-2:]
            if verb in ("train", "plan"):
                assert Path(f"configs/{name}.py").exists()
                # a model that is yet to be made decides which keys have an effect
                if "init=MODEL" not in overrides:
                    load_config(name, overrides)


def test_the_list_has_the_papers_size_and_fits_80_columns(tmp_path, monkeypatch, capsys):
    def listed_at(width):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["reproduce", "list", "--folder", str(tmp_path)]) == 0
        return capsys.readouterr().out

    wide = {line.split()[-1]: line.split() for line in listed_at(400).splitlines() if line}
    state = "not run: 20 days at the peak of an H100; fam_1b"
    end = f"{state} famjax reproduce fam-figure-3".split()
    assert wide["fam-figure-3"][-len(end) :] == end
    assert wide["fam-recipe"][-5:-3] == ["no", "config"]
    narrow = listed_at(80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert f"  paper size: {state}\n  command: famjax reproduce fam-figure-3\n" in narrow
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "fam-figure-3-paper.md").write_text("")
    assert main(["reproduce", "list", "--folder", str(tmp_path), "--pages", str(pages)]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert f"papersize:{pages}/fam-figure-3-paper.md" in shown


@pytest.mark.parametrize(
    ("x", "scale"),
    [
        ((8, 16, 32, 64), "log"),
        ((4, 16, 64), "log"),
        ((1, 2, 4), "linear"),
        ((0, 1, 2, 4), "linear"),
        ((4, 16), "linear"),
    ],
)
def test_powers_are_evenly_spaced_on_the_axis(x, scale):
    variants = [Variant(f"{i}", x=i) for i in x]
    experiment = replace(EXPERIMENTS["t2r-figure-4"], variants=tuple(variants), orderings=())
    name = experiment.scores[0].name
    found = {v.name: {0: {"scores": {name: 0.1 * i}}} for i, v in enumerate(variants)}
    axes = plot(Results(experiment, found, len(x))).axes[0]
    assert axes.get_xscale() == scale


def test_an_experiment_that_no_table_names_is_listed_with_its_paper():
    new = replace(EXPERIMENTS["fam-table-3"], id="fam-new", source="TransformerFAM, Table 99")
    papers = listed([*EXPERIMENTS.values(), new])
    assert next(iter(papers.values()))[-1] == ("Table 99", new.title, "fam-new", *Entry("", "")[3:])
    assert sum(entry.experiment == "fam-table-3" for each in papers.values() for entry in each) == 1


@pytest.fixture
def fake(monkeypatch):
    """Have processes write results without a training."""
    home = os.path.dirname(__file__)
    monkeypatch.setattr("famjax.reproduce.runner._PROCESS", "fake_cell")
    monkeypatch.setattr("famjax.reproduce.runner._POLL_SECONDS", 0.01)
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)


def reproduce(folder, *arguments):
    where = ["--folder", str(folder / "runs"), "--pages", str(folder / "pages")]
    return main(["reproduce", *arguments, *where])


def test_results_are_shown_judged_and_kept(fake, tmp_path, monkeypatch, capsys):
    assert reproduce(tmp_path, COPY, "--seeds", "2") == 0
    out, err = capsys.readouterr()
    assert "4/4" in err
    # each when it begins
    begun = [line for line in err.splitlines() if line.startswith("training ")]
    assert len(begun) == 4
    assert begun[0] == f"training {COPY}: Transformer, seed 0: about 4 minutes"
    assert err.index(begun[0]) < err.index("1/4")
    shown = " ".join(out.split())
    assert "Feedback 2 80.5% ± 6.4" in shown
    assert "guessing 10.0%" in shown
    claim = "Feedback is better than Transformer answers, 40 holds"
    assert f"{claim} +30.0 (+30.0 to +30.0) points" in shown
    page = (tmp_path / "pages" / f"{COPY}.md").read_text()
    row = "| Transformer | 2 | 10 | 20 | 50.5% ± 6.4 | 50.5% ± 6.4 | answers 59.1%, episodes 6.2% |"
    assert row in page
    assert "4 of 4 trainings, 1 minute of" in page
    assert (tmp_path / "pages" / f"{COPY}.png").exists()
    assert f"]({COPY}.md)" in (tmp_path / "pages" / "index.md").read_text()
    # what is done is not done again
    files = sorted((tmp_path / "runs").rglob(RESULT))
    before = [json.loads(file.read_text())["at"] for file in files]
    assert reproduce(tmp_path, COPY, "--seeds", "2") == 0
    assert [json.loads(file.read_text())["at"] for file in files] == before
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "list", "--folder", str(tmp_path / "runs")]) == 0
    assert "4 of 6 trainings done" in capsys.readouterr().out
    pages = tmp_path / "pages"
    arguments = ["--folder", str(tmp_path / "none"), "--pages", str(pages)]
    assert main(["reproduce", "list", *arguments]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert f"{COPY}.md(4of6trainings);again:" in shown


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


def test_a_page_from_before_a_claim_is_told():
    experiment = replace(EXPERIMENTS[COPY], follow_up="tried", unequal_parameters="unequal")
    claim, (score, other_score) = "Feedback is better than Transformer", experiment.scores
    table = (
        f"| model | seeds | parameters | {score.name} | {other_score.name} | the paper |\n"
        "|---|---|---|---|---|---|\n"
        "| Transformer | 3 | 10 | 1% | 2% | answers 59.1%, episodes 6.2% |\n"
        "| Feedback | 3 | 10 | 1% | 2% | answers 76.2%, episodes 23.6% |\n"
        "| guessing |  |  | 1% | 2% |  |\n"
    )
    page = (
        f"\n{experiment.note} unequal\n6 of 6 trainings, 1 minute\n\n{table}\n"
        f"| {claim} | {other_score.name} | holds |\n| {claim} | {score.name} | holds |\n"
        "\n## Follow-up\n\ntried\n"
    )
    assert _missing(experiment, page, 6) == []
    assert _missing(experiment, page.replace("6 of", "4 of"), 6) == ["4 of 6 trainings"]
    # neither a longer claim counts, nor one about another score, nor the text
    row = f"| {claim} | {score.name} |"
    longer = f"| {claim}, by more | {score.name} |"
    for other in ("", longer, f"| {claim} | other |", f"The {claim}"):
        assert _missing(experiment, page.replace(row, other), 6) == ["without 1 new claim"]
    for text in (experiment.note, "unequal", "tried"):
        assert _missing(experiment, page.replace(text, "other"), 6) == ["with other notes"]
    # a model, a score or a number of the paper that is another one, missing or new
    rows = table.splitlines(keepends=True)
    others = (
        table.replace("| Transformer |", "| Other |"),
        "".join(rows[:-2]),
        f"{table}| New | 3 | 10 | 1% | 2% |  |\n",
        table.replace("76.2%", "76.3%"),
        table.replace(f"| {other_score.name} ", "| other "),
        table.replace(" | the paper |", " |"),
    )
    for other in others:
        assert _missing(experiment, page.replace(table, other), 6) == ["with another table"]
    # costs may be missing in older pages
    cheap = table.replace("| parameters |", "|").replace("| 10 |", "|")
    assert _missing(experiment, page.replace(table, cheap), 6) == []
    # also of a page that says more
    for less in ({"unequal_parameters": ""}, {"follow_up": ""}):
        assert _missing(replace(experiment, **less), page, 6) == ["with other notes"]


def test_a_claim_of_ours_is_told_from_the_papers():
    experiment = EXPERIMENTS["ft-table-4"]
    scores = {score.name: 0.5 for score in experiment.scores}
    found = {v.name: {0: {"scores": scores}} for v in experiment.variants}
    shown = "\n".join(ordering_table(Results(experiment, found, len(found))).lines(None))
    assert "Feedback is better than Transformer (ours)" in shown
    assert "the paper claims" not in shown
    theirs = replace(experiment, orderings=(Ordering("Feedback", "Transformer"),))
    shown = "\n".join(ordering_table(Results(theirs, found, len(found))).lines(None))
    assert "the paper claims" in shown
    assert "ours" not in shown


def age(folder, name, code="older"):
    """Have the results of an experiment be of another version of the code."""
    for file in (folder / "runs" / name).rglob(RESULT):
        file.write_text(json.dumps({**json.loads(file.read_text()), "code": code}))


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
    assert reproduce(tmp_path, COPY, "--seeds", "2", "--mixed") == 0
    # each row names the versions of its results
    page = (tmp_path / "pages" / f"{COPY}.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| Transformer |")]
    assert ", older |" in row
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


@pytest.mark.long
def test_of_several_experiments_one_without_its_data_is_left_out(fake, tmp_path, capsys):
    assert reproduce(tmp_path, "ft-v1-table-2", COPY, "--seeds", "1") == 0
    out, err = capsys.readouterr()
    assert re.search(r"ft-v1-table-2 is left out: .*ptb\.train\.txt: put", " ".join(err.split()))
    assert "2/2" in err
    assert "Copy digits" in out
    assert reproduce(tmp_path, "ft-v1-table-2", "--seeds", "1") == 2


@pytest.mark.long
def test_of_several_experiments_those_that_have_a_model_are_run(fake, tmp_path, capsys):
    names = (COPY, "ft-table-1-algorithmic-3")
    assert reproduce(tmp_path, *names, "--only", "LSTM", "--seeds", "1") == 0
    assert [page.stem for page in (tmp_path / "pages").glob("ft*.md")] == [names[1]]


@pytest.mark.long
def test_results_with_overrides_are_apart(fake, tmp_path, capsys):
    assert reproduce(tmp_path, COPY, "--seeds", "1", "train.steps=7") == 0
    assert "left as it is: these results are with train.steps=7" in " ".join(
        capsys.readouterr().out.split()
    )
    assert not (tmp_path / "pages").exists()
    apart = tmp_path / "runs" / "pages"
    assert f"famjax reproduce {COPY} --seeds 1 train.steps=7" in (apart / f"{COPY}.md").read_text()
    assert f"]({COPY}.md)" in (apart / "index.md").read_text()
    made = set((tmp_path / "runs" / COPY).rglob(RESULT))
    assert len(made) == 2
    assert reproduce(tmp_path, COPY, "--seeds", "1") == 0
    assert len(set((tmp_path / "runs" / COPY).rglob(RESULT)) - made) == 2
    page = (tmp_path / "pages" / f"{COPY}.md").read_text()
    assert f"famjax reproduce {COPY} --seeds 1\n" in page


@pytest.mark.long
def test_a_page_is_not_replaced_by_one_of_fewer_trainings(fake, tmp_path, capsys):
    assert reproduce(tmp_path, COPY, "--seeds", "2") == 0
    page = tmp_path / "pages" / f"{COPY}.md"
    full = page.read_text()
    capsys.readouterr()
    assert reproduce(tmp_path, COPY, "--seeds", "2", "--only", "Feedback") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "left as it is: it has 4 trainings, and these results 2" in shown
    assert page.read_text() == full
    part = (tmp_path / "runs" / "pages" / f"{COPY}.md").read_text()
    assert f"famjax reproduce {COPY} --seeds 2 --only Feedback\n" in part
    assert "2 of 4 trainings" in part
    assert reproduce(tmp_path, COPY, "--seeds", "3") == 0
    assert "6 of 6 trainings" in page.read_text()


@pytest.mark.long
def test_a_failure_is_told_and_the_rest_is_done_later(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_FAILS", "Feedback")
    assert reproduce(tmp_path, COPY, "--seeds", "1", "--jobs", "1") == 2
    error = capsys.readouterr().err
    assert "Feedback, seed 0: out of memory; take less; see" in error
    monkeypatch.delenv("FAKE_FAILS")
    assert reproduce(tmp_path, COPY, "--seeds", "1", "--jobs", "1") == 0
    assert "1/1" in capsys.readouterr().err


def test_what_does_not_fit_into_the_time_is_said(fake, tmp_path, capsys):
    assert reproduce(tmp_path, COPY, "--hours", "0.01") == 0
    out, err = capsys.readouterr()
    assert "nothing is done yet" in out
    assert "6 training runs are left" in err
    assert f"{COPY}, not run: Transformer (3), Feedback (3)" in err


@pytest.mark.long
def test_bases_come_first_and_are_shared(fake, tmp_path, monkeypatch):
    monkeypatch.setattr("famjax.reproduce.measures.CodeMeasure.prepare", lambda *_: ())
    chosen = {"fam-table-3": "FAM 1", "fam-table-4": "1 previous"}
    experiments = {name: EXPERIMENTS[name] for name in chosen}
    cells = [
        cell
        for name, variant in chosen.items()
        for cell in make_cells(experiments[name], tmp_path, 1, (variant,), "here", ())
    ]
    assert len(cells) == 4
    lines = []

    def said():
        """Return the lines of what is done."""
        return [line for line in lines if not line.startswith("training ")]

    base, variant = cells[0], cells[1]
    runner = Runner(experiments, 1, lines.append)
    # 1,000 steps, of which its variants continue 400
    assert runner.estimate(variant) == pytest.approx(60 * experiments["fam-table-3"].minutes)
    assert 2 < runner.estimate(base) / runner.estimate(variant) < 2.5
    # as many processes as cells: the fake asserts that its base is there
    assert Runner(experiments, 4, lines.append).run(cells) == []
    assert sum("base" in line for line in said()) == 1
    assert len(said()) == 3
    # what is done needs no base of newer code
    newer = [replace(cell, code="newer") for cell in cells]
    assert Runner(experiments, 1, lines.append).run(newer) == []
    assert len(said()) == 3


@pytest.mark.long
def test_a_variant_that_another_continues_comes_first(fake, tmp_path, monkeypatch):
    monkeypatch.setattr("famjax.reproduce.measures.CodeMeasure.prepare", lambda *_: ())
    experiment = EXPERIMENTS["memory-growing"]
    runner = Runner({experiment.id: experiment}, 4, (lines := []).append)
    cells = make_cells(experiment, tmp_path, 1, ("parts then whole",), "here", ())
    names = ["", "parts", "parts then whole"]
    assert [cell.variant for cell in cells] == names
    # in any order: the fake asserts that what it continues is there
    assert runner.run(cells[::-1]) == []

    def trained():
        """Return the names of what was trained since the last call."""
        found = [re.search("training memory-growing: (.*), seed", line) for line in lines]
        lines.clear()
        return [match[1] for match in found if match]

    assert trained() == ["base", *names[1:]]
    # a second one continues what is done
    second = make_cells(experiment, tmp_path, 1, ("parts then parts",), "here", ())
    assert runner.run(second) == []
    assert trained() == ["parts then parts"]
    # newer code trains again what it continues, and so does this one if that training is gone
    (result,) = tmp_path.glob("memory-growing/parts-then-whole/*/result.json")
    result.unlink()
    assert runner.run([replace(cell, code="newer") for cell in cells]) == []
    assert trained() == ["base", *names[1:]]
    result.unlink()
    shutil.rmtree(cells[1].training_folder(experiment))
    assert runner.run(cells) == []
    assert trained() == names[1:]


def test_seeds_are_trained_one_after_the_other(tmp_path):
    cells = make_cells(EXPERIMENTS["memory-passing"], tmp_path, 2, ("sum packed",), "here", ())
    expected = [("sum", 0), ("sum packed", 0), ("sum", 1), ("sum packed", 1)]
    assert [(cell.variant, cell.seed) for cell in cells] == expected


@pytest.mark.long
def test_experiments_of_papers_take_at_most_two_hours_of_two_cores():
    for experiment in EXPERIMENTS.values():
        if experiment.at_paper:
            assert 3 * sum(expected_seconds(experiment).values()) <= 4 * 3600, experiment.id


def test_the_expected_time_of_a_training_grows_with_its_tokens():
    seconds = expected_seconds(EXPERIMENTS["t2r-figure-5"])
    # 2,400 steps; 800 and 1 of the variants, of which the longest takes the experiment's minutes
    assert 2.5 < seconds[""] / seconds["T2R 4"] < 3
    assert seconds["T2R 4"] == pytest.approx(60 * EXPERIMENTS["t2r-figure-5"].minutes)
    assert 0.1 < seconds["before finetuning 4"] / seconds["T2R 4"] < 0.2
    longer = expected_seconds(EXPERIMENTS["t2r-figure-5"], given=("train.steps=1600",))
    assert 1.8 < longer["T2R 4"] / seconds["T2R 4"] < 2


def test_a_variant_that_is_the_base_is_not_trained_again():
    seconds = expected_seconds(EXPERIMENTS["t2r-figure-4"])
    assert seconds["Transformer"] < 0.2 * seconds["from scratch 4"]


def test_times_are_learned_from_trainings_that_take_long(tmp_path):
    experiment = EXPERIMENTS["t2r-figure-5"]
    names = "before finetuning 4", "T2R 4", "T2R 16"
    short, first, second = (Cell(str(tmp_path), experiment.id, name, 0) for name in names)
    runner = Runner({experiment.id: experiment}, 1, lambda _: None)
    before = runner.estimate(second)

    def finish(cell, seconds):
        process = SimpleNamespace(cell=cell, check=lambda: None, seconds=lambda: seconds)
        runner._report(process, [], 1)

    finish(short, 1000.0)
    assert runner.estimate(second) == before
    finish(first, 2 * before)
    assert runner.estimate(second) == pytest.approx(2 * before)
    # also if the user shortens all of them
    first, second = (replace(cell, given=("train.steps=8",)) for cell in (first, second))
    runner = Runner({experiment.id: experiment}, 1, lambda _: None)
    before = runner.estimate(second)
    finish(first, 3 * before)
    assert runner.estimate(second) == pytest.approx(3 * before)


def test_sigterm_stops_the_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("famjax.reproduce.measures.CodeMeasure.prepare", lambda *_: ())
    seen = tmp_path / "pid"
    program = (
        "import os, time\n"
        f"open({str(seen)!r}, 'w').write(f'{{os.getpid()}} {{os.getpgid(0)}}')\n"
        "time.sleep(99)\n"
    )
    (tmp_path / "sleeper.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("famjax.reproduce.runner._PROCESS", "sleeper")

    def stop() -> None:
        while not (seen.exists() and seen.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=stop)
    thread.start()
    runner = Runner({COPY: EXPERIMENTS[COPY]}, 1, print)
    with pytest.raises(KeyboardInterrupt):
        runner.run([Cell(str(tmp_path), COPY, EXPERIMENTS[COPY].variants[0].name, 0)])
    thread.join()
    pid, group = map(int, seen.read_text().split())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    # Ctrl-C in a terminal does not reach it: the runner's signal is its only one
    assert group != os.getpgid(0)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL; if the machine ran out of"),
        ("import sys; sys.exit('famjax: no data')", "no data; see"),
        ("raise SystemExit(1)", "no output; see"),
    ],
)
def test_why_a_process_failed_is_said(program, reason, tmp_path, monkeypatch):
    monkeypatch.setattr("famjax.reproduce.measures.CodeMeasure.prepare", lambda *_: ())
    (tmp_path / "failing.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("famjax.reproduce.runner._PROCESS", "failing")
    cell = Cell(str(tmp_path), COPY, EXPERIMENTS[COPY].variants[0].name, 0)
    log = cell.folder(EXPERIMENTS[COPY]) / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("300/1200 of an earlier process\n")
    with pytest.raises(UserError, match=reason):
        Runner({COPY: EXPERIMENTS[COPY]}, 1, print).run([cell])


def test_equal_trainings_do_not_run_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("famjax.reproduce.measures.CodeMeasure.prepare", lambda *_: ())
    names = {"ft-figure-5": "all layers", "ft-figure-8": "weighted sum"}
    first, second = (Cell(str(tmp_path), *pair, 0) for pair in names.items())
    runner = Runner({name: EXPERIMENTS[name] for name in names}, 2, print)

    class Process:
        cell = first

    assert runner._next([second], []) == second
    assert runner._next([second], [Process]) is None


TINY = (
    *("train.steps=2", "model.width=16", "model.heads=2", "model.head_dim=8"),
    *("model.mlp_width=16", "data.batch=2", "model.layers=1", "data.toy.steps=4"),
    *("data.toy.start_steps=0", "data.length=16", "data.toy.episodes=8"),
)


def tiny_experiment(name, **more):
    measure = ToyMeasure("copy", (4,), 8)
    return Experiment(name, "", "", "copy_feedback", (Variant("one"),), measure, (), TINY, **more)


def test_code_that_changed_meanwhile_trains_nothing(tmp_path):
    experiment = tiny_experiment("tiny")
    cell = replace(make_cells(experiment, tmp_path, 1, (), "here", ())[-1], code="before")
    with pytest.raises(UserError, match="the code was before when this began, and is"):
        run_cell(cell, experiment)
    assert not (tmp_path / TRAININGS).exists()


@pytest.mark.long
def test_a_training_is_measured(tmp_path):
    cell = Cell(str(tmp_path), "tiny", "one", 1)
    run_cell(cell, tiny_experiment("tiny"))
    result = json.loads((tmp_path / "tiny" / "one" / "seed-1" / RESULT).read_text())
    assert 0 <= result["scores"]["answers, 4"] <= 1
    # four digits
    expected = {"answers, 4": 0.1, "episodes, 4": pytest.approx(0.1**4)}
    assert result["baselines"]["guessing"] == expected
    assert (result["steps"], result["tokens"]) == (2, 2 * 2 * 16)
    assert result["parameters"] > 0
    # 6 for a parameter and token; in so small a model attention costs more than the weights
    assert 6 < result["flops"] / (result["parameters"] * result["tokens"]) < 20
    # an equal training of another experiment is this one
    trained = list((tmp_path / TRAININGS).glob("*/checkpoints/*"))
    again = tiny_experiment("again", timed=True)
    cell = Cell(str(tmp_path), "again", "one", 1)
    run_cell(cell, again)
    assert list((tmp_path / TRAININGS).glob("*/checkpoints/*")) == trained
    scores = read_result(cell, again)["scores"]
    assert scores["answers, 4"] == result["scores"]["answers, 4"]
    assert scores[OWN_SECONDS] == scores[ALL_SECONDS] == result["train_seconds"]
    # and what was measured before its settings changed is not its result
    assert read_result(cell, replace(again, overrides=(*TINY, "train.steps=3"))) is None
    assert read_result(cell, replace(again, timed=False)) is not None
    # nor what lacks a score
    first = Cell(str(tmp_path), "tiny", "one", 1)
    assert read_result(first, tiny_experiment("tiny")) is not None
    assert read_result(first, tiny_experiment("tiny", timed=True)) is None


@pytest.mark.long
def test_what_was_continued_counts(tmp_path):
    base = tiny_experiment("based", base=("optimizer.warmup_steps=1",), timed=True)
    base = replace(base, variants=(Variant("one", ("train.steps=1",)),))
    cells = make_cells(base, tmp_path, 1, (), "here", ())
    for cell in cells:
        run_cell(cell, base)
    result = read_result(cells[1], base)
    first = read_result(cells[0], base)
    assert (result["tokens"], result["base_tokens"]) == (32, 64)
    assert result["base_code"] == first["code"]
    whole = result["train_seconds"] + first["train_seconds"]
    assert result["scores"][ALL_SECONDS] == pytest.approx(whole)
    page = make_page(collect(base, cells, mixed=False), "figure.png")
    row = next(line for line in page.splitlines() if line.startswith("| one |"))
    assert result["base_flops"] == 2 * result["flops"]
    assert f"| {result['parameters']:,} | 96 | {3 * result['flops'] / 1e12:.3g} |" in row
    # of a base by other code
    file = cells[1].folder(base) / RESULT
    page = make_page(collect(base, cells, mixed=False), "figure.png")
    assert "Tokens and TFLOP are of training, including the base." in " ".join(page.split())
    # of a base from before FLOPs were counted
    file.write_text(json.dumps({k: v for k, v in result.items() if k != "base_flops"}))
    page = make_page(collect(base, cells, mixed=False), "figure.png")
    assert "TFLOP" not in page
    file.write_text(json.dumps({**result, "base_code": "older"}))
    with pytest.raises(UserError, match=r"its results are from .*older\)"):
        collect(base, cells, mixed=False)
    file.write_text(json.dumps(result))
    # and what continues this continues the base, too, with other documents than either
    variants = (*base.variants, Variant("two", ("train.steps=1",), continues="one"))
    chain = replace(base, variants=variants)
    cells = make_cells(chain, tmp_path, 1, ("two",), "here", ())
    run_cell(cells[2], chain)
    second = read_result(cells[2], chain)
    assert [cell.variant for cell in cells] == ["", "one", "two"]
    assert (second["tokens"], second["base_tokens"]) == (32, 32 + 64)
    assert second["base_flops"] == result["flops"] + result["base_flops"]
    assert second["scores"][ALL_SECONDS] == pytest.approx(whole + second["train_seconds"])
    assert len({cell.config(chain).seed for cell in cells}) == 3


def test_a_page_has_a_follow_up():
    experiment = replace(EXPERIMENTS[COPY], follow_up="With 2,000 steps both copy all.")
    result = {"scores": {score.name: 0.5 for score in experiment.scores}, "baselines": {}}
    result |= {"train_seconds": 1, "evaluation_seconds": 1, "parameters": 1, "tokens": 1}
    results = Results(experiment, {"Feedback": {0: {**result, "code": "1", "device": "cpu"}}}, 6)
    page = make_page(results, "figure.png")
    assert "## Follow-up\n\nWith 2,000 steps both copy all.\n" in page


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


def test_cores_are_split():
    parts = [set(part.split(",")) for part in split_cores(2)]
    assert len(split_cores(5)) == 5
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    if cores >= 2:
        assert not parts[0] & parts[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fam-table3"], "experiment; did you mean 'fam-table-3'? famjax reproduce list shows all"),
        (["unlike-any"], "unlike-any: no such experiment; famjax reproduce list shows all"),
        (["fam-figure-77"], "no such experiment; did you mean 'fam-figure-7'? famjax reproduce"),
        (["rmt"], "rmt: no such experiment; did you mean 'fam-figure-8'? famjax reproduce list"),
        (
            ["ft-table-1-alg"],
            "mean 'ft-table-1-algorithmic-3' or 'ft-table-1-algorithmic-5'? famjax",
        ),
        (["T2R"], "mean 't2r-activations', 't2r-"),
        (["transformerfam"], "or another of "),
        (["table-1"], "mean 'ft-table-1-copy', "),
        (["blocked walk"], "did you mean 'ft-table-1-blocked-walk'"),
        (["list", COPY], f"list: must be the only name; leave out list, or {COPY}"),
        ([COPY, "all"], f"all: must be the only name; leave out all, or {COPY}"),
        ([], "name experiments, list or all"),
        ([COPY, "--size", "big"], "--size big: here or paper"),
        ([COPY, "--only", "LSTM"], "--only LSTM: ft-table-1-copy has Transformer, Feedback"),
        ([COPY, "ft-table-1-reverse", "--only", "LSTM"], "ft-table-1-reverse has Transformer"),
        (["fam-figure-3", "--size", "paper", "--only", "gated FAM"], "fam-figure-3 has FAM, M0"),
        ([COPY, "--hours", "0"], "must be more than 0"),
        ([COPY, "--hours", "nan"], "--hours nan: must be more than 0"),
        ([COPY, "--seeds", "0"], "must be at least 1"),
    ],
)
def test_mistakes_are_told(arguments, says, tmp_path, capsys):
    assert reproduce(tmp_path, *arguments) == 2
    assert says in capsys.readouterr().err


def test_an_unknown_override_is_told_before_anything_runs(tmp_path, capsys):
    assert reproduce(tmp_path, COPY, "model.widht=3") == 2
    assert "model.widht" in capsys.readouterr().err
    assert not list(tmp_path.rglob("log.txt"))


def test_figures_have_lines_rows_and_levels():
    shapes = (("ft-figure-8", 4), ("ft-figure-9", 2), ("fam-figure-3", 7), (COPY, 0))
    for name, lines in shapes:
        experiment = EXPERIMENTS[name]
        scores = {score.name: 0.5 for score in experiment.measure.scores}
        found = {v.name: {0: {"scores": scores}} for v in experiment.variants}
        results = Results(experiment, found, len(found))
        figure = plot(results)
        labels = figure.axes[0].get_legend_handles_labels()[1]
        assert len(labels) == lines
        rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        assert (rows == [v.name for v in experiment.variants]) == (name == COPY)


def test_a_figure_may_have_several_scores():
    experiment = EXPERIMENTS["ft-figure-4-translation"]
    scores = {score.name: 0.5 for score in experiment.scores}
    found = {v.name: {0: {"scores": scores}} for v in experiment.variants}
    panels = plot(Results(experiment, found, len(found))).axes
    assert [panel.get_ylabel() for panel in panels] == ["tokenized BLEU", "greedy tokens/s"]
    assert len({variant.line for variant in experiment.variants}) == len(panels[1].containers)


def test_the_papers_figure_may_have_other_scores_of_which_those_of_given_files_are_drawn():
    every = EXPERIMENTS["fam-figure-4"].at("paper")
    some = EXPERIMENTS["fam-figure-4"].at("paper", "a.txt,xlsum:b.jsonl,isabelle:c.thy,qasper:d")
    for experiment, count in ((every, 6), (some, 4)):
        scores = {score.name: 0.5 for score in experiment.scores}
        found = {v.name: {0: {"scores": scores}} for v in experiment.variants}
        panels = plot(Results(experiment, found, len(found))).axes
        assert len(panels) == len(experiment.drawn) == count
        assert {panel.get_ylabel() for panel in panels} == {f"{name}, %" for name in scores}


def test_a_command_that_trains_in_the_same_folder_is_named_with_the_option_of_reproduce(tmp_path):
    with hold(tmp_path, print), pytest.raises(UserError) as error, hold(tmp_path, print):
        pass
    assert "give --run another folder" in str(error.value)
    reason = reason_of_failure(f"step 1\nfamjax: {error.value}\n")
    assert reason == str(error.value).replace("--run another folder", "--folder another folder")
    assert reason_of_failure("") == "no output"


def test_words_of_penn_treebank_become_characters(tmp_path):
    measure = PennTreebankMeasure()
    with pytest.raises(UserError, match=r"ptb\.train\.txt: put the train words"):
        measure.prepare(tmp_path)
    (tmp_path / "ptb").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "ptb" / f"ptb.{split}.txt").write_text(f" a <unk> {split} \n no it \n")
    assert f"data.files={tmp_path}/ptb/characters-train" in measure.prepare(tmp_path)
    parts = sorted((tmp_path / "ptb" / "characters-valid").iterdir())
    assert [part.read_text() for part in parts] == ["a_<unk>_valid\n", "no_it\n"]


def test_a_split_of_penn_treebank_has_sixteen_parts(tmp_path):
    (tmp_path / "ptb").mkdir()
    lines = [f"line {number}" for number in range(50)]
    for split in ("train", "valid", "test"):
        (tmp_path / "ptb" / f"ptb.{split}.txt").write_text("\n".join(lines))
    PennTreebankMeasure().prepare(tmp_path)
    parts = sorted((tmp_path / "ptb" / "characters-test").iterdir())
    assert len(parts) == 16
    assert "".join(part.read_text() for part in parts) == to_characters("\n".join(lines))

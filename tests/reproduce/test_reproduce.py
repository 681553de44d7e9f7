"""Experiments: all can be run, they are run once, and their results are judged and shown."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from experiment_helpers import COPY, TINY, reproduce, tiny_experiment

from famjax.cli.main import VERBS, main
from famjax.cli.reproduce_pages import make_page
from famjax.cli.reproduce_results import collect
from famjax.core.errors import UserError
from famjax.experiment.load import load_config
from famjax.plan.chips import parse_topology
from famjax.reproduce.cell import RESULT, TRAININGS, Cell, run_cell
from famjax.reproduce.experiment import (
    ALL_SECONDS,
    OWN_SECONDS,
    Variant,
)
from famjax.reproduce.experiments import EXPERIMENTS
from famjax.reproduce.papers import Entry, listed
from famjax.reproduce.penn_treebank import PennTreebankMeasure, to_characters
from famjax.reproduce.runner import (
    expected_seconds,
    make_cells,
    read_result,
)


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
        assert bool(entry.experiment) != bool(entry.state)
        for page in re.findall(r"docs/\S+\.md", entry.state):
            assert Path(page).exists()
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


def test_an_experiment_that_no_table_names_is_listed_with_its_paper():
    new = replace(EXPERIMENTS["fam-table-3"], id="fam-new", source="TransformerFAM, Table 99")
    papers = listed([*EXPERIMENTS.values(), new])
    assert next(iter(papers.values()))[-1] == ("Table 99", new.title, "fam-new", *Entry("", "")[3:])
    assert sum(entry.experiment == "fam-table-3" for each in papers.values() for entry in each) == 1


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
def test_experiments_of_papers_take_at_most_two_hours_of_two_cores():
    for experiment in EXPERIMENTS.values():
        if experiment.at_paper:
            assert 3 * sum(expected_seconds(experiment).values()) <= 4 * 3600, experiment.id


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

"""Pages and figures of experiments."""

from dataclasses import replace

import pytest
from experiment_helpers import COPY, reproduce

from famjax.cli.reproduce_figures import plot
from famjax.cli.reproduce_pages import _missing, make_page
from famjax.cli.reproduce_results import Results
from famjax.cli.reproduce_tables import ordering_table
from famjax.reproduce.cell import RESULT
from famjax.reproduce.experiment import (
    Ordering,
    Variant,
)
from famjax.reproduce.experiments import EXPERIMENTS


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


def test_a_page_has_a_follow_up():
    experiment = replace(EXPERIMENTS[COPY], follow_up="With 2,000 steps both copy all.")
    result = {"scores": {score.name: 0.5 for score in experiment.scores}, "baselines": {}}
    result |= {"train_seconds": 1, "evaluation_seconds": 1, "parameters": 1, "tokens": 1}
    results = Results(experiment, {"Feedback": {0: {**result, "code": "1", "device": "cpu"}}}, 6)
    page = make_page(results, "figure.png")
    assert "## Follow-up\n\nWith 2,000 steps both copy all.\n" in page


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

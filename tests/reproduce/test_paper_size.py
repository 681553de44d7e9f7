"""Experiments at the papers' sizes: their data, what they are tested on, and what they refuse."""

import json
from dataclasses import replace

import pytest
from test_reproduce import COPY, TINY, fake, reproduce, tiny_experiment  # noqa: F401

from famjax.core.errors import UserError
from famjax.reproduce import paper_measures as paper_measures_module
from famjax.reproduce.cell import Cell, run_cell
from famjax.reproduce.experiments import EXPERIMENTS
from famjax.reproduce.measures import CodeTexts, ToyMeasure
from famjax.reproduce.paper_measures import PG19, WIKITEXT_WINDOWS, SummariesMeasure, TextMeasure
from famjax.reproduce.runner import Runner, make_cells, read_result
from famjax.tasks.toy import eval_steps

PAPER = [e for e in EXPERIMENTS.values() if e.has_paper_size]


@pytest.mark.parametrize("experiment", PAPER, ids=lambda e: e.id)
def test_nothing_of_the_size_here_is_measured(experiment):
    there = experiment.at("paper")
    assert not isinstance(there.measure, CodeTexts)
    assert there.note == f"At the paper's size: config `{experiment.paper_config}`."
    assert not any(variant.here_only for variant in there.variants)
    assert experiment.at("here") is experiment


def test_toy_tasks_have_the_papers_lengths():
    for name, steps in (("copy", 400), ("reverse", 400), ("algorithmic-3", 100)):
        experiment = EXPERIMENTS[f"ft-table-1-{name}"].at("paper")
        data = experiment.make_config(experiment.variants[0], 0, "paper").data
        assert experiment.measure == ToyMeasure(data.task)
        assert eval_steps(data.task, data.toy) == steps


@pytest.mark.parametrize("name", ["fam-figure-3", "fam-figure-3-gradient", "fam-figure-10"])
def test_passkeys_have_the_papers_lengths(name, tmp_path):
    experiment = EXPERIMENTS[name].at("paper")
    lengths = experiment.measure.lengths
    assert (min(lengths), max(lengths)) == (2048, 262_144)
    for variant in experiment.variants:
        block = experiment.make_config(variant, 0, "paper").model.block_len
        assert min(lengths) > block
    # the tokenizer is that of the model that is finetuned
    assert experiment.measure.prepare(tmp_path) == ()
    assert not list(tmp_path.iterdir())


def test_penn_treebank_is_prepared_at_both_sizes(tmp_path):
    (tmp_path / "data" / "ptb").mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (tmp_path / "data" / "ptb" / f"ptb.{split}.txt").write_text("a line\n" * 20)
    experiment = EXPERIMENTS["ft-v1-table-2"].at("paper")
    cell = Cell(str(tmp_path), experiment.id, "Transformer of 4 layers", 0, "paper")
    assert cell.config(experiment).data.files.endswith("ptb/characters-train")
    assert (tmp_path / "data" / "ptb" / "characters-test").is_dir()


@pytest.fixture
def texts(tmp_path):
    """Return overrides for training texts that are there, and for a vocabulary."""
    (tmp_path / "train.txt").write_text("some text to train on\n" * 50)
    return [f"data.files={tmp_path}/train.txt", "data.tokenizer=bytes"]


def test_test_files_are_asked_for_before_anything_trains(tmp_path, texts, capsys):
    arguments = ["fam-table-7", "--size", "paper", *texts]

    def error(*more):
        assert reproduce(tmp_path, *arguments, *more) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "give the files to test on with --test FILES; the paper's are the test books" in error()
    assert "--test: no such file or folder: /absent.txt" in error("--test", "/absent.txt")
    arguments[-2] = "data.files=/flan.jsonl"
    assert "data.files" in error("--test", str(tmp_path / "train.txt"))
    assert not list(tmp_path.rglob("log.txt"))


def test_a_missing_tokenizer_is_told_before_anything_trains(tmp_path, texts, capsys):
    test = str(tmp_path / "train.txt")
    assert reproduce(tmp_path, "ft-table-3", "--size", "paper", texts[0], "--test", test) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "wikitext103.txt" in error
    assert "init=FOLDER takes a trained model with its own" in error
    assert not list(tmp_path.rglob("log.txt"))


def test_unreadable_articles_are_told_before_anything_trains(tmp_path, texts, capsys):
    (tmp_path / "xlsum.jsonl").write_text('{"text": "no summary"}\n')
    arguments = ["fam-table-4", "--size", "paper", *texts]
    assert reproduce(tmp_path, *arguments, "--test", str(tmp_path / "xlsum.jsonl")) == 2
    assert "summary" in capsys.readouterr().err
    assert not list(tmp_path.rglob("log.txt"))


@pytest.mark.long
def test_results_are_of_the_test_files(fake, tmp_path, texts, capsys):  # noqa: F811
    arguments = ["fam-table-8", "--size", "paper", "--seeds", "1", *texts, "--test"]
    first, second = tmp_path / "train.txt", tmp_path / "other.txt"
    second.write_text("another text\n")
    assert reproduce(tmp_path, *arguments, str(first)) == 0
    # a page of its own: that of the size here is kept
    pages = tmp_path / "pages"
    assert f"--size paper --test {first} " in (pages / "fam-table-8-paper.md").read_text()
    assert "](fam-table-8-paper.md)" in (pages / "index.md").read_text()
    assert not (pages / "fam-table-8.md").exists()
    out, err = capsys.readouterr()
    assert "2/2" in err
    assert "PG-19 accuracy" in out
    assert reproduce(tmp_path, *arguments, str(first)) == 0
    assert "2/2" not in capsys.readouterr().err
    assert reproduce(tmp_path, *arguments, str(second)) == 0
    assert "2/2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fam-recipe", "--size", "paper"], "fam-recipe: has no config at the paper's size"),
        (
            [COPY, "--size", "paper", "--hours", "1"],
            "--hours: how long trainings of the paper's size take is not known; leave it out",
        ),
        ([COPY, "--test", "x"], "--test: only with --size paper"),
        ([COPY, "--size", "paper", "--test", "x"], "no experiment that was named takes test files"),
        (
            ["fam-table-7", "ft-table-3", "--size", "paper", "--test", "x"],
            "fam-table-7, ft-table-3 are tested on different texts; run them one by one",
        ),
    ],
)
def test_mistakes_are_told(arguments, says, tmp_path, capsys):
    assert reproduce(tmp_path, *arguments) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_the_time_is_not_known_and_the_planner_is_named(fake, tmp_path, capsys):  # noqa: F811
    assert reproduce(tmp_path, COPY, "--size", "paper", "--seeds", "1", "--jobs", "1") == 0
    error = " ".join(capsys.readouterr().err.split())
    assert "take is not known; famjax plan copy_paper --topology v5e:4x8 prints" in error
    assert f"training {COPY}: Transformer, seed 0: an unknown time" in error
    # after the first one, its time is known
    assert "about 1 minute left" in error
    cell = Cell("x", COPY, "Feedback", 0, "paper")
    runner = Runner({COPY: EXPERIMENTS[COPY].at("paper")}, 1, print)
    assert runner.estimate(cell) is None
    assert runner.time_left([cell]) == "an unknown time"
    assert runner.estimate(replace(cell, size="here")) == 60 * EXPERIMENTS[COPY].minutes


def test_all_is_what_has_the_size_and_the_data(fake, tmp_path, capsys):  # noqa: F811
    arguments = ["--size", "paper", "--seeds", "1", "--only", "LSTM,zero"]
    assert reproduce(tmp_path, "all", *arguments) == 0
    error = " ".join(capsys.readouterr().err.split())
    without = ", ".join(e.id for e in EXPERIMENTS.values() if not e.has_paper_size)
    assert f"left out, since they have no paper's size: {without} " in error
    assert "fam-table-7 is left out: give the files to test on with --test FILES" in error
    assert "2/2" in error


def test_t2r_has_the_papers_teacher_and_features():
    """A.1.1: 286,000 steps from scratch, 142,000 from the teacher; 32 features."""
    experiment = EXPERIMENTS["t2r-table-1"].at("paper")
    assert experiment.has_base("paper")
    for variant in experiment.variants:
        config = experiment.make_config(variant, 0, "paper")
        assert config.train.steps == (142_000 if variant.continues else 286_000)
        if variant.name[:3] in ("T2R", "RFA"):
            assert config.model.linear.features == 32
    assert "T2R from scratch" in [variant.name for variant in experiment.variants]


def test_without_any_data_nothing_succeeds(tmp_path, capsys):
    assert reproduce(tmp_path, "fam-table-7", "fam-table-8", "--size", "paper") == 2
    assert capsys.readouterr().err.count("is left out: give the files to test on") == 2


def test_without_a_measure_there_is_no_papers_size():
    experiment = replace(EXPERIMENTS[COPY], paper_measure=None)
    with pytest.raises(UserError, match=f"^{COPY}: has no measure at the paper's size; leave out"):
        experiment.at("paper")


def test_texts_are_scored_whole_or_in_windows(monkeypatch, tmp_path):
    asked = []

    def evaluate(run, files, **options):
        asked.append((files, options["window"], options["score"]))
        scores = {"perplexity": 20.0, "bits_per_byte": 1.0, "accuracy": 0.4}
        return {**scores, "uniform": scores, "unigram": scores}

    monkeypatch.setattr(paper_measures_module, "evaluate_text", evaluate)
    found = PG19.on("books").measure(None, tmp_path, quiet=True)
    assert found.scores == {"bits per byte": 1.0, "PG-19 accuracy": 0.4}
    WIKITEXT_WINDOWS.on("wiki").measure(None, tmp_path, quiet=True)
    assert asked == [("books", None, None), ("wiki", 512, 256)]


@pytest.mark.long
def test_a_training_is_measured_on_test_files(tmp_path, texts):
    """By a text, and by summaries."""
    (tmp_path / "xlsum.jsonl").write_text(json.dumps({"text": "a b c", "summary": "b"}) + "\n")
    given = (*(key for key in TINY if "toy" not in key), *texts)
    for measure, files in (
        (TextMeasure("", PG19.scored), "train.txt"),
        (SummariesMeasure(), "xlsum.jsonl"),
    ):
        experiment = replace(
            tiny_experiment("tiny"), paper_config="char_ptb_paper", paper_measure=measure
        ).at("paper", str(tmp_path / files))
        (cell,) = make_cells(experiment, tmp_path, 1, (), "paper", given)
        cell.check(experiment)
        run_cell(cell, experiment)
        scores = read_result(cell, experiment)["scores"]
        assert set(scores) == {score.name for score in measure.scores}
        assert all(0 <= value < 10 for value in scores.values())

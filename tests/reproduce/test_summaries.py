"""The experiment on summaries: its data, what is measured, and that its models can be trained."""

import json
import sys
from pathlib import Path

import pytest
from small import compiled_once  # noqa: F401

from famjax.core.errors import UserError
from famjax.eval import translate
from famjax.experiment.load import load_config
from famjax.reproduce import summary_measure
from famjax.reproduce.cell import RESULT, run_cell
from famjax.reproduce.experiments import EXPERIMENTS
from famjax.reproduce.runner import make_cells
from famjax.reproduce.summary_measure import PairSummaryMeasure

FIGURE_7 = "ft-figure-7-summaries"
TINY = (
    *("model.width=16", "model.heads=2", "model.mlp_width=16", "model.encoder.layers=1"),
    *("data.batch=1", "train.steps=2", "train.log_every=1"),
)


def write_pairs(folder: Path, *_: int) -> None:
    """Write functions and summaries of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 40), ("val", 2), ("test", 2)):
        functions = [f"def get_{i}(self): return self.values[{i}]" for i in range(count)]
        summaries = [f"Return value {i}, one of the values." for i in range(count)]
        for name, lines in (("functions", functions), ("summaries", summaries)):
            (folder / f"{split}.{name}").write_text("\n".join([*lines, ""]))


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_a_training_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(summary_measure, "write_docstrings", write_pairs)
    experiment = EXPERIMENTS[FIGURE_7]
    (cell,) = make_cells(experiment, tmp_path, 1, ("Feedback 1",), "here", TINY)
    run_cell(cell, experiment)
    result = json.loads((cell.folder(experiment) / RESULT).read_text())
    assert set(result["scores"]) == {score.name for score in experiment.scores}
    assert set(result["baselines"]["the first words"]) == {"ROUGE-L", "ROUGE-1", "ROUGE-2"}
    assert result["scores"]["tokens/s"] > 0


def test_data_is_made_for_each_number_of_words(tmp_path, monkeypatch):
    made = []

    def write(folder, *words):
        made.append((folder.name, words))
        write_pairs(folder)

    monkeypatch.setattr(summary_measure, "write_docstrings", write)
    python = "python{}.{}".format(*sys.version_info[:2])
    folder = tmp_path / f"functions-{python}-64-60"
    given = PairSummaryMeasure(64, vocabulary=300).prepare(tmp_path)
    assert given == (
        f"data.source={folder}/train.functions",
        f"data.target={folder}/train.summaries",
        f"data.tokenizer={folder}/joint.model",
    )
    tokenizer = (folder / "joint.model").stat().st_mtime_ns
    assert PairSummaryMeasure(64, vocabulary=300).prepare(tmp_path) == given
    assert (folder / "joint.model").stat().st_mtime_ns == tokenizer
    PairSummaryMeasure(32, 50, vocabulary=300).prepare(tmp_path)
    other = f"functions-{python}-32-50"
    assert made == [(folder.name, (64, 60))] * 2 + [(other, (32, 50))]
    # on the user's files
    assert PairSummaryMeasure(0).prepare(tmp_path) == ()
    assert len(made) == 3


def test_what_is_measured(tmp_path, monkeypatch):
    write_pairs(tmp_path)
    # summaries of 2 and 4 words, so that the first 3 words of the functions are taken
    (tmp_path / "test.functions").write_text("def run(x): x\nreturn each value later\n")
    (tmp_path / "test.summaries").write_text("Return x.\nReturn each value twice.\n")
    requests = []

    def evaluate(run, request):
        requests.append(request)
        rouge = {"rouge_lsum": 0.3, "rouge_l": 0.2, "rouge_1": 0.4, "rouge_2": 0.1}
        return {**rouge, "tokens_per_second": 20.0}

    class Run:
        config = load_config(
            "cnn_dm_paper",
            [f"data.source={tmp_path}/train.functions", f"data.target={tmp_path}/train.summaries"],
        )

    monkeypatch.setattr(translate, "evaluate", evaluate)
    measured = PairSummaryMeasure(0, beam=4, length_penalty=0.8).measure(Run, tmp_path, quiet=True)
    rouge = {"ROUGE-L": 0.3, "ROUGE-1": 0.4, "ROUGE-2": 0.1}
    assert measured.scores == {**rouge, "tokens/s": 20.0, "greedy tokens/s": 20.0}
    request, greedy = requests
    assert greedy == request._replace(beam=1, length_penalty=greedy.length_penalty)
    assert request.task == "summarize"
    assert request.files == f"{tmp_path}/test.functions={tmp_path}/test.summaries"
    assert (request.beam, request.length_penalty, request.no_repeat_ngram) == (4, 0.8, 3)
    # def, run, x, x has x in common with return, x; return, each, value has all its words in common
    # with the second summary's four
    shared = f1(1 / 4, 1 / 2), f1(3 / 3, 3 / 4)
    found = measured.baselines["the first words"]
    assert found["ROUGE-1"] == found["ROUGE-L"] == pytest.approx(sum(shared) / 2)
    # pairs of words: return each, each value of three
    assert found["ROUGE-2"] == pytest.approx(f1(2 / 2, 2 / 3) / 2)


def test_the_length_penalty_is_tuned_on_the_development_files(tmp_path, monkeypatch):
    write_pairs(tmp_path)
    requests = []

    def evaluate(run, request):
        requests.append(request)
        rouge = dict.fromkeys(("rouge_lsum", "rouge_l", "rouge_1", "rouge_2"), 0.5)
        return {**rouge, "tokens_per_second": 20.0, "length_penalty": 1.4}

    class Run:
        config = load_config(
            "cnn_dm_paper",
            [f"data.source={tmp_path}/train.functions", f"data.target={tmp_path}/train.summaries"],
        )

    monkeypatch.setattr(translate, "evaluate", evaluate)
    PairSummaryMeasure(0).measure(Run, tmp_path, quiet=True)
    tuned, measured, greedy = requests
    assert greedy.beam == 1
    assert tuned.files == f"{tmp_path}/val.functions={tmp_path}/val.summaries"
    assert tuned.tune
    assert tuned == measured._replace(files=tuned.files, tune=True, length_penalty=1.0)
    assert (measured.tune, measured.length_penalty, measured.no_repeat_ngram) == (False, 1.4, 3)


def f1(precision, recall):
    return 2 * precision * recall / (precision + recall)


def test_missing_test_files_are_told(tmp_path):
    write_pairs(tmp_path)
    (tmp_path / "test.summaries").unlink()
    files = [f"data.source={tmp_path}/train.functions", f"data.target={tmp_path}/train.summaries"]
    with pytest.raises(
        UserError, match=r"test\.summaries.*put the test files beside those to train on"
    ):
        PairSummaryMeasure(0).check(load_config("cnn_dm_paper", files))

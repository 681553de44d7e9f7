"""The experiment on summaries: its data, what is measured, and that its models can be trained."""

import json
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
from famjax.reproduce.summary_measure import SummaryMeasure

FIGURE_7 = "ft-figure-7-summaries"
TINY = (
    *("model.width=16", "model.heads=2", "model.mlp_width=16", "model.encoder.layers=1"),
    *("data.batch=1", "train.steps=2", "train.log_every=1"),
)


def write_pairs(folder: Path, words: int = 0) -> None:
    """Write functions and summaries of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 40), ("test", 2)):
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


def test_data_is_made_once_for_each_number_of_words(tmp_path, monkeypatch):
    made = []

    def write(folder, words):
        made.append((folder.name, words))
        write_pairs(folder)

    monkeypatch.setattr(summary_measure, "write_docstrings", write)
    measure, folder = SummaryMeasure(64, vocabulary=300), tmp_path / "docstrings-64"
    assert measure.prepare(tmp_path) == (
        f"data.source={folder}/train.functions",
        f"data.target={folder}/train.summaries",
        f"data.tokenizer={folder}/joint.model",
    )
    assert made == [("docstrings-64", 64)]
    assert SummaryMeasure(0).prepare(tmp_path) == ()
    assert len(made) == 1


def test_what_is_measured(tmp_path, monkeypatch):
    write_pairs(tmp_path)
    (tmp_path / "test.functions").write_text("def f(x): return x\nreturn a\n")
    (tmp_path / "test.summaries").write_text("Return x.\nReturn b twice.\n")
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
    measured = SummaryMeasure(0, beam=4, length_penalty=0.8).measure(Run, tmp_path, quiet=True)
    assert measured.scores == {"ROUGE-L": 0.3, "ROUGE-1": 0.4, "ROUGE-2": 0.1, "tokens/s": 20.0}
    (request,) = requests
    assert request.task == "summarize"
    assert request.files == f"{tmp_path}/test.functions={tmp_path}/test.summaries"
    assert (request.beam, request.length_penalty, request.no_repeat_ngram) == (4, 0.8, 3)
    # two words, the mean of the summaries' 2 and 3 (rounded to even): "def f(x):" and "return a";
    # words are def, f, x and return, a: of the first summary's words, x is among three
    found = measured.baselines["the first words"]
    assert found["ROUGE-1"] == pytest.approx((2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2) + 0.4) / 2)


def test_missing_test_files_are_told(tmp_path):
    write_pairs(tmp_path)
    (tmp_path / "test.summaries").unlink()
    files = [f"data.source={tmp_path}/train.functions", f"data.target={tmp_path}/train.summaries"]
    with pytest.raises(UserError, match="put the test files beside those to train on"):
        SummaryMeasure(0).check(load_config("cnn_dm_paper", files))

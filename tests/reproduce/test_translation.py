"""Experiments on translation: their data, what is measured, and that each can be trained."""

import gzip
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small import compiled_once  # noqa: F401

from famjax.cli.main import main
from famjax.cli.reproduce_results import Results
from famjax.cli.reproduce_tables import claim
from famjax.config.schema import DataConfig
from famjax.core.errors import UserError
from famjax.eval import translate
from famjax.experiment.load import load_config, to_json
from famjax.reproduce.cell import DATA, RESULT, Cell, run_cell
from famjax.reproduce.experiments import EXPERIMENTS
from famjax.reproduce.pair_files import _find_development_files, find_test_files
from famjax.reproduce.runner import make_cells
from famjax.reproduce.translation_measure import TranslationMeasure
from famjax.train.average import open_average
from famjax.train.run import open_run

FIGURE_4, TABLE_2 = "ft-figure-4-translation", "t2r-table-2"
FIGURE_7 = "ft-figure-7-translation"
TINY = (
    *("model.width=16", "model.heads=2", "model.mlp_width=16", "model.encoder.layers=1"),
    *("data.batch=1", "train.steps=2"),
    *("train.checkpoint_every=1", "train.log_every=1"),
)


def write_pairs(folder: Path, count: int = 60) -> Path:
    """Write captions and what they are in another language, for training and test."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for language, words in (("de", "hund katze ball baum"), ("en", "dog cat ball tree")):
        for split, lines in (("train", count), ("val", 4), ("test", 4)):
            picked = [" ".join(rng.choice(words.split(), 3)) for _ in range(lines)]
            (folder / f"{split}.{language}").write_text("\n".join([*picked, ""]))
    return folder


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        (FIGURE_7, "Transformer 1"),
        # with an average, as in Figure 4, and a base
        (TABLE_2, "T2R pretrained"),
        pytest.param(FIGURE_4, "Feedback 2", marks=pytest.mark.slow),
    ],
)
def test_a_training_is_measured(name, variant, tmp_path, monkeypatch):
    experiment, runs, measure = EXPERIMENTS[name], [], TranslationMeasure.measure

    def keep(self, run, *rest, **options):
        runs.append(run)
        return measure(self, run, *rest, **options)

    monkeypatch.setattr(TranslationMeasure, "measure", keep)
    write_pairs(tmp_path / DATA / experiment.measure.folder)
    for cell in make_cells(experiment, tmp_path, 1, (variant,), "here", TINY):
        run_cell(cell, experiment)
    folder, trained = cell.folder(experiment), cell.training_folder(experiment)
    last, mean = open_run(trained).fingerprint(), open_average(trained, 5).fingerprint()
    assert last != mean
    assert [run.fingerprint() for run in runs] == [mean if experiment.averaged else last]
    result = json.loads((folder / RESULT).read_text())
    assert set(result["scores"]) == {score.name for score in experiment.scores}
    assert min(result["scores"]["tokens/s"], result["scores"]["greedy tokens/s"]) > 0
    assert set(result["baselines"]["the source"]) == {"BLEU", "tokenized BLEU"}
    assert result["steps"] == 2


def test_as_many_checkpoints_are_averaged_as_in_the_papers():
    """FT3 4.2.1 and 6.2; T2R A.1.2: the checkpoints of the last five epochs."""
    of = {name: EXPERIMENTS[name].averaged for name in (FIGURE_4, TABLE_2, FIGURE_7)}
    assert of == {FIGURE_4: 10, TABLE_2: 5, FIGURE_7: 0}
    for name, count in of.items():
        experiment = EXPERIMENTS[name]
        for variant in experiment.variants:
            assert experiment.make_config(variant, 0, "paper").train.keep >= count


def test_what_is_measured(tmp_path, monkeypatch):
    folder, requests = write_pairs(tmp_path / "wmt"), []
    for language in ("de", "en"):
        (folder / f"test.{language}").write_text("der a-b c d e\n")

    def evaluate(run, request):
        requests.append(request)
        bleus = {"bleu": 28.0, "bleu_compounds": 29.0, "bleu_tokenized": 27.0}
        return {**bleus, "tokens_per_second": 20.0}

    class Run:
        config = load_config(
            "multi30k", [f"data.source={folder}/train.de", f"data.target={folder}/train.en"]
        )

    monkeypatch.setattr(translate, "evaluate", evaluate)
    measure = TranslationMeasure("", beam=3, length_penalty=0.7)
    measured = measure.measure(Run, tmp_path, quiet=True)
    assert measured.scores == {
        "BLEU": 28.0,
        "tokenized BLEU": 29.0,
        "tokens/s": 20.0,
        "greedy BLEU": 28.0,
        "greedy tokens/s": 20.0,
    }
    assert measured.baselines["the source"] == pytest.approx({"BLEU": 100, "tokenized BLEU": 100})
    # IWSLT14's BLEU splits no compounds
    other = EXPERIMENTS[FIGURE_7].measure.measure(Run, tmp_path, quiet=True)
    assert other.scores["tokenized BLEU"] == 27.0
    request, greedy, tokenized, _ = requests
    assert greedy == request._replace(beam=1, length_penalty=1.0)
    assert (request.tokenized, tokenized.tokenized) == (False, True)
    assert request.files == f"{folder}/test.de={folder}/test.en"
    assert (request.beam, request.length_penalty, request.examples) == (3, 0.7, None)


def test_the_length_penalty_is_tuned_on_the_development_files(tmp_path, monkeypatch):
    """FT3 4.2.1: "tuning a length penalty on the dev set"; T2R has 0.6, Table 5."""
    penalties = {name: EXPERIMENTS[name].measure.length_penalty for name in (FIGURE_4, TABLE_2)}
    assert penalties == {FIGURE_4: None, TABLE_2: 0.6}
    folder, requests = write_pairs(tmp_path / "wmt"), []

    def evaluate(run, request):
        requests.append(request)
        bleus = {"bleu": 28.0, "bleu_compounds": 29.0, "bleu_tokenized": 27.0}
        return {**bleus, "tokens_per_second": 20.0, "length_penalty": 0.4}

    class Run:
        config = load_config(
            "multi30k", [f"data.source={folder}/train.de", f"data.target={folder}/train.en"]
        )

    monkeypatch.setattr(translate, "evaluate", evaluate)
    measure = TranslationMeasure("")
    measured = measure.measure(Run, tmp_path, quiet=True)
    assert measured.scores["length penalty"] == 0.4
    assert list(measured.scores) == [
        *("BLEU", "tokenized BLEU", "tokens/s", "greedy BLEU", "greedy tokens/s", "length penalty")
    ]
    assert set(measured.scores) == {score.name for score in measure.scores}
    tuned, search, greedy = requests
    assert tuned.files == f"{folder}/val.de={folder}/val.en"
    assert tuned == search._replace(files=tuned.files, tune=True, length_penalty=1.0)
    assert (search.tune, search.length_penalty) == (False, 0.4)
    assert (greedy.tune, greedy.beam) == (False, 1)
    for language in ("de", "en"):
        (folder / f"val.{language}").rename(folder / f"valid.{language}")
    measure.check(Run.config)
    measure.measure(Run, tmp_path, quiet=True)
    assert requests[3].files == f"{folder}/valid.de={folder}/valid.en"
    (folder / "valid.en").unlink()
    with pytest.raises(UserError, match=r"wmt/val\.de: put the development files"):
        measure.check(Run.config)
    (folder / "dev.de").write_text("der\ndie\n")
    (folder / "dev.en").write_text("the\n")
    with pytest.raises(UserError, match=r"wmt/dev\.de"):
        measure.check(Run.config)


def test_development_files_are_found_as_those_to_train_on(tmp_path, monkeypatch):
    """~ is expanded, brackets may be in a name, and there may be spaces in a list."""
    folder = write_pairs(tmp_path / "a[1]")
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in ("~/a[1]/train.de", f"{folder}/train.de", f"{folder}/train.de, ~/a[1]/train.de"):
        data = DataConfig(source=source, target=source.replace(".de", ".en"))
        assert _find_development_files(data)[0] == source.replace("train", "val")


def test_development_splits_of_data_sets_are_those_of_tfds():
    name = "tfds:wmt14_translate/de-en:train:"
    found = _find_development_files(DataConfig(source=f"{name}en", target=f"{name}de"))
    assert found == tuple(f"tfds:wmt14_translate/de-en:validation:{x}" for x in ("en", "de"))


def test_data_is_found_or_asked_for(tmp_path):
    measure = TranslationMeasure("multi30k", length_penalty=1.0)
    with pytest.raises(UserError, match=r"multi30k/train\.de: put its texts there"):
        measure.prepare(tmp_path)
    folder = write_pairs(tmp_path / "multi30k")
    given = measure.prepare(tmp_path)
    assert given == (
        f"data.source={folder}/train.de",
        f"data.target={folder}/train.en",
        f"data.tokenizer={folder}/joint.model",
    )
    made = (folder / "joint.model").stat().st_mtime_ns
    for split in ("train", "test"):
        text = (folder / f"{split}.de").read_bytes()
        (folder / f"{split}.de").unlink()
        (folder / f"{split}.de.gz").write_bytes(gzip.compress(text))
    assert measure.prepare(tmp_path)[0] == f"data.source={folder}/train.de.gz"
    assert (folder / "joint.model").stat().st_mtime_ns == made
    # compressed as those to train on
    (folder / "test.de.gz").rename(folder / "test.de")
    with pytest.raises(UserError, match=r"test\.de\.gz: put its texts there"):
        measure.prepare(tmp_path)
    (folder / "train.de").write_bytes(text)
    (folder / "test.de").rename(folder / "test.de.gz")
    with pytest.raises(UserError, match=r"test\.de: put its texts there"):
        measure.prepare(tmp_path)


def test_test_files_are_beside_those_to_train_on():
    def of(source, target):
        return find_test_files(DataConfig(source=source, target=target))

    assert of("train.de", "train.en.gz") == ("test.de", "test.en.gz")
    assert of("/train/train.de", "a/train.en") == ("/train/test.de", "a/test.en")
    name = "tfds:wmt14_translate/de-en:train:"
    assert of(f"{name}en", f"{name}de")[0] == "tfds:wmt14_translate/de-en:test:en"
    both = of("wmt/train.1.en,wmt/train.2.en", "train.1.de,wmt/train.2.de")
    assert both == ("wmt/test.1.en,wmt/test.2.en", "test.1.de,wmt/test.2.de")
    assert of("train.jsonl", "") == ("test.jsonl", "")
    assert of("train.constrained.de", "training.en") == ("test.constrained.de", "testing.en")
    name = "seqio:my_train_task:train:"
    assert of(f"{name}inputs", f"{name}targets")[0] == "seqio:my_train_task:test:inputs"


@pytest.mark.parametrize("name", ["wmt/commoncrawl.en", "train/news.en"])
def test_training_files_are_not_their_own_test_files(name):
    for files in (name, f"wmt/train.en,{name}"):
        with pytest.raises(UserError, match=f"^{name}: cannot find its test file"):
            find_test_files(DataConfig(source=files, target="wmt/train.de"))


def test_a_tokenizer_is_of_the_texts_that_are_there(tmp_path):
    measure, folder = TranslationMeasure("multi30k"), write_pairs(tmp_path / "multi30k")

    def prepared(measure=measure):
        measure.prepare(tmp_path)
        return (folder / "joint.model").read_bytes()

    first = prepared()
    assert prepared() == first
    text = (folder / "train.de").read_text()
    (folder / "train.de").write_text(text.replace("hund", "wolf"))
    assert prepared() != first
    (folder / "train.de").write_text(text)
    assert prepared() == first
    assert prepared(replace(measure, vocabulary=280)) != first


def test_missing_test_files_are_told_before_anything_runs(tmp_path, capsys):
    folder = write_pairs(tmp_path / "wmt")
    (folder / "test.en").unlink()
    where = ["--folder", str(tmp_path / "runs"), "--pages", str(tmp_path / "pages")]
    data = [f"data.source={folder}/train.en", f"data.target={folder}/train.de"]
    assert main(["reproduce", FIGURE_4, "--size", "paper", *where, *data]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "wmt/test.en" in error
    assert "put the test files beside those to train on" in error
    assert not list(tmp_path.rglob("log.txt"))


def test_the_papers_size_has_a_teacher(tmp_path):
    experiment = EXPERIMENTS[TABLE_2].at("paper")
    cells = make_cells(experiment, tmp_path, 1, (), "paper", ())
    base, *variants = cells
    assert base.variant == ""
    folder = base.folder(experiment)
    assert folder.name.startswith("wmt14_ende_paper-")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(to_json(base.config(experiment)))
    (folder / "tokenizer.model").touch()
    configs = {cell.variant: cell.config(experiment) for cell in variants}
    for name, config in configs.items():
        teacher = str(folder) if "pretrained" in name else ""
        assert config.init == teacher
        assert config.train.steps == (20000 if teacher else 30000)
        assert (config.model.mixer == "linear") == (name != "Transformer")
        assert (config.model.encoder.cross == "linear") == (name != "Transformer")
        if name[:3] in ("T2R", "RFA"):
            assert (config.model.linear.features, config.model.encoder.features) == (4, 32)
        # Tables 5 and 6
        rate = 2e-4 if teacher else 3e-4 if name == "T2R from scratch" else 5e-4
        assert config.optimizer.learning_rate == rate
    # others have none: their models begin from weights that the user gives
    other = EXPERIMENTS["fam-table-7"]
    assert Cell(str(tmp_path), other.id, other.variants[0].name, 0, "here").base(other)
    assert Cell(str(tmp_path), other.id, other.variants[0].name, 0, "paper").base(other) is None


def test_both_decoders_have_equal_encoders_and_training():
    """At both sizes: equal data, encoders, optimizers and steps."""
    experiment = EXPERIMENTS[FIGURE_4]
    for size in ("here", "paper"):
        pair = [
            experiment.make_config(experiment.variant(f"{line} 2"), 0, size)
            for line in ("Transformer", "Feedback")
        ]
        assert pair[0].model != pair[1].model
        assert pair[0].model.encoder == pair[1].model.encoder
        for part in ("data", "optimizer", "train"):
            assert getattr(pair[0], part) == getattr(pair[1], part)


def test_teachers_and_recurrent_models_have_the_papers_features():
    experiment = EXPERIMENTS[TABLE_2]
    starts, sizes = ("from scratch", "pretrained"), ("here", "paper")
    for name, start, size in itertools.product(("ELU", "RFA", "T2R"), starts, sizes):
        model = experiment.make_config(experiment.variant(f"{name} {start}"), 0, size).model
        assert model.linear.map == {"ELU": "elu", "RFA": "rfa", "T2R": "relu"}[name]
        if name != "ELU":
            # cross attention: half of a head, whose size is 32 here and 64 in the paper
            assert model.encoder.features == {"here": 16, "paper": 32}[size]
            assert model.linear.features == 4


def test_each_pair_of_languages_has_the_papers_numbers_and_teacher():
    pairs = {
        "t2r-table-2": ("wmt14_ende_paper", 28.7, 28.9, 30000, 20000),
        "t2r-table-2-en-fr": ("wmt14_enfr_paper", 42.1, 42.2, 60000, 40000),
        "t2r-table-2-zh-en": ("wmt17_zhen_paper", 23.8, 24.2, 30000, 20000),
    }
    for name, (teacher, t2r, transformer, scratch_steps, steps) in pairs.items():
        experiment = EXPERIMENTS[name]
        found = {v.name: v.paper.get("tokenized BLEU") for v in experiment.variants}
        assert (found["T2R pretrained"], found["Transformer"]) == (t2r, transformer)
        assert experiment.make_base_config(0, "paper").name == teacher
        for variant in experiment.variants:
            config = experiment.make_config(variant, 0, "paper")
            expected = scratch_steps if variant.continues is None else steps
            assert config.train.steps == expected
        # ELU diverged on English-French
        claims = {claim.better for claim in experiment.orderings}
        assert ("ELU from scratch" in claims) == (found["ELU from scratch"] is not None)
        hours = {variant.paper.get("GPU hours") for variant in experiment.variants}
        assert (hours == {None}) == (name != TABLE_2)


def test_a_gap_is_judged_to_be_wider_than_another():
    """Three seeds: by 3, 4 and 5 with one layer, by 1, 1 and 2 with four."""
    experiment = EXPERIMENTS[FIGURE_4]
    found = {
        "Feedback 1": (23, 24, 25),
        "Transformer 1": (20, 20, 20),
        "Feedback 4": (31, 31, 32),
        "Transformer 4": (30, 30, 30),
    }
    results = Results(
        experiment,
        {
            name: {seed: {"scores": {"tokenized BLEU": value}} for seed, value in enumerate(values)}
            for name, values in found.items()
        },
        12,
    )
    wider = next(ordering for ordering in experiment.orderings if ordering.wider_than)
    judgement = results.judge(wider)
    assert judgement.difference == pytest.approx((2 + 3 + 3) / 3)
    assert judgement.verdict == "holds"
    lower = Results(experiment, {**results.by_variant, "Feedback 1": {}}, 12)
    assert lower.judge(wider) is None
    assert claim(wider) == (
        "Feedback 1 is better than Transformer 1, by more than Feedback 4 than Transformer 4"
    )

"""Experiments at the papers' sizes: their data, what they are tested on, and what they refuse."""

import json
from dataclasses import replace

import pytest
from experiment_helpers import COPY, TINY, reproduce, tiny_experiment

from famjax.config.schema import Config, DataConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.experiment.load import to_json
from famjax.experiment.size import count_params
from famjax.reproduce import attention_measure as attention_measure_module
from famjax.reproduce import long_context_measure as long_context_measure_module
from famjax.reproduce import paper_measures as paper_measures_module
from famjax.reproduce.cell import Cell, run_cell
from famjax.reproduce.cost import paper_flops
from famjax.reproduce.experiment import PaperSize
from famjax.reproduce.experiments import EXPERIMENTS
from famjax.reproduce.long_context_measure import LongContextMeasure
from famjax.reproduce.measures import CodeTexts, ToyMeasure
from famjax.reproduce.paper_measures import PG19, WIKITEXT_WINDOWS, TextMeasure
from famjax.reproduce.runner import Runner, make_cells, read_result
from famjax.tasks import TASKS
from famjax.tasks.questions.summaries import XLSUM
from famjax.tasks.toy import eval_steps

WIKITEXT_103_WORDS = 267_735
PAPER = [e for e in EXPERIMENTS.values() if e.at_paper]


@pytest.mark.parametrize("experiment", PAPER, ids=lambda e: e.id)
def test_nothing_of_the_size_here_is_measured(experiment):
    there = experiment.at("paper")
    assert not isinstance(there.measure, CodeTexts)
    begin = f"At the paper's size: config `{experiment.at_paper.config}`."
    assert there.note == f"{begin} {experiment.at_paper.note}".strip()
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

    given = "give the files to test on with --test FILES; the paper's are pg19:pg19/test/*.txt"
    assert given in error()
    assert "--test: no such file or folder: /absent.txt" in error("--test", "/absent.txt")
    unknown = "--test foo: no such set; the paper's are pg19:pg19/test/*.txt"
    assert unknown in error("--test", "foo:bar")
    assert "no such set; did you mean 'isabelle'?" in error("--test", "isabele:bar")
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
    assert reproduce(tmp_path, *arguments, "--test", "xlsum:absent.jsonl") == 2
    assert "--test: no such file or folder: absent.jsonl" in capsys.readouterr().err
    assert not list(tmp_path.rglob("log.txt"))


@pytest.mark.long
def test_results_are_of_the_test_files(fake, tmp_path, texts, capsys):
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


@pytest.mark.long
def test_the_least_time_and_the_planner_are_named(fake, tmp_path, capsys):
    assert reproduce(tmp_path, COPY, "--size", "paper", "--seeds", "1", "--jobs", "1") == 0
    error = " ".join(capsys.readouterr().err.split())
    assert (
        "the matrix products of training take 1 minute of an H100 at its peak, and training takes "
        "longer; famjax plan copy_paper --topology v5e:4x8 prints" in error
    )
    assert f"training {COPY}: Transformer, seed 0: an unknown time" in error
    # after the first one, its time is known
    assert "about 1 minute left" in error
    cell = Cell("x", COPY, "Feedback", 0, "paper")
    runner = Runner({COPY: EXPERIMENTS[COPY].at("paper")}, 1, print)
    assert runner.estimate(cell) is None
    assert runner.time_left([cell]) == "an unknown time"
    assert runner.estimate(replace(cell, size="here")) == 60 * EXPERIMENTS[COPY].minutes


@pytest.mark.long
def test_all_is_what_has_the_size_and_the_data(fake, tmp_path, capsys):
    arguments = ["--size", "paper", "--seeds", "1", "--only", "LSTM,zero"]
    assert reproduce(tmp_path, "all", *arguments) == 0
    error = " ".join(capsys.readouterr().err.split())
    without = ", ".join(e.id for e in EXPERIMENTS.values() if not e.at_paper)
    assert f"left out, since they have no paper's size: {without} " in error
    assert "fam-table-7 is left out: give the files to test on with --test FILES" in error
    assert "2/2" in error


def test_t2r_has_the_papers_teacher_and_features():
    """A.1.1: 286,000 steps from scratch, 142,000 from the teacher; 32 features."""
    experiment = EXPERIMENTS["t2r-table-1"].at("paper")
    assert experiment.has_base("paper")
    for variant in experiment.variants:
        config = experiment.make_config(variant, 0, "paper")
        assert config.train.steps == (286_000 if variant.continues is None else 142_000)
        if variant.name[:3] in ("T2R", "RFA"):
            assert config.model.linear.features == 32
    assert "T2R from scratch" in [variant.name for variant in experiment.variants]


def test_without_any_data_nothing_succeeds(tmp_path, capsys):
    assert reproduce(tmp_path, "fam-table-7", "fam-table-8", "--size", "paper") == 2
    assert capsys.readouterr().err.count("is left out: give the files to test on") == 2


def test_an_experiment_may_have_no_papers_size():
    experiment = replace(EXPERIMENTS[COPY], at_paper=None)
    with pytest.raises(UserError, match=f"^{COPY}: has no config at the paper's size; leave out"):
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
        (LongContextMeasure(("xlsum",)), "xlsum.jsonl"),
    ):
        experiment = replace(
            tiny_experiment("tiny"), at_paper=PaperSize("char_ptb_paper", measure)
        ).at("paper", str(tmp_path / files))
        (cell,) = make_cells(experiment, tmp_path, 1, (), "paper", given)
        cell.check(experiment)
        run_cell(cell, experiment)
        scores = read_result(cell, experiment)["scores"]
        assert set(scores) == {score.name for score in measure.scores}
        assert all(0 <= value < 10 for value in scores.values())


def configs_at_paper(name):
    """Return the config of each model of an experiment at the paper's size, without its base."""
    experiment = EXPERIMENTS[name].at("paper")
    return {v.name: experiment.make_config(v, 0, "paper") for v in experiment.variants}


def test_only_famjaxs_own_experiments_have_no_paper_size():
    without = {e.id for e in EXPERIMENTS.values() if not e.at_paper}
    own = {e.id for e in EXPERIMENTS.values() if e.source == "famjax"}
    assert without == {"fam-recipe", *own}


def test_autocompressors_have_room_for_260_summaries():
    """B.4.6; and LoRA, as all finetuned models of the paper."""
    configs = configs_at_paper("fam-figure-8")
    assert list(configs) == ["FAM", "M1", "RMT", "AutoCompressor"]
    model = configs["AutoCompressor"].model
    assert (model.fam_len, model.capacity) == (1, 260 * model.block_len)
    assert configs["RMT"].model.fam_len == configs["FAM"].model.fam_len
    for config in configs.values():
        assert config.model.lora.rank == 64
        assert config.data == configs["FAM"].data


@pytest.mark.parametrize(
    ("name", "deepest", "params"),
    [("ft-figure-9", 6, 10.7e6), ("ft-figure-9-words", 8, 139e6)],
)
def test_depths_have_equally_many_parameters(name, deepest, params):
    """Within 3% of Table 9's models, of 50 characters or the words of WikiText-103."""
    vocab_size = 50 if params < 1e8 else WIKITEXT_103_WORDS
    depths = set()
    for config in configs_at_paper(name).values():
        model = replace(config.model, vocab_size=vocab_size)
        depths.add(model.layers)
        assert count_params(model).weights == pytest.approx(params, rel=0.03)
    assert max(depths) == deepest
    assert min(depths) == 1


def test_each_layer_of_the_papers_model_is_a_memory():
    configs = configs_at_paper("ft-figure-8")
    layers = {c.model.feedback.layer for name, c in configs.items() if name.startswith("layer")}
    assert layers == set(range(7))
    assert all(config.model.layers == 6 for config in configs.values())


def test_ablations_of_wikitext_differ_by_what_their_names_say():
    """v3, Table 6, and v1, Table 6: 200,000 steps, half of them for each of two stacks."""
    for name, config in configs_at_paper("ft-table-6").items():
        model, train = config.model, config.train
        assert model.arch.pre_norm == ("pre-norm" in name)
        assert train.bptt_start == (32 if "BPTT" in name else 0)
        assert model.feedback.span == (2048 if "span" in name else 512)
        assert model.feedback.adaptive_span == ("span" in name)
        assert not model.feedback.shared_kv
    experiment = EXPERIMENTS["ft-v1-table-6"].at("paper")
    base = experiment.make_base_config(0, "paper")
    last = experiment.make_config(experiment.variants[-1], 0, "paper")
    assert (base.model.stack, last.model.stack) == ("transformer", "feedback")
    assert base.train.steps + last.train.steps == 200_000
    assert 4 * last.train.bptt_double_every == last.train.steps


@pytest.mark.parametrize("name", ["t2r-figure-4", "t2r-figure-5", "t2r-figure-6"])
def test_features_are_the_papers(name):
    found = {
        config.model.linear.features
        for config in configs_at_paper(name).values()
        if config.model.mixer == "linear"
    }
    assert found == {8, 16, 32, 64, 128, 256, 512}


def test_programs_have_a_transformer_of_eight_layers_and_an_lstm():
    for name, deeper, lstm in (("3", 0.474, 0.828), ("5", 0.291, 0.321)):
        experiment = EXPERIMENTS[f"ft-table-1-algorithmic-{name}"]
        configs = configs_at_paper(experiment.id)
        assert configs["LSTM"].model.stack == "lstm"
        assert configs["Transformer of twice the layers"].model.layers == 8
        assert experiment.variant("LSTM").paper == {"answers": lstm}
        assert experiment.variant("Transformer of twice the layers").paper == {"answers": deeper}


def test_counting_to_1000_is_the_papers():
    for config in configs_at_paper("ft-table-1-counting-1000").values():
        assert eval_steps("counting", config.data.toy) == 1000
        assert config.model.feedback.span >= 2 * 1000


def test_the_walk_has_v1s_two_sets():
    """v1, Table 1: 10,000 and a million episodes."""
    configs = configs_at_paper("ft-table-1-blocked-walk")
    found = {name: config.data.toy.episodes for name, config in configs.items()}
    assert found == {
        "Transformer": 10_000,
        "Feedback": 10_000,
        "Transformer 1M": 1_000_000,
        "Feedback 1M": 1_000_000,
    }
    for name, config in configs.items():
        assert config.model == configs[name.removesuffix(" 1M")].model


def test_v1s_small_models_have_44_million_parameters():
    """v1, Table 4."""
    for config in configs_at_paper("ft-v1-table-4").values():
        model = replace(config.model, vocab_size=WIKITEXT_103_WORDS)
        assert count_params(model).weights == pytest.approx(44e6, rel=0.01)


def test_a_shallow_decoder_has_an_encoder_of_twelve_layers_with_layerdrop():
    """v3 4.2.1."""
    configs = configs_at_paper("ft-figure-4-translation")
    deep = configs.pop("Feedback 2 of an encoder of 12").model
    assert (deep.stack, deep.layers, deep.encoder.layers) == ("feedback", 2, 12)
    assert deep.dropout.layer > 0
    for config in configs.values():
        assert config.model.encoder.layers == 6
        assert config.model.dropout.layer == 0
    assert {config.model.layers for config in configs.values()} == {1, 2, 4, 6}


def test_attention_is_compared_with_the_teachers_on_the_users_texts(monkeypatch, tmp_path):
    asked = []

    def analyze(run, teacher, files, length, examples, quiet):
        asked.append((teacher, files, length))
        found = {"entropy": {"last": 4.0, "mean": 0.0}, "distance": {"last": 0.1, "mean": 0.0}}
        return {**found, "uniform": found}

    class Run:
        config = replace(Config(), init="teacher")

    monkeypatch.setattr(attention_measure_module, "analyze", analyze)
    monkeypatch.setattr(attention_measure_module, "open_run", lambda path: path.name)
    for name, scores in (
        ("t2r-figure-5", {"distance": 0.1, "entropy": 4.0}),
        ("t2r-figure-6", {"entropy": 4.0}),
    ):
        measure = EXPERIMENTS[name].at("paper", "wiki").measure
        assert measure.measure(Run, tmp_path, quiet=True).scores == scores
    assert asked == [("teacher", "wiki", 512), (None, "wiki", 512)]


def test_the_first_sentence_is_a_summary(monkeypatch, tmp_path):
    pytest.importorskip("rouge_score")
    articles = tmp_path / "xlsum.jsonl"
    records = ({"text": "A b c. More.", "summary": "a b c"}, {"text": "d\n", "summary": "e"})
    articles.write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr(type(XLSUM), "evaluate", lambda *_: {"score": 0.3}, raising=False)
    measure = LongContextMeasure(("qasper", "xlsum")).on(f"xlsum:{articles}")
    found = measure.measure(None, tmp_path, quiet=True)
    assert found.scores == {"XLSum": 0.3}
    assert found.baselines == {"the first sentence": {"XLSum": 0.5}}


def test_a_table_is_scored_on_the_sets_that_are_given(monkeypatch, tmp_path):
    table = EXPERIMENTS["fam-table-8"]
    every = ["PG-19 accuracy", "Isabelle accuracy", "NarrativeQA", "Qasper", "QuALITY", "XLSum"]
    assert [score.name for score in table.at("paper").scores] == every
    assert [claim.score for claim in table.at("paper").orderings] == every
    # with several files; those without a name are the first set's
    some = table.at("paper", "a/*.txt,b.txt,quality:tfds:quality/raw:dev,c.jsonl")
    assert some.measure.files == (
        ("pg19", "a/*.txt,b.txt"),
        ("quality", "tfds:quality/raw:dev,c.jsonl"),
    )
    assert [score.name for score in some.scores] == ["PG-19 accuracy", "QuALITY"]
    assert [claim.score for claim in some.orderings] == ["PG-19 accuracy", "QuALITY"]
    unnamed = table.at("paper", "tfds:pg19:test,/a/b:c.txt")
    assert unnamed.measure.files == (("pg19", "tfds:pg19:test,/a/b:c.txt"),)
    with pytest.raises(UserError, match=r"--test pg19: is not in this table; .*xlsum:xlsum/"):
        EXPERIMENTS["fam-table-4"].at("paper", "pg19:a.txt")
    accuracy = {"accuracy": 0.4}
    monkeypatch.setattr(
        long_context_measure_module,
        "evaluate_text",
        lambda run, files, **_: {**accuracy, "uniform": {"accuracy": 0.1}, "unigram": accuracy},
    )
    monkeypatch.setattr(
        type(TASKS["quality"]), "evaluate", lambda *_: {"score": 0.3}, raising=False
    )
    found = some.measure.measure(None, tmp_path, quiet=True)
    assert found.scores == {"PG-19 accuracy": 0.4, "QuALITY": 0.3}
    assert found.baselines["uniform"] == {"PG-19 accuracy": 0.1}


@pytest.mark.parametrize("name", ["ft-table-3", "ft-table-4", "ft-v1-table-4"])
def test_language_models_end_at_a_tenth_of_the_rate(name):
    """v3 7.6; the cost of a finetuned model has that of the training before."""
    experiment = EXPERIMENTS[name].at("paper")
    configs = configs_at_paper(name)
    finetuned = [v.name for v in experiment.variants if v.continues]
    assert finetuned == [v.name for v in EXPERIMENTS[name].variants]
    for model in finetuned:
        last, before = configs[model], configs[f"{model} before finetuning"]
        assert experiment.variant(model).continues == f"{model} before finetuning"
        assert last.optimizer.learning_rate == pytest.approx(before.optimizer.learning_rate / 10)
        assert (last.train.steps, last.train.bptt_start) == (10_000, 0)
        assert before.train.steps in (100_000, 200_000)
        assert (last.model, last.data) == (before.model, before.data)
    both = paper_flops([EXPERIMENTS[name]], 1, [f"{finetuned[0]} before finetuning"])
    assert paper_flops([EXPERIMENTS[name]], 1, finetuned[:1]) > 1.04 * both


@pytest.mark.parametrize("experiment", PAPER, ids=lambda e: e.id)
def test_the_claims_hold_for_the_numbers_of_the_paper(experiment):
    """With margins in the unit of the score, so that an exact reproduction is not refused."""
    there = experiment.at("paper")
    numbers = {variant.name: variant.paper for variant in there.variants}
    for claim in there.orderings:
        score = there.score(claim.score or there.scores[0].name)
        pair, other = (claim.better, claim.worse), claim.wider_than or ()
        if any(score.name not in numbers[name] for name in (*pair, *other)):
            continue
        sign = 1 if score.higher_is_better else -1
        gap = sign * (numbers[pair[0]][score.name] - numbers[pair[1]][score.name])
        if other:
            gap -= sign * (numbers[other[0]][score.name] - numbers[other[1]][score.name])
        if claim.margin:
            assert gap > -claim.margin
            assert claim.may_be_better or gap < claim.margin
        else:
            assert gap > 0


@pytest.mark.parametrize(
    "experiment", [e for e in PAPER if e.at_paper.config == "fam_1b"], ids=lambda e: e.id
)
def test_a_pretrained_folder_does_not_choose_the_papers_model(experiment, tmp_path):
    """`init` gives the shape, whatever memory the folder's model has (3.1, Table 6)."""
    model = ModelConfig(
        vocab_size=258, mixer="fam", block_len=128, memory_segments=1, fam_len=16, width=64
    )
    there = Config(model=model, data=DataConfig(tokenizer="bytes"))
    (tmp_path / "config.json").write_text(to_json(there))
    for variant in experiment.variants_at("paper"):
        config = experiment.make_config(variant, 0, "paper", (f"init={tmp_path}",))
        own = experiment.make_config(variant, 0, "paper").model
        found = config.model
        assert (found.width, found.vocab_size) == (64, 258)
        if found.stack == "residual" and not found.mixer.startswith("swa"):
            assert found.memory_segments == own.memory_segments
        assert found.block_len == own.block_len == 1024
        if found.mixer == "fam" or found.stack != "residual":
            assert found.fam_len == own.fam_len
        if found.mixer == "fam":
            assert found.fam_update == own.fam_update

"""That experiments train what their names say, on equal terms, and claim something of each."""

import importlib
import re
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from famjax.config.derived import mixer_pattern
from famjax.data.train_tokenizer import train_sentencepiece
from famjax.experiment.load import to_json
from famjax.experiment.size import count_params
from famjax.reproduce import experiments
from famjax.reproduce import measures as measures_module
from famjax.reproduce.cell import TRAININGS, Cell
from famjax.reproduce.experiment import SIZES, Experiment
from famjax.reproduce.experiments import EXPERIMENTS
from famjax.reproduce.measures import (
    CodeByPosition,
    CodeMeasure,
    CodeTexts,
    KeysAndCodeMeasure,
    PasskeyMeasure,
)
from famjax.reproduce.penn_treebank import PennTreebankMeasure
from famjax.reproduce.runner import make_cells
from famjax.reproduce.summary_measure import PairSummaryMeasure
from famjax.reproduce.translation_measure import TranslationMeasure
from famjax.tasks.passkey import Passkey

each = pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda e: e.id)

# the stack or the mixers of models, by what is in their names: the first pattern that is
NAMES = {
    "^DELTA": "delta",
    r"^BSWA\+DELTA|^\d x \d+ features": "bswa,delta",
    "initialized from Transformer|growing BPTT": "feedback",
    r"^Transformer-XL$": "swa",
    r"^TransformerBSWA$": "bswa",
    "^Feedback": "feedback",
    "^Transformer": "transformer",
    "layer|average|weighted sum": "feedback",
    "LSTM": "lstm",
    "RMT": "rmt",
    "AutoCompressor": "autocompressor",
    "Block-Recurrent": "bswa,block_recurrent",
    "T2R 75%": "linear,linear,linear,full",
    "ELU|RFA|T2R|pretrained|from scratch|finetuning|frozen": "linear",
    r"^FM\d": "fm",
    r"^M\d+_SG": "bswa_sg",
    r"^M\d|^window|^n-grams": "bswa",
}


def expected(experiment, name):
    if experiment.id.startswith("t2r") and name == "Transformer":
        return "full"
    if re.search("translation|summaries", experiment.id) and name.startswith("Transformer"):
        return "full"
    found = (kind for pattern, kind in NAMES.items() if re.search(pattern, name))
    return next(found, "fam" if experiment.id.startswith(("fam", "memory")) else "feedback")


def kind(model):
    return ",".join(mixer_pattern(model)) if model.stack == "residual" else model.stack


def test_each_file_has_experiments_with_ids_of_their_own():
    files = [f for f in Path(experiments.__file__).parent.glob("*.py") if f.name[0] != "_"]
    modules = [importlib.import_module(f"{experiments.__name__}.{file.stem}") for file in files]
    found = {
        id(value): value.id
        for module in modules
        for name, values in vars(module).items()
        if not name.startswith("_")
        for value in (values if isinstance(values, tuple) else (values,))
        if isinstance(value, Experiment)
    }
    assert len(files) > 30
    assert sorted(found.values()) == sorted(EXPERIMENTS)


@pytest.fixture
def no_data(monkeypatch):
    for measure in (
        CodeTexts,
        KeysAndCodeMeasure,
        PasskeyMeasure,
        PennTreebankMeasure,
        PairSummaryMeasure,
        TranslationMeasure,
    ):
        monkeypatch.setattr(measure, "prepare", lambda *_: ())


def configs_of(experiment, root: Path, size):
    """Return the config of each variant, that continues a stub of its base."""
    found = {}
    experiment = experiment.at(size)
    for cell in make_cells(experiment, root, 1, (), size, ()):
        config = cell.config(experiment)
        if cell.variant:
            found[cell.variant] = config
        folder = cell.training_folder(experiment)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(to_json(config))
        (folder / "tokenizer.model").touch()
    return found


@each
@pytest.mark.parametrize("size", SIZES)
def test_models_are_what_their_names_say(experiment, size, tmp_path, no_data):
    if size == "paper" and not experiment.at_paper:
        return
    for name, config in configs_of(experiment, tmp_path, size).items():
        assert kind(config.model) == expected(experiment, name), name
        variant = experiment.at(size).variant(name)
        continues = variant.continues or (experiment.has_base(size) and variant.continues == "")
        assert bool(config.init) == bool(continues)
        segments = re.match(r"F?M(\d+)", name)
        if segments:
            assert config.model.memory_segments == int(segments[1])


@each
def test_variants_have_equally_many_tokens_unless_said(experiment, tmp_path):
    def tokens(config):
        return config.train.steps * config.data.batch * config.data.length

    def total(variant):
        own = tokens(experiment.make_config(variant, 0, "here"))
        if variant.continues:
            return own + total(experiment.variant(variant.continues))
        is_based = experiment.base is not None and variant.continues is not None
        return own + (tokens(experiment.make_base_config(0)) if is_based else 0)

    found = {total(variant) for variant in experiment.variants}
    assert (len(found) > 1) == bool(experiment.unequal)


@each
def test_variants_have_equally_many_parameters_unless_said(experiment, tmp_path, no_data):
    def count(config):
        # few tokens, as in toy tasks, whose embeddings are no large part of the parameters
        known = config.model.vocab_size or getattr(experiment.measure, "vocabulary", 0) or 100
        found = count_params(replace(config.model, vocab_size=known))
        return found.weights + found.adapters

    numbers = [count(config) for config in configs_of(experiment, tmp_path, "here").values()]
    assert (max(numbers) > 1.02 * min(numbers)) == bool(experiment.unequal_parameters)


@each
@pytest.mark.parametrize("size", SIZES)
def test_claims_are_of_what_is_measured(experiment, size):
    if size == "paper" and not experiment.at_paper:
        return
    experiment = experiment.at(size)
    assert experiment.orderings
    names = {variant.name for variant in experiment.variants}
    scores = {score.name for score in experiment.scores}
    for ordering in experiment.orderings:
        assert {ordering.better, ordering.worse, *ordering.wider_than} <= names
        assert len(ordering.wider_than) in (0, 2)
        assert ordering.score in scores | {""}
    assert len(set(experiment.orderings)) == len(experiment.orderings)
    assert set(experiment.drawn) <= {score.name for score in experiment.scores}
    assert not (experiment.drawn and experiment.measure.points)


@pytest.mark.parametrize("name", ["fam-figure-3", "fam-figure-8", "fam-figure-10"])
def test_passkeys_are_the_same_for_all_models(name):
    """The key first, one question at one place, no smeared keys: what rivals can do, too."""
    experiment = EXPERIMENTS[name]
    configs = {v.name: experiment.make_config(v, 0, "here") for v in experiment.variants}
    for config in configs.values():
        assert config.data == configs["M1"].data
        assert config.train == configs["M1"].train
        assert not config.model.smeared_keys
        passkey = config.data.passkey
        assert (passkey.needle_within, passkey.ask_every) == (0, 0)
        assert passkey.multiple == config.model.block_len
    for name, update in (("FAM", "sum"), ("gated FAM", "gated")):
        model = configs[name].model
        assert (model.fam_update, model.memory_segments) == (update, 0)
    # what is claimed of FAM is claimed of the paper's
    assert not any("gated FAM" in (o.better, o.worse) for o in experiment.orderings)


def test_the_papers_documents_fit_their_rows():
    experiment = EXPERIMENTS["fam-figure-3"]
    for variant in experiment.variants_at("paper"):
        config = experiment.make_config(variant, 0, "paper")
        assert config.data.length > config.data.passkey.max_length == 18_432
        assert config.data.repeat_len == 0
    names = [variant.name for variant in experiment.variants_at("paper")]
    assert "gated FAM" not in names
    cells = make_cells(experiment, Path("x"), 1, (), "paper", ())
    assert [cell.variant for cell in cells] == names


@pytest.mark.parametrize(("multiple", "anywhere"), [(1, True), (32, False)])
def test_questions_are_where_they_were_in_training(multiple, anywhere, monkeypatch):
    experiment, asked = EXPERIMENTS["fam-figure-8"], []

    class Run:
        config = experiment.make_config(
            experiment.variants[0], 0, "here", (f"data.passkey.multiple={multiple}",)
        )

    def evaluate(run, lengths, examples, **options):
        asked.append(options["anywhere"])
        return [{"length": n, "key_accuracy": 1.0, "key_chance": 0.0} for n in lengths]

    monkeypatch.setattr(measures_module, "evaluate_passkey", evaluate)
    PasskeyMeasure((128,)).measure(Run, Path("x"), quiet=True)
    assert asked == [anywhere]


def test_a_pretrained_model_is_measured_on_keys_and_on_code(monkeypatch, tmp_path):
    experiment, counts = EXPERIMENTS["memory-finetune-keys"], {}

    class Run:
        config = experiment.make_config(experiment.variants[0], 0, "here")

    def evaluate(run, lengths, examples, **_):
        counts.update({n: examples(n) for n in lengths})
        return [{"length": n, "key_accuracy": 1 / n, "key_chance": 0.0} for n in lengths]

    monkeypatch.setattr(measures_module, "evaluate_passkey", evaluate)
    text = {"perplexity": 20.0, "bits_per_byte": 1.5, "accuracy": 0.4}
    text = {**text, "uniform": text, "unigram": text}
    monkeypatch.setattr(measures_module, "evaluate_text", lambda *_, **__: text)
    monkeypatch.setattr(CodeMeasure, "held_out", lambda *_: "code")
    measure = KeysAndCodeMeasure((100, 200_000, 3_200_000), examples=32)
    found = measure.measure(Run, tmp_path, quiet=True)
    assert found.scores["100"] == 0.01
    assert found.scores["bits per byte"] == 1.5
    assert {score.name for score in measure.scores} == set(found.scores)
    assert not measure.scores[-1].higher_is_better
    assert counts == {100: 32, 200_000: 16, 3_200_000: 8}


def test_a_finetuned_models_block_holds_the_shortest_document(tmp_path):
    experiment = EXPERIMENTS["memory-finetune-keys"]
    # a part of the library: another Python has another one
    texts = Path(sysconfig.get_paths()["stdlib"], "email")
    vocabulary = experiment.measure.vocabulary
    tokenizer = train_sentencepiece(str(texts), vocabulary, tmp_path / "m.model")
    shortest = Passkey(tokenizer, 5).shortest
    for variant in experiment.variants:
        config = experiment.make_config(variant, 0, "here")
        assert shortest <= config.data.passkey.min_length <= config.model.block_len
        assert config.data.passkey.start_length == config.model.block_len
        assert config.data.length == config.data.passkey.max_length == 15 * config.model.block_len
        assert config.data.passkey.needle_within in (0, config.data.length)


def test_losses_far_from_the_beginning_are_of_all_tokens_there(monkeypatch, tmp_path):
    # 100 tokens that cost 1 nat each up to 16,384, and 300 that cost 2 up to 65,536
    rows = [
        {"from": 2**n // 2, "to": 2**n - 1, "tokens": 100, "loss": float(n)} for n in range(10, 14)
    ]
    rows += [
        {"from": 8192, "to": 16_383, "tokens": 100, "loss": 1.0},
        {"from": 16_384, "to": 32_767, "tokens": 200, "loss": 2.0},
        {"from": 32_768, "to": 65_535, "tokens": 100, "loss": 2.0},
    ]
    result = {"by_position": rows, "bits_per_byte": 1.5}
    monkeypatch.setattr(measures_module, "evaluate_text", lambda *_, **__: result)
    monkeypatch.setattr(CodeByPosition, "held_out", lambda *_: "code")
    measure = CodeByPosition()
    found = measure.measure(None, tmp_path, quiet=True).scores
    assert found["beyond 8,192"] == 1.75
    assert found["bits per byte"] == 1.5
    assert found["to 1,024"] == 10.0
    assert found["to 8,192"] == 13.0
    assert found["to 32,768"] == 2.0
    assert [score.name for score in measure.scores][1:-1] == list(measure.points)
    assert set(found) == {score.name for score in measure.scores}


def test_bptt_is_increased_and_not_only_longer():
    table = EXPERIMENTS["ft-table-6"]
    for variant in table.variants:
        train = table.make_config(variant, 0, "here").train
        assert (train.bptt_start > 0) == ("BPTT" in variant.name)
        # at its longest for a quarter of the steps, as the paper's
        assert 4 * train.bptt_double_every in (0, train.steps)


def test_the_transformer_sees_whole_episodes():
    for name in ("random-walk", "algorithmic-3", "algorithmic-5"):
        experiment = EXPERIMENTS[f"ft-table-1-{name}"]
        toy = experiment.make_config(experiment.variant("Transformer"), 0, "here").data.toy
        assert toy.start_steps == 0
        grown = experiment.make_config(experiment.variant("Feedback"), 0, "here").data.toy
        assert grown.start_steps > 0
    assert "75.3%" in EXPERIMENTS["ft-table-1-random-walk"].note
    claims = {
        number: {
            (o.better, o.worse) for o in EXPERIMENTS[f"ft-table-1-algorithmic-{number}"].orderings
        }
        for number in (3, 5)
    }
    assert ("LSTM", "Transformer") in claims[3]
    assert ("Transformer", "LSTM") in claims[5]


def test_a_shallow_feedback_transformer_is_finetuned_against_a_deeper_transformer(
    tmp_path, no_data
):
    experiment = EXPERIMENTS["ft-v1-table-2"]
    for size, layers, rate in (("here", 4, 2e-4), ("paper", 6, 1.5e-4)):
        transformer, feedback = configs_of(experiment, tmp_path / size, size).values()
        assert (transformer.model.layers, feedback.model.layers) == (layers, 2)
        assert feedback.optimizer.learning_rate == rate
        assert feedback.train.steps < transformer.train.steps / 10


def test_shared_keys_are_the_papers_smaller_model():
    experiment = EXPERIMENTS["ft-table-3"]
    assert experiment.measure.scores[0].name == "perplexity"
    for size in SIZES:
        shared = {
            v.name: experiment.make_config(v, 0, size).model.feedback.shared_kv
            for v in experiment.variants
        }
        assert [name for name, is_shared in shared.items() if is_shared] == [
            "Feedback of shared keys"
        ]
    assert experiment.variant("Feedback of shared keys").paper == {"perplexity": 18.3}


def test_beginnings_are_of_held_out_code(tmp_path, monkeypatch):
    folder = tmp_path / "code" / "held_out"
    folder.mkdir(parents=True)
    for name in ("cgi.py", "encodings.cp037.py", "socket.py"):
        (folder / name).write_text("a line\n" * 5000)
    monkeypatch.setattr(measures_module, "train_sentencepiece", lambda *_: None)
    measure = CodeMeasure(whole=False)
    measure.prepare(tmp_path)
    assert len(measure.held_out(tmp_path).split(",")) == 3
    short = sorted(Path(measure.held_out(tmp_path, whole=False)).iterdir())
    assert [path.name for path in short] == ["cgi.py", "socket.py"]
    texts = {path.read_text() for path in short}
    assert texts == {"a line\n" * (2**14 // 7)}


def test_learned_features_are_a_quarter_of_a_head():
    """As the paper's 32 of 128, and ELU has all of it."""
    experiment = EXPERIMENTS["t2r-table-1"]
    base = experiment.make_base_config(0).model
    assert base.width // base.heads == 64
    for name in ("T2R from scratch", "RFA pretrained", "T2R 75% pretrained"):
        model = experiment.make_config(experiment.variant(name), 0, "here").model
        assert 4 * model.linear.features == 64


def test_a_cell_has_the_folder_of_its_training(tmp_path, no_data):
    """Of equal trainings in two experiments one; another seed or version has another."""
    all_layers = Cell(str(tmp_path), "ft-figure-5", "all layers", 0, code="1")
    weighted = Cell(str(tmp_path), "ft-figure-8", "weighted sum", 0, code="1")

    def folder(cell):
        return cell.training_folder(EXPERIMENTS[cell.experiment])

    assert folder(all_layers) == folder(weighted)
    assert folder(all_layers).parent == tmp_path / TRAININGS
    others = [
        Cell(str(tmp_path), "ft-figure-5", "all layers", 0, code="2"),
        Cell(str(tmp_path), "ft-figure-5", "all layers", 1, code="1"),
        Cell(str(tmp_path), "ft-figure-5", "last layer", 0, code="1"),
    ]
    assert len({*map(folder, others), folder(weighted)}) == 4

"""seqio tasks and TFDS datasets as sources: complete, disjoint between lanes, resumable."""

import functools
import json
from functools import partial
from itertools import islice

import numpy as np
import pytest
import seqio
import small
import tensorflow as tf
import tensorflow_datasets as tfds

from famjax.config.schema import Config, DataConfig
from famjax.core.errors import UserError
from famjax.data.lanes import Lanes
from famjax.data.packing import PackedRows
from famjax.data.pairs import Pairs
from famjax.data.seqio_tasks import TfSource
from famjax.data.train_tokenizer import train_sentencepiece
from famjax.experiment.load import override
from famjax.tokenizers.load import load_tokenizer
from famjax.train.loop import train

COUNT = 23


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Return a tokenizer for the tasks 'lines' (targets), 'pairs' (inputs too) and 'mixed'."""
    folder = tmp_path_factory.mktemp("seqio")
    lines = [f"question {i}\tanswer {i} " + "long " * 200 for i in range(COUNT)]
    (folder / "lines.txt").write_text("\n".join(lines))
    train_sentencepiece(str(folder / "lines.txt"), 300, folder / "m.model")
    feature = seqio.Feature(seqio.SentencePieceVocabulary(str(folder / "m.model")), add_eos=True)
    source = seqio.TextLineDataSource({"train": str(folder / "lines.txt")})
    end = [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]

    def targets(dataset):
        return dataset.map(lambda line: {"targets": line})

    seqio.TaskRegistry.add(
        "lines", source, preprocessors=[targets, *end], output_features={"targets": feature}
    )

    def pairs(dataset):
        parts = dataset.map(lambda line: tf.strings.split(line, "\t"))
        return parts.map(lambda part: {"inputs": part[0], "targets": part[1]})

    seqio.TaskRegistry.add(
        "pairs",
        source,
        preprocessors=[pairs, *end],
        output_features={"inputs": feature, "targets": feature},
    )
    seqio.TaskRegistry.add(
        "tokens_alone",
        source,
        preprocessors=[pairs, partial(end[0], copy_pretokenized=False), end[1]],
        output_features={"inputs": feature, "targets": feature},
    )

    @seqio.map_over_dataset(num_seeds=1)
    def numbered(example, seed):
        number = tf.strings.as_string(tf.random.stateless_uniform([], seed, 0, 1000, tf.int32))
        return {key: text + " " + number for key, text in example.items()}

    seqio.TaskRegistry.add(
        "numbered:at_random",
        source,
        preprocessors=[pairs, numbered, *end],
        output_features={"inputs": feature, "targets": feature},
    )
    seqio.MixtureRegistry.add("mixed", ["lines"], default_rate=1.0)
    yield load_tokenizer(str(folder / "m.model"))
    seqio.MixtureRegistry.remove("mixed")
    seqio.TaskRegistry.remove("lines")
    seqio.TaskRegistry.remove("pairs")
    seqio.TaskRegistry.remove("tokens_alone")
    seqio.TaskRegistry.remove("numbered:at_random")


def document(source, lane, lanes, k):
    pieces = list(source.open(source.key(lane, lanes, k)))
    return np.concatenate([p.tokens for p in pieces]), np.concatenate([p.weights for p in pieces])


@pytest.mark.parametrize("name", ["lines", "mixed"])
def test_lanes_of_a_task_are_disjoint_and_nothing_is_trimmed(tokenizer, name):
    source = TfSource(DataConfig(seqio=name), tokenizer, seed=0)
    seen = []
    for lane in range(3):
        texts = set()
        for k in range(len(range(lane, COUNT, 3))):
            tokens, weights = document(source, lane, 3, k)
            assert tokens[0] == tokenizer.bos_id
            assert (tokens == tokenizer.eos_id).sum() == 1
            assert weights[1:].all()
            assert len(tokens) > 190
            texts.add(tokenizer.decode(tokens).split("\t")[0])
        seen += sorted(texts)
    assert len(seen) == len(set(seen))
    if name == "lines":  # a mixture repeats its tasks before shuffling
        assert sorted(seen) == sorted(f"question {i}" for i in range(COUNT))


def test_inputs_have_weight_zero(tokenizer):
    tokens, weights = document(TfSource(DataConfig(seqio="pairs"), tokenizer, 0), 0, 1, 0)
    assert tokenizer.decode(tokens[weights == 0]).startswith("question")
    assert tokenizer.decode(tokens[weights == 1]).startswith("answer")


@pytest.mark.parametrize("name", ["lines", "mixed"])
def test_documents_do_not_depend_on_where_reading_starts(tokenizer, name):
    data = DataConfig(seqio=name)
    source = TfSource(data, tokenizer, seed=0)
    expected = [document(source, 1, 2, k)[0] for k in range(2 * COUNT)]
    assert tokenizer.decode(expected[0]) != tokenizer.decode(expected[COUNT // 2])
    for k in (3, COUNT + 3):
        np.testing.assert_array_equal(
            document(TfSource(data, tokenizer, seed=0), 1, 2, k)[0], expected[k]
        )
    other = [document(TfSource(data, tokenizer, seed=1), 1, 2, k)[0] for k in range(3)]
    assert any(not np.array_equal(a, b) for a, b in zip(other, expected, strict=False))


def test_each_of_two_readers_starts_a_lane_once(tokenizer, monkeypatch):
    """As after `data.batch` grew: each reader takes every second document, at its own speed."""
    data, started = DataConfig(seqio="lines"), []
    expected = [document(TfSource(data, tokenizer, 0), 0, 1, k)[0] for k in range(8)]
    examples = TfSource._examples

    def count_examples(*args):
        started.append(args)
        return examples(*args)

    monkeypatch.setattr(TfSource, "_examples", count_examples)
    source = TfSource(data, tokenizer, 0)
    for k in (0, 2, 4, 1, 3, 6, 5, 7):
        np.testing.assert_array_equal(document(source, 0, 1, k)[0], expected[k])
    assert len(started) == 2


def test_lanes_resume_in_the_middle_of_an_example(tokenizer):
    data = DataConfig(seqio="lines")
    iterator = iter(Lanes(TfSource(data, tokenizer, seed=0), 2, 48, 16))
    for _ in range(17):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    resumed = iter(Lanes(TfSource(data, tokenizer, seed=0), 2, 48, 16))
    resumed.set_state(state)
    for a, b in islice(zip(iterator, resumed, strict=False), 12):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_a_changed_dataset_cannot_resume(tokenizer):
    for name in ("lines", "mixed"):
        source = TfSource(DataConfig(seqio=name), tokenizer, 0)
        state = json.loads(json.dumps(source.get_state()))
        source.set_state(state)
        with pytest.raises(UserError, match=rf"{name}: the set changed .*examples \[3\] then"):
            source.set_state(state | {"examples": [3]})


def test_seqio_mistakes_are_one_line_errors(tokenizer):
    with pytest.raises(UserError, match=r"data\.seqio=line: .*did you mean 'lines'"):
        TfSource(DataConfig(seqio="line"), tokenizer, 0)
    with pytest.raises(UserError, match=r"its vocabulary has \d+ ids, data\.tokenizer=bytes only"):
        TfSource(DataConfig(seqio="lines"), load_tokenizer("bytes"), 0)
    with pytest.raises(UserError, match="no validation or test split, only train"):
        TfSource(DataConfig(seqio="lines"), tokenizer, 0, "holdout")
    source = TfSource(DataConfig(seqio="lines"), tokenizer, 0)
    with pytest.raises(UserError, match=r"fewer examples than lanes; lower data\.batch=100"):
        document(source, 99, 100, 0)


def test_the_text_of_a_tfds_dataset_is_read(tmp_path):
    tokenizer = load_tokenizer("bytes")

    class Poems(tfds.core.GeneratorBasedBuilder):
        """Poems."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "id": np.int64})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(), "test": self._generate_examples()}

        def _generate_examples(self):
            for i in range(11):
                yield i, {"text": f"poëm {i}", "id": i}

    with pytest.MonkeyPatch.context() as patch:
        builder = Poems(data_dir=tmp_path)
        patch.setattr(tfds, "builder", lambda name: builder)
        source = TfSource(DataConfig(tfds="poems"), tokenizer, 0)
        texts = [
            tokenizer.decode(document(source, lane, 2, k)[0])
            for lane in range(2)
            for k in range(len(range(lane, 11, 2)))
        ]
        assert sorted(texts) == sorted(f"poëm {i}" for i in range(11))
        assert TfSource(DataConfig(tfds="poems"), tokenizer, 0, "holdout").report() == (
            "data.tfds=poems, split 'test'"
        )
        with pytest.raises(UserError, match=r"no feature 'txt', set data\.feature to one of"):
            TfSource(DataConfig(tfds="poems", feature="txt"), tokenizer, 0)
        source = TfSource(DataConfig(tfds="poems", feature="id"), tokenizer, 0)
        with pytest.raises(UserError, match="feature 'id' is not text"):
            document(source, 0, 1, 0)


@pytest.mark.long
def test_an_unknown_tfds_dataset_is_rejected(monkeypatch):
    """The suggestion needs no network, unlike the list of community datasets."""
    community = tfds.core.community
    monkeypatch.setattr(community, "community_register", lambda: pytest.fail("network access"))
    with pytest.raises(UserError, match="knows no such set; did you mean 'imdb_reviews'"):
        TfSource(DataConfig(tfds="imdb_review"), load_tokenizer("bytes"), 0)


@pytest.mark.long
def test_a_set_that_cannot_be_downloaded_comes_with_what_prepares_it(tmp_path, monkeypatch, capsys):
    def fail(self, **kwargs):
        raise OSError("no route to host\nafter 5 tries")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", fail)
    monkeypatch.setattr(tfds, "builder", functools.partial(tfds.builder, data_dir=tmp_path))
    said = r"could not be prepared \(no route to host\); run `tfds build mnist` where there is a n"
    with pytest.raises(UserError, match=said):
        TfSource(DataConfig(tfds="mnist"), load_tokenizer("bytes"), 0)
    assert f"TFDS downloads it to {tmp_path}/mnist" in capsys.readouterr().err


def test_a_mocked_public_dataset_works_with_lanes_and_packing(tmp_path):
    """A stand-in for a public dataset: TFDS generates random examples of its features offline."""
    tokenizer = load_tokenizer("bytes")

    class Letters(tfds.core.GeneratorBasedBuilder):
        """Letters."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": ((i, {"text": "unused"}) for i in range(9))}

        def _generate_examples(self):
            raise AssertionError

    builder = Letters(data_dir=tmp_path)
    builder.download_and_prepare()
    with pytest.MonkeyPatch.context() as patch, tfds.testing.mock_data(num_examples=9):
        patch.setattr(tfds, "builder", lambda name: builder)
        source = TfSource(DataConfig(tfds="letters"), tokenizer, 0)
        texts = {tokenizer.decode(document(source, 0, 1, k)[0]) for k in range(9)}
        assert "unused" not in texts
        assert len(texts) == 9
        lanes = next(iter(Lanes(source, 2, 32, 8)))
        assert lanes["reset"].any(axis=1).all()
        packed = next(iter(PackedRows(source, tokenizer, 2, 32, seed=0)))
        assert packed["valid"].all()


def test_pairs_of_a_task(tokenizer):
    """The texts before tokenization, or what a task's tokens say; each without outer spaces."""
    for task in ("pairs", "tokens_alone"):
        pairs = Pairs(f"seqio:{task}:train:inputs", f"seqio:{task}:train:targets")
        assert len(pairs) == COUNT
        assert pairs[7] == ("question 7", f"answer 7 {' '.join(['long'] * 200)}")


def test_both_texts_of_a_pair_are_of_one_example(tokenizer):
    """Of a task, too, that draws numbers."""
    name = "seqio:numbered:at_random:train"
    pairs = Pairs(f"{name}:inputs", f"{name}:targets")
    ends = {tuple(text.split()[-1] for text in pairs[i]) for i in range(COUNT)}
    assert all(source == target for source, target in ends)
    assert len(ends) > COUNT // 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("seqio:pear:train:inputs", "no such task is registered.*did you mean 'pairs'"),
        ("seqio:pairs:dev:inputs", "has no split 'dev'; write seqio:pairs:SPLIT:FEATURE, .* train"),
        ("seqio:pairs:train:source", "has no feature 'source'.* inputs, targets"),
    ],
)
def test_mistakes_in_the_name_of_a_task(tokenizer, name, message):
    with pytest.raises(UserError, match=message):
        Pairs(name, "seqio:pairs:train:targets")


def assert_trains_on(source, target, folder, capsys):
    """Check that a run reads the pairs, and continues, since they are the same."""
    shape = [given for given in small.COMMAND if "block_len" not in given]
    keys = [
        *("model.block_len=1", "model.mixer=full", "model.capacity=1100", "model.encoder.layers=1"),
        *("data.task=translate", "data.layout=pairs", "data.length=1100", "data.source_length=64"),
        *(f"data.source={source}", f"data.target={target}", "train.steps=1"),
    ]
    given = override(Config(), [*shape, *keys])
    train(given, folder / "run")
    assert f"{COUNT} pairs; rows are " in capsys.readouterr().err
    assert train(override(given, ["train.steps=2"]), folder / "run", quiet=True).step == 2


@pytest.mark.long
@pytest.mark.usefixtures("one_device", "tokenizer")
def test_a_run_reads_the_pairs_of_a_task(tmp_path, capsys):
    name = "seqio:pairs:train"
    assert_trains_on(f"{name}:inputs", f"{name}:targets", tmp_path, capsys)


@pytest.mark.long
@pytest.mark.usefixtures("one_device")
def test_a_run_reads_the_pairs_of_a_tfds_set(tmp_path, monkeypatch, capsys):
    class Sentences(tfds.core.GeneratorBasedBuilder):
        """Sentences."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {name: tfds.features.Text() for name in ("de", "en")}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {"train": ((i, {"de": f"Satz {i}", "en": f"text {i}"}) for i in range(COUNT))}

        def _generate_examples(self):
            raise AssertionError

    builder = Sentences(data_dir=tmp_path / "tfds")
    monkeypatch.setattr(tfds, "builder", lambda name: {"sentences": builder}[name])
    name = "tfds:sentences:train"
    assert_trains_on(f"{name}:de", f"{name}:en", tmp_path, capsys)

"""The translation demo end to end, with models that are hardly trained."""

import gzip
import json

import pytest

from famjax import demo_translation
from famjax.demo_translation import TranslationDemo, demonstrate, make_config

SMALL = (
    *("model.width=16", "model.heads=1", "model.mlp_width=16", "model.encoder.layers=1"),
    *("data.batch=2", "data.length=64", "data.source_length=64", "train.steps=4"),
    *("train.log_every=2", "train.checkpoint_every=2"),
)


@pytest.fixture
def data(tmp_path):
    """A folder with pairs of words and their reversals."""
    folder = tmp_path / "captions"
    folder.mkdir()
    words = [f"{a}{b}{c}" for a in "abcdef" for b in "ghij" for c in "klm"]
    backwards = [word[::-1] for word in words]
    for name, lines in (("de", words), ("en", backwards)):
        with gzip.open(folder / f"train.{name}.gz", "wt") as file:
            file.write("\n".join(lines) + "\n")
        (folder / f"test_2016_flickr.{name}").write_text("\n".join(lines[:8]) + "\n")
    return folder


@pytest.fixture
def asked(monkeypatch):
    """The demos that `main` would run."""
    demos = []
    monkeypatch.setattr(demo_translation, "demonstrate", lambda demo: demos.append(demo) or 0)
    return demos


def test_arguments_name_the_captions_and_change_the_config(data, asked, monkeypatch):
    monkeypatch.setattr("sys.argv", ["demo", str(data), "model.stack=feedback", "data.batch=8"])
    assert demo_translation.main() == 0
    (demo,) = asked
    assert demo.train == tuple(str(data / f"train.{language}.gz") for language in ("de", "en"))
    assert demo.test == tuple(str(data / f"test_2016_flickr.{name}") for name in ("de", "en"))
    config = make_config(demo)
    assert (config.data.source, config.data.target) == demo.train
    assert (config.model.stack, config.data.batch) == ("feedback", 8)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give the folder of Multi30k's captions"),
        (["data.batch=8"], "give the folder of Multi30k's captions"),
        (["{tmp}"], "has no train.de and train.en, plain or .gz"),
        (["{tmp}/captions"], "has no test.de and test.en or test_2016_flickr.de and"),
    ],
)
def test_missing_captions_are_told(arguments, told, data, asked, tmp_path, monkeypatch, capsys):
    (data / "test_2016_flickr.en").unlink()
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    monkeypatch.setattr("sys.argv", ["demo", *given])
    assert demo_translation.main() == 2
    assert told in capsys.readouterr().err
    assert not asked


@pytest.mark.slow
def test_model_is_trained_and_evaluated(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo_translation, "_VOCABULARY", 290)
    train = tuple(str(data / f"train.{language}.gz") for language in ("de", "en"))
    test = tuple(str(data / f"test_2016_flickr.{language}") for language in ("de", "en"))
    demo = TranslationDemo(tmp_path / "demo", train, test, overrides=SMALL)
    assert demonstrate(demo) == 0
    said = capsys.readouterr().out
    assert "beam 5" in said
    assert "agk" in said  # a sample
    result = json.loads((tmp_path / "demo" / "model" / "result.json").read_text())
    assert [found["beam"] for found in result["searches"]] == [1, 5]
    assert all(found["pairs"] == 8 for found in result["searches"])
    assert result["training_seconds"] > 0
    # a second call trains nothing
    monkeypatch.setattr(demo_translation, "train_and_time", None)
    assert demonstrate(demo) == 0

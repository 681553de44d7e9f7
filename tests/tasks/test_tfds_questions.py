"""Sets of questions of TFDS: its own builders, with records here in place of downloads."""

import json

import pytest
import tensorflow_datasets as tfds

from famjax.core.errors import UserError
from famjax.data.pairs import Pairs
from famjax.tasks import TASKS

QUESTIONS = [
    {"question": "Who sat?", "options": ["a cat", "a dog"], "gold_label": 1},
    {"question": "Who ran — and why?", "options": ["a cat", "a dog", "none"], "gold_label": 2},
]
IDS = {"question_unique_id": "q", "difficult": 0, "writer_label": 1}
NAMES = ("article_id", "set_unique_id", "writer_id", "source", "title", "topic", "url")
STORY = {"article": "A cat sat. A dog ran.", "questions": [{**q, **IDS} for q in QUESTIONS]}


def prepared(name, folder, monkeypatch, examples):
    """Have TFDS find a set whose examples by split are these of the builder's own making."""
    kind = tfds.builder_cls(name.partition("/")[0])
    monkeypatch.setattr(kind, "_split_generators", lambda self, _: examples(self))
    config = {"config": name.partition("/")[2]} if "/" in name else {}
    builder = kind(data_dir=folder, **config)
    monkeypatch.setattr(tfds, "builder", lambda asked: {name: builder}[asked])


def test_quality_is_the_set_of_its_own_file(tmp_path, monkeypatch):
    file = tmp_path / "quality.jsonl"
    file.write_text(json.dumps(dict.fromkeys(NAMES, "x") | STORY))
    splits = {"dev": "dev", "test": "test"}
    prepared(
        "quality/raw",
        tmp_path / "tfds",
        monkeypatch,
        lambda self: {name: self._generate_examples(file, name) for name in splits},
    )
    (own,), _ = TASKS["quality"].load(str(file), skip_broken=False)
    (found,), _ = TASKS["quality"].load("tfds:quality/raw:dev", skip_broken=False)
    assert found == own._replace(name="tfds:quality/raw:dev:1")
    with pytest.raises(UserError, match=r"raw:test:1: 2 questions have 0 gold_labels; take anoth"):
        TASKS["quality"].load("tfds:quality/raw:test", skip_broken=False)
    with pytest.raises(UserError, match=r"no split 'train'; write tfds:quality/raw:SPLIT, one of "):
        TASKS["quality"].load("tfds:quality/raw:train", skip_broken=False)


def test_qasper_is_that_of_scrolls(tmp_path, monkeypatch):
    record = {"id": "1", "pid": "1_0", "input": "Who?\n\nA cat sat.", "output": "a cat"}
    prepared("scrolls/qasper", tmp_path, monkeypatch, lambda self: {"validation": [("1", record)]})
    (found,), _ = TASKS["qasper"].load("tfds:scrolls/qasper:validation", skip_broken=False)
    assert found.text == "A cat sat."
    assert found.questions[0].references == ("a cat",)


def test_an_unknown_set_is_an_error(monkeypatch):
    monkeypatch.setattr(tfds.core.community, "community_register", None)
    with pytest.raises(UserError, match=r"tfds:qualty/raw:dev: TFDS knows no such set"):
        TASKS["quality"].load("tfds:qualty/raw:dev", skip_broken=False)


def test_features_of_a_set_are_pairs(tmp_path, monkeypatch):
    record = {"id": "1", "pid": "1_0", "input": "Who? ", "output": "a cat"}
    prepared("scrolls/qasper", tmp_path, monkeypatch, lambda self: {"validation": [("1", record)]})
    name = "tfds:scrolls/qasper:validation"
    assert Pairs(f"{name}:input", f"{name}:output")[0] == ("Who?", "a cat")
    with pytest.raises(UserError, match=r"no text 'de'; write .*:FEATURE, one of id, input, outp"):
        Pairs(f"{name}:de", f"{name}:output")

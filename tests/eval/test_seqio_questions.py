"""Sets of questions as seqio tasks."""

import json

import numpy as np
import pytest
import seqio

from famjax.core.errors import UserError
from famjax.eval.seqio_questions import register


@pytest.fixture
def files(tmp_path):
    file = tmp_path / "qa.jsonl"
    rows = [
        {"passage": "A cat sat.", "question": "Who?", "answer": ["a cat", "the tom"]},
        {"passage": "A dog ran.", "question": "Who ran?", "answer": ["a dog"]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_a_task_has_the_questions_of_its_files(files):
    name = register("narrativeqa", {"test": files}, seqio.ByteVocabulary())
    try:
        assert name == "famjax_narrativeqa"
        task = seqio.get_mixture_or_task(name)
        found = list(task.get_dataset(None, "test", shuffle=False).as_numpy_iterator())
        vocabulary = seqio.ByteVocabulary()
        assert vocabulary.decode(found[0]["inputs"]) == "A cat sat.\n\nQuestion: Who?\nAnswer:"
        assert vocabulary.decode(found[1]["targets"]) == "a dog"
        assert found[1]["targets"][-1] == 1
        targets = [task.postprocess_fn("", example=each, is_target=True) for each in found]
        outputs = [task.postprocess_fn(text, example=None) for text in ("tom", "dog cat")]
        (measure,) = task.metric_fns
        scores = measure(targets, outputs)
        assert scores["f1"] == pytest.approx(np.mean([1, 2 / 3]))
        assert scores["rouge_l"] == pytest.approx(np.mean([2 / 3, 0.5]))
    finally:
        seqio.TaskRegistry.remove(name)


def test_options_are_compared(tmp_path):
    file = tmp_path / "q.jsonl"
    asked = {"question": "Who?", "options": ["a cat", "a dog"], "gold_label": 2}
    file.write_text(json.dumps({"article": "x", "questions": [asked]}) + "\n")
    name = register("quality", {"dev": str(file)}, seqio.ByteVocabulary())
    try:
        task = seqio.get_mixture_or_task(name)
        (found,) = task.get_dataset(None, "dev", shuffle=False).as_numpy_iterator()
        target = task.postprocess_fn("", example=found, is_target=True)
        (measure,) = task.metric_fns
        assert measure([target], ["a dog"]) == {"exact": 1.0}
    finally:
        seqio.TaskRegistry.remove(name)


def test_what_is_no_set_of_questions_is_an_error(files):
    with pytest.raises(UserError, match="passkey: is no set of questions"):
        register("passkey", {"test": files}, seqio.ByteVocabulary())
    with pytest.raises(UserError, match="did you mean 'qasper'"):
        register("qasperr", {"test": files}, seqio.ByteVocabulary())

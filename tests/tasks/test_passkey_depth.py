"""`passkey_depth` has the tokens of `passkey`, so that runs trained on passkey know them."""

from __future__ import annotations

import numpy as np
import pytest

from famjax.core.errors import UserError
from famjax.experiment.load import load_config
from famjax.pipeline import make_source
from famjax.tasks import TASKS
from famjax.tasks.long.document import Document, LongTask
from famjax.tasks.passkey import NEEDLE, QUESTION, Passkey
from famjax.tokenizers.load import load_tokenizer

TOKENIZER = load_tokenizer("bytes")


def document(length: int, depth: float) -> Document:
    task = TASKS["passkey_depth"]
    assert isinstance(task, LongTask)
    return task.document(TOKENIZER, length, (0, 0, 1), depth=depth)


@pytest.mark.parametrize("depth", [0.0, 0.5, 0.95])
def test_tokens_are_those_of_passkey(depth: float) -> None:
    made = document(1200, depth)
    (question,) = made.content.questions
    (key,) = question.references
    tokens = np.concatenate(list(made.tokens()))
    needle = TOKENIZER.encode(NEEDLE.format(key=key))
    passkey = Passkey(TOKENIZER, digits=5)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(needle))
    (at,) = np.flatnonzero((windows == needle).all(1))
    before, after = tokens[1:at], tokens[at + len(needle) :]
    filler = np.concatenate([before, after])
    assert any((passkey._filler(start, len(filler)) == filler).all() for start in passkey.starts)
    assert abs(at / 1200 - depth * made.room / 1200) < 0.03
    assert (made.questions[0] == TOKENIZER.encode(QUESTION)).all()
    # the token after the question begins the key
    assert passkey.tail("", key).tolist()[: -len(key) - 1] == made.questions[0].tolist()


def test_keys_differ_and_have_five_digits() -> None:
    task = TASKS["passkey_depth"]
    assert isinstance(task, LongTask)
    made = [task.evaluated_document(TOKENIZER, 600, i, 20) for i in range(20)]
    keys = [each.content.questions[0].references[0] for each in made]
    assert len(set(keys)) == 20
    assert all(len(key) == 5 and key.isdigit() for key in keys)


def test_it_is_not_for_training() -> None:
    with pytest.raises(UserError, match=r"train on passkey with data\.passkey\.needle_within"):
        make_source(load_config("text_fam", ["data.task=passkey_depth"]), TOKENIZER)

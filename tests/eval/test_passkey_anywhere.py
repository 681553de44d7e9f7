"""Questions anywhere in their block: documents of one length are shortened by part of a block."""

from __future__ import annotations

import numpy as np
import pytest
import tiny

from famjax.eval.passkey import evaluate_passkey
from famjax.tasks.passkey import Passkey


def test_documents_are_shorter_by_a_part_of_a_block() -> None:
    run, length, w = tiny.run(), 450, tiny.SHAPE.block_len
    task = Passkey(run.tokenizer, 3)
    [row] = evaluate_passkey(run, [length], examples=6, batch=2, quiet=True, anywhere=True)
    hits, shorter = [], set()
    for number in range(6):
        n = length - int(np.random.default_rng([0, length, number, 3]).integers(w))
        shorter.add(length - n)
        pieces = list(task.document(np.random.default_rng([0, number, 2]), n))
        tokens = np.concatenate([piece.tokens for piece in pieces])[None]
        likeliest = tiny.logits(run.model, tokens[:, :-1]).argmax(-1)
        hits.append((likeliest == tokens[:, 1:])[0, -4:-1])
    assert row["token_accuracy"] == pytest.approx(np.mean(hits))
    # documents of one batch, too
    assert len(shorter) > 3
    assert max(shorter) < w


def test_no_document_is_too_short() -> None:
    shortest = Passkey(tiny.run().tokenizer, 3).shortest
    [row] = evaluate_passkey(tiny.run(), [shortest], examples=4, batch=1, quiet=True, anywhere=True)
    assert row["examples"] == 4

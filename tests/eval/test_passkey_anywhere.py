"""Questions anywhere in their block: documents of one length are shortened by part of a block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny

from famjax.eval.passkey import evaluate, evaluate_passkey
from famjax.eval.streaming import Streamer
from famjax.tasks.passkey import Passkey
from famjax.tasks.task import Request


@pytest.mark.parametrize("needle_within", [0, 40])
def test_documents_are_shorter_by_a_part_of_a_block(needle_within: int) -> None:
    # lengths less than a block apart, and documents of several calls
    run, lengths, w = tiny.run(), [451, 450, 300], tiny.SHAPE.block_len
    passkey = replace(run.config.data.passkey, needle_within=needle_within)
    run = replace(run, config=replace(run.config, data=replace(run.config.data, passkey=passkey)))
    task = Passkey(run.tokenizer, 3, needle_within=needle_within)
    # all lengths hold the farthest needle, so they share their documents
    assert task.shortest + needle_within + w <= 300
    seed = (0, 300 if needle_within else 0)
    rows = evaluate_passkey(run, lengths, examples=6, batch=2, quiet=True, anywhere=True)
    shorter = [int(np.random.default_rng([*seed, i, 3]).integers(w)) for i in range(6)]
    # documents of one batch, too
    assert len(set(shorter)) > 3
    for row, length in zip(rows, lengths, strict=True):
        hits = []
        for number in range(6):
            n = length - shorter[number]
            pieces = list(task.document(np.random.default_rng([*seed, number, 2]), n))
            tokens = np.concatenate([piece.tokens for piece in pieces])[None]
            likeliest = tiny.logits(run.model, tokens[:, :-1], pad=480).argmax(-1)
            hits.append((likeliest == tokens[:, 1:])[0, -4:-1])
        assert row["token_accuracy"] == pytest.approx(np.mean(hits))


def test_a_window_reads_the_same_questions_late(monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[np.ndarray] = []

    class RecordingStreamer(Streamer):
        def losses(self, tokens: np.ndarray, targets: np.ndarray) -> Any:
            losses.append(super().losses(tokens, targets)[0])
            return np.zeros(targets.shape), np.zeros(targets.shape, bool)

        def warm_up(self) -> None:
            pass

    monkeypatch.setattr("famjax.eval.passkey.Streamer", RecordingStreamer)
    monkeypatch.setattr("famjax.eval.streaming.CHUNK", 64)
    run, arguments = tiny.run_with("bswa"), ([900, 300, 310, 290], 4, 2, True)
    evaluate_passkey(run, *arguments, whole=True, anywhere=True)
    whole, losses[:] = list(losses), []
    evaluate_passkey(run, *arguments, whole=False, anywhere=True)
    assert len(whole) == 2 * 4
    np.testing.assert_equal(losses, whole)


def test_no_document_is_too_short() -> None:
    shortest = Passkey(tiny.run().tokenizer, 3).shortest
    [row] = evaluate_passkey(tiny.run(), [shortest], examples=4, batch=1, quiet=True, anywhere=True)
    assert row["examples"] == 4


def test_famjax_eval_asks_where_training_does() -> None:
    run, lengths = tiny.run(), [300]
    w = run.config.model.block_len
    for multiple, anywhere in ((1, True), (w, False)):
        passkey = replace(run.config.data.passkey, multiple=multiple)
        config = replace(run.config, data=replace(run.config.data, passkey=passkey))
        given = replace(run, config=config)
        request = Request("passkey", lengths=lengths, examples=4, batch=4, quiet=True)
        [row] = evaluate(given, request)
        read = {
            way: evaluate_passkey(given, lengths, 4, 4, quiet=True, anywhere=way)[0]["documents"]
            for way in (True, False)
        }
        assert read[True] != read[False]
        assert row["documents"] == read[anywhere]

"""Lanes at different places of different documents are streams by themselves."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from contracts.harness import KINDS, VOCAB, runner

from famjax.eval.lane_answers import answer_prompts, score_continuations
from famjax.eval.lane_stream import MOST_PADDING, LaneStream, plan_lanes, read_documents
from famjax.eval.memory import update_tokens
from famjax.eval.streaming import Streamer


@pytest.mark.parametrize("case", KINDS)
def test_each_lane_is_a_stream_by_itself(case: str) -> None:
    r = runner(case, x64=False)
    model = r.model(r.params)
    block = model.block_len
    rng = np.random.default_rng(0)
    most = model.stack.capacity or 100
    # of whole chunks, of parts of a block, and of less than a chunk
    chunk = 2 * block
    documents = [
        rng.integers(VOCAB, size=min(size, most - 4)).astype(np.int32)
        for size in (4 * block, 2 * block + 1, 5 * block - 1, 3, 4 * block + 2)
    ]
    sizes = [len(document) for document in documents]
    found = read_documents(LaneStream(model, 2, chunk), sizes, documents.__getitem__)
    ended = sorted(found, key=lambda each: each[0])
    assert [number for number, *_ in ended] == list(range(5))
    for first in (0, 2):
        group = ended[first : first + 3]
        stream = LaneStream(model, 3, chunk)
        stream.set_lanes([state for _, state, _ in group])
        width = max(-(-len(left) // block) for *_, left in group) * block or block
        rows = np.stack([np.pad(left, (0, width - len(left))) for *_, left in group])
        counts = np.array([len(left) for *_, left in group])
        stream.read_lanes(rows, counts, np.zeros(3, bool))
        for step in range(2):
            if step:
                stream.step_lanes(np.full((3, 1), 7, np.int32))
            for lane, (number, *_) in enumerate(group):
                # of a document of whole chunks nothing is left, so nothing was read
                if counts[lane] or step:
                    alone = Streamer(model, 1)
                    alone.read(np.append(documents[number], [7] * step)[None])
                    np.testing.assert_allclose(
                        stream.logits[lane], alone.logits[0], atol=3e-5, rtol=0
                    )


def test_answers_and_log_likelihoods_are_the_models_own() -> None:
    run = tiny.run_with("fam", seed=3)
    block = update_tokens(run.config)
    rng = np.random.default_rng(0)
    documents = [rng.integers(97, 122, size=size).astype(np.int32) for size in (30, 5, 17, 40)]
    prompts = [rng.integers(97, 122, size=size).astype(np.int32) for size in (3, 20, 1, 2)]
    reading = LaneStream(run.model, 2, 2 * block)
    found = list(read_documents(reading, list(map(len, documents)), documents.__getitem__))
    numbers = [number for number, *_ in found]
    texts = [np.concatenate([left, prompts[n]]) for n, _, left in found]
    states = [state for _, state, _ in found]
    stream = LaneStream(run.model, 5, 2 * block)
    most = [4, 9, 9, 9]
    answers = answer_prompts(stream, run.tokenizer, states, texts, most, lambda *_: False)
    continuations = [rng.integers(97, 122, size=n).astype(np.int32) for n in (1, 6, 9, 2)]
    sums = score_continuations(stream, states, texts, continuations)
    for lane, number in enumerate(numbers):
        before = np.concatenate([documents[number], prompts[number]])
        written: list[int] = []
        while len(written) < most[lane]:
            line = np.append(before, written).astype(np.int32)[None]
            written.append(int(tiny.logits(run.model, line)[0, -1].argmax()))
            if written[-1] in run.tokenizer.stop_ids:
                break
        stopped = written[-1] in run.tokenizer.stop_ids
        text = run.tokenizer.decode(written[:-1] if stopped else written)
        assert answers[lane] == (text, not stopped)
        both = np.concatenate([before, continuations[lane]])[None]
        logits = tiny.logits(run.model, both)[0].astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        at = np.arange(len(before) - 1, both.shape[1] - 1)
        assert sums[lane] == pytest.approx(logs[at, both[0, at + 1]].sum(), abs=1e-3)


def test_a_reset_at_every_block_leaves_the_last_block() -> None:
    run = tiny.run_with("bswa", seed=1)
    block = update_tokens(run.config)
    text = np.random.default_rng(0).integers(97, 122, size=3 * block + 5).astype(np.int32)
    stream = LaneStream(run.model, 1, 2 * block, reset_every=block)
    ((_, state, left),) = read_documents(stream, [len(text)], lambda _: text)
    stream.set_lanes([state])
    rows = np.pad(left, (0, 2 * block - len(left)))[None]
    stream.read_lanes(rows, np.array([len(left)]), np.zeros(1, bool))
    alone = Streamer(run.model, 1)
    alone.read(text[None, -5:])
    np.testing.assert_allclose(stream.logits, alone.logits, atol=3e-5, rtol=0)
    stream.step_lanes(np.array([[97]]))


@pytest.mark.parametrize(
    ("sizes", "batch"), [([7000, 40000, 12000, 9000, 30000, 8000], 8), ([9000] * 25, 8), ([500], 8)]
)
def test_little_is_padding(sizes: list[int], batch: int) -> None:
    plan = plan_lanes(sizes, batch, 64)
    assert plan.lanes <= batch
    assert plan.chunk % 64 == 0
    assert plan.padding <= MOST_PADDING
    # most of it is read in whole chunks
    assert sum(size // plan.chunk * plan.chunk for size in sizes) >= sum(sizes) / 2


def test_equal_documents_are_read_side_by_side() -> None:
    assert plan_lanes([10000] * 16, 8, 64).lanes == 8

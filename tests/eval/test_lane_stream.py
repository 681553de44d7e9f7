"""Lanes at different places of different documents are streams by themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
from contracts.harness import FURTHER, VOCAB, but, kinds, runner

from famjax.core.errors import UserError
from famjax.eval.ablations import parse_ablations
from famjax.eval.lane_answers import answer_prompts, score_continuations
from famjax.eval.lane_stream import MAX_PADDING, LaneStream, plan_lanes, read_documents
from famjax.eval.memory_usage import update_tokens
from famjax.eval.streaming import Streamer


# one of each kind of state
@kinds(
    slow=(*FURTHER, "swa-2", "bswa_sg-2", "fm-2", "transformer-shared", "autocompressor"),
    long=but("full", "fam-1-3", "lstm"),
)
def test_each_lane_is_a_stream_by_itself(case: str) -> None:
    r = runner(case, x64=False)
    model = r.model(r.params)
    block = model.block_len
    rng = np.random.default_rng(0)
    max_tokens = model.stack.capacity or 100
    # of whole chunks, of parts of a block, and of less than a chunk
    chunk = 2 * block
    documents = [
        rng.integers(VOCAB, size=min(size, max_tokens - 4)).astype(np.int32)
        for size in (4 * block, 2 * block + 1, 5 * block - 1, 3, 4 * block + 2)
    ]
    stream = LaneStream(model, 2, chunk)
    pieces = [np.array_split(document, 3) for document in documents]
    found = read_documents(stream, [4, 1, 3, 2, 0], pieces.__getitem__)
    ended = sorted(found, key=lambda each: each.number)
    assert [each.number for each in ended] == list(range(5))
    for first in (0, 2):
        group = ended[first : first + 3]
        stream = LaneStream(model, 3, chunk)
        stream.set_lanes([each.state for each in group])
        rows = np.stack([np.pad(each.left, (0, block - len(each.left))) for each in group])
        counts = np.array([len(each.left) for each in group])
        stream.read_lanes(rows, counts, np.zeros(3, bool))
        for step in range(2):
            if step:
                stream.step_lanes(np.full((3, 1), 7, np.int32))
            for lane, each in enumerate(group):
                assert each.state.tokens + len(each.left) == len(documents[each.number])
                # of a document of whole blocks nothing is left, so nothing was read
                if counts[lane] or step:
                    alone = Streamer(model, 1)
                    alone.read(np.append(documents[each.number], [7] * step)[None])
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
    found = list(read_documents(reading, range(4), lambda number: [documents[number]]))
    numbers = [number for number, *_ in found]
    texts = [np.concatenate([left, prompts[n]]) for n, _, left in found]
    states = [state for _, state, _ in found]
    stream = LaneStream(run.model, 5, 2 * block)
    max_tokens = [4, 9, 9, 9]
    answers = answer_prompts(stream, run.tokenizer, states, texts, max_tokens, lambda *_: False)
    continuations = [rng.integers(97, 122, size=n).astype(np.int32) for n in (1, 6, 9, 2)]
    scores = score_continuations(stream, states, texts, continuations)
    for lane, number in enumerate(numbers):
        before = np.concatenate([documents[number], prompts[number]])
        written: list[int] = []
        while len(written) < max_tokens[lane]:
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
        targets = both[0, at + 1]
        expected = logs[at, targets].sum()
        assert scores[lane].log_likelihood == pytest.approx(expected, abs=1e-3)
        assert scores[lane].is_greedy == bool((logs[at].argmax(-1) == targets).all())


def last_logits(run: Any, text: np.ndarray, ablation: str) -> np.ndarray:
    """Return the logits after a text of an ablated run, its last tokens read one by one."""
    stream = LaneStream(run.model, 2, 2 * run.model.block_len, ablation)
    (each,) = read_documents(stream, [0], lambda _: [text[:-2]])
    stream.set_lanes([each.state] * 2)
    rows = np.pad(each.left, (0, run.model.block_len - len(each.left)))[None]
    stream.read_lanes(np.repeat(rows, 2, 0), np.full(2, len(each.left)), np.zeros(2, bool))
    for token in text[-2:]:
        stream.step_lanes(np.full((2, 1), token))
    return np.asarray(stream.logits[0])


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    return np.random.default_rng(0).integers(97, 122, size=4 * 8 + 5).astype(np.int32)


@pytest.mark.parametrize("rest", [5, 1])
def test_a_reset_at_every_block_leaves_the_last_block(text: np.ndarray, rest: int) -> None:
    run = tiny.run_with("fam", seed=1, fam_update="gated")
    alone = Streamer(run.model, 1)
    alone.read(text[None, 32 : 32 + rest])
    found = last_logits(run, text[: 32 + rest], "reset")
    np.testing.assert_allclose(found, alone.logits[0], atol=3e-5, rtol=0)


@pytest.mark.long
def test_without_segments_and_memory_nothing_is_left(text: np.ndarray) -> None:
    """What each ablation leaves: without FAM a window, without a window's segments FAM alone."""
    for mixer in ("bswa", "fm"):
        window = tiny.run_with(mixer, seed=1, memory_segments=2)
        alone = Streamer(window.model, 1)
        alone.read(text[None, 32:])
        found = last_logits(window, text, "segments")
        np.testing.assert_allclose(found, alone.logits[0], atol=3e-5, rtol=0)
    fam = tiny.run_with("fam", seed=1, memory_segments=2)
    whole = last_logits(fam, text, "")
    without_memory, without_segments = (
        last_logits(fam, text, name) for name in ("memory", "segments")
    )
    assert np.abs(whole - without_memory).max() > 1e-3
    assert np.abs(whole - without_segments).max() > 1e-3
    # FAM alone carries the first token to the last; the window reaches two blocks in each layer
    other = np.concatenate([text[:1] + 1, text[1:]])
    assert (last_logits(fam, other, "segments") != without_segments).any()
    assert (last_logits(fam, other, "memory") != without_memory).any()
    none = tiny.run_with("fam", seed=1, memory_segments=0)
    np.testing.assert_array_equal(
        last_logits(none, other, "memory"), last_logits(none, text, "memory")
    )
    assert (last_logits(none, other, "") != last_logits(none, text, "")).any()


@pytest.mark.parametrize(
    ("mixer", "ablation", "said"),
    [
        ("bswa", "memory", "no memory beside its window"),
        ("full", "segments", "no memory segments"),
        ("fam", "segments", "no memory segments"),
    ],
)
def test_what_a_model_does_not_have_is_not_ablated(mixer: str, ablation: str, said: str) -> None:
    run = tiny.run_with(mixer, memory_segments=0)
    with pytest.raises(UserError, match=said):
        LaneStream(run.model, 1, 8, ablation)


def test_names_of_ablations() -> None:
    assert parse_ablations("segments, reset") == ("reset", "segments")
    assert parse_ablations("") == ()
    with pytest.raises(UserError, match="--ablate segment: unknown; did you mean 'segments'"):
        parse_ablations("segment")


@pytest.mark.parametrize(
    ("sizes", "batch"), [([7000, 40000, 12000, 9000, 30000, 8000], 8), ([9000] * 25, 8), ([500], 8)]
)
def test_little_is_padding(sizes: list[int], batch: int) -> None:
    plan = plan_lanes(sizes, batch, 64)
    assert plan.lanes <= batch
    assert plan.chunk % 64 == 0
    assert plan.padding <= MAX_PADDING


def test_equal_documents_are_read_side_by_side() -> None:
    assert plan_lanes([10000] * 16, 8, 64).lanes == 8

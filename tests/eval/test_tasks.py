"""Evaluation counts every token once, and its numbers equal direct computations."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from famjax.core.errors import UserError
from famjax.eval import text as text_module
from famjax.eval.lane_stream import LaneStream
from famjax.eval.passkey import Documents, evaluate_passkey
from famjax.eval.passkey import evaluate as evaluate_task
from famjax.eval.streaming import Streamer
from famjax.eval.text import evaluate_text
from famjax.ops.losses import token_losses
from famjax.tasks.passkey import QUESTION, Passkey
from famjax.tasks.task import Request
from famjax.train.run import Run

W, LONGEST = 8, 2048  # block_len; tokens of the longest direct computation
TEXTS = ["a", "short one", tiny.TEXT * 5, "é" * 40, tiny.TEXT * 20]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let documents span many calls."""
    monkeypatch.setattr("famjax.eval.text.CHUNK", 64)
    monkeypatch.setattr("famjax.eval.streaming.CHUNK", 64)


def write(folder: Path, texts: Sequence[str]) -> Path:
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    return folder


def line(text: str) -> np.ndarray:
    run = tiny.run()
    return np.array([[run.tokenizer.bos_id, *run.tokenizer.encode(text), run.tokenizer.eos_id]])


def direct_losses(run: Run, text: str, block: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return nll and hits of a document's tokens [t]; with `block`, of independent blocks."""
    tokens = line(text)
    read, targets = tokens[:, :-1], tokens[:, 1:]
    if block is None:
        logits = tiny.logits(run.model, read, pad=LONGEST)
    else:
        rows = np.pad(read, ((0, 0), (0, LONGEST - read.shape[1]))).reshape(-1, block)
        logits = tiny.logits(run.model, rows, pad=block).reshape(1, -1, 258)[:, : read.shape[1]]
    nats, right = token_losses(jnp.asarray(logits), targets)
    return np.asarray(nats)[0].astype(float), np.asarray(right)[0]


@pytest.mark.parametrize("batch", [1, 3])
def test_text_losses_equal_a_direct_computation(batch: int, tmp_path: Path) -> None:
    run = tiny.run()
    result = evaluate_text(run, str(write(tmp_path / "d", TEXTS)), batch=batch, quiet=True)
    size = sum(len(text.encode()) for text in TEXTS)
    for scores, block in ((result, None), (result["without_memory"], W)):
        nats, right = (
            np.concatenate(parts)
            for parts in zip(*(direct_losses(run, text, block) for text in TEXTS), strict=True)
        )
        assert scores["loss"] == pytest.approx(nats.mean(), rel=1e-5)
        assert scores["perplexity"] == pytest.approx(math.exp(nats.mean()), rel=1e-4)
        assert scores["bits_per_byte"] == pytest.approx(nats.sum() / size / math.log(2), rel=1e-5)
        assert scores["accuracy"] == pytest.approx(right.mean(), abs=2 / len(right))
    assert result["documents"] == len(TEXTS)
    assert result["documents_left"] == 0
    assert result["bytes"] == size
    assert result["tokens"] == size + len(TEXTS)
    gain = result["without_memory"]["loss"] - result["loss"]
    assert result["memory_gain"]["loss"] == pytest.approx(gain)
    assert len(result["by_document"]) == len(TEXTS)
    for row, text in zip(result["by_document"], TEXTS, strict=True):
        assert row["bytes"] == len(text.encode())
        assert row["tokens"] == len(text.encode()) + 1
        for name, block in (("nats", None), ("nats_without_memory", W)):
            assert row[name] == pytest.approx(direct_losses(run, text, block)[0].sum(), rel=1e-5)


def test_longest_documents_are_read_first_in_few_rows(tmp_path, monkeypatch):
    """More rows than two would wait for the longest document."""
    sizes = [3 * W, 20 * W, 5 * W, 2 * W]
    files = str(write(tmp_path / "d", ["x" * size for size in sizes]))
    passes, one_pass = [], text_module.one_pass

    def keep(documents, lanes, *rest):
        passes.append((documents, lanes))
        return one_pass(documents, lanes, *rest)

    monkeypatch.setattr(text_module, "one_pass", keep)
    result = evaluate_text(tiny.run(), files, batch=4, quiet=True)
    ((documents, lanes),) = passes
    assert lanes == 2
    assert result["bytes"] == sum(sizes)
    longest_first = [Path(key[0]).read_text() for key in documents.keys]
    assert [len(each) for each in longest_first] == sorted(sizes, reverse=True)
    # with a limit, a random part of the documents is read
    limited = evaluate_text(tiny.run(), files, batch=4, quiet=True, max_bytes=10**6)
    assert passes[1][1] == 4
    assert limited["loss"] == pytest.approx(result["loss"], rel=1e-5)


def test_predictions_without_context_equal_a_direct_computation(tmp_path: Path) -> None:
    """Each predicted token counts once for any windows."""
    files = str(write(tmp_path / "d", TEXTS))
    targets = np.concatenate([line(text)[0, 1:] for text in TEXTS])
    seen = np.unique(targets, return_counts=True)[1]
    entropy = -np.sum(seen / len(targets) * np.log(seen / len(targets)))
    size = sum(len(text.encode()) for text in TEXTS)
    for how in ({}, {"window": 4 * W, "score": W}):
        result = evaluate_text(tiny.run(), files, batch=2, quiet=True, **how)
        for name, loss, accuracy in (
            ("unigram", entropy, seen.max() / len(targets)),
            ("uniform", math.log(258), 1 / 258),
        ):
            assert result[name]["loss"] == pytest.approx(loss)
            assert result[name]["perplexity"] == pytest.approx(math.exp(loss))
            assert result[name]["accuracy"] == pytest.approx(accuracy)
            bits = loss * len(targets) / size / math.log(2)
            assert result[name]["bits_per_byte"] == pytest.approx(bits)


def test_loss_by_position_equals_a_direct_computation(tmp_path: Path) -> None:
    run = tiny.run()
    result = evaluate_text(run, str(write(tmp_path / "d", TEXTS)), quiet=True)
    nats, alone = ([direct_losses(run, text, block)[0] for text in TEXTS] for block in (None, W))
    rows = result["by_position"]
    assert [(row["from"], row["to"]) for row in rows] == [
        (0, 255),
        (256, 511),
        (512, 1023),
        (1024, 2047),
    ]
    for row in rows:
        window = slice(row["from"], row["to"] + 1)
        expected = np.concatenate([n[window] for n in nats])
        assert row["tokens"] == len(expected)
        assert row["loss"] == pytest.approx(expected.mean(), rel=1e-5)
        without = np.concatenate([n[window] for n in alone]).mean()
        assert row["loss_without_memory"] == pytest.approx(without, rel=1e-5)
    assert sum(row["tokens"] for row in rows) == result["tokens"]


def test_the_split_into_files_does_not_matter(tmp_path: Path) -> None:
    files = write(tmp_path / "d", TEXTS)
    expected = evaluate_text(tiny.run(), str(files), quiet=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    packed = tmp_path / "all.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.encode()))
    got = evaluate_text(tiny.run(), str(packed), batch=2, quiet=True)
    for key in ("tokens", "bytes", "documents"):
        assert got[key] == expected[key]
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_max_bytes_ends_between_documents(tmp_path: Path) -> None:
    files = str(write(tmp_path / "d", [tiny.TEXT * 5] * 6))
    result = evaluate_text(tiny.run(), files, max_bytes=400, batch=1, quiet=True)
    assert 0 < result["documents"] < 6
    assert result["documents"] + result["documents_left"] == 6
    assert result["bytes"] == result["documents"] * len((tiny.TEXT * 5).encode())
    # a trial only has to find mistakes
    request = Request("text", files, batch=2, quiet=True, is_trial=True)
    assert text_module.evaluate(tiny.run(), request)["documents"] == 2


def test_held_out_documents_are_the_default() -> None:
    result = evaluate_text(tiny.run(), quiet=True)
    assert result["bytes"] == pytest.approx(len((tiny.TEXT * 60).encode()) / 20, abs=20)


def test_text_of_passkey_runs_and_invalid_files(tmp_path: Path) -> None:
    run = tiny.run()
    passkey = replace(run.config, data=replace(run.config.data, task="passkey"))
    with pytest.raises(UserError, match="trained on passkey"):
        evaluate_text(replace(run, config=passkey), quiet=True)
    for content, what in ((b"", "no text"), (b"a\0b", "binary"), (b"a\xff", "UTF-8")):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(UserError, match=what):
            evaluate_text(run, str(tmp_path / "bad"), quiet=True)
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="empty"):
        evaluate_text(run, str(tmp_path / "empty.jsonl"), quiet=True)
    with pytest.raises(UserError, match="no such file"):
        evaluate_text(run, str(tmp_path / "none"), quiet=True)


def test_full_attention_rejects_a_document_beyond_its_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny.run_with("full")
    result = evaluate_text(run, str(write(tmp_path / "a", ["x" * 63, "ab"])), quiet=True)
    assert result["tokens"] == 67
    assert result["without_memory"]["loss"] != result["loss"]
    # before anything is read, by its name, with what can be done
    monkeypatch.setattr("famjax.eval.text._predictions", None)
    told = r"65 tokens of .*b/1.txt do not fit its cache of 64; --window 64 reads it in windows"
    with pytest.raises(UserError, match=told):
        evaluate_text(run, str(write(tmp_path / "b", ["x", "x" * 64])), quiet=True)


# passkey


def keys(count: int) -> list[str]:
    """Return the keys in the evaluation's documents."""
    task, length = Passkey(tiny.run().tokenizer, 3), 420
    found = []
    for number in range(count):
        rng = np.random.default_rng([0, 0, number, 2])
        tokens = np.concatenate([piece.tokens for piece in task.document(rng, length)])
        assert len(tokens) == length
        found.append(tiny.run().tokenizer.decode(tokens).split(QUESTION)[1])
    return found


class Oracle:
    """A stream that knows some answers: correct where `knows(row, token)` is true."""

    def __init__(self, stream: Streamer, knows: Any, log: list[Any]):
        self.stream, self.knows, self.log = stream, knows, log
        self.batch, self.chunk = stream.batch, stream.chunk

    def new_stream(self, batch: int | None = None) -> Oracle:
        return Oracle(self.stream.new_stream(batch), self.knows, self.log)

    def warm_up(self) -> None:
        pass

    def skim(self, tokens: np.ndarray) -> None:
        self.log.append(("skim", tokens))

    def copy(self) -> Oracle:
        return self

    def losses(self, tokens: np.ndarray, targets: np.ndarray) -> Any:
        self.log.append(("losses", targets))
        right = np.array([[self.knows(row, t) for t in line] for row, line in enumerate(targets)])
        return np.zeros(targets.shape), right


def test_passkey_counts_known_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    # row 0 is always correct, row 1 when the digit is less than 5, others never
    knows = lambda row, token: row == 0 or (row == 1 and token < ord("5"))  # noqa: E731
    oracle = lambda *args: Oracle(Streamer(*args), knows, log)  # noqa: E731
    monkeypatch.setattr("famjax.eval.passkey.Streamer", oracle)
    lengths = [420, 700]
    rows = evaluate_passkey(tiny.run(), lengths, examples=3, batch=2, quiet=True)
    assert [row["length"] for row in rows] == lengths
    found = keys(3)
    for row in rows:
        # rows 0 and 1, then row 0 again with a filler row that does not count
        hits = [[True] * 3, [int(d) < 5 for d in found[1]], [True] * 3]
        assert row["examples"] == 3
        assert row["token_accuracy"] == pytest.approx(np.mean(hits))
        assert row["key_accuracy"] == pytest.approx(np.mean([all(h) for h in hits]))
        assert row["key_chance"] == pytest.approx(1e-3)
    # two batches are read once, in chunks of 64, and asked twice
    skimmed = [tokens.shape for kind, tokens in log if kind == "skim"]
    asked = [targets.shape[1] for kind, targets in log if kind == "losses"]
    starts = [(n - Passkey(tiny.run().tokenizer, 3).question_len) // 64 * 64 for n in lengths]
    assert skimmed == [(2, 64)] * (2 * starts[1] // 64)
    assert asked == [n - start - 1 for n, start in zip(lengths, starts, strict=True)] * 2


@pytest.mark.parametrize("needle_within", [0, 300])
def test_passkey_of_a_model_equals_its_own_argmax(needle_within: int) -> None:
    run, lengths = tiny.run(), [450, 260]
    passkey = replace(run.config.data.passkey, needle_within=needle_within)
    run = replace(run, config=replace(run.config, data=replace(run.config.data, passkey=passkey)))
    task = Passkey(run.tokenizer, 3, needle_within=needle_within)
    rows = evaluate_passkey(run, lengths, examples=lambda n: 2 if n > 300 else 3, batch=4)
    for row, length in zip(rows, lengths, strict=True):
        hits = []
        for number in range(row["examples"]):
            # where the needle is depends on the length
            rng = np.random.default_rng([0, length if needle_within else 0, number, 2])
            tokens = np.concatenate([piece.tokens for piece in task.document(rng, length)])[None]
            likeliest = tiny.logits(run.model, tokens[:, :-1], pad=LONGEST).argmax(-1)
            hits.append((likeliest == tokens[:, 1:])[0, -4:-1])
        assert row["examples"] == (2 if length > 300 else 3)
        assert row["token_accuracy"] == pytest.approx(np.mean(hits))
        assert row["tokens_per_second"] > 0


@pytest.mark.long
def test_passkey_without_a_part_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, names = tiny.run_with("fam", seed=2, memory_segments=1), ("reset", "memory", "segments")
    tokens_of = Documents.tokens

    def all_wanted(*arguments: Any) -> Any:
        return (np.stack([piece[0], 1 + 0 * piece[0]]) for piece in tokens_of(*arguments))

    def likely(method: Any) -> Any:
        def losses(*arguments: Any) -> Any:
            nll, _ = method(*arguments)
            return nll, nll < np.log(258)

        return losses

    # a random model predicts next to nothing: every token counts, if it is likelier than by chance
    monkeypatch.setattr(Documents, "tokens", all_wanted)
    monkeypatch.setattr(Streamer, "losses", likely(Streamer.losses))
    monkeypatch.setattr(LaneStream, "lane_losses", likely(LaneStream.lane_losses))
    monkeypatch.setattr("famjax.eval.passkey._version", lambda *arguments: "")
    file, length = tmp_path / "answers.json", 450
    rows = evaluate_passkey(run, [length], 3, 2, quiet=True, file=file, ablate=names)
    batches = json.loads(file.read_text())["batches"]
    task, chunk = Passkey(run.tokenizer, 3), 64
    start = (length - task.question_len) // chunk * chunk
    found: dict[str, list[list[bool]]] = {name: [] for name in ("", *names)}
    for number in range(3):
        rng = np.random.default_rng([0, 0, number, 2])
        tokens = np.concatenate([piece.tokens for piece in task.document(rng, length)])
        wide = np.pad(tokens, (0, -length % W + 1))[None]
        for name, hits in found.items():
            stream = LaneStream(run.model, 1, chunk, name)
            correct = stream.lane_losses(wide[:, :-1], wide[:, 1:], np.array([length - 1]))[1]
            hits.append(correct[0, start : length - 1].tolist())
    answered = [row for batch in batches for row in batch]
    assert [hits for row in answered for hits in row["hits"]] == found[""]
    for name in names:
        assert [hits for row in answered for hits in row["ablated"][name]] == found[name]
        gain = rows[0]["ablations"][name]["gain"]
        assert len(gain) == 3
    assert len({str(hits) for hits in found.values()}) == 4
    assert rows[0]["updates"] == length // W
    assert rows[0]["state_bytes"] == Streamer(run.model, 1).state_bytes()


def test_passkey_as_a_task_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("passkey", None, [260], 3, batch=2, folder=tmp_path / "eval", quiet=True)
    rows = evaluate_task(tiny.run(), request)
    monkeypatch.setattr("famjax.eval.passkey._ask", None)
    assert evaluate_task(tiny.run(), request) == rows
    with pytest.raises(TypeError):
        evaluate_task(tiny.run(), request._replace(ablate=("reset",)))


def test_passkey_continues_after_the_batches_that_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, file, arguments = tiny.run(), tmp_path / "answers.json", ([450, 260], 6, 2)
    whole = evaluate_passkey(run, *arguments, quiet=True)
    calls: list[int] = []

    class FailingStreamer(Streamer):
        def losses(self, tokens: np.ndarray, targets: np.ndarray) -> Any:
            calls.append(1)
            if len(calls) == 5:
                raise KeyboardInterrupt
            return super().losses(tokens, targets)

        def warm_up(self) -> None:
            pass

    monkeypatch.setattr("famjax.eval.passkey.Streamer", FailingStreamer)
    with pytest.raises(KeyboardInterrupt):
        evaluate_passkey(run, *arguments, quiet=True, file=file)
    # two of three batches are kept; the last is asked twice, and nothing afterwards
    for _ in range(2):
        rows = evaluate_passkey(run, *arguments, quiet=True, file=file)
        assert [r["token_accuracy"] for r in rows] == [r["token_accuracy"] for r in whole]
        assert len(calls) == 5 + 2
    # other arguments: nothing of it is used
    evaluate_passkey(run, [450, 260], 4, 2, quiet=True, file=file)
    assert len(calls) == 5 + 2 + 4


@pytest.mark.long
def test_answers_may_have_different_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny.run()
    encode = type(run.tokenizer).encode

    def encode_pairs(self: Any, text: str) -> np.ndarray:
        """Encode "00" to "44" as one token each; everything else in bytes."""
        for digit in range(5):
            text = text.replace(str(digit) * 2, chr(200 + digit))
        return encode(self, text) if text.isascii() else np.array([*map(ord, text)], np.int32)

    monkeypatch.setattr(type(run.tokenizer), "encode", encode_pairs)
    task = Passkey(run.tokenizer, 3)
    assert task.answer_len == 4
    [row] = evaluate_passkey(run, [450], examples=40, batch=8, quiet=True)
    hits, sizes = [], []
    for number in range(40):
        pieces = list(task.document(np.random.default_rng([0, 0, number, 2]), 450))
        tokens = np.concatenate([piece.tokens for piece in pieces])[None]
        size = int((pieces[-1].weights == 1).sum())
        likeliest = tiny.logits(run.model, tokens[:, :-1], pad=LONGEST).argmax(-1)
        hits.append((likeliest == tokens[:, 1:])[0, -1 - size : -1])
        sizes.append(size)
    assert set(sizes) == {2, 3}
    assert row["examples"] == 40
    assert row["token_accuracy"] == pytest.approx(np.mean(np.concatenate(hits)))
    assert row["key_accuracy"] == pytest.approx(np.mean([h.all() for h in hits]))
    assert row["token_chance"] == pytest.approx(np.mean([10 ** (-3 / size) for size in sizes]))


@pytest.mark.long
def test_tokens_outside_the_receptive_field_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class RecordingStreamer(Streamer):
        def losses(self, tokens: np.ndarray, targets: np.ndarray) -> Any:
            seen.append(super().losses(tokens, targets))
            return seen[-1]

    monkeypatch.setattr("famjax.eval.passkey.Streamer", RecordingStreamer)
    # chunks of 64, a receptive field of 144; the second length has its question in two chunks
    lengths = [5000, 4100]
    for mixer, read in (("bswa", [5000 - 4736, 4100 - 3840]), ("fam", [5000 - 4032, 4100])):
        run = tiny.run_with(mixer, memory_segments=9)
        whole = evaluate_passkey(run, lengths, examples=2, quiet=True)
        every, seen[:] = list(seen), []
        late = evaluate_passkey(run, lengths, examples=2, quiet=True, whole=False)
        np.testing.assert_equal(seen, every)
        seen.clear()
        assert [row["read"] for row in whole] == [5000 - 4032, 4100]
        assert [row["read"] for row in late] == read
        assert [row["token_accuracy"] for row in whole] == [row["token_accuracy"] for row in late]


def test_passkey_errors_are_raised_before_reading() -> None:
    with pytest.raises(UserError, match="are too few for needle and question"):
        evaluate_passkey(tiny.run(), [500, 10], quiet=True)
    with pytest.raises(UserError, match="at least 1"):
        evaluate_passkey(tiny.run(), [500], examples=0, quiet=True)
    with pytest.raises(UserError, match="do not fit its cache of 64"):
        evaluate_passkey(tiny.run_with("full"), [500], quiet=True)


# windows


def windowed_loss(run: Run, texts: Sequence[str], window: int, score: int) -> tuple[float, int]:
    """Return the mean loss of documents' tokens, each predicted from its own window, and
    their number."""
    rows, before, targets = [], [], []
    for tokens in (line(text)[0] for text in texts):
        for last in range(len(tokens) - 1):
            begin = max(-(-(last + 1 - window) // score), 0) * score
            read = tokens[begin : last + 1]
            rows.append(np.pad(read, (0, 24 - len(read))))
            before.append(last - begin)
            targets.append(tokens[last + 1])
    assert max(before) == window - 1
    logits = tiny.logits(run.model, np.stack(rows), pad=24)[np.arange(len(rows)), before]
    nats, _ = token_losses(jnp.asarray(logits)[None], np.array([targets]))
    return float(np.asarray(nats, float).mean()), len(rows)


@pytest.mark.parametrize(("window", "score"), [(16, 8), (24, 5), (16, None)])
def test_windows_count_every_token_once(window: int, score: int | None, tmp_path: Path) -> None:
    run = tiny.run()
    # documents whose targets end with a window, one token after it, and within the first
    texts = ["x" * 23, "y" * 24, "é" * 40, "", "a cat", tiny.TEXT * 3]
    files = str(write(tmp_path / "d", texts))
    result = evaluate_text(run, files, batch=3, quiet=True, window=window, score=score)
    assert (result["window"], result["score"]) == (window, score or window)
    nats, tokens = windowed_loss(run, [text for text in texts if text], window, score or window)
    assert result["tokens"] == tokens
    assert result["bytes"] == sum(len(text.encode()) for text in texts)
    assert result["loss"] == pytest.approx(nats, rel=1e-5)
    by_document = {Path(row["file"]).name: row for row in result["by_document"]}
    for i, text in enumerate(texts):
        if text:
            row = by_document[f"{i}.txt"]
            assert row["tokens"] == row["bytes"] + 1 == len(text.encode()) + 1
    assert sum(row["nats"] for row in result["by_document"]) == pytest.approx(nats * tokens)


def test_invalid_windows_are_rejected(tmp_path: Path) -> None:
    files = str(write(tmp_path / "d", ["some text"]))
    full = replace(tiny.run(), model=tiny.model("full"))
    for run, window, score, told in (
        (tiny.run(), 12, None, "--window 12: must be a positive multiple of the model's block, 8"),
        (tiny.run(), 16, 17, "--score 17: must be from 1 to --window 16"),
        (tiny.run(), 16, 0, "--score 0: must be from 1"),
        (tiny.run(), None, 8, "give --window as well"),
        (full, 65, 8, "give --window 64 or less"),
    ):
        with pytest.raises(UserError, match=told) as caught:
            evaluate_text(run, files, quiet=True, window=window, score=score)
        assert "\n" not in str(caught.value)


def test_the_perplexity_of_a_word_is_that_of_its_nats(tmp_path: Path) -> None:
    run = tiny.run()
    (tmp_path / "a.txt").write_text("one two  three\nfour\n")
    # inputs are not predicted, so their words do not count
    (tmp_path / "b.jsonl").write_text('{"inputs": "not these", "targets": "five six"}\n')
    result = evaluate_text(run, str(tmp_path), quiet=True)
    assert result["words"] == 6
    nats = sum(row["nats"] for row in result["by_document"])
    assert result["word_perplexity"] == pytest.approx(np.exp(nats / 6), rel=1e-5)
    published = evaluate_text(run, str(tmp_path), quiet=True, words=12)
    assert published["word_perplexity"] == pytest.approx(np.exp(nats / 12), rel=1e-5)


@pytest.mark.long
def test_texts_without_a_part_of_the_memory(tmp_path: Path) -> None:
    run = tiny.run_with("fam", seed=2, memory_segments=1)
    texts = ["abcdefgh" * 7, "x", "hello there, " * 9, "one two " * 4]
    files = str(write(tmp_path / "d", texts))
    result = evaluate_text(run, files, batch=3, quiet=True, ablate=("reset", "memory", "segments"))
    assert result["ablations"].keys() == {"memory", "segments"}
    by_name: dict[str, list[float]] = {"memory": [], "segments": []}
    for row in result["by_document"]:
        tokens = np.array([256, *(Path(row["file"])).read_bytes(), 257], np.int32)
        for name, nats in row["ablated"].items():
            stream = LaneStream(run.model, 1, 16, name)
            wide = np.pad(tokens, (0, -(len(tokens) - 1) % 8))
            rows, targets = wide[None, :-1], wide[None, 1:]
            size = np.array([len(tokens) - 1])
            losses, _ = stream.lane_losses(rows[:, : len(wide) // 8 * 8], targets, size)
            assert nats == pytest.approx(losses[0, : size[0]].sum(), rel=1e-4)
            by_name[name].append(nats)
    for name, nats in by_name.items():
        found = result["ablations"][name]
        assert found["loss"] == pytest.approx(sum(nats) / result["tokens"], rel=1e-4)
        gain = (sum(nats) / np.log(2)) / result["bytes"] - result["bits_per_byte"]
        assert found["gain"][0] == pytest.approx(gain, rel=1e-3)
        assert found["gain"][1] <= found["gain"][0] <= found["gain"][2]

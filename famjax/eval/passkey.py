"""Passkey retrieval from documents of any length (TransformerFAM 3.2, D.1).

A document is read once. At every length the question is asked to a copy of the state, and reading
goes on.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.core.json_files import RUN_AGAIN, read_json, write_json
from famjax.eval.ablations import UNABLATED
from famjax.eval.examples import AblationScore, digest, weights_version
from famjax.eval.intervals import mean_interval
from famjax.eval.lane_stream import LaneStream
from famjax.eval.memory_usage import memory_report, update_tokens
from famjax.eval.progress import TokenProgress
from famjax.eval.streaming import Streamer, check_capacity, rechunk
from famjax.tasks.passkey import LENGTHS, Passkey, evaluated_task
from famjax.tasks.task import Request
from famjax.train.run import Run

# last number of the seeds of a document and of its shift; no seed in training is equal to these
_EVALUATION, _SHIFT = 2, 3
_FEWEST_DOCUMENTS = 8


class PasskeyRow(TypedDict):
    """How often a run retrieves the passkey at a length.

    Attributes:
      length: number of tokens of a document.
      examples: number of documents.
      key_accuracy: share of answers with all tokens correct.
      interval: ends of its 95% interval over documents.
      token_accuracy: share of correct tokens.
      key_chance: key accuracy of guessing digits.
      token_chance: token accuracy of guessing digits.
      read: tokens of each document that were read after the question at the next shorter length.
      seconds: time to read these tokens and the question.
      tokens_per_second: these tokens, of all documents, in a second.
      peak_bytes: see `memory_report`, when the length was first read.
      by_document: whether each key was found.
      ablations: for each ablation by name, the share of keys that it finds, and the gain over it.
      documents: a hash: runs with the same hash read the same documents.
      updates: blocks per document.
      state_bytes: size of the state of one document.
    """

    length: int
    examples: int
    key_accuracy: float
    interval: list[float]
    token_accuracy: float
    key_chance: float
    token_chance: float
    read: int
    seconds: float
    tokens_per_second: float
    peak_bytes: int
    by_document: list[bool]
    ablations: dict[str, AblationScore]
    documents: str
    updates: int
    state_bytes: int


def asks_anywhere(config: Config) -> bool:
    """Return whether questions of a run's training are anywhere in a block, or cross its end."""
    return config.data.passkey.multiple % config.model.block_len > 0


def evaluate(run: Run, request: Request) -> list[PasskeyRow]:
    """Return the rows of `evaluate_passkey`; answers are kept in the folder for later calls.

    Questions are at the same place in their block if they are in training, else anywhere.
    """
    lengths, examples = request.lengths or LENGTHS, request.examples or 20
    anywhere = asks_anywhere(run.config)
    file = None
    if request.folder is not None:
        weights = weights_version(request.folder.parent, run.step)
        settings = [repr(run.config), weights, lengths, examples, request.batch, request.ablate]
        settings += ["anywhere"] if anywhere else []
        request.folder.mkdir(parents=True, exist_ok=True)
        file = request.folder / f"passkey-{digest(settings)[:8]}.json"
    return evaluate_passkey(
        run,
        lengths,
        examples,
        request.batch,
        request.quiet,
        anywhere=anywhere,
        file=file,
        ablate=request.ablate,
    )


def count_documents(examples: int, tokens: int, length: int) -> int:
    """Return how many documents of a length to evaluate: fewer long ones, which take their time.

    Args:
      examples: maximum number of documents.
      tokens: maximum number of tokens over all of them, for more than 8.
      length: tokens of a document.
    """
    return min(examples, max(tokens // length, _FEWEST_DOCUMENTS))


def evaluate_passkey(
    run: Run,
    lengths: Sequence[int],
    examples: int | Callable[[int], int] = 20,
    batch: int = 8,
    quiet: bool = False,
    whole: bool = True,
    anywhere: bool = False,
    file: Path | None = None,
    ablate: Sequence[str] = (),
) -> list[PasskeyRow]:
    """Return how often a run retrieves the passkey, by the length of the document.

    The n-th document of every length has the same key and the same filler. It is read once, up to
    the longest length; at every length a copy of the state reads the question. With
    `data.passkey.needle_within`, which puts the needle anywhere in a part of the document, lengths
    whose needles would be at different places have documents of their own.

    A batch keeps its size up to its longest length: a length with fewer than `batch` examples costs
    as much as one with `batch` examples.

    Args:
      run: a run of any task; documents have as many keys and digits as its `data.passkey`.
      lengths: numbers of tokens of a document.
      examples: number of documents of each length, or a function of the length.
      batch: number of documents that are streamed together.
      quiet: whether to hide the progress.
      whole: whether to read every document from its first token. If not, a stack with a finite
        receptive field reads only the tokens that the answer can depend on; answers are bitwise the
        same.
      anywhere: shorten each document by a random part of a block, so that questions are anywhere in
        their block, and may cross its end.
      file: file that keeps the answers of finished batches; a later call with equal arguments
        continues after them.
      ablate: ablations (`famjax.eval.ablations`) with which the same documents are read again.

    Returns:
      A row for each length.

    Raises:
      UserError: a length is too short for the task or exceeds full attention's KV cache, there is
        nothing to ablate, or the file is not readable.
    """
    task = evaluated_task(run.tokenizer, run.config.data.passkey)
    counts = [examples(length) if callable(examples) else examples for length in lengths]
    _check_passkey(run, task, lengths, [*counts, batch])
    streamer = Streamer(run.model, min(batch, max(counts, default=1)))
    documents = Documents(
        task,
        run.model.block_len if anywhere else 1,
        streamer.chunk,
        None if whole else run.model.stack.receptive_field,
    )
    readings = {UNABLATED: (streamer, documents), **_ablated(run, streamer, documents, ablate)}
    batches = _plan(documents, lengths, counts, streamer.batch)
    settings = [repr(run.config), run.step, list(lengths), counts, batch, whole, anywhere]
    settings += [list(ablate)] if ablate else []
    results = _read_results(file, settings)
    rest = batches[len(results) :]
    cost = sum(read.cost(group) for _, read in readings.values() for group in rest)
    with TokenProgress("passkey", cost, quiet) as progress:
        if rest:
            with progress.compiling():
                for stream, _ in readings.values():
                    stream.warm_up()
        for group in rest:
            rows = {
                name: _ask(stream.new_stream(), read, group, progress)
                for name, (stream, read) in readings.items()
            }
            results.append(_with_ablated(rows))
            if file is not None:
                write_json(file, {"settings": settings, "batches": results})
    by_length = [_join(results, length) for length in lengths]
    version = _version(documents, batches)
    return [
        _passkey_row(run, task, length, rows, version)
        for length, rows in zip(lengths, by_length, strict=True)
    ]


def _ablated(
    run: Run, streamer: Streamer, documents: Documents, ablate: Sequence[str]
) -> dict[str, tuple[LaneStream, Documents]]:
    """Return for each ablation a stream, and the documents that it has to read."""
    update = update_tokens(run.config)
    readings = {}
    for name in ablate:
        stream = LaneStream(run.model, streamer.batch, streamer.chunk, name, update)
        # with a reset at every block, an answer does not depend on earlier chunks
        nothing = name == "reset" and update == run.model.block_len
        readings[name] = stream, replace(documents, receptive_field=0) if nothing else documents
    return readings


def _with_ablated(rows: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of the unablated run, with the hits of each ablation in them."""
    unablated = rows.pop(UNABLATED)
    if not rows:
        return unablated
    return [
        {**row, "ablated": {name: ablated[i]["hits"] for name, ablated in rows.items()}}
        for i, row in enumerate(unablated)
    ]


def _version(documents: Documents, batches: Sequence[DocumentBatch]) -> str:
    """Return a hash that identifies the documents.

    It is over the settings that determine them and the tokens of one document, which depend on the
    tokenizer.
    """
    task = documents.task
    decided = [task.digits, len(task.names), task.needle_within, documents.shifts]
    first = (
        b"".join(p.tobytes() for p in documents.tokens(b, 0, task.shortest, 0)) for b in batches
    )
    return hashlib.sha256(repr(decided).encode() + next(first, b"")).hexdigest()[:16]


class DocumentBatch(NamedTuple):
    """Documents that are read together.

    Attributes:
      numbers: numbers of the documents.
      questions: pairs of a length and the number of documents that count there, in ascending order.
      seed: first numbers of the documents' seeds; the document's number follows.
    """

    numbers: range
    questions: list[tuple[int, int]]
    seed: tuple[int, ...]


def _plan(
    documents: Documents, lengths: Sequence[int], counts: Sequence[int], batch: int
) -> list[DocumentBatch]:
    batches = []
    for group in _group_lengths(documents, sorted(set(zip(lengths, counts, strict=True)))):
        seed = (0, group[0][0] if documents.task.needle_within else 0)
        for first in range(0, max(count for _, count in group), batch):
            # documents that do not count fill up the last batch, to keep the compiled shape
            questions = [(n, min(count - first, batch)) for n, count in group if count > first]
            batches.append(DocumentBatch(range(first, first + batch), questions, seed))
    return batches


def _group_lengths(
    documents: Documents, requests: list[tuple[int, int]]
) -> list[list[tuple[int, int]]]:
    """Return pairs of a length and a count, grouped by lengths whose documents begin the same."""
    if not documents.task.needle_within:
        return [requests] if requests else []
    # the needles of shorter documents are at other places: each of these lengths is a group
    short = [pair for pair in requests if pair[0] < documents.needle_anywhere]
    groups = [[pair] for pair in short] + [requests[len(short) :]]
    return [group for group in groups if group]


@dataclass
class Documents:
    """The documents of an evaluation.

    Attributes:
      task: the passkey task.
      shifts: documents are shortened by a random number of tokens below this.
      chunk: tokens per call. Reading starts, and is interrupted for questions, at multiples of it.
      receptive_field: the model's receptive field; None reads everything.
    """

    task: Passkey
    shifts: int
    chunk: int
    receptive_field: int | None

    def length(self, batch: DocumentBatch, number: int, length: int) -> int:
        """Return the number of tokens of a document at a nominal length."""
        # the shift does not depend on the length, so that a longer document's question never begins
        # before a shorter one's
        rng = np.random.default_rng([*batch.seed, number, _SHIFT])
        return max(length - int(rng.integers(self.shifts)), self.task.shortest)

    @property
    def needle_anywhere(self) -> int:
        """The length from which on the place of the needle does not depend on the length."""
        return self.task.needle_within + self.task.shortest + self.shifts - 1

    def tokens(
        self, batch: DocumentBatch, number: int, length: int, start: int
    ) -> Iterator[np.ndarray]:
        """Yield a document from token `start` in pieces [2 chunk].

        The first row has the tokens, the second is 1 for tokens of the answer and else 0.
        """
        rng = np.random.default_rng([*batch.seed, number, _EVALUATION])
        pieces = (
            np.stack([piece.tokens, (piece.weights == 1).astype(np.int32)])
            for piece in self.task.document(rng, length)
        )
        return islice(rechunk(pieces, self.chunk), start // self.chunk, None)

    def start_of_question(self, batch: DocumentBatch, length: int) -> int:
        """Return where the state is copied: the start of a chunk before all questions begin."""
        shortest = min(self.length(batch, number, length) for number in batch.numbers)
        return (shortest - self.task.question_len) // self.chunk * self.chunk

    def first_token(self, start: int) -> int:
        """Return the first token that has to be read for exact outputs from `start` on."""
        if self.receptive_field is None:
            return 0
        return max(start - self.receptive_field, 0) // self.chunk * self.chunk

    def cost(self, batch: DocumentBatch) -> int:
        """Return how many tokens are read, including questions and documents that do not count."""
        total = position = 0
        for length, _ in batch.questions:
            start = self.start_of_question(batch, length)
            total += start - max(position, self.first_token(start)) + length - start
            position = start
        return total * len(batch.numbers)


def _ask(
    stream: Streamer, documents: Documents, batch: DocumentBatch, progress: TokenProgress
) -> list[dict[str, Any]]:
    """Read a batch of documents, and ask at every length; return a row for each length."""
    rows = []
    position, pieces = 0, _lockstep(documents, batch, 0)
    for length, count in batch.questions:
        begin = time.perf_counter()
        start = documents.start_of_question(batch, length)
        first = documents.first_token(start)
        if first > position:
            stream, position = stream.new_stream(), first
            pieces = _lockstep(documents, batch, first)
        read = length - position
        while position < start:
            _skim(stream, next(pieces)[:, 0])
            position += stream.chunk
            progress.advance(stream.batch * stream.chunk)
        hits = _answers(stream.copy(), documents, batch, length, start)[:count]
        progress.advance(stream.batch * (length - start))
        seconds = time.perf_counter() - begin
        peak = memory_report()["peak_bytes"]
        rows.append(
            {"length": length, "hits": hits, "read": read, "seconds": seconds, "peak": peak}
        )
    return rows


def _lockstep(documents: Documents, batch: DocumentBatch, start: int) -> Iterator[np.ndarray]:
    """Yield the batch's documents of the longest length from token `start`, [b 2 chunk]."""
    longest = batch.questions[-1][0]
    every = [
        documents.tokens(batch, number, documents.length(batch, number, longest), start)
        for number in batch.numbers
    ]
    # not strict: all are read only up to the question of the shortest one
    return (np.stack(pieces) for pieces in zip(*every, strict=False))


def _answers(
    stream: Streamer, documents: Documents, batch: DocumentBatch, length: int, start: int
) -> list[list[bool]]:
    """Return for each document which tokens of the answer the model predicts correctly."""
    texts = []
    for number in batch.numbers:
        end = documents.length(batch, number, length)
        text = np.concatenate(list(documents.tokens(batch, number, end, start)), -1)
        # the model is causal: padding after a text cannot change its answers
        texts.append(np.pad(text, ((0, 0), (0, length - end))))
    line = np.stack(texts)
    tokens, targets, wanted = line[:, 0, :-1], line[:, 0, 1:], line[:, 1, 1:] == 1
    correct = _losses(stream, tokens, targets)
    return [hits[answer].tolist() for hits, answer in zip(correct, wanted, strict=True)]


def _skim(stream: Streamer, tokens: np.ndarray) -> None:
    """Read a chunk [b chunk] in all lanes."""
    if isinstance(stream, LaneStream):
        nothing = np.zeros(stream.batch, bool)
        stream.skim_lanes(tokens, np.full(stream.batch, stream.chunk), nothing)
    else:
        stream.skim(tokens)


def _losses(stream: Streamer, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Read tokens [b t] in all lanes; return whether each target was predicted, [b t]."""
    if not isinstance(stream, LaneStream):
        return stream.losses(tokens, targets)[1]
    size = tokens.shape[1]
    pad = ((0, 0), (0, -size % stream.chunk))
    sizes = np.full(stream.batch, size)
    return stream.lane_losses(np.pad(tokens, pad), np.pad(targets, pad), sizes)[1][:, :size]


def _read_results(file: Path | None, settings: list[Any]) -> list[list[dict[str, Any]]]:
    if file is None or not file.exists():
        return []
    saved = read_json(file, RUN_AGAIN)
    return saved["batches"] if saved.get("settings") == settings else []


def _join(results: list[list[dict[str, Any]]], length: int) -> list[dict[str, Any]]:
    return [row for batch in results for row in batch if row["length"] == length]


def _check_passkey(run: Run, task: Passkey, lengths: Sequence[int], sizes: Sequence[int]) -> None:
    """Check all lengths and sizes before reading anything."""
    for length in lengths:
        check_capacity(run.model.stack.capacity, length - 1)
        if length < task.shortest:
            raise UserError(
                f"passkey: {length} tokens are too few for needle and question, which take "
                f"{task.shortest} with tokenizer {task.tokenizer.name}; give longer lengths"
            )
    if min(sizes) < 1:
        raise UserError(f"passkey: {min(sizes)} examples or rows of a batch; take at least 1")


def _ablation_scores(batches: list[dict[str, Any]]) -> dict[str, AblationScore]:
    """Return for each ablation the share of keys found, and the run's gain over it."""
    is_found = np.array([all(hits) for batch in batches for hits in batch["hits"]], float)
    scores: dict[str, AblationScore] = {}
    for name in batches[0].get("ablated", {}):
        hits = [all(each) for batch in batches for each in batch["ablated"][name]]
        mean, *ends = mean_interval(is_found - np.array(hits, float))
        gain = [mean, *np.clip(ends, -1, 1).tolist()]
        scores[name] = {"score": float(np.mean(hits)), "gain": gain}
    return scores


def _first_peak(batches: list[dict[str, Any]]) -> int:
    """Return the lowest peak of a length's batches.

    Before later batches, the process has already read longer documents.
    """
    # answers that were saved before 2026-11-26 have no peak
    peaks = [batch["peak"] for batch in batches if "peak" in batch]
    return min(peaks, default=memory_report()["peak_bytes"])


def _passkey_row(
    run: Run, task: Passkey, length: int, batches: list[dict[str, Any]], version: str
) -> PasskeyRow:
    answers = [hits for batch in batches for hits in batch["hits"]]
    is_found = np.array([all(hits) for hits in answers], float)
    digits = np.array([task.digits / len(hits) for hits in answers])
    seconds = sum(batch["seconds"] for batch in batches)
    read = sum(batch["read"] * len(batch["hits"]) for batch in batches)
    return {
        "length": length,
        "examples": len(answers),
        "key_accuracy": float(np.mean(is_found)),
        "interval": np.clip(mean_interval(is_found)[1:], 0, 1).tolist(),
        "token_accuracy": float(np.mean(np.concatenate(answers))),
        "key_chance": 10.0**-task.digits,
        # chance to guess a token that has the answer's mean number of digits
        "token_chance": float(np.mean(10.0**-digits)),
        "read": batches[0]["read"],
        "seconds": seconds,
        "tokens_per_second": read / seconds,
        "peak_bytes": _first_peak(batches),
        "by_document": [all(hits) for hits in answers],
        "ablations": _ablation_scores(batches),
        "documents": version,
        "updates": length // update_tokens(run.config),
        "state_bytes": run.model.state_bytes(),
    }

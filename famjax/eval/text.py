"""Evaluation on text: the loss with and without memory, on whole documents or in windows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from famjax.core.errors import UserError
from famjax.core.types import Batch
from famjax.data.find_files import list_files
from famjax.data.lanes import Reader, empty_row, stack_rows, write_span
from famjax.data.one_pass import (
    DocumentPass,
    EndOfDocuments,
    min_rows,
    one_pass,
    reset_blocks,
)
from famjax.data.sources import Key, Source, TextSource
from famjax.eval.document_sums import DocumentSums
from famjax.eval.fetch_late import fetch_late
from famjax.eval.guessing import TokenCounts
from famjax.eval.intervals import paired_interval
from famjax.eval.lane_stream import LaneStream
from famjax.eval.memory_usage import update_tokens
from famjax.eval.progress import TokenProgress
from famjax.eval.streaming import CHUNK, Streamer, check_capacity
from famjax.tasks import TASKS
from famjax.tasks.task import Request
from famjax.tokenizers.tokenizer import Tokenizer
from famjax.train.run import Run

# the first bucket of positions holds 2 ** 8 tokens
_FIRST_BUCKET = 8
_BUCKETS = 64 - _FIRST_BUCKET


# with more documents than this, a report does not list them: there may be millions
_MANY_DOCUMENTS = 1000


class TextScores(TypedDict):
    """Scores of predictions of text.

    Attributes:
      loss: nats per token.
      accuracy: share of the tokens that are predicted correctly.
      perplexity: e to the loss.
      bits_per_byte: bits per byte of the text.
    """

    loss: float
    accuracy: float
    perplexity: float
    bits_per_byte: float


class AblatedTextScores(TextScores):
    """Scores with an ablation.

    Attributes:
      gain: by how many bits per byte the run is better, and the ends of the 95% interval over
        documents, which are None if there is only one document.
    """

    gain: tuple[float, float | None, float | None]


# "from" is no name of an attribute
_Positions = TypedDict("_Positions", {"from": int, "to": int})


class PositionRow(_Positions):
    """Scores of predictions at a range of positions.

    Attributes:
      from, to: first and last position of the predicted token in its document or window.
      tokens: number of predicted tokens.
      loss: nats per token.
      accuracy: share of the tokens that are predicted correctly.
      loss_without_memory: the loss with a reset at each block.
    """

    tokens: int
    loss: float
    accuracy: float
    loss_without_memory: float


class DocumentRow(TypedDict):
    """The loss of a document.

    Attributes:
      file: path of its file.
      line: number of its line in the file, from 0.
      tokens: number of predicted tokens.
      bytes: size of the predicted tokens.
      nats: loss, summed over the tokens.
      nats_without_memory: the same with a reset at each block.
      ablated: the same with each ablation, if there are any.
    """

    file: str
    line: int
    tokens: int
    bytes: int
    nats: float
    nats_without_memory: float
    ablated: NotRequired[dict[str, float]]


class _MemoryScores(TextScores):
    without_memory: TextScores
    memory_gain: TextScores
    by_position: list[PositionRow]


class _WordScores(TypedDict):
    words: int
    word_perplexity: float


class TextResult(_MemoryScores, _WordScores):
    """The results of `evaluate_text`; the loss and the other three `TextScores` are with memory.

    Attributes:
      files: the request's files, or "holdout"; only in the results of `evaluate`.
      window: tokens per window; None for whole documents.
      score: number of predictions that are scored per window; None for whole documents.
      documents: number of documents read.
      documents_left: number of documents not read.
      tokens: number of predicted tokens.
      bytes: size of the predicted tokens.
      seconds: time that all readings took.
      tokens_per_second: tokens read in a second; every reading counts: with memory, without, and
        with each ablation.
      state_bytes: size of the state of one document.
      words: number of words.
      word_perplexity: e to the nats per word.
      without_memory: the scores with a reset at each block.
      memory_gain: how much memory improves each score.
      by_position: scores by position.
      ablations: scores with each ablation but `reset`, by name.
      by_document: losses by document, ordered by file and line; `evaluate` leaves them out if they
        are many.
      unigram, uniform: scores of context-free baselines (`famjax.eval.guessing`).
    """

    files: NotRequired[str]
    window: int | None
    score: int | None
    documents: int
    documents_left: int
    tokens: int
    bytes: int
    seconds: float
    tokens_per_second: float
    state_bytes: int
    ablations: dict[str, AblatedTextScores]
    by_document: NotRequired[list[DocumentRow]]
    unigram: TextScores
    uniform: TextScores


def check_files(request: Request) -> None:
    """Raise a `UserError` if the request names a file that does not exist."""
    if request.files:
        list_files(request.files, "--tasks")


def evaluate(run: Run, request: Request) -> TextResult:
    """Return the results of `evaluate_text`, and files; `by_document` is left out if it is long."""
    files, window, score = request.files, request.window, request.score
    scores = evaluate_text(
        run,
        files,
        max_bytes=1 if request.is_trial else None,
        batch=request.batch,
        quiet=request.quiet,
        window=window,
        score=score,
        words=request.words,
        ablate=request.ablate,
    )
    if len(scores["by_document"]) > _MANY_DOCUMENTS:
        del scores["by_document"]
    return {"files": files or "holdout", **scores}


def evaluate_text(
    run: Run,
    files: str | None = None,
    *,
    max_bytes: int | None = None,
    batch: int = 8,
    quiet: bool = False,
    window: int | None = None,
    score: int | None = None,
    words: int | None = None,
    ablate: Sequence[str] = (),
) -> TextResult:
    """Evaluate a run on text, with its memory and without.

    Every document is streamed as [bos] tokens [eos]; every token but bos and the inputs of .jsonl
    lines is scored. Documents are read in batches. "Without memory" is the same run on the same
    tokens with a reset at the start of each block.

    With a window, documents are read in windows of that many tokens, each with an empty memory.
    Only the last `score` predictions of a window are scored, but all of a document's first window.
    Windows overlap so that every token is scored once (T2R 3.2.1).

    Args:
      run: any run.
      files: texts, in the form of `data.files`; None is the holdout.
      max_bytes: start no further document after this number of bytes of text. Started documents are
        read to their end.
      batch: maximum number of documents per batch; fewer if that takes no more batches.
      quiet: whether to hide the progress.
      window: tokens per window, a multiple of the model's block; None reads whole documents.
      score: number of predictions that are scored per window, at most `window`; None is `window`.
      words: number of words of the texts, for `word_perplexity`; None counts words between white
        space. Published results use the data set's own count, which does not depend on a tokenizer
        (PG-19: arXiv 1911.05507, 4.2).
      ablate: ablations (`famjax.eval.ablations`) with which the texts are read again; `reset`
        always is one.

    Raises:
      UserError: there is no such text, or nothing to ablate, a document exceeds full attention's KV
        cache, or the window is invalid.
    """
    if batch < 1 or (max_bytes is not None and max_bytes < 1):
        raise UserError(f"text: batch={batch}, max_bytes={max_bytes}: must be at least 1")
    _check_window(run, window, score)
    score = score or window
    source = text_source(run, files)
    names = [name for name in ablate if name != "reset"]
    reading = _start_reading(run, source, max_bytes, batch, window, score, names)
    sums = _TextSums(run.tokenizer, reading.lanes, names)
    with TokenProgress("text", source.text_bytes, quiet) as progress:
        with progress.compiling():  # now, so that timings exclude compilation
            _compile(reading.streams)
        begin = time.perf_counter()
        _accumulate(run, reading, sums, progress)
    if sums.with_memory.bytes == 0:
        raise UserError(f"text:{files or 'holdout'}: the documents are empty")
    seconds = time.perf_counter() - begin
    return _report(run, source, reading, sums, seconds, window, score, words)


class _Reading(NamedTuple):
    """What an evaluation reads, and the streams that read it.

    Attributes:
      documents: the pass over the documents.
      rows: batches of rows of documents, or of windows, [b t].
      streams: streams of b lanes: with memory, with a reset at each block, and with each ablation.
      lanes: number of lanes that follow documents: b, or 1 for windows, which are in order.
    """

    documents: DocumentPass
    rows: Iterator[Batch[np.ndarray]]
    streams: tuple[Streamer, ...]
    lanes: int


def _start_reading(
    run: Run,
    source: TextSource,
    max_bytes: int | None,
    batch: int,
    window: int | None,
    score: int | None,
    names: Sequence[str],
) -> _Reading:
    """Return the reading of a source, before its first batch.

    Args:
      max_bytes, batch, window, score: as in `evaluate_text`; a window needs a score.
      names: names of the ablations but `reset`.
    """
    documents = DocumentPass(source, max_bytes)
    if window is None:
        block = update_tokens(run.config)
        batch = min(batch, len(source))
        if max_bytes is None:
            _check_documents(run, source)
            documents, batch = _longest_first(source, batch)
        streamer = Streamer(run.model, batch, max(CHUNK // block, 1) * block)
        rows = one_pass(documents, streamer.batch, streamer.chunk, block)
    else:
        assert score is not None
        streamer = Streamer(run.model, batch, window)
        rows = windows(documents, batch, window, score)
    ablated = [LaneStream(run.model, streamer.batch, streamer.chunk, name) for name in names]
    lanes = streamer.batch if window is None else 1
    return _Reading(documents, rows, (streamer, streamer.new_stream(), *ablated), lanes)


def _compile(streams: Sequence[Streamer]) -> None:
    """Compile the programs of streams of equal sizes."""
    empty = stack_rows([empty_row(streams[0].chunk)] * streams[0].batch)
    for stream in streams:
        stream.new_stream().batch_losses(empty)


def _accumulate(run: Run, reading: _Reading, sums: _TextSums, progress: TokenProgress) -> None:
    """Read all batches, and add them to the sums."""
    block = update_tokens(run.config)
    predictions = _predictions(run, reading.rows, reading.streams, block)
    for batch, positions, results in fetch_late(predictions):
        sums.add(batch, positions, results)
        # the overlap of windows is not new text
        new = batch.get("new", batch["valid"])
        read = int(run.tokenizer.token_bytes[batch["tokens"][new]].sum())
        reading.documents.bytes += read
        # every stream reads them, as in tokens_per_second
        progress.advance(int(new.sum()) * len(reading.streams), read)


def _report(
    run: Run,
    source: TextSource,
    reading: _Reading,
    sums: _TextSums,
    seconds: float,
    window: int | None,
    score: int | None,
    words: int | None,
) -> TextResult:
    """Return the results of `evaluate_text`.

    Args:
      seconds: time that all streams together took to read.
      window, score, words: as in `evaluate_text`.
    """
    keys, with_memory, names = reading.documents.keys, sums.with_memory, sums.names
    return {
        "window": window,
        "score": score,
        "documents": len(keys),
        "documents_left": len(source) - len(keys),
        "tokens": int(with_memory.tokens.sum()),
        "bytes": with_memory.bytes,
        "seconds": seconds,
        "tokens_per_second": sums.read * len(reading.streams) / seconds,
        "state_bytes": run.model.state_bytes(),
        **_scores(with_memory, sums.reset),
        **_word_scores(source, keys, words, float(with_memory.nll.sum())),
        "ablations": _ablation_scores(names, sums.ablated, sums.by_document),
        "by_document": _document_rows(sums.by_document, keys, names),
        "unigram": with_memory.compute_scores(*sums.counts.unigram()),
        "uniform": with_memory.compute_scores(*sums.counts.uniform()),
    }


def _longest_first(source: TextSource, batch: int) -> tuple[DocumentPass, int]:
    """Return a pass with the longest documents first, and how many rows are enough for it.

    In random order, the last rows with a document keep the others waiting. If the sizes are not
    known, the order is random, and there are as many rows as given.
    """
    sizes = source.document_sizes()
    if sizes is None:
        return DocumentPass(source), batch
    order = np.argsort(-sizes, kind="stable").tolist()
    rows = min_rows(sizes[order].astype(int).tolist(), batch)
    return DocumentPass(source, order=order), rows


def _check_window(run: Run, window: int | None, score: int | None) -> None:
    if window is None:
        if score is not None:
            raise UserError(f"--score {score}: is for windows; give --window as well")
        return
    block, capacity = run.model.block_len, run.model.stack.capacity
    if window < 1 or window % block:
        raise UserError(
            f"--window {window}: must be a positive multiple of the model's block, {block}"
        )
    if score is not None and not 1 <= score <= window:
        raise UserError(f"--score {score}: must be from 1 to --window {window}")
    if capacity is not None and window > capacity:
        raise UserError(
            f"--window {window}: the run holds {capacity} tokens of a document (model.capacity); "
            f"give --window {capacity // block * block} or less"
        )


def _check_documents(run: Run, source: TextSource) -> None:
    """Raise a `UserError` before reading if full attention's KV cache cannot hold a document."""
    capacity, block = run.model.stack.capacity, run.model.block_len
    if capacity is None:
        return
    for k in range(len(source)):
        key = source.key(0, 1, k)
        # the last token is only predicted
        tokens = sum(len(piece.tokens) for piece in source.open(key)) - 1
        remedy = f"--window {capacity // block * block} reads it in windows"
        check_capacity(capacity, tokens, source.name(key), remedy)


def text_source(run: Run, files: str | None) -> TextSource:
    """Return the texts in files, or the holdout of a run's training texts.

    Args:
      run: the run, whose tokenizer reads the texts.
      files: texts, in the form of `data.files`; None is the holdout.

    Raises:
      UserError: there are no such files, or nothing was held out.
    """
    if files is not None:
        return TextSource(files, run.tokenizer, seed=0, holdout=0)
    if run.config.data.task != "text" and not run.config.data.text_rows:
        raise UserError(
            f"text:holdout: the run was trained on {run.config.data.task}, which holds out no "
            "text; give text:FILES"
        )
    if run.step == 0:
        # the config's data.files was not used for training
        raise UserError(
            "text:holdout: the run is at step 0, so no text was held out; give --tasks text:FILES"
        )
    source = TASKS["text"].make_source(run.config, run.tokenizer, "holdout", None)
    if not isinstance(source, TextSource):
        raise UserError("text:holdout: seqio and TFDS sets have no end; give text:FILES")
    return source


def windows(source: Source, rows: int, window: int, score: int) -> Iterator[Batch[np.ndarray]]:
    """Yield batches of windows until all documents are read.

    Args:
      source: the documents.
      rows: number of windows per batch.
      window, score: as in `evaluate_text`.
    """
    every = _windows(Reader(source, 0, 1), window, score)
    while together := list(islice(every, rows)):
        missing = rows - len(together)
        yield stack_rows([*together, *[_empty_window(window)] * missing])


def _empty_window(window: int) -> Batch[np.ndarray]:
    # new: tokens that are not in the window before it; starts: first token of a document
    return {**empty_row(window), "new": np.zeros(window, bool), "starts": np.zeros(window, bool)}


def _windows(reader: Reader, window: int, score: int) -> Iterator[Batch[np.ndarray]]:
    row, overlap = _empty_window(window), window - score
    while True:
        before, row = row, _empty_window(window)
        first = reader.at_start()
        try:
            span = reader.take(window if first else score)
        except EndOfDocuments:
            return
        at = 0 if first else overlap
        # the overlap has weight 0; all windows but a document's last are full
        row["tokens"][:at] = before["tokens"][window - at :]
        row["targets"][:at] = before["targets"][window - at :]
        row["valid"][:at] = True
        count = len(span.tokens) - span.last
        write_span(row, at, span, count)
        row["new"][at : at + count] = True
        row["starts"][0] = first
        row["reset"][0], row["pass_state"][0] = True, False
        if count:
            yield row


def _predictions(
    run: Run, rows: Iterator[Batch[np.ndarray]], streams: Sequence[Streamer], block: int
) -> Iterator[tuple[Batch[np.ndarray], np.ndarray, list[Any]]]:
    """Yield each batch, the positions of its tokens [b t], and the results of all streams.

    The results are pairs (nll, correct), [b t] each, on the device: with memory, without, and with
    each ablation.
    """
    read = np.zeros(streams[0].batch, np.int64)
    for batch in rows:
        positions, read = token_positions(batch, read)
        check_capacity(run.model.stack.capacity, int(positions[batch["valid"]].max()) + 1)
        forgetting: Batch[np.ndarray] = {**batch, "reset": reset_blocks(batch, block)}
        with_memory, reset, *ablated = streams
        results = [with_memory.batch_losses(batch), reset.batch_losses(forgetting)]
        results += [stream.batch_losses(batch) for stream in ablated]
        yield batch, positions, results


def token_positions(batch: Batch[np.ndarray], read: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's position in its document [b t], and the next position of each lane [b].

    Args:
      read: [b], number of tokens that earlier batches had of each lane's document.
    """
    index = np.arange(batch["reset"].shape[1])
    start = np.maximum.accumulate(np.where(batch["reset"], index, -1), axis=1)
    positions = np.where(start < 0, index + read[:, None], index - start)
    return positions, positions[:, -1] + 1


class _MetricSums:
    """Sums of metrics over tokens, by buckets of positions: 0 to 255, 256 to 511, 512 to 1023, ...

    Attributes:
      bytes: total size of the predicted tokens.
      tokens, nll, correct: [buckets], number of tokens, and sums over them.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.tokens, self.nll, self.correct = (np.zeros(_BUCKETS) for _ in range(3))

    def add(
        self,
        counted: np.ndarray,
        positions: np.ndarray,
        nll: np.ndarray,
        correct: np.ndarray,
        size: np.ndarray,
    ) -> None:
        """Add one batch, [b t] each; `size` is in bytes."""
        # frexp rather than log2: exact at powers of two
        bucket = np.maximum(np.frexp(positions[counted])[1] - _FIRST_BUCKET, 0)
        self.tokens += np.bincount(bucket, minlength=_BUCKETS)
        self.nll += np.bincount(bucket, nll[counted], minlength=_BUCKETS)
        self.correct += np.bincount(bucket, correct[counted], minlength=_BUCKETS)
        self.bytes += int(size.sum())

    def scores(self) -> TextScores:
        return self.compute_scores(float(self.nll.sum()), float(self.correct.sum()))

    def compute_scores(self, nll: float, correct: float) -> TextScores:
        """Return the scores of the added tokens for a sum of nll and of correct predictions."""
        tokens = float(self.tokens.sum())
        loss = nll / tokens
        return {
            "loss": loss,
            "accuracy": correct / tokens,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "bits_per_byte": nll / self.bytes / math.log(2),
        }


class _TextSums:
    """Sums over all that was read, with memory, without, and with each ablation.

    Attributes:
      names: names of the ablations.
      with_memory, reset, ablated: metrics of each stream; `ablated` has one for each name.
      by_document: tokens, bytes and nats of each document; the nats are those of each stream.
      counts: how often each token occurs as a target.
      read: number of tokens that a stream has read, with the overlap of windows.
    """

    def __init__(self, tokenizer: Tokenizer, lanes: int, names: Sequence[str]):
        self.names = names
        self.with_memory, self.reset = _MetricSums(), _MetricSums()
        self.ablated = [_MetricSums() for _ in names]
        self.by_document = DocumentSums(lanes)
        self.counts = TokenCounts(tokenizer.vocab_size)
        self.read = 0
        self._token_bytes = tokenizer.token_bytes

    def add(
        self,
        batch: Batch[np.ndarray],
        positions: np.ndarray,
        results: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Add one batch of `_predictions`."""
        counted = batch["weights"] > 0
        size = self._token_bytes[batch["targets"]] * counted
        totals = (self.with_memory, self.reset, *self.ablated)
        for metrics, (nll, correct) in zip(totals, results, strict=True):
            metrics.add(counted, positions, nll, correct, size)
        values = np.stack([counted, size, *(nll * counted for nll, _ in results)])
        if "starts" in batch:  # the windows of a document follow each other, as if in one lane
            starts = batch["starts"].reshape(1, -1)
            self.by_document.add(starts, values.reshape(len(values), 1, -1))
        else:
            self.by_document.add(batch["reset"], values)
        self.counts.add(batch["targets"][counted])
        self.read += int(batch["valid"].sum())


def _word_scores(
    source: TextSource, keys: Sequence[Key], words: int | None, nats: float
) -> _WordScores:
    """Return the number of words of the documents that were read, and the perplexity per word."""
    if words is None:
        pieces = (text for key in keys for text in source.scored_texts(key))
        words = sum(len(text.split()) for text in pieces)
    each = nats / words if words else math.inf
    return {"words": words, "word_perplexity": math.exp(each) if each < 700 else math.inf}


def _document_rows(
    sums: DocumentSums, keys: Sequence[Key], names: Sequence[str]
) -> list[DocumentRow]:
    """Return a row for each document, ordered by file and line.

    Args:
      sums: sums of the values of each document.
      keys: keys of the documents, in the order in which they were started.
      names: names of the ablations.
    """
    rows = []
    for (file, line, _), (tokens, size, nll, reset_nll, *ablated) in zip(
        keys, sums.sums, strict=True
    ):
        row: DocumentRow = {
            "file": file,
            "line": line,
            "tokens": int(tokens),
            "bytes": int(size),
            "nats": float(nll),
            "nats_without_memory": float(reset_nll),
        }
        if names:
            row["ablated"] = dict(zip(names, map(float, ablated), strict=True))
        rows.append(row)
    return sorted(rows, key=lambda row: (row["file"], row["line"]))


def _ablation_scores(
    names: Sequence[str], sums: Sequence[_MetricSums], documents: DocumentSums
) -> dict[str, AblatedTextScores]:
    """Return the scores with each ablation, and the gain of the run over it."""
    found: dict[str, AblatedTextScores] = {}
    for i, (name, totals) in enumerate(zip(names, sums, strict=True)):
        size, nats, ablated = (np.array([row[n] for row in documents.sums]) for n in (1, 2, 4 + i))
        found[name] = {**totals.scores(), "gain": paired_interval(ablated, nats, size)}
    return found


def _scores(with_memory_sums: _MetricSums, reset_sums: _MetricSums) -> _MemoryScores:
    with_memory, without = with_memory_sums.scores(), reset_sums.scores()
    rows: list[PositionRow] = []
    for i in np.flatnonzero(with_memory_sums.tokens):
        tokens = with_memory_sums.tokens[i]
        rows.append(
            {
                "from": 0 if i == 0 else 2 ** (_FIRST_BUCKET - 1 + int(i)),
                "to": 2 ** (_FIRST_BUCKET + int(i)) - 1,
                "tokens": int(tokens),
                "loss": float(with_memory_sums.nll[i] / tokens),
                "accuracy": float(with_memory_sums.correct[i] / tokens),
                "loss_without_memory": float(reset_sums.nll[i] / tokens),
            }
        )
    return {
        **with_memory,
        "without_memory": without,
        "memory_gain": {
            "loss": without["loss"] - with_memory["loss"],
            "accuracy": with_memory["accuracy"] - without["accuracy"],
            "perplexity": without["perplexity"] - with_memory["perplexity"],
            "bits_per_byte": without["bits_per_byte"] - with_memory["bits_per_byte"],
        },
        "by_position": rows,
    }

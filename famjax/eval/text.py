"""Evaluation on text: the loss with and without memory, on whole documents or in windows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

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
from famjax.data.sources import Source, TextSource
from famjax.eval.fetch_late import fetch_late
from famjax.eval.lane_stream import LaneStream
from famjax.eval.memory_usage import update_tokens
from famjax.eval.progress import TokenProgress
from famjax.eval.streaming import CHUNK, Streamer, check_capacity
from famjax.eval.text_results import TextResult
from famjax.eval.text_sums import (
    TextSums,
    document_rows,
    memory_scores,
    text_ablation_scores,
    word_scores,
)
from famjax.tasks import TASKS
from famjax.tasks.task import Request
from famjax.train.run import Run

# with more documents than this, a report does not list them: there may be millions
_MANY_DOCUMENTS = 1000


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
    sums = TextSums(run.tokenizer, reading.lanes, names)
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


def _accumulate(run: Run, reading: _Reading, sums: TextSums, progress: TokenProgress) -> None:
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
    sums: TextSums,
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
        **memory_scores(with_memory, sums.reset),
        **word_scores(source, keys, words, float(with_memory.nll.sum())),
        "ablations": text_ablation_scores(names, sums.ablated, sums.by_document),
        "by_document": document_rows(sums.by_document, keys, names),
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
        return TextSource(files, run.tokenizer, seed=0, holdout=0, probe_only=True)
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

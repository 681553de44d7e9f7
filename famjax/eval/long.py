"""Long documents with questions: a document is read once, and asked from copies of its state.

Answers are generated greedily, and scored by RULER's rule: the share of the references that an
answer contains, whatever the case (arXiv 2404.06654, 4).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from famjax.core.errors import UserError
from famjax.eval.examples import Example, Examples, digest, examples_name, weights_version
from famjax.eval.intervals import mean_interval
from famjax.eval.memory import memory_report, update_tokens
from famjax.eval.progress import TokenProgress
from famjax.eval.streaming import Streamer, check_capacity, rechunk
from famjax.tasks import TASKS
from famjax.tasks.long.document import Document, LongTask, Question
from famjax.tasks.task import Request
from famjax.train.run import Run

LENGTHS = [1024, 4096, 16384]
# RULER's bar, the score of Llama 2 7B at 4,096 tokens; NoLiMa's share of the base score
RULER_BAR, NOLIMA_SHARE = 0.856, 0.85
# equal parts of a document, by which scores are reported
_DEPTHS = 5


def evaluate(run: Run, request: Request) -> dict[str, Any]:
    """Return the results of `evaluate_long`; files and facts are by default the run's own."""
    task, data = find_task(request.task), run.config.data
    own = data.files if data.task != "text" else ""
    files = request.files or (own if task.has_files else "")
    facts = (request.facts or data.long.facts) if task.has_facts else ""
    return evaluate_long(
        run,
        request.task,
        request.lengths or LENGTHS,
        request.examples or 20,
        request.batch,
        request.questions or 1,
        files,
        facts,
        request.ablate,
        request.quiet,
        request.folder,
    )


def find_task(name: str) -> LongTask:
    """Return the task on long documents of that name."""
    task = TASKS[name]
    assert isinstance(task, LongTask)
    return task


def evaluate_long(
    run: Run,
    name: str,
    lengths: Sequence[int],
    examples: int = 20,
    batch: int = 8,
    questions: int = 1,
    files: str = "",
    facts: str = "",
    ablate: bool = False,
    quiet: bool = False,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Evaluate a run on a long task (`famjax.tasks.long`), by length and by depth.

    Documents are generated while they are read; memory does not grow with their length.

    Args:
      run: of any task.
      name: of the task.
      lengths: most tokens of a document, the question and its answer included.
      examples: documents of each length.
      batch: documents read together.
      questions: asked of each document.
      files: filler of a task that has files, as `data.files`; "" is Python's standard library.
      facts: file of the facts of a task that has them, as `data.long.facts`.
      ablate: answer also with the memory reset at every block, of the same documents.
      quiet: no progress.
      folder: keeps every example in a file of JSON lines; a later call with equal arguments
        continues. With other lengths, too, what is there is kept.

    Returns:
      task, source, files, facts, examples (the name of the file), settings (what identifies its
      examples), effective_length (of RULER's and NoLiMa's rule), and rows, one for each length:
      length, examples (answers), score (their mean), interval (95%, a bootstrap over documents),
      score_without_memory and memory_gain (mean and 95% interval of the paired difference) of
      `ablate`, by_depth (of each fifth of the document, None where nothing was asked), cut (answers
      at their most tokens without the full score), updates (blocks of a document), seconds,
      tokens_per_second (of reading), answer_seconds (of one question to a batch), state_bytes (of a
      document), peak_bytes (of the process so far).

    Raises:
      UserError: a length is too short, or exceeds full attention's KV cache, the tokenizer cannot
        express an answer, the task has fewer questions, or the file is damaged.
    """
    task = find_task(name)
    if files and not task.has_files:
        raise UserError(f"{name}:{files}: the task has its own filler; write {name}")
    material = task.load(files, facts, run.tokenizer)
    lengths = sorted(set(lengths))

    def document(length: int, number: int) -> Document:
        return task.evaluated_document(run.tokenizer, length, number, examples, material)

    _check(run, name, document, lengths, examples, questions)
    streamer = Streamer(run.model, min(batch, examples))
    streamers = [streamer]
    if ablate:
        streamers.append(Streamer(run.model, streamer.batch, reset_every=update_tokens(run.config)))
    settings = {
        "run": repr(run.config),
        "weights": None if folder is None else weights_version(folder.parent, run.step),
        "material": material.version,
        "task": name,
        "files": files,
        "facts": facts,
        "examples": examples,
        "batch": batch,
        "questions": questions,
        "ablate": ablate,
    }
    file_name = examples_name(name, files, facts)
    store = Examples(None if folder is None else folder / file_name, settings)
    groups = [
        (length, range(first, min(first + streamer.batch, examples)))
        for length in lengths
        for first in range(0, examples, streamer.batch)
    ]
    left = [group for group in groups if not store.has(group)]
    with TokenProgress(name, sum(n * streamer.batch for n, _ in left), quiet) as progress:
        if left:
            with progress.compiling():
                for each in streamers:
                    _warm_up(each)
        for length, numbers in left:
            # the last batch is padded with the first documents, to keep the compiled shape
            padded = [*numbers, *range(streamer.batch - len(numbers))]
            documents = [document(length, number) for number in padded]
            found, times = _ask(run, streamers, documents, questions, progress)
            kept = [
                Example(length, number, **row)
                for number, answers in zip(numbers, found, strict=False)
                for row in answers
            ]
            store.add((length, numbers), kept, times)
    rows = [
        _row(run, length, *store.of_length(length), streamer.state_bytes() // streamer.batch)
        for length in lengths
    ]
    return {
        "task": name,
        "source": task.source,
        "files": files,
        "facts": facts,
        "examples": file_name,
        "settings": digest(settings),
        "effective_length": effective_lengths(rows),
        "rows": rows,
    }


def effective_lengths(rows: Sequence[dict[str, Any]]) -> dict[str, int | None]:
    """Return the longest length whose score reaches a bar, as do all shorter ones, by rule.

    RULER: 85.6%. NoLiMa: 85% of the score of the shortest length. None: not even the shortest.
    """
    bars = {"ruler": RULER_BAR, "nolima": NOLIMA_SHARE * rows[0]["score"]}
    lengths: dict[str, int | None] = {}
    for rule, bar in bars.items():
        lengths[rule] = None
        for row in rows:
            if row["score"] < bar or not row["score"]:
                break
            lengths[rule] = row["length"]
    return lengths


def score(output: str, question: Question) -> float:
    """Return the share of the references that an output contains, whatever the case (RULER).

    Of a question with `wrong` answers (BABILong) only the first sentence counts, it has to have all
    references, as whole words, and none of the wrong ones.
    """
    if question.wrong is None:
        lowered = output.lower()
        found = sum(reference.lower() in lowered for reference in question.references)
        return found / len(question.references)
    first = _first_sentence(output)
    has_all = all(_has_word(first, reference) for reference in question.references)
    return float(has_all and not any(_has_word(first, wrong) for wrong in question.wrong))


def _first_sentence(text: str) -> str:
    return re.split(r"[.\n]", text.lstrip(), maxsplit=1)[0]


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _is_settled(text: str, question: Question) -> bool:
    """Return whether what follows a text cannot change its score."""
    if question.wrong is None:
        return score(text, question) == 1
    return _first_sentence(text) != text.lstrip()


def _check(
    run: Run,
    name: str,
    document: Callable[[int, int], Document],
    lengths: Sequence[int],
    examples: int,
    questions: int,
) -> None:
    """Refuse what would fail while it is read."""
    check_capacity(run.model.stack.capacity, lengths[-1])
    for number in range(examples):
        first = document(lengths[0], number)
        if not number:
            # a piece of the filler, which may not fit
            list(islice(first.tokens(), 2))
        known = len(first.questions)
        if questions > known:
            raise UserError(f"--questions {questions}: a document of {name} has {known}")


def _warm_up(streamer: Streamer) -> None:
    """Compile what reads and answers, so that it is not timed."""
    streamer.warm_up()
    stream, token = streamer.new_stream(), np.zeros((streamer.batch, 1), np.int32)
    stream.read(token)
    stream.step(token)


def _ask(
    run: Run,
    streamers: list[Streamer],
    documents: list[Document],
    questions: int,
    progress: TokenProgress,
) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
    """Read a batch of documents and answer their questions; return the fields of each `Example`.

    The first streamer reads all of them. The second one, if there is one, is reset at every block,
    so that the last tokens are all that it needs to read.
    """
    begin = time.perf_counter()
    stream = streamers[0].new_stream()
    last = _skim(stream, documents, progress)
    sizes = [stream.tokens + len(tokens) for tokens in last]
    streams = [stream, *(streamer.new_stream() for streamer in streamers[1:])]
    # of documents of unequal lengths, what all have is read once
    common = min(map(len, last))
    for each in streams:
        each.read(np.stack([tokens[:common] for tokens in last]))
    stream.wait()
    progress.advance(stream.batch * common)
    read = time.perf_counter()
    found: list[list[dict[str, Any]]] = [[] for _ in documents]
    for number in range(questions):
        asked = [document.content.questions[number] for document in documents]
        prompts = [
            np.concatenate([tokens[common:], document.questions[number]])
            for tokens, document in zip(last, documents, strict=True)
        ]
        most = [document.most_written for document in documents]
        outputs = [answer(run, each.copy(), prompts, asked, most) for each in streams]
        for i, ((text, cut), *without_memory) in enumerate(zip(*outputs, strict=True)):
            row = {
                "question": number,
                "tokens": sizes[i],
                "depth": max((documents[i].depths[fact] for fact in asked[i].facts), default=None),
                "prompt": asked[i].text,
                "references": list(asked[i].references),
                "output": text,
                "score": score(text, asked[i]),
                "cut": cut,
            }
            for output, _ in without_memory:
                row["output_without_memory"] = output
                row["score_without_memory"] = score(output, asked[i])
            found[i].append(row)
    answering = (time.perf_counter() - read) / questions / len(streams)
    times = {"tokens": sum(sizes), "read": read - begin, "answer": answering}
    return found, times


def _skim(stream: Streamer, documents: list[Document], progress: TokenProgress) -> list[np.ndarray]:
    """Read the chunks that all documents have; return what is left of each, [n]."""
    pieces = [rechunk(document.tokens(), stream.chunk) for document in documents]
    while True:
        heads = [next(piece, np.zeros(0, np.int32)) for piece in pieces]
        if min(map(len, heads)) < stream.chunk:
            return [
                np.concatenate([head, *piece]) for head, piece in zip(heads, pieces, strict=True)
            ]
        stream.skim(np.stack(heads))
        progress.advance(stream.batch * stream.chunk)


def answer(
    run: Run,
    stream: Streamer,
    prompts: Sequence[np.ndarray],
    questions: Sequence[Question],
    most: Sequence[int],
) -> list[tuple[str, bool]]:
    """Read a prompt [n] in each lane, of any length, and continue it greedily.

    A lane that is through with its prompt generates while others still read theirs. It ends with a
    stop token, when its score is settled, or after the lane's `most` tokens.

    Returns:
      for each lane the text, and whether it ended after `most` tokens without a full score.
    """
    common = min(map(len, prompts))
    stream.read(np.stack([prompt[:common] for prompt in prompts]))
    vocabulary, stops = run.tokenizer.vocab_size, set(run.tokenizer.stop_ids)
    waiting = [prompt[common:].tolist()[::-1] for prompt in prompts]
    written: list[list[int]] = [[] for _ in prompts]
    ended: dict[int, tuple[str, bool]] = {}

    def write(lane: int, token: int) -> None:
        if token not in stops:
            written[lane].append(token)
        text = run.tokenizer.decode(written[lane])
        done = token in stops or _is_settled(text, questions[lane])
        if done or len(written[lane]) == most[lane]:
            ended[lane] = text, not done and score(text, questions[lane]) < 1

    while True:
        likeliest = np.asarray(stream.logits)[:, :vocabulary].argmax(-1).tolist()
        tokens = []
        for lane, rest in enumerate(waiting):
            if not rest and lane not in ended:
                write(lane, likeliest[lane])
            tokens.append(rest.pop() if rest else likeliest[lane])
        if len(ended) == len(prompts):
            break
        stream.step(np.array(tokens, np.int32)[:, None])
    return [ended[lane] for lane in range(len(prompts))]


def _row(
    run: Run, length: int, examples: list[Example], times: list[dict[str, Any]], state_bytes: int
) -> dict[str, Any]:
    depths = np.array([_part(example.depth) for example in examples])
    scores = np.array([example.score for example in examples])
    by_document = _by_document(examples, scores)
    seconds = sum(time["read"] for time in times)
    row = {
        "length": length,
        "examples": len(examples),
        "score": float(scores.mean()),
        "interval": np.clip(mean_interval(by_document)[1:], 0, 1).tolist(),
        "by_depth": [
            float(scores[depths == i].mean()) if (depths == i).any() else None
            for i in range(_DEPTHS)
        ],
        "cut": sum(example.cut for example in examples),
        "updates": length // update_tokens(run.config),
        "seconds": seconds,
        "tokens_per_second": sum(time["tokens"] for time in times) / seconds,
        "answer_seconds": float(np.mean([time["answer"] for time in times])),
        "state_bytes": state_bytes,
        "peak_bytes": memory_report()["peak_bytes"],
    }
    without = [e.score_without_memory for e in examples if e.score_without_memory is not None]
    if without:
        row["score_without_memory"] = float(np.mean(without))
        mean, *ends = mean_interval(_by_document(examples, scores - np.array(without)))
        row["memory_gain"] = [mean, *np.clip(ends, -1, 1).tolist()]
    return row


def _part(depth: float | None) -> int:
    """Return the number of the part of a document; -1 is none."""
    return -1 if depth is None else min(int(depth * _DEPTHS), _DEPTHS - 1)


def _by_document(examples: list[Example], values: np.ndarray) -> np.ndarray:
    """Return the mean of the values of each document, [documents]."""
    groups: dict[int, list[float]] = {}
    for example, value in zip(examples, values, strict=True):
        groups.setdefault(example.document, []).append(float(value))
    return np.array([np.mean(group) for group in groups.values()])

"""Evaluation on generated long documents with questions.

A document is read once; each question is answered from a copy of the state after it. Answers are
generated greedily, and scored by RULER's rule: the share of the references that an answer contains,
ignoring case (arXiv 2404.06654, 4).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from famjax.core.errors import UserError
from famjax.eval.ablated_reading import AblatedReading
from famjax.eval.ablations import UNABLATED
from famjax.eval.effective_length import effective_lengths
from famjax.eval.examples import (
    AblationScore,
    Example,
    Examples,
    ablation_scores,
    digest,
    document_interval,
    examples_name,
    weights_version,
)
from famjax.eval.lane_answers import answer_prompts
from famjax.eval.lane_stream import ReadDocument
from famjax.eval.memory_usage import memory_report, update_tokens
from famjax.eval.progress import TokenProgress
from famjax.eval.streaming import check_capacity
from famjax.tasks import TASKS
from famjax.tasks.long.document import Document, LongTask, Material, Question
from famjax.tasks.task import Request
from famjax.train.run import Run

LENGTHS = [1024, 4096, 16384]
EXAMPLES = 20
# number of equal parts of a document for which scores are reported
_DEPTHS = 5


class LongRow(TypedDict):
    """The results of a long task at a length.

    Attributes:
      length: maximum number of tokens of a document, including the question and its answer.
      examples: number of answers.
      score: their mean score.
      interval: ends of its 95% interval, a bootstrap over documents.
      by_depth: score for each fifth of the document; None where no fact was.
      cut: number of answers that reached their maximum number of tokens without the full score.
      ablations: for each ablation by name, its score, and the gain over it.
      updates: blocks per document.
      seconds: time of reading.
      tokens_per_second: of reading.
      answer_seconds: time to answer one question for a batch of documents.
      state_bytes: size of the state of one document.
      peak_bytes: see `memory_report`, after reading this length.
    """

    length: int
    examples: int
    score: float
    interval: list[float]
    by_depth: list[float | None]
    cut: int
    ablations: dict[str, AblationScore]
    updates: int
    seconds: float
    tokens_per_second: float
    answer_seconds: float
    state_bytes: int
    peak_bytes: int


class LongResult(TypedDict):
    """The results of `evaluate_long`.

    Attributes:
      task: name of the task.
      source: origin of the task.
      files: files of the filler.
      facts: file of the facts.
      examples: name of the examples file.
      settings: a hash that identifies the examples.
      effective_length: by the rules of RULER and NoLiMa, see `famjax.eval.effective_length`.
      rows: results by length.
    """

    task: str
    source: str
    files: str
    facts: str
    examples: str
    settings: str
    effective_length: dict[str, int | None]
    rows: list[LongRow]


def evaluate(run: Run, request: Request) -> LongResult:
    """Return the results of `evaluate_long`; by default with the run's own files and facts."""
    files, facts = _files(run, request)
    return evaluate_long(
        run,
        request.task,
        request.lengths or LENGTHS,
        examples=request.examples or EXAMPLES,
        batch=request.batch,
        questions=request.questions or 1,
        files=files,
        facts=facts,
        ablate=request.ablate,
        quiet=request.quiet,
        folder=request.folder,
    )


def check_documents(run: Run, request: Request) -> None:
    """Raise the errors of `evaluate` that can be found before anything is read by the model."""
    task, examples = find_task(request.task), request.examples or EXAMPLES
    material = task.load(*_files(run, request), run.tokenizer)
    document = _evaluated_documents(run, task, examples, material)
    lengths = sorted(request.lengths or LENGTHS)
    _check(run, request.task, document, lengths, examples, request.questions or 1)


def _files(run: Run, request: Request) -> tuple[str, str]:
    """Return the files of the filler and the file of the facts, by default the run's own."""
    task, data = find_task(request.task), run.config.data
    training_files = data.files if data.task != "text" else ""
    files = request.files or (training_files if task.has_files else "")
    return files, (request.facts or data.long.facts) if task.has_facts else ""


def _evaluated_documents(
    run: Run, task: LongTask, examples: int, material: Material
) -> Callable[[int, int], Document]:
    """Return a function from a length and a number to the document that is evaluated."""

    def document(length: int, number: int) -> Document:
        return task.evaluated_document(run.tokenizer, length, number, examples, material)

    return document


def find_task(name: str) -> LongTask:
    """Return the task on long documents of that name."""
    task = TASKS[name]
    assert isinstance(task, LongTask)
    return task


def evaluate_long(
    run: Run,
    name: str,
    lengths: Sequence[int],
    *,
    examples: int = EXAMPLES,
    batch: int = 8,
    questions: int = 1,
    files: str = "",
    facts: str = "",
    ablate: Sequence[str] = (),
    quiet: bool = False,
    folder: Path | None = None,
) -> LongResult:
    """Evaluate a run on a long task (`famjax.tasks.long`), by length and by depth.

    Documents are generated while they are read; memory does not grow with their length.

    Args:
      run: a run of any task.
      name: name of the long task.
      lengths: maximum number of tokens of a document, including the question and its answer.
      examples: number of documents of each length.
      batch: number of documents that are read together.
      questions: number of questions about each document.
      files: filler of a task that takes files, in the form of `data.files`; "" is Python's standard
        library.
      facts: file with the facts of a task that takes them, in the form of `data.long.facts`.
      ablate: ablations (`famjax.eval.ablations`) with which the same questions about the same
        documents are answered again.
      quiet: whether to hide the progress.
      folder: folder of the examples file, to which every example is written. A later call with
        equal arguments, or with other lengths, answers only what is missing there.

    Raises:
      UserError: there is nothing to ablate, a length is too short or exceeds full attention's KV
        cache, the tokenizer cannot express an answer, the task has fewer questions, or the
        examples file is damaged.
    """
    task = find_task(name)
    if files and not task.has_files:
        raise UserError(f"{name}:{files}: the task has its own filler; write {name}")
    material = task.load(files, facts, run.tokenizer)
    lengths = sorted(set(lengths))
    document = _evaluated_documents(run, task, examples, material)
    _check(run, name, document, lengths, examples, questions)
    batch = min(batch, examples)
    reading = AblatedReading(run, batch, batch, ablations=ablate)
    settings = _settings(
        run,
        name,
        material,
        files=files,
        facts=facts,
        examples=examples,
        questions=questions,
        ablate=ablate,
        folder=folder,
    )
    file_name = examples_name(settings)
    store = Examples(None if folder is None else folder / file_name, settings)
    missing = [
        (length, numbers)
        for length in lengths
        for numbers in _batches(store.missing(length, range(examples)), batch)
    ]
    _answer_missing(run, name, reading, document, missing, questions, store, quiet)
    rows = [_row(run, length, *store.of_length(length)) for length in lengths]
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


# version of how documents are tokenized: an evaluation is not continued with another. 2: spaces
# between sentences are encoded with the next word
_TOKENIZATION = 2


def _settings(
    run: Run,
    name: str,
    material: Material,
    *,
    files: str,
    facts: str,
    examples: int,
    questions: int,
    ablate: Sequence[str],
    folder: Path | None,
) -> dict[str, Any]:
    """Return what the examples of `evaluate_long` depend on, besides their lengths."""
    return {
        "run": repr(run.config),
        "tokenization": _TOKENIZATION,
        "weights": None if folder is None else weights_version(folder.parent, run.step),
        "material": material.version,
        "texts": material.source and material.source.content_version(),
        "task": name,
        "files": files,
        "facts": facts,
        "examples": examples,
        "questions": questions,
        "ablate": list(ablate),
    }


def _answer_missing(
    run: Run,
    name: str,
    reading: AblatedReading,
    document: Callable[[int, int], Document],
    missing: Sequence[tuple[int, Sequence[int]]],
    questions: int,
    store: Examples,
    quiet: bool,
) -> None:
    """Answer the questions about documents that have no examples yet, and store the examples.

    Args:
      document: see `_evaluated_documents`.
      missing: batches of documents that are read together: their length, and their numbers.
      store: where the examples are added.
    """
    total = sum(length * len(numbers) for length, numbers in missing) * reading.passes
    asked = sum(len(numbers) for _, numbers in missing) * questions * len(reading.names)
    with TokenProgress(name, total, quiet, answers=asked) as progress:
        if missing:
            with progress.compiling():
                reading.warm_up()
        for length, numbers in missing:
            documents = {number: document(length, number) for number in numbers}
            rows, times = _ask(run, reading, documents, questions, progress)
            examples = [Example(length=length, **row) for row in rows]
            store.add(((length, numbers), examples, times))


def _batches(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(numbers), size):
        yield numbers[first : first + size]


def score(output: str, question: Question) -> float:
    """Return the share of the references that an output contains, ignoring case (RULER).

    If any one reference suffices (`any_of`), one of them scores 1.

    If the question has `wrong` answers (BABILong), only the first sentence of the output counts. It
    scores 1 if it contains all references, as whole words, and none of the wrong answers, else 0.
    """
    if question.wrong is None:
        lowered = output.lower()
        count = sum(reference.lower() in lowered for reference in question.references)
        return float(count > 0) if question.any_of else count / len(question.references)
    first = _first_sentence(output)
    has_all = all(_has_word(first, reference) for reference in question.references)
    return float(has_all and not any(_has_word(first, wrong) for wrong in question.wrong))


def _first_sentence(text: str) -> str:
    return re.split(r"[.\n]", text.lstrip(), maxsplit=1)[0]


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _is_settled(text: str, question: Question) -> bool:
    """Return whether no continuation of a text can change its score."""
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
    """Raise early the errors that would otherwise occur while documents are read."""
    check_capacity(run.model.stack.capacity, lengths[-1])
    for number in range(examples):
        first = document(lengths[0], number)
        if not number:
            # take a piece of the filler, which may not fit
            list(islice(first.tokens(), 2))
        known = len(first.questions)
        if questions > known:
            raise UserError(f"--questions {questions}: a document of {name} has {known}")


def _ask(
    run: Run,
    reading: AblatedReading,
    documents: dict[int, Document],
    questions: int,
    progress: TokenProgress,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Read documents together and answer their questions.

    Returns:
      the fields of each `Example` but the length, and the times of the batch.
    """
    reading.seconds = 0.0
    readings = list(
        reading.read(list(documents), lambda n: documents[n].tokens(), progress.advance)
    )
    # sort by number, since documents end in any order
    readings.sort(key=lambda each: each[UNABLATED].number)
    if not reading.has_answered:
        with progress.compiling():  # now, so that timings exclude compilation
            _compile_answering(run, reading, readings, documents)
    begin = time.perf_counter()
    rows = []
    for question in range(questions):
        outputs = {}
        for name in reading.names:
            outputs[name] = _answer(
                run,
                reading,
                name,
                readings,
                documents,
                question,
                on_token=lambda: progress.answer(0),
            )
            progress.answer(len(readings))
        for i, each in enumerate(readings):
            read = each[UNABLATED]
            of_example = {name: outputs[name][i] for name in reading.names}
            rows.append(_example_fields(read, documents[read.number], question, of_example))
    tokens = sum(each[UNABLATED].tokens for each in readings)
    answering = (time.perf_counter() - begin) / questions / len(reading.names)
    peak = memory_report()["peak_bytes"]
    return rows, {"tokens": tokens, "read": reading.seconds, "answer": answering, "peak": peak}


def _compile_answering(
    run: Run,
    reading: AblatedReading,
    readings: Sequence[dict[str, ReadDocument]],
    documents: dict[int, Document],
) -> None:
    """Compile the functions that answer."""
    for name in reading.names:
        # two tokens: the question's call and a step
        _answer(run, reading, name, readings, documents, 0, max_tokens=2)
    reading.has_answered = True


def _example_fields(
    read: ReadDocument, document: Document, question: int, outputs: dict[str, tuple[str, bool]]
) -> dict[str, Any]:
    """Return the fields of an `Example` but the length.

    Args:
      read: the document as it was read.
      document: the document.
      question: number of the question.
      outputs: for each name of `AblatedReading.names` the answer, and whether it was cut.
    """
    asked = document.content.questions[question]
    text, cut = outputs[UNABLATED]
    return {
        "document": read.number,
        "question": question,
        "tokens": read.tokens,
        "depth": max((document.depths[fact] for fact in asked.facts), default=None),
        "prompt": asked.text,
        "references": list(asked.references),
        "output": text,
        "score": score(text, asked),
        "cut": cut,
        "ablated": {
            name: {"output": output, "score": score(output, asked)}
            for name, (output, _) in outputs.items()
            if name != UNABLATED
        },
    }


def _answer(
    run: Run,
    reading: AblatedReading,
    name: str,
    found: Sequence[dict[str, ReadDocument]],
    documents: dict[int, Document],
    question: int,
    max_tokens: int | None = None,
    on_token: Callable[[], None] = lambda: None,
) -> list[tuple[str, bool]]:
    """Return the answer about each document with an ablation, and whether the answer was cut.

    An answer ends with a stop token, when its score is settled, or at its maximum number of tokens.
    It counts as cut if it reached the maximum without the full score.

    Args:
      max_tokens: maximum number of tokens of an answer; None is that of its document.
      on_token: called after each token that is added to the answers.
    """
    asked = [documents[each[name].number].content.questions[question] for each in found]
    answers = answer_prompts(
        reading.answering[name],
        run.tokenizer,
        [each[name].state for each in found],
        [
            np.concatenate([each[name].left, documents[each[name].number].questions[question]])
            for each in found
        ],
        [max_tokens or documents[each[name].number].max_written for each in found],
        lambda lane, text: _is_settled(text, asked[lane]),
        on_token,
    )
    return [
        (text, cut and score(text, which) < 1)
        for (text, cut), which in zip(answers, asked, strict=True)
    ]


def _row(run: Run, length: int, examples: list[Example], times: list[dict[str, Any]]) -> LongRow:
    depths = np.array([_part(example.depth) for example in examples])
    scores = np.array([example.score for example in examples])
    seconds = sum(time["read"] for time in times)
    return {
        "length": length,
        "examples": len(examples),
        "score": float(scores.mean()),
        "interval": np.clip(document_interval(examples, scores.tolist())[1:], 0, 1).tolist(),
        "by_depth": [
            float(scores[depths == i].mean()) if (depths == i).any() else None
            for i in range(_DEPTHS)
        ],
        "cut": sum(example.cut for example in examples),
        "ablations": ablation_scores(examples),
        "updates": length // update_tokens(run.config),
        "seconds": seconds,
        "tokens_per_second": sum(time["tokens"] for time in times) / seconds,
        "answer_seconds": float(np.mean([time["answer"] for time in times])),
        "state_bytes": run.model.state_bytes(),
        "peak_bytes": max(time["peak"] for time in times),
    }


def _part(depth: float | None) -> int:
    """Return which of the `_DEPTHS` parts of a document a depth lies in; -1 without a depth."""
    return -1 if depth is None else min(int(depth * _DEPTHS), _DEPTHS - 1)

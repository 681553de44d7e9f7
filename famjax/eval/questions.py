"""Evaluation on questions about documents in files.

Each document is read once; its questions are answered from the state after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import numpy as np

from famjax.core.errors import UserError
from famjax.eval.ablated_reading import AblatedReading
from famjax.eval.ablations import UNABLATED
from famjax.eval.answer_scores import check_metrics, score_answer
from famjax.eval.examples import (
    Example,
    Examples,
    ablation_scores,
    digest,
    document_interval,
    examples_name,
    weights_version,
)
from famjax.eval.lane_answers import answer_prompts, score_continuations
from famjax.eval.lane_stream import LanePlan, ReadDocument, plan_lanes
from famjax.eval.memory_usage import memory_report, update_tokens
from famjax.eval.progress import TokenProgress
from famjax.eval.questions_result import OctaveRow, QuestionScores, QuestionsResult
from famjax.eval.streaming import CHUNK
from famjax.eval.subsets import mean_score, subset_rows
from famjax.tasks import TASKS
from famjax.tasks.questions.question_set import QuestionSet
from famjax.tasks.questions.records import Asked, AskedDocument
from famjax.tasks.task import Request
from famjax.tokenizers.tokenizer import Tokenizer
from famjax.train.run import Run

# number of documents per lane whose questions are answered together, so that batches have prompts
# of similar lengths, and the maximum size of these documents' states, in bytes
_TOGETHER, _HELD_BYTES = 8, 2**30


class _Work(NamedTuple):
    """A document to read.

    Attributes:
      number: number of the document, in the order of the files.
      document: the document, with the questions that are asked.
      prompts: tokens [n] of each question.
      size: number of tokens that are read, including bos.
      tokens: number of tokens of the whole document, including bos; more than `size` if its
        beginning is cut off.
    """

    number: int
    document: AskedDocument
    prompts: list[np.ndarray]
    size: int
    tokens: int


def evaluate(run: Run, request: Request) -> QuestionsResult:
    """Evaluate a run on documents with questions.

    Raises:
      UserError: a line cannot be read, a document exceeds full attention's cache, or the library of
        a metric is not installed.
    """
    task = TASKS[request.task]
    assert isinstance(task, QuestionSet)
    assert request.files  # `needs_files`
    documents, skipped = task.load(request.files, request.skip_broken)
    documents = _select(documents, request)
    metrics = _metrics(task, documents)
    check_metrics(metrics)
    work, cut_documents = _prepare(run, task, documents, request.window)
    settings = {
        "run": repr(run.config),
        "weights": None
        if request.folder is None
        else weights_version(request.folder.parent, run.step),
        "task": task.name,
        "files": request.files,
        "scoring": [list(task.metrics), task.answer_tokens, task.stop],
        "ablate": list(request.ablate),
        "window": request.window,
    }
    name = examples_name(settings)
    store = Examples(None if request.folder is None else request.folder / name, settings)
    left = [each for each in work if not store.has(_group(each.number), _version(each))]
    if left:
        _answer_all(run, task, left, request, store)
    # only of these documents: an earlier call may have kept examples of more
    examples, times = store.of_length(0, len(work))
    plan = _plan(run, work, request.batch)
    return {
        "task": task.name,
        "source": task.source,
        "files": request.files,
        "examples": name,
        "settings": digest(settings),
        "window": request.window,
        "skipped": skipped,
        "cut_documents": cut_documents,
        **_scores(metrics, examples),
        "rows": _rows(work, examples),
        "longest": max(each.tokens for each in work),
        "updates": max(each.size for each in work) // update_tokens(run.config),
        "lanes": plan.lanes,
        "chunk": plan.chunk,
        "padding": plan.padding,
        "tokens_per_second": sum(t["tokens"] for t in times) / sum(t["read"] for t in times),
        "answer_seconds": sum(t["answer"] for t in times) / len(examples),
        "state_bytes": run.model.state_bytes(),
        "peak_bytes": memory_report()["peak_bytes"],
    }


def check_documents(run: Run, request: Request) -> None:
    """Raise the errors of `evaluate` about lines that cannot be read, and metrics not installed."""
    task = TASKS[request.task]
    assert isinstance(task, QuestionSet)
    assert request.files  # `needs_files`
    documents, _ = task.load(request.files, request.skip_broken)
    check_metrics(_metrics(task, _select(documents, request)))


def _select(documents: list[AskedDocument], request: Request) -> list[AskedDocument]:
    """Return the documents and questions that are asked for; of a collection, from all its sets."""
    chosen, asked = _alternate(documents)[: request.examples], request.questions
    return [document._replace(questions=document.questions[:asked]) for document in chosen]


def _alternate(documents: Sequence[AskedDocument]) -> list[AskedDocument]:
    """Return the documents interleaved, round robin over their data sets."""
    sets: dict[str, list[AskedDocument]] = {}
    for document in documents:
        sets.setdefault(document.questions[0].subset, []).append(document)
    return [each for group in zip_longest(*sets.values()) for each in group if each is not None]


def _metrics(task: QuestionSet, documents: Sequence[AskedDocument]) -> list[str]:
    further = {
        asked.metric for document in documents for asked in document.questions if asked.metric
    }
    return [*task.metrics, *sorted(further)]


def _prepare(
    run: Run, task: QuestionSet, documents: Sequence[AskedDocument], window: int | None
) -> tuple[list[_Work], int]:
    """Tokenize the documents; return them, and how many are cut to the window."""
    encode, capacity = run.tokenizer.encode, run.model.stack.capacity
    work, cut = [], 0
    for number, document in enumerate(documents):
        if _is_ranked(task):
            _check_options(run.tokenizer, document)
        prompts = [encode(asked.prompt) for asked in document.questions]
        asks = zip(prompts, document.questions, strict=True)
        after = max(len(prompt) + _max_tokens(run, task, asked) for prompt, asked in asks)
        tokens = size = len(encode(document.text)) + 1
        if window is not None and size + after > window:
            if after >= window:
                raise UserError(
                    f"--window {window}: question and answer of {document.name} take {after:,} "
                    "tokens; give more"
                )
            size, cut = window - after, cut + 1
        if capacity is not None and size + after > capacity:
            raise UserError(
                f"{document.name}: {size + after:,} tokens with question and answer, and the model "
                f"holds at most {capacity:,} of a document (model.capacity); --window {capacity} "
                f"reads only the last {capacity:,}, and reports how many documents it cut"
            )
        work.append(_Work(number, document, prompts, size, tokens))
    return work, cut


def _check_options(tokenizer: Tokenizer, document: AskedDocument) -> None:
    """Raise a `UserError` for options without tokens, or with unknown ones.

    Their likelihoods would mean nothing.
    """
    for asked in document.questions:
        for option in asked.options:
            tokens = tokenizer.encode(f" {option}")
            # an unknown token has no bytes
            if not option.strip() or not tokenizer.token_bytes[tokens].all():
                raise UserError(
                    f"{document.name}: tokenizer {tokenizer.name} cannot express the option "
                    f"{option!r}; take a run whose tokenizer knows all characters (byte fallback)"
                )


def _max_tokens(run: Run, task: QuestionSet, asked: Asked) -> int:
    """Return the maximum number of tokens after a question."""
    if not asked.options or not _is_ranked(task):
        return task.answer_tokens if asked.answer_tokens is None else asked.answer_tokens
    return max(len(run.tokenizer.encode(f" {option}")) for option in asked.options)


def _is_ranked(task: QuestionSet) -> bool:
    return "accuracy" in task.metrics


def _encode(run: Run, work: _Work) -> np.ndarray:
    """Return the tokens of a document that are read, [size]: bos and the document's last ones."""
    tokens = run.tokenizer.encode(work.document.text)
    tokens = tokens[len(tokens) - (work.size - 1) :]
    return np.append(np.int32(run.tokenizer.bos_id), tokens).astype(np.int32)


def _group(number: int) -> tuple[int, range]:
    return 0, range(number, number + 1)


def _version(work: _Work) -> str:
    """Return a hash that changes with the document or the questions about it."""
    return digest([work.document.text, [list(asked) for asked in work.document.questions]])


def _plan(run: Run, work: Sequence[_Work], batch: int) -> LanePlan:
    longest = run.model.stack.call_len or CHUNK
    return plan_lanes([each.size for each in work], batch, run.model.block_len, longest)


class _Prompt(NamedTuple):
    """A question about a document that was read.

    Attributes:
      work: the document.
      question: number of the question.
      documents: for each name of `AblatedReading.names`, the document as it was read.
    """

    work: _Work
    question: int
    documents: dict[str, ReadDocument]

    @property
    def asked(self) -> Asked:
        return self.work.document.questions[self.question]

    @property
    def tokens(self) -> np.ndarray:
        """[n], tokens of the document after its whole blocks, then of the question."""
        return np.concatenate([self.documents[UNABLATED].left, self.work.prompts[self.question]])


def _answer_all(
    run: Run, task: QuestionSet, work: list[_Work], request: Request, store: Examples
) -> None:
    """Read the documents, answer their questions, and store the examples."""
    plan = _plan(run, work, request.batch)
    answers = min(request.batch, sum(len(each.prompts) for each in work))
    reading = AblatedReading(run, plan.lanes, answers, plan.chunk, request.ablate)
    by_number = {each.number: each for each in work}
    total = sum(each.size for each in work) * reading.passes
    asked = _count_answers(task, work) * len(reading.names)
    with TokenProgress(task.name, total, request.quiet, answers=asked) as progress:
        with progress.compiling():
            reading.warm_up()
        readings = reading.read(
            [each.number for each in sorted(work, key=lambda each: -each.size)],
            lambda number: [_encode(run, by_number[number])],
            progress.advance,
        )
        together = _count_held(run, plan.lanes, len(reading.names))
        while group := list(islice(readings, together)):
            read, reading.seconds = reading.seconds / len(group), 0.0
            begin = time.perf_counter()
            prompts = [
                _Prompt(by_number[documents[UNABLATED].number], question, documents)
                for documents in group
                for question in range(len(by_number[documents[UNABLATED].number].prompts))
            ]
            outputs = {
                name: _answer(run, task, reading, name, prompts, progress) for name in reading.names
            }
            answer = (time.perf_counter() - begin) / len(group) / len(outputs)
            batches = []
            for each in (by_number[documents[UNABLATED].number] for documents in group):
                rows = [
                    _example(prompt, {name: outputs[name][j] for name in outputs})
                    for j, prompt in enumerate(prompts)
                    if prompt.work is each
                ]
                times: dict[str, Any] = {"tokens": each.size, "read": read, "answer": answer}
                times["version"] = _version(each)
                batches.append((_group(each.number), rows, times))
            # one write of the file for all of them
            store.add(*batches)


def _count_answers(task: QuestionSet, work: Sequence[_Work]) -> int:
    """Return how many answers are written; for a choice, how many options are scored."""
    asked = [question for each in work for question in each.document.questions]
    return sum(len(each.options) for each in asked) if _is_ranked(task) else len(asked)


def _count_held(run: Run, lanes: int, readings: int) -> int:
    """Return how many documents are read before their questions are answered."""
    return int(np.clip(_HELD_BYTES // (readings * run.model.state_bytes()), 1, _TOGETHER * lanes))


class _Output(NamedTuple):
    """An answer.

    Attributes:
      text: its text.
      scores: its score by each metric; the first one is "the" score.
      cut: whether it reached its maximum number of tokens.
    """

    text: str
    scores: dict[str, float]
    cut: bool = False


def _answer(
    run: Run,
    task: QuestionSet,
    reading: AblatedReading,
    name: str,
    prompts: Sequence[_Prompt],
    progress: TokenProgress,
) -> list[_Output]:
    """Return the answer to each prompt with the ablation `name`."""
    if _is_ranked(task):
        return _rank(run, task, reading, name, prompts, progress)
    stream = reading.answering[name]
    outputs: dict[int, _Output] = {}
    for numbers in _batches(
        prompts, stream.batch, lambda prompt: _max_tokens(run, task, prompt.asked)
    ):
        together = [prompts[i] for i in numbers]

        def is_done(lane: int, text: str, together: list[_Prompt] = together) -> bool:
            stop = _stop(task, together[lane].asked)
            return bool(stop) and stop in text.lstrip("\n ")

        answers = answer_prompts(
            stream,
            run.tokenizer,
            [prompt.documents[name].state for prompt in together],
            [prompt.tokens for prompt in together],
            [_max_tokens(run, task, prompt.asked) for prompt in together],
            is_done,
            lambda: progress.answer(0),
        )
        for i, (text, cut) in zip(numbers, answers, strict=True):
            outputs[i] = _score(task, prompts[i].asked, text, cut)
        progress.answer(len(numbers))
    return [outputs[i] for i in range(len(prompts))]


def _score(task: QuestionSet, asked: Asked, text: str, cut: bool) -> _Output:
    """Return an answer up to its stop string, and its scores."""
    stop = _stop(task, asked)
    text = text.lstrip("\n ").split(stop)[0] if stop else text
    metrics = [asked.metric] if asked.metric else task.metrics
    scores = {
        metric: score_answer(metric, text, asked.references, asked.options) for metric in metrics
    }
    return _Output(text, scores, cut)


def _stop(task: QuestionSet, asked: Asked) -> str:
    return task.stop if asked.stop is None else asked.stop


def _rank(
    run: Run,
    task: QuestionSet,
    reading: AblatedReading,
    name: str,
    prompts: Sequence[_Prompt],
    progress: TokenProgress,
) -> list[_Output]:
    """Return for each prompt the likeliest of its options, and whether it is right.

    The second score is for the option that is the likeliest per byte.
    """
    stream = reading.answering[name]
    pairs = [(prompt, option) for prompt in prompts for option in prompt.asked.options]
    scores = np.zeros(len(pairs))
    sizes = np.array([len(f" {option}".encode()) for _, option in pairs])
    for numbers in _batches([prompt for prompt, _ in pairs], stream.batch):
        continuation_scores = score_continuations(
            stream,
            [pairs[i][0].documents[name].state for i in numbers],
            [pairs[i][0].tokens for i in numbers],
            [run.tokenizer.encode(f" {pairs[i][1]}") for i in numbers],
        )
        scores[numbers] = [score.log_likelihood for score in continuation_scores]
        progress.answer(len(numbers))
    outputs, at = [], 0
    for prompt in prompts:
        options, right = prompt.asked.options, prompt.asked.references
        of_prompt = slice(at, at + len(options))
        at = of_prompt.stop
        chosen = options[int(scores[of_prompt].argmax())]
        by_byte = options[int((scores[of_prompt] / sizes[of_prompt]).argmax())]
        shares = (float(chosen in right), float(by_byte in right))
        outputs.append(_Output(chosen, dict(zip(task.metrics, shares, strict=True))))
    return outputs


def _batches(
    prompts: Sequence[_Prompt], batch: int, max_tokens: Callable[[_Prompt], int] = lambda _: 0
) -> Iterator[list[int]]:
    """Yield batches of indices of prompts with similar lengths.

    Args:
      max_tokens: maximum number of tokens of a prompt's answer. All answers of a batch wait for the
        longest one, so prompts are sorted by it first.
    """
    order = sorted(
        range(len(prompts)), key=lambda i: (max_tokens(prompts[i]), len(prompts[i].tokens))
    )
    for first in range(0, len(order), batch):
        yield order[first : first + batch]


def _example(prompt: _Prompt, outputs: dict[str, _Output]) -> Example:
    output, asked = outputs.pop(UNABLATED), prompt.asked
    return Example(
        length=0,
        document=prompt.work.number,
        question=prompt.question,
        tokens=prompt.work.size,
        depth=None,
        prompt=asked.prompt,
        references=list(asked.references),
        output=output.text,
        score=next(iter(output.scores.values())),
        cut=output.cut,
        scores=output.scores,
        subset=asked.subset,
        words=asked.words,
        ablated={
            name: {"output": each.text, "score": next(iter(each.scores.values()))}
            for name, each in outputs.items()
        },
    )


def _scores(metrics: Sequence[str], examples: Sequence[Example]) -> QuestionScores:
    score, *ends = document_interval(examples, [example.score for example in examples])
    return {
        "documents": len({example.document for example in examples}),
        "questions": len(examples),
        "metric": metrics[0] if set(metrics) == set(examples[0].scores or ()) else "mean",
        "score": score,
        "interval": np.clip(ends, 0, 1).tolist(),
        "scores": {metric: mean_score(examples, metric) for metric in metrics},
        "subsets": subset_rows(examples),
        "cut": sum(example.cut for example in examples),
        "ablations": ablation_scores(examples),
    }


def _rows(work: Sequence[_Work], examples: Sequence[Example]) -> list[OctaveRow]:
    """Return a row with the score for each octave of document lengths."""
    octaves: dict[int, list[Example]] = {}
    sizes = {each.number: each.size for each in work}
    for example in examples:
        octaves.setdefault((sizes[example.document] - 1).bit_length(), []).append(example)
    return [
        {
            "from": (1 << octave >> 1) + 1,
            "to": 1 << octave,
            "documents": len({example.document for example in found}),
            "questions": len(found),
            "score": float(np.mean([example.score for example in found])),
        }
        for octave, found in sorted(octaves.items())
    ]

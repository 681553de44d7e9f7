"""Evaluation of a run with the unmodified lm-evaluation-harness, by a subclass of its `TemplateLM`.

Differences from the harness's own `hf` model:

- A document always begins with bos, as in training (`hf` with `add_bos_token=True`).
- Nothing is ever cut off on the left.
- `loglikelihood_rolling` reads a document of any length in one stream, so that every token is
  predicted from all before it, whereas `hf` starts again every `max_length` tokens. Documents that
  fit in one window get the same result.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from famjax.core.errors import UserError, did_you_mean
from famjax.core.optional import missing_message, missing_modules

if missing := missing_modules(["lm_eval"]):
    raise UserError(f"lm_eval: {missing_message(missing)}")

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from famjax.eval.examples import digest
from famjax.eval.generate import Generator, cut_at_stop
from famjax.eval.lane_answers import answer_prompts
from famjax.eval.lane_stream import LaneStream
from famjax.eval.log_likelihoods import Continuation, log_likelihoods
from famjax.eval.memory_usage import memory_report
from famjax.eval.progress import TokenProgress
from famjax.tasks.task import Request
from famjax.train.run import Run

_MAX_GENERATED = 256
# the harness's settings of generation that `Generator` has, too
_SAMPLING = ("temperature", "top_k", "top_p")
# suffixes of files with tasks
_FILES = (".yaml", ".yml")


class FamjaxLM(TemplateLM):
    """A run as a model of the harness: `simple_evaluate(model=FamjaxLM(run), ...)`.

    Args:
      run: any run.
      batch: number of documents that are read together.
      quiet: whether to hide the progress.
    """

    def __init__(self, run: Run, batch: int = 8, quiet: bool = True):
        super().__init__()
        self._run, self._batch, self._quiet = run, batch, quiet

    @property
    def eot_token_id(self) -> int:
        return self._run.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self._run.tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self._run.tokenizer.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the ids of a text, after bos unless `add_special_tokens` is False."""
        # a control token counts as one only where the chat template wrote it, marked in the text
        ids = self._run.tokenizer.encode_rendered(string).tolist()
        return ids if add_special_tokens is False else [self.prefix_token_id, *ids]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        template = self._run.tokenizer.chat_template
        if template is None:
            raise UserError(
                f"--chat: tokenizer {self._run.tokenizer.name} has no chat template; leave it out"
            )
        if not add_generation_prompt and chat_history[-1]["role"] == "assistant":
            return template.render_unfinished(chat_history)  # the task's `gen_prefix`
        return template.render_prompt(chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        return "" if not chat_template else self.tokenizer_name

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        continuations = [
            Continuation(np.array(context, np.int32), np.array(tokens, np.int32))
            for _, context, tokens in requests
        ]
        scores = log_likelihoods(self._run, continuations, self._batch, self._quiet)
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, each token predicted from all before it."""
        pairs = []
        for (text,) in (request.args for request in requests):
            first, *tokens = self.tok_encode(text)
            pairs.append((None, [first], tokens))
        return [score for score, _ in self._loglikelihood_tokens(pairs)]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the text generated after each context, up to the first of its stop strings.

        Texts that are decoded greedily are generated `batch` at a time.
        """
        given = [request.args for request in requests]
        capacity = self._run.model.stack.capacity
        asked = [
            _Asked.parse(self.tok_encode(text), settings, capacity) for text, settings in given
        ]
        batched = [self._is_batched(each) for each in asked]
        greedy, others = ([i for i, b in enumerate(batched) if b == kind] for kind in (True, False))
        tokens = sum(len(each.context) for each in asked)
        with TokenProgress("answers", tokens, self._quiet, answers=len(asked)) as progress:
            texts = self._answer_greedily(asked, greedy, progress) if greedy else {}
            texts |= self._answer_alone(asked, others, progress) if others else {}
        return [texts[i] for i in range(len(asked))]

    def _is_batched(self, asked: _Asked) -> bool:
        """Return whether a text is decoded greedily and fits the model's cache for certain."""
        capacity = self._run.model.stack.capacity
        fits = capacity is None or len(asked.context) + asked.max_tokens - 1 <= capacity
        return fits and not asked.sampling.get("temperature")

    def _answer_alone(
        self, asked: Sequence[_Asked], numbers: Sequence[int], progress: TokenProgress
    ) -> dict[int, str]:
        """Return the texts after the contexts of these numbers, one after the other."""
        generator = Generator(self._run)
        texts: dict[int, str] = {}
        for i in numbers:
            context, max_tokens, stops, sampling = asked[i]
            texts[i] = "".join(
                # a seed of its own, since a task may repeat a context to compare its samples
                generator.continue_tokens(context, max_tokens, stop=stops, seed=i, **sampling)
            )
            progress.advance(len(context))
            progress.answer(1)
        return texts

    def _answer_greedily(
        self, asked: Sequence[_Asked], greedy: Sequence[int], progress: TokenProgress
    ) -> dict[int, str]:
        """Return the texts after the contexts of these numbers, `batch` at a time."""
        stream = LaneStream(self._run.model, min(self._batch, len(greedy)))
        texts: dict[int, str] = {}
        by_length = sorted(greedy, key=lambda i: (asked[i].max_tokens, len(asked[i].context)))
        for first in range(0, len(by_length), stream.batch):
            numbers = by_length[first : first + stream.batch]
            answers = self._answer_batch(stream, [asked[i] for i in numbers], progress)
            texts |= dict(zip(numbers, answers, strict=True))
        return texts

    def _answer_batch(
        self, stream: LaneStream, asked: Sequence[_Asked], progress: TokenProgress
    ) -> list[str]:
        """Return the greedy continuations of a batch."""
        fresh = stream.new_stream()
        answers = answer_prompts(
            fresh,
            self._run.tokenizer,
            [fresh.lane(0)] * len(asked),
            [each.context for each in asked],
            [each.max_tokens for each in asked],
            lambda lane, text: any(stop in text for stop in asked[lane].stops),
            lambda: progress.answer(0),
            [self._run.tokenizer.stop_ids_with(each.stops) for each in asked],
        )
        progress.advance(sum(len(each.context) for each in asked))
        progress.answer(len(asked))
        return [
            "".join(cut_at_stop(each.stops, iter([text])))
            for (text, _), each in zip(answers, asked, strict=True)
        ]


class _Asked(NamedTuple):
    """A context to continue.

    Attributes:
      context: its tokens [n].
      max_tokens: maximum number of tokens of the text.
      stops: strings at which the text ends.
      sampling: temperature, top_k and top_p, where they are given.
    """

    context: np.ndarray
    max_tokens: int
    stops: Sequence[str]
    sampling: dict[str, Any]

    @classmethod
    def parse(cls, context: Sequence[int], given: dict[str, Any], capacity: int | None) -> _Asked:
        """Return a context with the harness's settings of generation.

        As with other models of the harness, sampling has temperature 1 unless it is given, and a
        text ends where the model's cache of `capacity` tokens does.
        """
        if given.get("do_sample"):
            given = {"temperature": 1.0, **given}
        settings = normalize_gen_kwargs(given, _MAX_GENERATED)
        if capacity is not None and len(context) <= capacity:
            # the last token is not read
            room = capacity - len(context) + 1
            settings["max_gen_toks"] = min(settings["max_gen_toks"], room)
        sampling = {name: settings[name] for name in _SAMPLING if name in settings}
        stops = [stop for stop in settings["until"] if stop]
        return cls(np.array(context, np.int32), settings["max_gen_toks"], stops, sampling)


def evaluate(run: Run, request: Request) -> dict[str, Any]:
    """Evaluate the requested tasks of the harness one after the other.

    Returns:
      files (names of the tasks, as given), shots, chat, harness (its version), seconds; scores, the
      first metric of each task, or of the group itself for a group that has one; rows of task,
      metric, filter, value, error (standard error of the value, or None), examples, shots, version,
      documents (a hash of the examples) and by_example (the metric of each example if the value is
      their mean, else empty).

    Raises:
      UserError: the harness does not have a task, its data cannot be loaded, or it has no metric.
    """
    begin = time.perf_counter()
    scores: dict[str, float] = {}
    rows = []
    for name, task in find_tasks(request.files):
        found = _rows(_evaluate_task(run, request, name, task))
        if not found:
            raise UserError(f"lm_eval:{name}: has no metric that is a number; take another task")
        for row in [row for row in found if row["task"] == task] or found:
            scores.setdefault(row["task"], row["value"])
        rows += found
    return {
        "files": request.files,
        "shots": request.shots,
        "chat": request.chat,
        "seconds": time.perf_counter() - begin,
        "harness": lm_eval.__version__,
        "scores": scores,
        "rows": rows,
        **memory_report(),
    }


def check_names(request: Request) -> None:
    """Raise a `UserError` if the harness does not have all requested tasks."""
    find_tasks(request.files)


def _evaluate_task(run: Run, request: Request, name: str, task: str) -> dict[str, Any]:
    # the bootstrap prints, and forks processes, which may deadlock beside the threads of JAX
    with contextlib.redirect_stdout(sys.stderr), _environment("DISABLE_MULTIPROC", "1"):
        found: dict[str, Any] = lm_eval.simple_evaluate(
            model=FamjaxLM(run, request.batch, request.quiet),
            tasks=[task],
            num_fewshot=request.shots,
            limit=request.examples,
            apply_chat_template=request.chat,
            fewshot_as_multiturn=request.chat,
            task_manager=_task_manager(name),
            bootstrap_iters=1000,
            log_samples=True,
        )
    return found


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment inside, unless it is set."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


class _TaskManager(TaskManager):
    """A `TaskManager` that raises a `UserError` if a task's data cannot be loaded.

    Loading a task runs no code of famjax, so any exception there is an error of the data.
    """

    def load(self, task_list: Any) -> Any:
        with _loading(task_list):
            return super().load(task_list)

    def load_task_or_group(self, task_list: Any = None) -> Any:
        """Like `load`, for versions of the harness that call this instead."""
        with _loading(task_list):
            return super().load_task_or_group(task_list)


@functools.cache
def _own_tasks() -> _TaskManager:
    # cached: the harness reads all its task files, which takes seconds
    return _TaskManager()


def _task_manager(name: str) -> _TaskManager:
    if name.endswith(_FILES):
        return _TaskManager(include_path=[str(Path(name).parent)], include_defaults=False)
    return _own_tasks()


@contextlib.contextmanager
def _loading(tasks: Any) -> Iterator[None]:
    """Turn an error while the data of tasks is loaded into a `UserError` of one line."""
    try:
        yield
    except Exception as error:
        name = ",".join(map(str, tasks)) if isinstance(tasks, list) else str(tasks)
        cause, message = _cause(error)
        raise UserError(
            f"lm_eval:{name}: its data cannot be loaded ({message}); {_remedy(name, cause)}"
        ) from error


def _cause(error: BaseException) -> tuple[BaseException, str]:
    """Return the error that is the root cause of another, and a short description of it."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    # the last one with a message
    last = next((each for each in reversed(causes) if str(each).strip()), causes[-1])
    line = next(iter(str(last).strip().splitlines()), "")
    if isinstance(last, KeyError):
        return last, f"it has no split or field {line}"
    return last, f"{type(last).__name__}: {line}" if line else type(last).__name__


def _remedy(name: str, cause: BaseException) -> str:
    """Return advice on how to make the data of a task loadable."""
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
        return "free disk space, or set HF_HOME to a folder on another disk"
    if "scripts are no longer supported" in str(cause):
        return "its set is a script: pip install 'datasets<4', or take a task of local files"
    if isinstance(cause, KeyError | ValueError):
        checked = "correct the splits and fields in its YAML file, or the data that it names"
        return f"{checked}; data that was not downloaded whole: {_prepare(name)}"
    return f"{_prepare(name)}, or write a task of local files (docs/evaluation.md)"


def _prepare(name: str) -> str:
    return f"with a network, famjax eval RUN --tasks lm_eval:{name} --examples 1 keeps a copy of it"


def find_tasks(files: str | None) -> list[tuple[str, str]]:
    """Return the requested tasks, each as given and with its name in the harness.

    Args:
      files: names of tasks and YAML files, separated by commas.

    Raises:
      UserError: the harness does not have a task, or a file does not exist.
    """
    tasks = []
    for name in filter(None, (files or "").split(",")):
        if name.endswith(_FILES):
            tasks.append((name, _task_of(Path(name))))
            continue
        if name not in (known := _own_tasks().all_tasks):
            raise UserError(
                f"lm_eval:{name}: lm-evaluation-harness has no such task{did_you_mean(name, known)}"
            )
        tasks.append((name, name))
    return tasks


def _task_of(file: Path) -> str:
    """Return the name of the task in a YAML file.

    A regular expression finds it: the file may have `!function` tags, which a plain YAML parser
    rejects.
    """
    if not file.exists():
        raise UserError(f"lm_eval:{file}: there is no such file")
    name = re.search(r"^(?:task|group):\s*([^\s#]+)", file.read_text(), re.MULTILINE)
    if name is None:
        raise UserError(f"lm_eval:{file}: is no task of the harness: it has no field task")
    return name[1].strip("\"'")


def _rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each metric of each task."""
    rows = []
    for task, results in found["results"].items():
        samples = found.get("n-samples", {}).get(task, {})
        for key, value in results.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = results.get(f"{metric}_stderr,{filtered}")
            known = isinstance(error, int | float) and math.isfinite(error)
            rows.append(
                {
                    "task": task,
                    "metric": metric,
                    "filter": filtered,
                    "value": float(value),
                    "error": float(error) if known else None,
                    "examples": samples.get("effective"),
                    "shots": found.get("n-shot", {}).get(task),
                    "version": found.get("versions", {}).get(task),
                    "documents": _hash_documents(found, task),
                    "by_example": _by_example(found, task, metric, filtered, float(value)),
                }
            )
    return rows


def _hash_documents(found: dict[str, Any], task: str) -> str:
    """Return a hash of the examples of a task, in order; "" if it has none, like a group."""
    samples = sorted(found["samples"].get(task, []), key=lambda sample: sample["doc_id"])
    return digest([sample["doc_hash"] for sample in samples]) if samples else ""


def _by_example(
    found: dict[str, Any], task: str, metric: str, filtered: str, value: float
) -> list[float]:
    """Return a task's metric for each example; an empty list if `value` is not their mean."""
    samples = sorted(found["samples"].get(task, []), key=lambda sample: sample["doc_id"])
    values = [sample.get(metric) for sample in samples if sample["filter"] == filtered]
    if not values or not all(isinstance(each, int | float) for each in values):
        return []
    return [float(each) for each in values] if np.isclose(np.mean(values), value) else []

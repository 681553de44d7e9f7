"""The interface of tasks: documents to train on, and how a run is evaluated on them.

A new task is one file with a `Task`, and one line in `famjax.tasks.TASKS`.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from famjax.config.schema import Config, DataConfig
from famjax.core.errors import UserError
from famjax.data.sources import Source, Split
from famjax.tokenizers.load import load_tokenizer
from famjax.tokenizers.tokenizer import Tokenizer


class Request(NamedTuple):
    """A request of `famjax eval` to a task. Where a value is None, the task chooses.

    Attributes:
      task: name of the task.
      files: for a text task, files in the form of `data.files`; None is the holdout. Other tasks
        have a form of their own.
      lengths: lengths of the documents or episodes.
      examples: number of documents or episodes of each length.
      batch: number of documents that are read together.
      window, score, words: for texts, see `famjax.eval.text.evaluate_text`.
      questions: number of questions about each long document.
      facts: file with the facts of long documents.
      ablate: ablations (`famjax.eval.ablations`) with which the evaluation is repeated.
      folder: folder to which the examples with their outputs are written; None writes none.
      quiet: whether to hide the progress.
      shots: number of solved examples before each question; None is the task's own number.
      chat: whether to ask questions as messages, with the tokenizer's chat template.
      skip_broken: whether to leave out lines of files that cannot be read.
      beam, length_penalty, no_repeat_ngram: for pairs, settings of the search for outputs, see
        `famjax.eval.translator.Translator`.
      tune: for pairs, whether to try several length penalties, and take the best.
      max_tokens: for pairs, maximum number of tokens of an output; None is twice the source's
        number as padded, plus 16, but at most the longest target in training.
      tokenized: whether the files of translations are already tokenized, for example by Moses.
      is_trial: whether the evaluation only has to find mistakes, so that a text is read in part.
    """

    task: str
    files: str | None = None
    lengths: list[int] | None = None
    examples: int | None = None
    batch: int = 8
    window: int | None = None
    score: int | None = None
    words: int | None = None
    questions: int | None = None
    facts: str = ""
    ablate: tuple[str, ...] = ()
    folder: Path | None = None
    quiet: bool = False
    shots: int | None = None
    chat: bool = False
    skip_broken: bool = False
    beam: int = 1
    length_penalty: float = 1.0
    no_repeat_ngram: int = 0
    tune: bool = False
    max_tokens: int | None = None
    tokenized: bool = False
    is_trial: bool = False


def _find(name: str) -> Callable[..., Any]:
    """Return the function with the name "module:function"."""
    module, _, function_name = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), function_name)
    return function


def answer_weight_error(key: str, weight: float) -> str:
    """Return the error for a weight of tokens that are no answers, if it is 1 or more."""
    return (
        f"{key}={weight}: must be less than 1, since tokens of weight 1 count as answers of the "
        "task in its accuracy; take 0.02"
    )


class Task(abc.ABC):
    """A task, as selected by `data.task` or `famjax eval --tasks`.

    Attributes:
      keys: config keys (`fnmatch` patterns) that have an effect only with this task.
      switches: config keys like `keys`, whose values 0, false, none and "" are accepted with any
        task.
      has_own_words: whether `data.tokenizer=task` makes a vocabulary of the task's own words.
      group: section of the task's results in the report of `famjax eval`; tasks may share one.
      options: options of `famjax eval` that the task takes: any of lengths, examples, questions,
        facts, ablate, window, score, words, shots, chat, skip_broken, beam, length_penalty,
        no_repeat_ngram, tune, max_tokens and tokenized.
      eval_lengths: lengths that `eval.tasks` measures if `eval.lengths` gives none, since all of
        `famjax eval` would take too long; () is those of `famjax eval`.
      files: what may follow the task's name and a colon in `--tasks`, as an example for errors; ""
        is nothing.
      needs_files: whether files must follow the task's name.
      has_parts: whether each of these files, between commas, has a result of its own.
      evaluation: name "module:function" of a function that takes a `Run` and a `Request`, and
        returns results: a dictionary with "rows", one for each length, in which the scores of
        trivial baselines are columns. It is a name, not a function, since evaluations import runs,
        which import the tasks.
      request_check: name "module:function" of a function that takes a `Request`, and raises a
        `UserError` for a mistake in it; "" is none.
      documents_check: name of a function that takes a `Run` and a `Request`, and raises a
        `UserError` for a mistake that is found by reading the files; "" is none.
      headline: name of the score by which a run is judged, in each row of the results.
      lower_is_better: whether a lower headline is better.
      reads_sources: whether the task is for models with an encoder; if not, it is for models
        without one.
    """

    keys: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    has_own_words: bool = False
    group: str
    options: tuple[str, ...] = ("lengths", "examples")
    eval_lengths: tuple[int, ...] = (1024,)
    files: str = ""
    needs_files = False
    has_parts = False
    evaluation: str
    request_check = ""
    documents_check = ""
    headline: str
    lower_is_better = False
    reads_sources = False

    def check(self, config: Config) -> Iterator[str]:
        """Yield an error line for each setting that this task cannot work with."""
        yield from ()

    def resolve(self, data: DataConfig) -> DataConfig:
        """Return the config, with keys of the task set that follow from others; idempotent."""
        return data

    def make_tokenizer(self, data: DataConfig) -> Tokenizer:
        """Return the tokenizer that `data.tokenizer` names."""
        return load_tokenizer(data.tokenizer)

    @abc.abstractmethod
    def make_source(
        self, config: Config, tokenizer: Tokenizer, split: Split, checked: Path | None
    ) -> Source:
        """Return the source of the task's documents; see `famjax.pipeline.make_source`."""

    def eval_options(self, config: Config, source: Any, capacity: int | None) -> str | None:
        """Return the options of `famjax eval` with which a run can be evaluated on this task.

        Examples are "" and " --lengths 256"; None means that it cannot be evaluated.

        Args:
          config: the run's config.
          source: source of the training data.
          capacity: maximum number of tokens of a document; None is unbounded.
        """
        return ""

    def check_request(self, run: Any, request: Request) -> None:
        """Raise a `UserError` for mistakes that can be found before anything is read."""
        if run.config.model.encoder.layers and not self.reads_sources:
            raise UserError(
                f"{request.task}: has no sources to read for a model with an encoder; take "
                "translate:SOURCES=TARGETS or summarize:SOURCES=TARGETS"
            )
        if self.needs_files and not request.files:
            raise UserError(f"{request.task}: names no files; write {request.task}:{self.files}")
        if self.request_check:
            _find(self.request_check)(request)

    def check_documents(self, run: Any, request: Request) -> None:
        """Raise a `UserError` for mistakes that are found by reading the files."""
        if self.documents_check:
            _find(self.documents_check)(run, request)

    def evaluate(self, run: Any, request: Request) -> Any:
        """Evaluate a `famjax.train.run.Run`, and return the results of `evaluation`.

        The argument has no type, since runs and evaluations need packages that need this one.
        """
        self.check_request(run, request)
        return _find(self.evaluation)(run, request)

    def scores(self, results: Any) -> dict[str, float]:
        """Return the headline scores in what `evaluate` returned.

        The keys are lengths ("1024") or names of parts; "" is the score over everything.
        """
        rows = results["rows"] if isinstance(results, dict) else results
        return {str(row["length"]): float(row[self.headline]) for row in rows}


class EvaluationTask(Task):
    """A task for evaluation only.

    Attributes:
      instead: advice on what to train on instead, for the error if it is trained on.
    """

    instead = "train on another task"

    def check(self, config: Config) -> Iterator[str]:
        yield self._no_training(config)

    def make_source(
        self, config: Config, tokenizer: Tokenizer, split: Split, checked: Path | None
    ) -> Source:
        raise UserError(self._no_training(config))

    def _no_training(self, config: Config) -> str:
        return f"data.task={config.data.task}: is for famjax eval; {self.instead}"

"""What a task is: documents to train on, and how a run is evaluated on it.

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
    """What `famjax eval` asks of a task. None leaves the choice to the task.

    Attributes:
      task: name.
      files: of a text task, as `data.files`; None is the holdout.
      lengths: of the documents or episodes.
      examples: documents or episodes of each length.
      batch: documents read together.
      window, score, words: of texts, see `famjax.eval.text.evaluate_text`.
      questions: of each long document.
      facts: file of the facts of long documents.
      ablate: ablations with which questions are answered, too (`famjax.eval.ablations`).
      folder: for the examples, each with its output; None writes none.
      quiet: no progress.
      shots: solved examples before each question; None is the task's own number.
      chat: questions are messages of the tokenizer's chat template.
      skip_broken: lines of files that cannot be read are left out.
      beam, length_penalty, no_repeat_ngram: of the search for outputs of pairs, see
        `famjax.eval.translator.Translator`.
      tune: try several length penalties, and take the best.
      max_tokens: most tokens of an output of pairs; None is twice the source's and 16 more, but at
        most those of the longest target in training.
      tokenized: the files of translations are tokenized, as by Moses.
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


def _find(name: str) -> Callable[..., Any]:
    """Return the function "module:function"."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


class Task(abc.ABC):
    """A task, `data.task`.

    Attributes:
      keys: config keys (`fnmatch` patterns) that have an effect only with such tasks.
      switches: the same, of which 0, false, none and "" are always accepted.
      has_own_words: its vocabulary is a list of its own words, `data.tokenizer=task`.
      group: where its results are in the report of `famjax eval`, which tasks may share.
      options: of `famjax eval`, which of lengths, questions, facts, ablate, window, score, words,
        shots, chat, skip_broken, beam, length_penalty,
        no_repeat_ngram, tune, max_tokens and tokenized it takes.
      files: what may follow its name and a colon; "" is nothing.
      needs_files: and has to.
      has_parts: each of those, between commas, has a result of its own.
      evaluation: "module:function" of `Request` and a `Run` to results: a dictionary with "rows",
        one for each length, in which the scores of trivial baselines are columns. It is a name,
        not a function, since evaluations import runs, which import the tasks.
      request_check: "module:function" of a `Request`, which raises a `UserError` for a mistake in
        it; "" is none.
      headline: the figure by which a run is judged, in each row of the results.
      lower_is_better: of the headline.
      reads_sources: it is of models with an encoder, and others are of models without one.
    """

    keys: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    has_own_words: bool = False
    group: str
    options: tuple[str, ...] = ("lengths",)
    files: str = ""
    needs_files = False
    has_parts = False
    evaluation: str
    request_check = ""
    headline: str
    lower_is_better = False
    reads_sources = False

    def check(self, config: Config) -> Iterator[str]:
        """Yield an error line for each setting that this task cannot work with."""
        yield from ()

    def resolve(self, data: DataConfig) -> DataConfig:
        """Return the config with what follows from other keys of the task; idempotent."""
        return data

    def make_tokenizer(self, data: DataConfig) -> Tokenizer:
        """Return the tokenizer that `data.tokenizer` names."""
        return load_tokenizer(data.tokenizer)

    @abc.abstractmethod
    def make_source(
        self, config: Config, tokenizer: Tokenizer, split: Split, checked: Path | None
    ) -> Source:
        """Return the source of documents; see `famjax.pipeline.make_source`."""

    def eval_options(self, config: Config, source: Any, capacity: int | None) -> str | None:
        """Return the options with which `famjax eval` evaluates a run on this task.

        Such as "" or " --lengths 256"; None if that is not possible.

        Args:
          source: of the training data.
          capacity: maximum number of tokens of a document; None is unbounded.
        """
        return ""

    def check_request(self, run: Any, request: Request) -> None:
        """Raise a `UserError` for what can be seen to be wrong before anything is read."""
        if run.config.model.encoder.layers and not self.reads_sources:
            raise UserError(
                f"{request.task}: has no sources to read for a model with an encoder; take "
                "translate:SOURCES=TARGETS or summarize:SOURCES=TARGETS"
            )
        if self.needs_files and not request.files:
            raise UserError(f"{request.task}: names no files; write {request.task}:{self.files}")
        if self.request_check:
            _find(self.request_check)(request)

    def evaluate(self, run: Any, request: Request) -> Any:
        """Evaluate a `famjax.train.run.Run`; evaluations need packages that need this one."""
        self.check_request(run, request)
        return _find(self.evaluation)(run, request)

    def scores(self, results: Any) -> dict[str, float]:
        """Return the headline of what `evaluate` returned, by length ("1024") or by the name of a
        part; "" is of all."""
        rows = results["rows"] if isinstance(results, dict) else results
        return {str(row["length"]): float(row[self.headline]) for row in rows}


class EvaluationTask(Task):
    """A task that nothing is trained on.

    Attributes:
      instead: what to train on.
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

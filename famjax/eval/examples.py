"""The examples file of an evaluation: every question with its answer, in JSON lines."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from famjax.core.atomic import write_file
from famjax.core.errors import UserError
from famjax.core.folder_lock import lock_folder
from famjax.core.json_files import RUN_AGAIN, parse_json, read_whole
from famjax.data.hashes import fingerprint_contents
from famjax.eval.intervals import mean_of_ratios

# files in a model's folder that decide how a text is tokenized
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja"),
    *("special_tokens_map.json", "generation_config.json", "config.json"),
)


@dataclass
class Example:
    """A question about a document, and its answer.

    Attributes:
      length: requested maximum number of tokens of the document.
      document, question: number of the document, and of the question in it.
      tokens: number of tokens before the question.
      depth: position of the last fact that the question needs, from 0 (the document's start) to 1
        (its end); None if the question needs no fact.
      prompt: the question.
      references: strings that a full answer contains.
      output: the answer.
      score: the share of the references that the output contains.
      cut: whether the output reached its maximum number of tokens without the full score.
      scores: for questions from files, the score by each metric.
      subset: in a collection of data sets, the data set that the question is from.
      words: number of words of the document with question and answers, as the collection counts
        them.
      ablated: for each ablation (`famjax.eval.ablations`) by name, its output and score.
    """

    length: int
    document: int
    question: int
    tokens: int
    depth: float | None
    prompt: str
    references: list[str]
    output: str
    score: float
    cut: bool
    scores: dict[str, float] = field(default_factory=dict)
    ablated: dict[str, dict[str, Any]] = field(default_factory=dict)
    subset: str = ""
    words: int | None = None


class AblationScore(TypedDict):
    """The score with an ablation, and how much better the run is without it.

    Attributes:
      score: the score with the ablation.
      gain: the mean of the paired differences, and the ends of its 95% interval over documents.
    """

    score: float
    gain: list[float]


def examples_name(settings: dict[str, Any]) -> str:
    """Return the name of an evaluation's examples file, which is different for all settings."""
    return f"{settings['task']}-{digest(settings)[:8]}.jsonl"


def digest(value: Any) -> str:
    """Return a hash of a JSON-able value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def weights_version(run: Path, step: int) -> list[Any]:
    """Return a value that changes whenever the weights of a run change.

    It has the step and, for a model's folder, the names, sizes and times of its safetensors and a
    hash of its tokenizer's files.
    """
    weights = sorted(run.glob("*.safetensors"))
    files = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in weights]
    if weights:
        tokenizer = [path for name in _TOKENIZER_FILES if (path := run / name).exists()]
        files.append(["tokenizer", fingerprint_contents(tokenizer)])
    return [step, *files]


def weights_digest(run: Path) -> str | None:
    """Return a hash of `weights_version` for a model's folder; None for a folder of a run."""
    _, *files = weights_version(run, 0)
    return digest(files)[:8] if files else None


def read_lines(file: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Return the settings of an examples file, and its other lines: examples and batch times.

    Raises:
      UserError: the file is damaged.
    """
    found, number = [], 0
    try:
        for number, line in enumerate(read_whole(file, RUN_AGAIN).decode().splitlines(), 1):
            found.append(parse_json(line))
            if number > 1 and not isinstance(found[-1], dict):
                raise ValueError("no example")
        settings, *lines = found
    except ValueError as error:
        raise UserError(f"{file}: damaged at line {number} ({error}); {RUN_AGAIN}") from None
    return settings, lines


def check_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    """Raise a `UserError` if a line is neither an example nor the times of a batch."""
    example = {field.name for field in fields(Example)}
    # older files lack the fields that were added later, which have defaults
    needed = {
        each.name
        for each in fields(Example)
        if each.default is MISSING and each.default_factory is MISSING
    }
    times = {"length", "first", "tokens", "read", "answer"}
    if any(
        set(line) - {"version", "peak"} != times and not needed <= set(line) <= example
        for line in lines
    ):
        raise UserError(f"{file}: damaged (a line that is not an example); {RUN_AGAIN}")


def document_interval(
    examples: Sequence[Example], values: Sequence[float]
) -> tuple[float, float, float]:
    """Return the mean of the examples' values, and the ends of its 95% interval over documents.

    For a collection, the mean is that of the means of its data sets, and the bootstrap draws
    documents within each data set.
    """
    subsets: dict[str, dict[int, list[float]]] = {}
    for example, value in zip(examples, values, strict=True):
        subsets.setdefault(example.subset, {}).setdefault(example.document, []).append(value)
    sets = [
        (
            np.array([sum(group) for group in groups.values()], float),
            np.array([len(group) for group in groups.values()], float),
        )
        for groups in subsets.values()
    ]
    return mean_of_ratios(sets)


def ablation_scores(examples: Sequence[Example]) -> dict[str, AblationScore]:
    """Return for each ablation its score and its gain."""
    found: dict[str, AblationScore] = {}
    for name in examples[0].ablated:
        scores = [float(example.ablated[name]["score"]) for example in examples]
        gains = [example.score - score for example, score in zip(examples, scores, strict=True)]
        mean, *ends = document_interval(examples, gains)
        gain = [mean, *np.clip(ends, -1, 1).tolist()]
        found[name] = {"score": document_interval(examples, scores)[0], "gain": gain}
    return found


# a length, and the numbers of the documents of that length that are read together, lowest first
Group = tuple[int, Sequence[int]]


class Examples:
    """The examples of an evaluation by batch, optionally kept in a file of JSON lines.

    The first line has the evaluation's settings. Each other line is an example, or the times of a
    batch, which include a version of its documents if the settings do not determine them.

    Args:
      file: the examples file; None keeps examples in memory only. Examples that other processes add
        to the file are kept, too.
      settings: the evaluation's settings, including task and files. Only examples of equal settings
        are continued. If the folder has only evaluations of the same files with other settings, a
        line on standard error says what changed.
      quiet: whether to leave out that line.

    Raises:
      UserError: the file is damaged.
    """

    def __init__(self, file: Path | None, settings: dict[str, Any], quiet: bool = False):
        self._file, self._settings = file, settings
        self._examples: list[Example] = []
        self._times: dict[tuple[int, int], dict[str, Any]] = {}
        # identity of the file when it was last read or written, to notice other processes' changes
        self._known: Any = None
        if file is None:
            return
        if file.exists():
            self._load(file)
        elif not quiet and (note := _describe_others(file, settings)):
            print(note, file=sys.stderr)

    def _load(self, file: Path) -> None:
        """Add the examples and times that are in the file but not in memory."""
        settings, lines = read_lines(file)
        self._known = _describe_file(file)
        if settings != self._settings:
            return
        check_lines(file, lines)
        here = self._documents()
        for line in lines:
            if "answer" in line:
                self._times.setdefault((line["length"], line["first"]), line)
            elif (line["length"], line["document"]) not in here:
                self._examples.append(Example(**line))

    def _documents(self) -> set[tuple[int, int]]:
        return {(example.length, example.document) for example in self._examples}

    def has(self, group: Group, version: str) -> bool:
        """Return whether the examples of a batch of documents are known, in this version."""
        length, numbers = group
        times = self._times.get((length, numbers[0]))
        return times is not None and times.get("version", "") == version

    def missing(self, length: int, documents: Iterable[int]) -> list[int]:
        """Return the documents of a length that have no examples yet, whatever their batch."""
        here = self._documents()
        return [number for number in documents if (length, number) not in here]

    def add(self, *batches: tuple[Group, list[Example], dict[str, Any]]) -> None:
        """Add batches, each with its group, examples and times; they replace earlier versions.

        The file is replaced atomically.
        """
        for (length, numbers), examples, times in batches:
            others = (e for e in self._examples if e.length != length or e.document not in numbers)
            self._examples = [*others, *examples]
            self._times[length, numbers[0]] = {"length": length, "first": numbers[0], **times}
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with lock_folder(self._file.parent):
            if self._file.exists() and _describe_file(self._file) != self._known:
                self._load(self._file)
            self._write(self._file)

    def _write(self, file: Path) -> None:
        lines = [self._settings, *map(asdict, self._examples), *self._times.values()]
        write_file(file, "".join(json.dumps(line) + "\n" for line in lines))
        self._known = _describe_file(file)

    def of_length(
        self, length: int, documents: int | None = None
    ) -> tuple[list[Example], list[dict[str, Any]]]:
        """Return the examples of a length, and the times of their batches.

        Args:
          documents: number of documents, the first ones, whose examples are returned; None is all.
        """
        end = math.inf if documents is None else documents
        times = [t for (n, first), t in self._times.items() if n == length and first < end]
        examples = [e for e in self._examples if e.length == length and e.document < end]
        return examples, times


def _describe_file(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _describe_others(file: Path, settings: dict[str, Any]) -> str:
    """Return a line about the newest evaluation of the same files with other settings, or ""."""
    others = file.parent.glob(f"{settings['task']}-*.jsonl")
    for other in sorted(others, key=lambda each: each.stat().st_mtime_ns, reverse=True):
        with other.open(encoding="utf-8") as lines:
            try:
                before = parse_json(lines.readline())
            except ValueError:  # damaged, and not needed
                continue
        if not isinstance(before, dict) or before.get("files") != settings["files"]:
            continue
        changed = [name for name in settings if before.get(name) != settings[name]]
        return (
            f"{settings['task']}: starts from the beginning ({', '.join(changed)} changed); "
            f"earlier answers are kept in {other}"
        )
    return ""

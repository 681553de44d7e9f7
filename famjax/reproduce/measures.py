"""Measures of experiments on passkeys, text and toy tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from famjax.core.atomic import fill_folder
from famjax.data.standard_library import standard_library
from famjax.data.train_tokenizer import train_sentencepiece
from famjax.eval.passkey import asks_anywhere, count_documents, evaluate_passkey
from famjax.eval.text import evaluate_text
from famjax.eval.text_results import TextScores
from famjax.eval.toy import evaluate_toy
from famjax.reproduce.experiment import Measure, Measured, Score
from famjax.tasks.passkey import sample_text
from famjax.train.run import Run


@dataclass(frozen=True)
class PasskeyMeasure(Measure):
    """The share of passkeys that are retrieved completely.

    Questions are always at the same place in their block if they are in training, else anywhere.

    Attributes:
      lengths: numbers of tokens of the documents.
      examples: number of documents of each length.
      vocabulary: number of tokens of the SentencePiece model; 0 makes none, and models have their
        own.
    """

    lengths: tuple[int, ...]
    examples: int = 100
    vocabulary: int = 600

    @property
    def scores(self) -> tuple[Score, ...]:
        """The mean over the lengths if there are several, then the share for each length."""
        each = [Score(f"{length:,}") for length in self.lengths]
        return (Score("mean"), *each) if len(each) > 1 else tuple(each)

    @property
    def points(self) -> Mapping[str, float]:
        return {f"{length:,}": length for length in self.lengths} if len(self.lengths) > 1 else {}

    def prepare(self, folder: Path) -> tuple[str, ...]:
        if not self.vocabulary:
            return ()
        tokenizer = folder / "passkey.model"
        if not tokenizer.exists():
            text = folder / "passkey.txt"
            text.write_text(sample_text())
            train_sentencepiece(str(text), self.vocabulary, tokenizer)
        return (f"data.tokenizer={tokenizer}",)

    def measure(self, run: Run, folder: Path, quiet: bool) -> Measured:
        anywhere = asks_anywhere(run.config)
        rows = evaluate_passkey(
            run, self.lengths, self._examples_of, quiet=quiet, whole=False, anywhere=anywhere
        )
        return Measured(
            self._means({row["length"]: row["key_accuracy"] for row in rows}),
            {"guessing digits": self._means({row["length"]: row["key_chance"] for row in rows})},
        )

    def _examples_of(self, length: int) -> int:
        return self.examples

    def _means(self, by_length: Mapping[int, float]) -> dict[str, float]:
        mean = float(np.mean(list(by_length.values())))
        return {"mean": mean, **{f"{length:,}": value for length, value in by_length.items()}}


_BITS = "bits per byte"
# tokens over all documents of a length to which `KeysAndCodeMeasure` limits long ones
_MAX_TOKENS = 3_200_000

# folder with the beginnings of held-out modules, and their size: many short documents can be read
# side by side by models that read token by token
_BEGINNINGS, _BEGINNING_BYTES = "code-beginnings", 2**14


@dataclass(frozen=True)
class CodeTexts(Measure):
    """Data of the modules of Python's standard library, some to train on, some held out.

    Attributes:
      vocabulary: number of SentencePiece tokens; 0 reads bytes.
    """

    vocabulary: int = 1024

    def prepare(self, folder: Path) -> tuple[str, ...]:
        texts = standard_library(folder / "code")
        if not (folder / _BEGINNINGS).exists():
            _write_beginnings(Path(texts.held_out), folder / _BEGINNINGS)
        tokenizer: Path | str = (
            folder / f"code-{self.vocabulary}.model" if self.vocabulary else "bytes"
        )
        if isinstance(tokenizer, Path) and not tokenizer.exists():
            train_sentencepiece(texts.training, self.vocabulary, tokenizer)
        return (
            f"data.files={texts.training}",
            f"data.tokenizer={tokenizer}",
            "data.holdout=0",
        )

    def held_out(self, folder: Path, whole: bool = True) -> str:
        """Return the held-out modules, in the form of `data.files`.

        Args:
          folder: the folder given to `prepare`.
          whole: whether to return all whole modules; if not, the beginnings of those that are code.
        """
        if not whole:
            return str(folder / _BEGINNINGS)
        modules = Path(standard_library(folder / "code").held_out)
        return ",".join(map(str, sorted(modules.iterdir())))


def _write_beginnings(modules: Path, folder: Path) -> None:
    """Write the first lines of each module, except for `encodings`, whose tables are not code."""
    with fill_folder(folder, shared=True) as partial:
        for module in modules.iterdir():
            if not module.name.startswith("encodings."):
                begin, newline, _ = module.read_bytes()[:_BEGINNING_BYTES].rpartition(b"\n")
                (partial / module.name).write_bytes(begin + newline)


@dataclass(frozen=True)
class CodeMeasure(CodeTexts):
    """Bits per byte and token accuracy on the held-out modules.

    Attributes:
      whole: whether to read all modules from beginning to end; if not, the first 16 kB of those
        that are code.
      window: tokens per window, which starts with an empty memory, and whose last half is scored;
        None reads documents whole.
      has_perplexity: whether the perplexity per token is the first score.
    """

    whole: bool = True
    window: int | None = None
    has_perplexity: bool = False

    @property
    def scores(self) -> tuple[Score, ...]:
        perplexity = Score("perplexity", higher_is_better=False, unit="", digits=2)
        return (
            *((perplexity,) if self.has_perplexity else ()),
            Score(_BITS, higher_is_better=False, unit="", digits=4),
            Score("token accuracy"),
        )

    def measure(self, run: Run, folder: Path, quiet: bool) -> Measured:
        score = self.window and self.window // 2
        files = self.held_out(folder, self.whole)
        result = evaluate_text(run, files, batch=16, quiet=quiet, window=self.window, score=score)
        return Measured(
            self._scores(result),
            {
                "uniform": self._scores(result["uniform"]),
                "frequencies": self._scores(result["unigram"]),
            },
        )

    def _scores(self, result: TextScores) -> dict[str, float]:
        values = {
            "perplexity": result["perplexity"],
            _BITS: result["bits_per_byte"],
            "token accuracy": result["accuracy"],
        }
        return {score.name: values[score.name] for score in self.scores}


# ends of the ranges of positions, each of which begins at half of its end; and the position from
# which tokens are far from the beginning of a module
_ENDS, _FAR = tuple(2**n for n in range(10, 17)), 8192


@dataclass(frozen=True)
class CodeByPosition(CodeTexts):
    """Nats per token of the held-out modules, by the position of the token in its module."""

    @property
    def scores(self) -> tuple[Score, ...]:
        """The mean over far tokens, then each range, then bits per byte of all tokens."""
        names = (f"beyond {_FAR:,}", *self.points, _BITS)
        return tuple(Score(name, higher_is_better=False, unit="", digits=4) for name in names)

    @property
    def points(self) -> Mapping[str, float]:
        return {f"to {end:,}": end for end in _ENDS}

    def measure(self, run: Run, folder: Path, quiet: bool) -> Measured:
        result = evaluate_text(run, self.held_out(folder), batch=16, quiet=quiet)
        rows = result["by_position"]
        ends = {f"to {row['to'] + 1:,}": row["loss"] for row in rows}
        tokens, nats = np.array(
            [(row["tokens"], row["tokens"] * row["loss"]) for row in rows if row["from"] >= _FAR]
        ).sum(0)
        scores = {self.scores[0].name: nats / tokens, _BITS: result["bits_per_byte"]}
        return Measured({**scores, **{name: ends[name] for name in self.points}}, {})


@dataclass(frozen=True)
class KeysAndCodeMeasure(PasskeyMeasure):
    """Passkeys, and bits per byte of held-out code, for models that are pretrained on code.

    There are fewer documents of the longest lengths.

    Attributes:
      vocabulary: number of SentencePiece tokens, of the code.
    """

    vocabulary: int = 512

    @property
    def scores(self) -> tuple[Score, ...]:
        return (*super().scores, CodeMeasure().scores[0])

    def prepare(self, folder: Path) -> tuple[str, ...]:
        return CodeMeasure(self.vocabulary).prepare(folder)

    def measure(self, run: Run, folder: Path, quiet: bool) -> Measured:
        keys = super().measure(run, folder, quiet)
        code = CodeMeasure().measure(run, folder, quiet)
        return Measured({**keys.scores, _BITS: code.scores[_BITS]}, keys.baselines)

    def _examples_of(self, length: int) -> int:
        return count_documents(self.examples, _MAX_TOKENS, length)


# the trivial baselines of toy tasks, and their keys in `famjax.tasks.toy.baselines`
_GUESSES = (
    ("guessing", "chance", "chance_episodes"),
    ("the most common answer", "commonest_accuracy", "commonest_episodes"),
    ("the last answer", "last_accuracy", "last_episodes"),
)


@dataclass(frozen=True)
class ToyMeasure(Measure):
    """For a toy task, the share of right answers, and of episodes without a wrong answer.

    Attributes:
      task: name of the task, as in `data.task`.
      lengths: numbers of steps of the test episodes; () takes the config's.
      examples: number of episodes of each length.
    """

    task: str
    lengths: tuple[int, ...] = ()
    examples: int = 1000

    @property
    def scores(self) -> tuple[Score, ...]:
        if not self.lengths:
            return (Score("answers"), Score("episodes"))
        kinds = ("answers", "episodes")
        return tuple(Score(f"{kind}, {n:,}") for n in self.lengths for kind in kinds)

    def measure(self, run: Run, folder: Path, quiet: bool) -> Measured:
        lengths = self.lengths or None
        rows = evaluate_toy(run, self.task, lengths, self.examples, 32, quiet)["rows"]
        scores: dict[str, float] = {}
        guesses: dict[str, dict[str, float]] = {}
        for row in rows:
            of_length = f", {row['length']:,}" if self.lengths else ""
            scores[f"answers{of_length}"] = row["accuracy"]
            scores[f"episodes{of_length}"] = row["episode_accuracy"]
            for name, answers, episodes in _GUESSES:
                if row[answers] is not None:
                    guesses.setdefault(name, {}).update(
                        {f"answers{of_length}": row[answers], f"episodes{of_length}": row[episodes]}
                    )
        return Measured(scores, guesses)

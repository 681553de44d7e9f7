"""How experiments are measured: passkeys, text, toy tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from famjax.data.standard_library import standard_library
from famjax.data.train_tokenizer import train_sentencepiece
from famjax.eval.passkey import evaluate_passkey
from famjax.eval.text import evaluate_text
from famjax.eval.toy import evaluate_toy
from famjax.reproduce.experiment import Measure, Measured, Score
from famjax.tasks.passkey import sample_text
from famjax.train.run import Run


@dataclass(frozen=True)
class PasskeyMeasure(Measure):
    """The share of passkeys that are retrieved whole.

    Questions are at one place in the block for runs that are trained so, else anywhere.

    Attributes:
      lengths: tokens of the documents.
      examples: documents of each length.
    """

    lengths: tuple[int, ...]
    examples: int = 100
    vocabulary: int = 600

    @property
    def scores(self) -> tuple[Score, ...]:
        """The mean over the lengths, and each of them."""
        return (Score("mean"), *(Score(f"{length:,}") for length in self.lengths))

    @property
    def points(self) -> Mapping[str, float]:
        return {f"{length:,}": length for length in self.lengths}

    def prepare(self, folder: Path) -> tuple[str, ...]:
        tokenizer = folder / "passkey.model"
        if not tokenizer.exists():
            text = folder / "passkey.txt"
            text.write_text(sample_text())
            train_sentencepiece(str(text), self.vocabulary, tokenizer)
        return (f"data.tokenizer={tokenizer}",)

    def measure(self, run: Run, folder: Path, quiet: bool) -> Measured:
        config = run.config
        anywhere = config.data.passkey.multiple % config.model.block_len > 0
        rows = evaluate_passkey(
            run, self.lengths, self.examples, quiet=quiet, whole=False, anywhere=anywhere
        )
        return Measured(
            self._means({row["length"]: row["key_accuracy"] for row in rows}),
            {"guessing digits": self._means({row["length"]: row["key_chance"] for row in rows})},
        )

    def _means(self, by_length: Mapping[int, float]) -> dict[str, float]:
        mean = float(np.mean(list(by_length.values())))
        return {"mean": mean, **{f"{length:,}": value for length, value in by_length.items()}}


# of held-out modules, which models that read token by token read side by side, and their bytes
_BEGINNINGS, _BEGINNING_BYTES = "code-beginnings", 2**14


@dataclass(frozen=True)
class CodeTexts(Measure):
    """Modules of Python's standard library, to train on and held out.

    Attributes:
      vocabulary: SentencePiece tokens; 0 reads bytes.
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
        """Return the modules that are not trained on, as `data.files`.

        Args:
          folder: of `prepare`.
          whole: all, from beginning to end; else the beginnings of those that are code.
        """
        if not whole:
            return str(folder / _BEGINNINGS)
        modules = Path(standard_library(folder / "code").held_out)
        return ",".join(map(str, sorted(modules.iterdir())))


def _write_beginnings(modules: Path, folder: Path) -> None:
    """Write the first lines of modules of code, which the tables of `encodings` are not."""
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(exist_ok=True)
    for module in modules.iterdir():
        if not module.name.startswith("encodings."):
            begin, newline, _ = module.read_bytes()[:_BEGINNING_BYTES].rpartition(b"\n")
            (partial / module.name).write_bytes(begin + newline)
    # the folder appears when all files are there
    partial.rename(folder)


@dataclass(frozen=True)
class CodeMeasure(CodeTexts):
    """Bits per byte and token accuracy on the held-out modules.

    Attributes:
      whole: reads all of them from beginning to end; else 16 kB of each that is code.
      window: tokens of a window with an empty memory, of which the last half are scored; None reads
        documents whole.
      has_perplexity: that of a token comes first.
    """

    whole: bool = True
    window: int | None = None
    has_perplexity: bool = False

    @property
    def scores(self) -> tuple[Score, ...]:
        perplexity = Score("perplexity", higher_is_better=False, unit="", digits=2)
        return (
            *((perplexity,) if self.has_perplexity else ()),
            Score("bits per byte", higher_is_better=False, unit="", digits=4),
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

    def _scores(self, result: Mapping[str, float]) -> dict[str, float]:
        keys = {
            "perplexity": "perplexity",
            "bits per byte": "bits_per_byte",
            "token accuracy": "accuracy",
        }
        return {score.name: result[keys[score.name]] for score in self.scores}


@dataclass(frozen=True)
class ToyMeasure(Measure):
    """The share of right answers, and of episodes without a wrong one, of a toy task.

    Attributes:
      task: of `data.task`.
      lengths: steps of the test episodes; none are those of the config.
      examples: episodes of each length.
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
            for name, key in (
                ("guessing", "chance"),
                ("the commonest answer", "commonest_accuracy"),
                ("the last answer", "last_accuracy"),
            ):
                if row[key] is not None:
                    guesses.setdefault(name, {})[f"answers{of_length}"] = row[key]
        return Measured(scores, guesses)

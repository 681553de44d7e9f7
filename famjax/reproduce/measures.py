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


@dataclass(frozen=True)
class CodeTexts(Measure):
    """Modules of Python's standard library, to train on and held out.

    Attributes:
      vocabulary: SentencePiece tokens; 0 reads bytes.
    """

    vocabulary: int = 1024

    def prepare(self, folder: Path) -> tuple[str, ...]:
        texts = standard_library(folder / "code")
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

    def held_out(self, folder: Path, modules: int | None = None) -> str:
        """Return the modules that are not trained on, as `data.files`.

        Args:
          folder: of `prepare`.
          modules: the first so many that are code, not the tables of `encodings`; None is all.
        """
        texts = standard_library(folder / "code")
        paths = sorted(Path(texts.held_out).iterdir())
        if modules is not None:
            paths = [path for path in paths if not path.name.startswith("encodings.")][:modules]
        return ",".join(map(str, paths))


@dataclass(frozen=True)
class CodeMeasure(CodeTexts):
    """Bits per byte and token accuracy on the held-out modules.

    Attributes:
      modules: how many of them are read, without tables; None is all.
      window: tokens of a window with an empty memory, of which the last half are scored; None reads
        documents whole.
      has_perplexity: that of a token comes first.
    """

    modules: int | None = None
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
        files = self.held_out(folder, self.modules)
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

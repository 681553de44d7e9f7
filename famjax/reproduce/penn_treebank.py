"""Measure of bits per character on Penn Treebank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from famjax.core.atomic import fill_folder
from famjax.core.errors import UserError
from famjax.eval.text import evaluate_text
from famjax.reproduce.experiment import Measure, Measured, Score
from famjax.train.run import Run

_SPLITS = ("train", "valid", "test")
_SCORED = {"dev": "valid", "test": "test"}
# number of documents of a split, which are read side by side
_PARTS = 16


@dataclass(frozen=True)
class PennTreebankMeasure(Measure):
    """Bits per character on the validation set and the test set.

    Each split is read in 16 parts side by side, since the Feedback Transformer reads a document one
    character after the other. The words are in `ptb/ptb.train.txt`, `ptb.valid.txt` and
    `ptb.test.txt` of the data's folder (Mikolov et al., 2010; no licence to pass them on).
    """

    @property
    def scores(self) -> tuple[Score, ...]:
        return tuple(Score(name, higher_is_better=False, unit="", digits=4) for name in _SCORED)

    def prepare(self, folder: Path) -> tuple[str, ...]:
        for split in _SPLITS:
            parts = _parts(folder, split)
            if not parts.exists():
                words = folder / "ptb" / f"ptb.{split}.txt"
                if not words.exists():
                    raise UserError(f"{words}: put the {split} words of Penn Treebank there")
                _write_parts(to_characters(words.read_text()), parts)
        train = _parts(folder, "train")
        return (f"data.files={train}", "data.tokenizer=bytes", "data.holdout=0")

    def measure(self, run: Run, folder: Path, quiet: bool) -> Measured:
        found = {
            name: evaluate_text(run, str(_parts(folder, split)), batch=_PARTS, quiet=quiet)
            for name, split in _SCORED.items()
        }
        baselines = {
            "uniform": {name: each["uniform"]["bits_per_byte"] for name, each in found.items()},
            "frequencies": {name: each["unigram"]["bits_per_byte"] for name, each in found.items()},
        }
        return Measured({name: each["bits_per_byte"] for name, each in found.items()}, baselines)


def to_characters(words: str) -> str:
    """Return lines without spaces at their ends, and with `_` in place of all other spaces."""
    return "".join(line.strip().replace(" ", "_") + "\n" for line in words.splitlines())


def _write_parts(text: str, folder: Path) -> None:
    """Write a text as one file for each of several parts with about the same number of lines."""
    lines = text.splitlines(keepends=True)
    with fill_folder(folder, shared=True) as partial:
        for part in range(_PARTS):
            own = lines[part * len(lines) // _PARTS : (part + 1) * len(lines) // _PARTS]
            if own:
                (partial / f"{part:02d}.txt").write_text("".join(own))


def _parts(folder: Path, split: str) -> Path:
    return folder / "ptb" / f"characters-{split}"

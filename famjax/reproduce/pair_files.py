"""Files of pairs for experiments, and the length penalty that is best on some of them.

Files for development and test are beside those to train on, with "val" and "test" in place of
"train" in their names. Other names for "val" are those of `_DEVELOPMENT`.
"""

from __future__ import annotations

import re
from pathlib import Path

from famjax.config.schema import Config, DataConfig
from famjax.core.errors import UserError
from famjax.data.find_files import list_files
from famjax.data.pairs import Pairs
from famjax.data.train_tokenizer import train_sentencepiece
from famjax.eval import translate
from famjax.reproduce.experiment import Score
from famjax.tasks.task import Request
from famjax.train.run import Run

_DEVELOPMENT = ("val", "valid", "dev", "validation")
_PENALTY = "length penalty"
_DATA_SETS = ("tfds:", "seqio:")


def prepare_pairs(source: Path, target: Path, vocabulary: int) -> tuple[str, ...]:
    """Train a joint SentencePiece model beside the files, unless that of these texts is there.

    Args:
      source, target: files to train on.
      vocabulary: number of tokens.

    Returns:
      overrides with which a config uses the files and the model.
    """
    tokenizer, made_of = source.with_name("joint.model"), source.with_name("joint.model.texts")
    texts = f"{Pairs(str(source), str(target)).digest()} {vocabulary}"
    if not (tokenizer.exists() and made_of.exists() and made_of.read_text() == texts):
        train_sentencepiece(f"{source},{target}", vocabulary, tokenizer)
        made_of.write_text(texts)
    return f"data.source={source}", f"data.target={target}", f"data.tokenizer={tokenizer}"


def check_test_files(config: Config) -> None:
    """Raise a `UserError` if the test files for the config's training files are missing."""
    files = find_test_files(config.data)
    try:
        Pairs(*files)
    except UserError as error:
        raise UserError(
            f"{error}; put the test files beside those to train on, test.en beside train.en"
        ) from None


def check_development_files(config: Config) -> None:
    """Raise a `UserError` if the development files for the config's training files are missing."""
    Pairs(*_find_development_files(config.data))


def penalty_scores(length_penalty: float | None) -> tuple[Score, ...]:
    """Return the score in which `with_length_penalty` gives the length penalty, if it is tuned."""
    return () if length_penalty is not None else (Score(_PENALTY, unit="", digits=1),)


def with_length_penalty(
    run: Run, request: Request, length_penalty: float | None
) -> tuple[Request, dict[str, float]]:
    """Return a request with its length penalty, and the score of `penalty_scores`.

    Args:
      run: a run that is trained on pairs.
      request: an evaluation of pairs by beam search.
      length_penalty: the length penalty; None is the best one on the development files.
    """
    if length_penalty is not None:
        return request._replace(length_penalty=length_penalty), {}
    files = "=".join(_find_development_files(run.config.data))
    found = translate.evaluate(run, request._replace(files=files, tune=True))
    tuned = float(found["length_penalty"])
    return request._replace(length_penalty=tuned), {_PENALTY: tuned}


def find_file(*paths: Path) -> Path:
    """Return the first of several files that exists.

    Raises:
      UserError: none of them exists.
    """
    for path in paths:
        if path.exists():
            return path
    raise UserError(f"{paths[0]}: put its texts there, one on each line")


def find_test_files(data: DataConfig) -> tuple[str, str]:
    """Return the test files of sources and of targets that belong to the training files.

    Raises:
      UserError: the name of a training file has no "train", so that it would be its own test file.
    """
    return name_test_files(data.source), name_test_files(data.target)


def name_test_files(training: str, split: str = "test") -> str:
    """Return the test files that belong to a list of training files; see `find_test_files`.

    Args:
      training: the files, separated by commas.
      split: what replaces "train" in their names.
    """
    return ",".join(_name_part(part, split) for part in training.split(","))


def _find_development_files(data: DataConfig) -> tuple[str, str]:
    """Return the development files of sources and of targets that belong to the training files."""
    for split in _DEVELOPMENT:
        files = name_test_files(data.source, split), name_test_files(data.target, split)
        if all(_exists(names, split) for names in files):
            return files
    first, others = name_test_files(data.source, _DEVELOPMENT[0]), " or ".join(_DEVELOPMENT[1:])
    raise UserError(
        f"{first}: put the development files, on which the length penalty is tuned, beside those "
        f"to train on, with {_DEVELOPMENT[0]} ({others}) in place of train"
    )


def _exists(names: str, split: str) -> bool:
    """Return whether files of these names exist; of data sets, whether it is TFDS's split."""
    if names.startswith(_DATA_SETS):
        return split == "validation"
    try:
        return not names or bool(list_files(names, "data.source"))
    except UserError:
        return False


def _name_part(training: str, split: str) -> str:
    folder, slash, name = training.rpartition("/")
    if not training:
        return training
    # the last "train" that is a word, in "my_train_task:train:de" that of the split; else any
    found = list(re.finditer("(?<![A-Za-z])train(?![A-Za-z])", name)) or [
        *re.finditer("train", name)
    ]
    if not found:
        raise UserError(
            f"{training}: cannot find its {split} file: the name of the training file must contain "
            f'"train", and that of the {split} file has "{split}" there; rename them, such as to '
            f"train.en and {split}.en"
        )
    start, end = found[-1].span()
    return folder + slash + name[:start] + split + name[end:]

"""Files of pairs for experiments: test files beside those to train on, and a joint tokenizer."""

from __future__ import annotations

from pathlib import Path

from famjax.config.schema import Config, DataConfig
from famjax.core.errors import UserError
from famjax.data.pairs import Pairs
from famjax.data.train_tokenizer import train_sentencepiece


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


def name_test_files(training: str) -> str:
    """Return the test files that belong to a list of training files; see `find_test_files`."""
    return ",".join(_test_part(part) for part in training.split(","))


def _test_part(training: str) -> str:
    folder, slash, name = training.rpartition("/")
    if training and "train" not in name:
        raise UserError(
            f"{training}: cannot find its test file: the name of the training file must contain "
            '"train", and that of the test file has "test" there; rename them, such as to train.en '
            "and test.en"
        )
    return folder + slash + name.replace("train", "test")

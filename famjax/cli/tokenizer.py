"""`famjax tokenizer train FILES... --vocab-size N --out M`, or a word list: --kind words."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from famjax.cli.main import parse
from famjax.core.errors import UserError, did_you_mean
from famjax.core.paths import expanded
from famjax.core.ticker import format_seconds, ticker

if TYPE_CHECKING:
    from famjax.tokenizers.tokenizer import Tokenizer


# seconds before the first report, and between reports
_PATIENCE, _INTERVAL = 5.0, 20.0


@dataclass(frozen=True)
class Arguments:
    """Train a SentencePiece model, or make a word list; use it with data.tokenizer=OUT."""

    files: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="FILE ...")]
    """Text files, folders or globs."""
    out: str
    """File to write: a SentencePiece model, or with --kind words a word list, .txt."""
    vocab_size: int | None = None
    """Number of tokens, needed for sentencepiece; with --kind words the maximum, default all."""
    kind: Literal["sentencepiece", "words"] = "sentencepiece"
    """Kind of tokenizer; words splits at white space, with line ends as tokens, as for WikiText."""
    min_count: int = 1
    """Minimum count of a word with --kind words; rarer ones become <unk>."""


def run(argv: list[str]) -> int:
    action = argv[0] if argv else "--help"
    if action in ("-h", "--help"):
        action, argv = "train", ["train", "--help"]
    if action != "train":
        raise UserError(
            f"unknown action {action!r}{did_you_mean(action, ['train'])}; "
            "write: famjax tokenizer train FILES --vocab-size N --out M"
        )
    arguments = parse(Arguments, argv[1:], "famjax tokenizer train")
    if not arguments.files:
        raise UserError("tokenizer train needs files: famjax tokenizer train FILES ...")
    if not all(files.strip() for files in arguments.files):
        raise UserError("tokenizer train: an empty name of files; give files, folders or globs")
    for name in ("vocab_size", "min_count"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    with ticker(_report, _PATIENCE, _INTERVAL):
        try:
            tokenizer = _train(arguments)
        except UserError as error:
            raise UserError(_name_command(str(error))) from None
    size = f"{tokenizer.vocab_size:,} tokens"
    if arguments.kind != "words" and tokenizer.vocab_size < (arguments.vocab_size or 0):
        size += f", the text does not yield {arguments.vocab_size:,}"
    print(f"wrote {arguments.out}: {size}; use it with data.tokenizer={arguments.out}")
    return 0


def _report(seconds: float) -> None:
    note = f"famjax: reading the texts and making the tokenizer, {format_seconds(seconds)} so far"
    print(note, file=sys.stderr)


def _name_command(error: str) -> str:
    """Return an error about data.files as one about this command."""
    for given, named in (("data.files=", "tokenizer train "), ("data.files:", "tokenizer train:")):
        if error.startswith(given):
            return named + error.removeprefix(given)
    return error


def _train(arguments: Arguments) -> Tokenizer:
    files, size, out = ",".join(arguments.files), arguments.vocab_size, expanded(arguments.out)
    if arguments.kind == "words":
        from famjax.data.train_tokenizer import build_word_list

        return build_word_list(files, out, arguments.min_count, size)
    if size is None:
        raise UserError("tokenizer train needs --vocab-size N, except with --kind words")
    if arguments.min_count != 1:
        raise UserError(f"--min-count {arguments.min_count} is for --kind words; remove it")
    from famjax.data.train_tokenizer import train_sentencepiece

    return train_sentencepiece(files, size, out)

"""`famjax tokenizer train FILES... --vocab-size N --out M`."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from famjax.cli.main import parse
from famjax.core.errors import UserError, nearest


@dataclass(frozen=True)
class Arguments:
    """Train a SentencePiece model; use it with data.tokenizer=OUT."""

    files: tyro.conf.Positional[tuple[str, ...]]
    """Text files, folders or globs."""
    vocab_size: int
    """Number of tokens."""
    out: str
    """The model file to write."""


def run(argv: list[str]) -> int:
    action = argv[0] if argv else "--help"
    if action in ("-h", "--help"):
        action, argv = "train", ["train", "--help"]
    if action != "train":
        raise UserError(
            f"unknown action {action!r}{nearest(action, ['train'])}; "
            "write: famjax tokenizer train FILES --vocab-size N --out M"
        )
    arguments = parse(Arguments, argv[1:], "famjax tokenizer train")
    if not arguments.files:
        raise UserError("tokenizer train needs files: famjax tokenizer train FILES ...")
    if arguments.vocab_size < 1:
        raise UserError(f"--vocab-size {arguments.vocab_size}: must be at least 1")
    from famjax.data.tokenizers import train_sentencepiece

    made = train_sentencepiece(",".join(arguments.files), arguments.vocab_size, arguments.out)
    size = f"{made.vocab_size:,} tokens"
    if made.vocab_size < arguments.vocab_size:
        size += f", for the text yields no {arguments.vocab_size:,}"
    print(f"wrote {arguments.out}: {size}; use it with data.tokenizer={arguments.out}")
    return 0

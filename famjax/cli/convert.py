"""`famjax convert HF_DIR DEST [--to fam] [--layers ::4] [model.block_len=512 ...]`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from famjax.cli.main import parse
from famjax.convert.surgery import To
from famjax.core import runtime


@dataclass(frozen=True)
class Arguments:
    """Turn a pretrained Hugging Face folder into a famjax model, with the attention you choose.

    Every weight is kept; the FAM's prompt, which no checkpoint has, begins as rows of the
    embedding. Sizes of the new attention are given as model.block_len=512, model.fam_len=64,
    model.memory_segments=2, behind the flags.
    """

    source: tyro.conf.Positional[str]
    """Folder with config.json, *.safetensors and a tokenizer."""
    dest: tyro.conf.Positional[str]
    """Folder to write, which must not exist."""
    to: To = "keep"
    """What the layers attend to from now on."""
    layers: str = ""
    """Which layers --to changes: numbers and slices, 0,4 or ::4. None given: those with full
    attention; of a model without such, all."""
    tokenizer: str = ""
    """Another tokenizer than the folder's: bytes, a tokenizer.json, a SentencePiece model."""


def run(argv: list[str]) -> int:
    overrides = tuple(token for token in argv if not token.startswith("-") and "=" in token)
    arguments = parse(Arguments, [a for a in argv if a not in overrides], "famjax convert")
    runtime.setup()
    from famjax.convert.folder import convert

    source, target = Path(arguments.source).expanduser(), Path(arguments.dest).expanduser()
    convert(
        source,
        target,
        arguments.to,
        arguments.layers,
        arguments.tokenizer,
        overrides,
        report=lambda line: print(line, file=sys.stderr),
    )
    print(f"wrote {target}; next: famjax train finetune init={target} data.files=...")
    return 0

"""`famjax convert SOURCE DEST [--to fam] [--layers ::4] [model.block_len=512 ...]`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from famjax.cli.main import parse, split_overrides
from famjax.config.schema import Config
from famjax.convert.surgery import convert_names
from famjax.core.errors import UserError
from famjax.core.paths import expanded
from famjax.mixers import mixer_specs
from famjax.processes import runtime


@dataclass(frozen=True)
class Arguments:
    """Convert a pretrained Hugging Face folder, or a famjax run, to a model with another attention.

    All weights are kept. New parameters are those of a memory (for FAM its prompt, initialized with
    rows of the embedding, and its gates; for the delta rule write rates, key smearing and gains;
    for model.ngram_memory=8 maps of what it recalls, 0 at first) and the feature maps of t2r,
    initialized at random. Give sizes of the new attention as overrides after the flags:
    model.block_len=512, model.fam_len=64, model.memory_segments=2, model.linear.map=elu. With an
    encoder, data.source_words=400 reads the first words of each source.
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Folder of a run, or of a Hugging Face model (config.json, *.safetensors and a tokenizer)."""
    dest: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DEST")]
    """Folder to write, which must not exist."""
    to: Annotated[str, tyro.conf.arg(metavar=f"{{keep,{','.join(convert_names())}}}")] = "keep"
    """New attention of the layers; t2r is linear attention, which makes them RNNs."""
    layers: str = ""
    """Layers that --to changes: numbers and slices, 0,4 or ::4.
    Default: those with full attention, or all if there are none."""
    keep_every: int | None = None
    """Keep the attention of the top layer and of every n-th below it, instead of --layers."""
    feature_size: int | None = None
    """Size of a feature map for --to t2r (model.linear.features)."""
    tokenizer: str = ""
    """Tokenizer instead of the folder's, with the same ids: a tokenizer.json, a SentencePiece model
    or bytes."""


def run(argv: list[str]) -> int:
    overrides, rest = split_overrides(argv)
    arguments = parse(Arguments, rest, "famjax convert")
    if arguments.feature_size is not None:
        overrides = (*overrides, _feature_size_override(arguments, overrides))
    runtime.setup()
    from famjax.convert.folder import convert

    source, target = expanded(arguments.source), expanded(arguments.dest)
    config = convert(
        source,
        target,
        arguments.to,
        arguments.layers,
        arguments.tokenizer,
        overrides,
        report=lambda line: print(line, file=sys.stderr),
        keep_every=arguments.keep_every,
    )
    off = " train.rpo=false" if _prevents_rpo(config) else ""
    command = f"finetune init={target}{off} data.files=..."
    if config.model.encoder.layers:
        # the config finetune is for texts; the rate is T2R's for a Transformer big (Table 6)
        rate = "optimizer.learning_rate=2e-4"
        command = f"multi30k init={target} {rate} data.source=... data.target=..."
    print(f"wrote {target}; next: famjax train {command}")
    return 0


def _prevents_rpo(config: Config) -> bool:
    """Return whether a mixer does not support train.rpo, which the finetune config sets."""
    without, with_rpo = (
        {line for spec in mixer_specs(config.model) for line in spec.check(changed)}
        for changed in (replace(config, train=replace(config.train, rpo=r)) for r in (False, True))
    )
    return bool(with_rpo - without)


def _feature_size_override(arguments: Arguments, overrides: tuple[str, ...]) -> str:
    """Return --feature-size as a config override."""
    assert arguments.feature_size is not None
    flag, key = f"--feature-size {arguments.feature_size}", "model.linear.features"
    if arguments.to != "t2r":
        raise UserError(f"{flag}: is for linear attention only; add --to t2r")
    if arguments.feature_size < 1:
        raise UserError(f"{flag}: must be at least 1")
    for override in overrides:
        if override.startswith(f"{key}="):
            raise UserError(f"{flag} and {override}: are the same; give one of them")
    return f"{key}={arguments.feature_size}"

"""Give a pretrained model another attention, layer by layer; every weight stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from famjax.convert.families.common import shortest_pattern
from famjax.core.config import ModelConfig
from famjax.core.errors import UserError
from famjax.models.remap_params import layer_mixers

To = Literal["keep", "full", "swa", "bswa", "bswa_sg", "fam", "t2r"]


def replace_attention(
    model: ModelConfig, to: To, layers: str = "", keep_every: int | None = None
) -> ModelConfig:
    """Return the config of a model some of whose layers attend as `to` says.

    Args:
      to: a mixer, or t2r, linear attention; "keep" changes nothing.
      layers: which ones: numbers and Python slices separated by commas, "0,4", "::4", "-8:". None
        given: those with full attention, so that the local layers of a Gemma stay local; and all
        layers of a model that has only local ones (Mistral).
      keep_every: n, the top layer and every n-th below it stay as they are (T2R 3.3).

    Raises:
      UserError: a layer that is not there, or no layers that could be changed.
    """
    if layers and keep_every is not None:
        raise UserError(
            f"--layers {layers} and --keep-every {keep_every}: both say which layers change; give "
            "one of them"
        )
    if to == "keep":
        if layers or keep_every is not None:
            given = f"--layers {layers}" if layers else f"--keep-every {keep_every}"
            raise UserError(f"{given}: says which layers --to changes; give --to too")
        return model
    if model.stack != "residual":
        raise UserError(
            f"--to {to}: model.stack={model.stack} has no layers with an attention of their own; "
            "give a model with model.stack=residual"
        )
    names = list(layer_mixers(model))
    chosen = parse_layers(layers, model.layers)
    if not layers:
        chosen = [i for i in chosen if names[i] == "full"] or chosen
    if keep_every is not None:
        chosen = _drop_kept(chosen, keep_every, model.layers)
    for i in chosen:
        names[i] = "linear" if to == "t2r" else to
    return replace(model, mixer=shortest_pattern(names))


def _drop_kept(chosen: list[int], every: int, count: int) -> list[int]:
    """Return the layers that change if the top one stays, and every n-th below it."""
    if not 2 <= every <= count:
        raise UserError(
            f"--keep-every {every}: must be from 2 to the model's {count} layers; to keep others "
            "give --layers"
        )
    left = [i for i in chosen if (count - 1 - i) % every]
    if not left:
        raise UserError(f"--keep-every {every}: keeps all layers that --to changes; give --layers")
    return left


def parse_layers(text: str, count: int) -> list[int]:
    """Return the layers of `count` that "0,4,::4" names, in order; "" names all."""
    chosen: set[int] = set()
    for part in text.split(",") if text else [":"]:
        try:
            if ":" in part:
                found = list(range(count))[slice(*(int(n) if n else None for n in part.split(":")))]
            else:
                found = [range(count)[int(part)]]
        except (ValueError, IndexError, TypeError):
            raise UserError(
                f"--layers {text}: {part!r} is no layer of {count}; give numbers from 0 to "
                f"{count - 1} or slices, such as ::4 or -8:"
            ) from None
        if not found:
            raise UserError(f"--layers {text}: {part!r} names none of the {count} layers")
        chosen |= set(found)
    return sorted(chosen)

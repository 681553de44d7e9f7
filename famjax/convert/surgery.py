"""Give a pretrained model another attention, layer by layer; every weight stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from famjax.convert.families.common import pattern
from famjax.core.config import ModelConfig
from famjax.core.errors import UserError
from famjax.models.transplant import layer_mixers

To = Literal["keep", "full", "swa", "bswa", "bswa_sg", "fam"]


def with_attention(model: ModelConfig, to: To, layers: str = "") -> ModelConfig:
    """Return the config of a model some of whose layers attend as `to` says.

    Args:
      to: a mixer; "keep" changes nothing.
      layers: which ones: numbers and Python slices separated by commas, "0,4", "::4", "-8:". None
        given: those with full attention, so that the local layers of a Gemma stay local; and all
        layers of a model that has only local ones (Mistral).

    Raises:
      UserError: a layer that is not there.
    """
    if to == "keep":
        if layers:
            raise UserError(f"--layers {layers}: says which layers --to changes; give --to too")
        return model
    names = list(layer_mixers(model))
    chosen = choose(layers, model.layers)
    if not layers:
        chosen = [i for i in chosen if names[i] == "full"] or chosen
    for i in chosen:
        names[i] = to
    return replace(model, mixer=pattern(names))


def choose(text: str, count: int) -> list[int]:
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

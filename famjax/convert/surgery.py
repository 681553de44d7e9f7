"""Attention surgery: replaces the mixers of a pretrained model's layers, keeping every weight."""

from __future__ import annotations

from dataclasses import replace

from famjax.config.derived import layer_mixers
from famjax.config.schema import ModelConfig
from famjax.convert.families.common import shortest_pattern
from famjax.core.errors import UserError, nearest
from famjax.mixers import MIXERS


def convert_names() -> dict[str, str]:
    """Return the mixers by their names for `famjax convert --to`."""
    return {spec.convert_name or name: name for name, spec in MIXERS.items()}


def replace_attention(
    model: ModelConfig, to: str, layers: str = "", keep_every: int | None = None
) -> ModelConfig:
    """Return the config with the mixer of some layers replaced.

    The new mixer's `MixerSpec.convert_settings` are applied as well.

    Args:
      model: config of the pretrained model.
      to: the new mixer, one of `convert_names`; "keep" changes nothing.
      layers: the layers to change: numbers and Python slices separated by commas, such as "0,4",
        "::4" or "-8:". By default these are the layers with full attention, so that the local
        layers of a Gemma stay local, or all layers of a model that has only local ones (Mistral).
      keep_every: n, the top layer and every n-th below it keep their mixer (T2R 3.3).

    Raises:
      UserError: an unknown name, a layer that does not exist, or no layers to change.
    """
    known = convert_names()
    if to not in ("keep", *known):
        raise UserError(f"--to {to}: unknown{nearest(to, known)} (known: {', '.join(known)})")
    if layers and keep_every is not None:
        raise UserError(
            f"--layers {layers} and --keep-every {keep_every}: both select layers; give one of them"
        )
    if to == "keep":
        if layers or keep_every is not None:
            option = f"--layers {layers}" if layers else f"--keep-every {keep_every}"
            raise UserError(f"{option}: selects layers for --to; give --to as well")
        return model
    if model.stack != "residual":
        raise UserError(
            f"--to {to}: model.stack={model.stack} has no layers with an attention of their own; "
            "give a model with model.stack=residual"
        )
    names = list(layer_mixers(model))
    chosen = parse_layers(layers, model.layers)
    if not layers:
        chosen = [i for i in chosen if MIXERS[names[i]].is_bounded] or chosen
    if keep_every is not None:
        chosen = _drop_kept(chosen, keep_every, model.layers)
    # if some layers already have this mixer, they keep its settings
    settings = {} if known[to] in names else MIXERS[known[to]].convert_settings
    for i in chosen:
        names[i] = known[to]
    return replace(model, mixer=shortest_pattern(names), **settings)


def _drop_kept(chosen: list[int], every: int, count: int) -> list[int]:
    """Return the layers to change if the top one and every n-th below it keep their mixer."""
    if not 2 <= every <= count:
        raise UserError(
            f"--keep-every {every}: must be from 2 to the model's {count} layers; select others "
            "with --layers"
        )
    changed = [i for i in chosen if (count - 1 - i) % every]
    if not changed:
        raise UserError(f"--keep-every {every}: keeps all layers of --to; give --layers")
    return changed


def parse_layers(text: str, count: int) -> list[int]:
    """Return the sorted layers that "0,4,::4" selects of `count`; "" selects all."""
    chosen: set[int] = set()
    for part in text.split(",") if text else [":"]:
        try:
            if ":" in part:
                selection = list(range(count))[
                    slice(*(int(n) if n else None for n in part.split(":")))
                ]
            else:
                selection = [range(count)[int(part)]]
        except (ValueError, IndexError, TypeError):
            raise UserError(
                f"--layers {text}: {part!r} is not a layer of {count}; give numbers from 0 to "
                f"{count - 1} or slices, such as ::4 or -8:"
            ) from None
        if not selection:
            raise UserError(f"--layers {text}: {part!r} selects none of the {count} layers")
        chosen |= set(selection)
    return sorted(chosen)

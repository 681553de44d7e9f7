"""Attention surgery: replaces the mixers of a pretrained model's layers, keeping every weight."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from famjax.config.derived import layer_mixers
from famjax.config.schema import ModelConfig
from famjax.convert.families.common import shortest_pattern
from famjax.core.errors import UserError, did_you_mean
from famjax.mixers import MIXERS, convert_settings

# mixers that carry nothing beyond the tokens that they attend to
_WITHOUT_MEMORY = {"full", "swa", "bswa", "bswa_sg"}


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
        raise UserError(f"--to {to}: unknown{did_you_mean(to, known)} (known: {', '.join(known)})")
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
            f"--to {to}: model.stack={model.stack} has no mixers that could be replaced; give a "
            "model with model.stack=residual"
        )
    names = list(layer_mixers(model))
    chosen = parse_layers(layers, model.layers)
    if not layers:
        chosen = [i for i in chosen if MIXERS[names[i]].is_bounded] or chosen
    if keep_every is not None:
        chosen = _drop_kept(chosen, keep_every, model.layers)
    for i in chosen:
        names[i] = known[to]
    new = replace(model, mixer=shortest_pattern(names))
    return replace(new, **convert_settings(model, new))


def describe_window(old: ModelConfig, new: ModelConfig, given: Collection[str]) -> Iterator[str]:
    """Yield a line for each mixer of `new` that sees other tokens than the layers of `old` did.

    Args:
      given: config keys that were given; for sizes that were not, the line says how to set them.
    """
    before, after = layer_mixers(old), layer_mixers(new)
    if len(before) != len(after):
        return
    for name in dict.fromkeys(after):
        span = _tokens_seen(new, name)
        old_spans = {
            _tokens_seen(old, n): None for n, now in zip(before, after, strict=True) if now == name
        }
        if list(old_spans) == [span] or name in ("full", "linear"):
            continue
        sizes = ", ".join(MIXERS[name].describe(new))
        line = f"{name}: {sizes}: a token sees {span} tokens directly (before: "
        line += f"{' or '.join(old_spans)})"
        key = "model.window" if name == "swa" else "model.block_len"
        size = new.window if name == "swa" else new.block_len
        other = 512 if size < 512 else 2 * size
        yield line if key in given else f"{line}; {key}={other} would change it"
    unchanged = after and old.mixer == new.mixer
    has_none = set(after) <= _WITHOUT_MEMORY and not new.ngram_memory
    if unchanged and has_none and not new.encoder.layers:
        yield "attention unchanged; --to delta, --to fam or model.ngram_memory=8 adds a memory"


def _tokens_seen(model: ModelConfig, mixer: str) -> str:
    """Return how many tokens a token attends to, itself included and without a memory."""
    m, w = model.memory_segments, model.block_len
    if mixer == "full":
        return f"all of {model.capacity:,}"
    if mixer == "linear":
        return "all"
    return f"{model.window:,}" if mixer == "swa" else f"{m * w + 1:,} to {(m + 1) * w:,}"


def _drop_kept(chosen: list[int], every: int, count: int) -> list[int]:
    """Return the layers to change if the top one and every n-th below it keep their mixer."""
    if not 2 <= every <= count:
        raise UserError(
            f"--keep-every {every}: must be from 2 to the model's {count} layers; for another "
            "selection use --layers"
        )
    changed = [i for i in chosen if (count - 1 - i) % every]
    if not changed:
        raise UserError(
            f"--keep-every {every}: keeps all layers that --to would change; use --layers instead"
        )
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

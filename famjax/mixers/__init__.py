"""Mixers: what a layer attends to, and the state it carries. One file each, registered here."""

from __future__ import annotations

from typing import Any

from flax import nnx

from famjax.config.derived import mixer_pattern
from famjax.config.resolved import ResolvedModelConfig
from famjax.config.schema import ModelConfig
from famjax.core.errors import UserError
from famjax.mixers.block_recurrent import BlockRecurrentSpec
from famjax.mixers.delta import DeltaSpec
from famjax.mixers.fam import FamSpec
from famjax.mixers.fm import FmSpec
from famjax.mixers.full import FullSpec
from famjax.mixers.linear import LinearSpec
from famjax.mixers.mixer import Mixer, MixerSpec
from famjax.mixers.other_names import suggest_mixer
from famjax.mixers.window import BswaSpec, BswaStopGradientSpec, SwaSpec
from famjax.ops.ngrams import context_lengths

MIXERS: dict[str, MixerSpec] = {
    "full": FullSpec(),
    "swa": SwaSpec(),
    "bswa": BswaSpec(),
    "bswa_sg": BswaStopGradientSpec(),
    "fam": FamSpec(),
    "fm": FmSpec(),
    "delta": DeltaSpec(),
    "block_recurrent": BlockRecurrentSpec(),
    "linear": LinearSpec(),
}


def make_mixer(name: str, config: ResolvedModelConfig, *, rngs: nnx.Rngs) -> Mixer:
    """Return a new mixer by its registered name."""
    if name not in MIXERS:
        raise UserError(f"model.mixer: unknown mixer {name!r}{suggest_mixer(name, MIXERS)}")
    return MIXERS[name].make(config, rngs)


def mixer_constants(model: ModelConfig) -> dict[str, float]:
    """Return the constants (`MixerSpec.constants`) of all the model's mixers in one dict.

    Of an n-gram memory of more than four contexts, the dict has the longest context, which was the
    number of contexts in earlier versions.
    """
    by_mixer = (spec.constants(model) for spec in mixer_specs(model))
    constants = {name: value for each in by_mixer for name, value in each.items()}
    longest = context_lengths(model.ngram_memory)[-1] if model.ngram_memory else 0
    return constants | ({"ngram_memory.longest": longest} if longest > model.ngram_memory else {})


def is_bounded(model: ModelConfig) -> bool:
    """Return whether documents are limited to `model.capacity` tokens."""
    return model.stack == "autocompressor" or any(spec.is_bounded for spec in mixer_specs(model))


def mixer_specs(model: ModelConfig) -> list[MixerSpec]:
    """Return the specs of the mixers that the layer pattern names, in the order of `MIXERS`.

    The list is empty for a stack without mixers. Unknown names are skipped.
    """
    names = mixer_pattern(model)
    return [spec for name, spec in MIXERS.items() if name in names]


def convert_settings(old: ModelConfig, new: ModelConfig) -> dict[str, Any]:
    """Return the `MixerSpec.convert_settings` of the mixers of `new` that `old` lacks."""
    present = mixer_pattern(old)
    return {
        field: value
        for name, spec in MIXERS.items()
        if name in mixer_pattern(new) and name not in present
        for field, value in spec.convert_settings.items()
    }

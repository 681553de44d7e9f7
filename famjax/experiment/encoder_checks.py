"""Checks of models with an encoder, and of settings that cannot be combined with one yet."""

from __future__ import annotations

from collections.abc import Iterator

from famjax.config.derived import has_linear_cross
from famjax.config.schema import Config
from famjax.core.errors import format_multiples
from famjax.mixers import mixer_specs

_STACKS = ("residual", "feedback", "transformer")


def check_encoder(config: Config) -> Iterator[str]:
    """Yield an error line for each setting that a model with an encoder cannot work with."""
    m = config.model
    if not m.encoder.layers:
        return
    named = f"model.encoder.layers={m.encoder.layers}"
    if m.stack not in _STACKS:
        yield (
            f"{named}: model.stack={m.stack} has no attention to an encoder; take "
            f"{' or '.join(_STACKS)}"
        )
    for spec in mixer_specs(m):
        if spec.applies_mlp:
            yield (
                f"{named}: {spec.title} applies the feed-forward itself, which leaves no place for "
                "attention to the encoder; take another mixer"
            )
    if m.arch.parallel:
        yield (
            f"model.arch.parallel=true: with {named} attention to the encoder comes between "
            "attention and feed-forward; set false"
        )
    source = config.data.source_length or config.data.length
    if m.arch.positions == "learned" and source > m.capacity:
        key = "data.source_length" if config.data.source_length else "data.length"
        yield (
            f"{key}={source} is longer than model.capacity={m.capacity}, the encoder's learned "
            f"positions; set data.source_length to at most {m.capacity}"
        )
    if m.adaptive.cutoffs and not m.encoder.shared:
        yield (
            "model.encoder.shared=false: an adaptive embedding is one for both; set true, or "
            "model.adaptive.cutoffs=''"
        )
    if has_linear_cross(m) and m.linear.map == "rfa" and m.encoder.features % 2:
        yield (
            f"model.encoder.features={m.encoder.features} is odd; rfa has a sine and a cosine of "
            f"each random vector, take {format_multiples(m.encoder.features, 2)}"
        )
    if config.mesh.sequence > 1:
        yield (
            f"mesh.sequence={config.mesh.sequence}: with {named} every token attends to the whole "
            "source; set 1"
        )


def check_encoder_task(config: Config) -> Iterator[str]:
    """Yield an error line if a model with an encoder has no sources to read."""
    layers, task = config.model.encoder.layers, config.data.task
    if layers and task != "translate":
        yield (
            f"model.encoder.layers={layers}: data.task={task} has no sources to read; set "
            "data.task=translate, or 0"
        )

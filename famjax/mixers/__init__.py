"""The registry of mixers: what a layer attends to, and the state it carries. One file each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.core.errors import UserError, nearest
from famjax.mixers.fam import Fam
from famjax.mixers.full import FullAttention
from famjax.mixers.linear import LinearAttention
from famjax.mixers.window import WindowAttention


def _make_swa(config: ResolvedModelConfig, *, rngs: nnx.Rngs) -> WindowAttention:
    # earlier blocks that a block's first token attends to
    segments = -(-(config.window - 1) // config.block_len)
    return WindowAttention(config, rngs=rngs, segments=segments, window=config.window)


def _make_bswa(config: ResolvedModelConfig, *, rngs: nnx.Rngs) -> WindowAttention:
    return WindowAttention(config, rngs=rngs, segments=config.memory_segments)


def _make_bswa_sg(config: ResolvedModelConfig, *, rngs: nnx.Rngs) -> WindowAttention:
    return WindowAttention(config, rngs=rngs, segments=config.memory_segments, stop_gradient=True)


MIXERS: dict[str, Callable[..., Any]] = {
    "full": FullAttention,
    "swa": _make_swa,  # fam.swa
    "bswa": _make_bswa,  # fam.bswa
    "bswa_sg": _make_bswa_sg,  # fam.bswa_sg
    "fam": Fam,  # fam.fam
    "linear": LinearAttention,  # t2r.map
}


def make_mixer(name: str, config: ResolvedModelConfig, *, rngs: nnx.Rngs) -> Any:
    """Return a new mixer by its registered name."""
    if name not in MIXERS:
        raise UserError(f"model.mixer: unknown mixer {name!r}{nearest(name, MIXERS)}")
    return MIXERS[name](config, rngs=rngs)

"""The table of mixers: what a layer attends to and carries. One file, one line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from famjax.core.config import ModelConfig
from famjax.core.errors import UserError, nearest
from famjax.mixers.fam import Fam
from famjax.mixers.full import Full
from famjax.mixers.linear import Linear
from famjax.mixers.window import Window


def _swa(config: ModelConfig, *, rngs: nnx.Rngs) -> Window:
    # the blocks that a block's first token looks back into
    segments = -(-(config.window - 1) // config.block_len)
    return Window(config, rngs=rngs, segments=segments, window=config.window)


def _bswa(config: ModelConfig, *, rngs: nnx.Rngs) -> Window:
    return Window(config, rngs=rngs, segments=config.memory_segments)


def _bswa_sg(config: ModelConfig, *, rngs: nnx.Rngs) -> Window:
    return Window(config, rngs=rngs, segments=config.memory_segments, stop_gradient=True)


MIXERS: dict[str, Callable[..., Any]] = {
    "full": Full,
    "swa": _swa,  # fam.swa
    "bswa": _bswa,  # fam.bswa
    "bswa_sg": _bswa_sg,  # fam.bswa_sg
    "fam": Fam,  # fam.fam
    "linear": Linear,  # t2r.map
}


def make_mixer(name: str, config: ModelConfig, *, rngs: nnx.Rngs) -> Any:
    """Return a new mixer by its name in the table."""
    if name not in MIXERS:
        raise UserError(f"model.mixer: unknown mixer {name!r}{nearest(name, MIXERS)}")
    return MIXERS[name](config, rngs=rngs)

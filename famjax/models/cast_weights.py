"""Keeps weights in the dtype in which the model uses them, for inference."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
from flax import nnx

from famjax.layers.adaptive import Cluster
from famjax.layers.linear import Linear
from famjax.layers.lora import Lora
from famjax.layers.ngram_memory import NgramMemory
from famjax.layers.short_conv import ShortConv
from famjax.models.language_model import LanguageModel


def cast_weights(model: LanguageModel) -> None:
    """Convert the weights that are only used in the compute dtype to it, in place.

    The model computes the same. Training keeps such weights in float32 and converts them at each
    use, so that generating a token in bfloat16 reads 4 bytes for each weight, writes 2 and reads 2;
    after the conversion it reads 2. Other parameters, such as the norms', stay as they are.
    """
    for param, dtype in _cast_params(model):
        param.set_value(param[...].astype(dtype))


def _cast_params(model: LanguageModel) -> Iterator[tuple[nnx.Param, jnp.dtype]]:
    """Yield the parameters that are converted at each use, and the dtype."""
    for _, module in nnx.iter_graph(model):
        match module:
            case Linear():
                params = [module.kernel, module.bias]
            case ShortConv():
                params = [module.kernel]
            case Lora():
                params = [module.a, module.b]
            case NgramMemory():
                params = [module.kernel, module.bias]
            case Cluster():
                params = [module.table, module.projection]
            case LanguageModel():
                embeddings = [module.embedding, getattr(module, "source_embedding", None)]
                # an adaptive embedding consists of clusters
                params = [x for x in embeddings if isinstance(x, nnx.Param)]
            case _:
                continue
        yield from ((param, module.dtype) for param in params if param is not None)

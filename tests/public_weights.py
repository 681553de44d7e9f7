"""What comparisons with public implementations share: equal weights, and differences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.config.schema import ModelConfig
from famjax.core.types import Array
from famjax.models.language_model import LanguageModel

Weights = dict[str, Any]


def graph(config: ModelConfig) -> tuple[Any, Any]:
    """Return the model without weights, and the shapes of its parameters."""
    return nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))


def model_with(graph: tuple[Any, Any], weights: Weights) -> LanguageModel:
    """Return the model with all of its parameters given by their paths, as a function of them."""
    definition, shapes = graph
    given = dict(weights)

    def give(path: Any, shape: jax.ShapeDtypeStruct) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        a = jnp.asarray(given.pop(name), shape.dtype)
        assert a.shape == shape.shape, name
        return a

    params = jax.tree_util.tree_map_with_path(give, shapes)
    assert not given, f"not parameters of the model: {sorted(given)}"
    return nnx.merge(definition, params)


def check(ours: Any, theirs: Any, tolerance: float) -> None:
    """Print the largest difference of two trees, relative to the range of its array, and check it.

    No array of theirs may be zero.
    """
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    errors = {}
    pairs = zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    for (path, a), b in pairs:
        a, b = np.asarray(a), np.asarray(b)
        name = jax.tree_util.keystr(path, simple=True, separator=" ")
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        assert np.isfinite(a).all(), name
        assert np.any(b), name
        errors[name] = np.abs(a - b).max() / np.abs(b).max()
    largest = max(errors, key=lambda name: errors[name])
    print(f"{len(errors)} arrays differ by at most {errors[largest]:.1e}, {largest}")
    assert errors[largest] < tolerance, {name: e for name, e in errors.items() if e >= tolerance}

"""What is exported."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core.config import ModelConfig
from famjax.models.language_model import LanguageModel
from famjax.train.run import Run


@dataclass(frozen=True)
class Source:
    """A run on its way into another format.

    Attributes:
      run: opened.
      folder: of the run.
      dtype: float32 or bfloat16, of the tensors to write.
    """

    run: Run
    folder: Path
    dtype: str = "float32"

    @property
    def model(self) -> ModelConfig:
        return self.run.config.model

    def reference(self) -> LanguageModel:
        """Return the run's model as the export must compute it: its parameters as they are
        written, everything else in float32."""
        config = replace(self.model, dtype="float32", remat="none")
        graph, _ = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))
        params = nnx.split(self.run.model)[1]
        kind = jnp.dtype(self.dtype)
        return nnx.merge(graph, jax.tree.map(lambda a: a.astype(kind).astype(jnp.float32), params))

"""The run to export."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.schema import ModelConfig
from famjax.export import check
from famjax.models.language_model import LanguageModel
from famjax.models.remap_params import abstract_inference_model
from famjax.train.partition import inference_config
from famjax.train.run import Run


@dataclass(frozen=True)
class ExportSource:
    """A run to export.

    Attributes:
      run: the opened run.
      folder: folder of the run.
      dtype: dtype of the tensors to write, float32 or bfloat16.
    """

    run: Run
    folder: Path
    dtype: str = "float32"

    @property
    def model(self) -> ModelConfig:
        return self.run.config.model

    def merge_adapters(self) -> ExportSource:
        """Return the run with its adapters merged into the weights."""
        return replace(self, run=self.run.merge_adapters())

    def reference_model(self) -> LanguageModel:
        """Return the reference model for the comparison.

        Its parameters are rounded to the exported dtype; it computes in float32.
        """
        # float32 keeps adapters separate, so that the merge is compared too
        run = self.run if self.dtype == "float32" else self.merge_adapters().run
        short = check.sample_capacity(run.config.model)
        config = replace(
            inference_config(run.config.model), dtype="float32", remat="none", capacity=short
        )
        graph, _ = abstract_inference_model(config)
        kind = jnp.dtype(self.dtype)
        params = nnx.split(run.model)[1]
        return nnx.merge(graph, jax.tree.map(lambda a: a.astype(kind).astype(jnp.float32), params))

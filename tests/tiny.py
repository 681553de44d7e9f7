"""Models that compile in seconds, and a trained run of one of them."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from small import shared_programs

from famjax.config.schema import Config, DataConfig, ModelConfig, PasskeyConfig, TrainConfig
from famjax.core.types import Context
from famjax.models.language_model import LanguageModel
from famjax.train.loop import train
from famjax.train.run import Run, open_run

TEXT = "the cat sat on the mat, and the dog — très bien — on the log.\n"

SHAPE = ModelConfig(
    vocab_size=258,
    layers=2,
    width=16,
    heads=2,
    block_len=8,
    window=8,
    fam_len=2,
    capacity=64,
)


def model(mixer: str, seed: int = 0, **shape: Any) -> LanguageModel:
    """Return a model with random parameters over bytes."""
    return model_of(replace(SHAPE, mixer=mixer, **shape), seed)


@functools.cache
def model_of(config: ModelConfig, seed: int = 0) -> LanguageModel:
    return LanguageModel(config, rngs=nnx.Rngs(seed))


def with_noise(model: LanguageModel, part: str, size: float) -> LanguageModel:
    """Return the model with noise of this size added to parameters with `part` in their names."""
    graph, params = nnx.split(model)
    return nnx.merge(
        graph,
        jax.tree_util.tree_map_with_path(
            lambda path, a: (
                a + size * jax.random.normal(jax.random.key(0), a.shape) if part in str(path) else a
            ),
            params,
        ),
    )


def logits(model: LanguageModel, tokens: np.ndarray, pad: int = 64) -> np.ndarray:
    """Return the logits of one call: [b t] -> [b t v].

    Compiled for multiples of `pad` tokens.
    """
    padded = np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % pad)))
    graph, params = nnx.split(model)
    return np.asarray(_forward(graph, params, padded))[:, : tokens.shape[1]]


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph: Any, params: Any, tokens: Any) -> Any:
    model = nnx.merge(graph, params)
    return model(tokens, model.init_state(len(tokens)))[0]


def read(model: LanguageModel, tokens: Any, state: Any) -> tuple[Any, Any]:
    """Return the outputs of the stack [b t d], and the state after it, in a compiled call."""
    return _read(*nnx.split(model), tokens, state)


@functools.partial(jax.jit, static_argnums=0)
def _read(graph: Any, params: Any, tokens: Any, state: Any) -> tuple[Any, Any]:
    model = nnx.merge(graph, params)
    return model.stack(model.embed(tokens), state, Context())


@functools.cache
def folder() -> Path:
    """Return the folder of a FAM run trained for two steps on text."""
    home = Path(_home().name)
    text = home / "train.txt"
    text.write_text(TEXT * 60, encoding="utf-8")
    config = Config(
        model=SHAPE,
        data=DataConfig(files=str(text), batch=1, length=16, passkey=PasskeyConfig(digits=3)),
        train=TrainConfig(steps=2, log_every=2),
    )
    with shared_programs():
        train(config, home / "run", quiet=True)
    return home / "run"


@functools.cache
def run() -> Run:
    return open_run(folder())


def run_of(config: ModelConfig, seed: int = 0) -> Run:
    """Return the run with another model, with random parameters."""
    return replace(run(), config=replace(run().config, model=config), model=model_of(config, seed))


def run_with(mixer: str, seed: int = 0, **shape: Any) -> Run:
    """Return the run with another model, like `model`."""
    return run_of(replace(SHAPE, mixer=mixer, **shape), seed)


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="famjax-tests-")

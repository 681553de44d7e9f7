"""Training objectives: negative log-likelihood of the next token, or a matching error (T2R)."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from famjax.config.derived import reads_whole_rows
from famjax.config.schema import Config, TrainConfig
from famjax.core.types import Array, Batch, Context, State
from famjax.mixers.mixer import MemoryLosses
from famjax.models.language_model import LanguageModel
from famjax.models.seq2seq import source_of
from famjax.stacks.residual import ResidualStack
from famjax.train.state import MetricSums

WeightField = Literal["weights", "valid"]


class Objective(Protocol):
    """Defines how a segment is processed, and its loss.

    Attributes:
      weight_field: name of the batch field with the weights of the loss.
    """

    weight_field: WeightField

    def initial_state(
        self,
        model: LanguageModel,
        carried: State,
        rows: int,
        offset: Array | None,
        key: Array,
        step: Array,
    ) -> State:
        """Return the state before the rows' first tokens; `carried` is `TrainState.memory`."""
        ...

    def forward(
        self,
        model: LanguageModel,
        memory: State,
        batch: Batch[Array],
        ctx: Context,
        share: Array,
    ) -> tuple[State, MetricSums]:
        """Run the forward pass on a segment [b t]; return the memory after it, and metric sums.

        Args:
          share: scalar, the sum of the whole batch's token weights divided by its number of
            (microbatch, segment) pairs. Losses that are not sums over tokens are multiplied by it.
        """
        ...


class NextToken:
    """Negative log-likelihood of the next token, in nats, with label smoothing if it is on."""

    weight_field: WeightField = "weights"

    def __init__(self, config: Config, token_bytes: np.ndarray):
        self._config, self._token_bytes = config, token_bytes

    def initial_state(
        self,
        model: LanguageModel,
        carried: State,
        rows: int,
        offset: Array | None,
        key: Array,
        step: Array,
    ) -> State:
        train, data = self._config.train, self._config.data
        if data.layout == "lanes":
            return carried
        fresh = model.init_state(rows, offset)
        if reads_whole_rows(self._config):
            fresh = model.stack.shorten(fresh, 0)
        if train.rsp == 0:
            return fresh
        # B.2.3: the memory of row 0 after the previous step, for all rows of this step
        passable = model.stack.passable_state(fresh)
        saved = jax.tree.map(lambda a, b: jnp.broadcast_to(a, b.shape), carried, passable)
        ramp = jnp.minimum(1.0, (step + 1) / max(train.rsp_ramp, 1))
        use = jax.random.bernoulli(key, train.rsp * ramp) & (step > 0)
        passed = model.stack.pass_state(fresh, jax.lax.stop_gradient(saved))
        return jax.tree.map(lambda a, b: jnp.where(use, a, b), passed, fresh)

    def forward(
        self,
        model: LanguageModel,
        memory: State,
        batch: Batch[Array],
        ctx: Context,
        share: Array,
    ) -> tuple[State, MetricSums]:
        train, embedded = self._config.train, model.embed(batch["tokens"])
        ctx = ctx._replace(source=source_of(model, batch))
        ctx = model.with_tokens(ctx, batch["tokens"])
        if not has_memory_losses(self._config):
            x, memory = model.stack(embedded, memory, ctx)
            return memory, sum_losses(model, x, batch, self._token_bytes, train.label_smoothing)
        assert isinstance(model.stack, ResidualStack)  # which has mixers with a memory
        x, memory, losses = model.stack.call_with_losses(embedded, memory, ctx)
        sums = sum_losses(model, x, batch, self._token_bytes, train.label_smoothing)
        weights = _loss_weights(train)
        extra = sum(weights[name] * loss for name, loss in minimized(train, losses).items())
        # the mean over the batch's tokens contains it once; bits per byte are without it
        added = (jnp.asarray(extra) * share).astype(sums.loss.dtype)
        return memory, sums._replace(loss=sums.loss + added)


def _loss_weights(train: TrainConfig) -> dict[str, float]:
    """Return the weights of the losses in `MemoryLosses`, by their names."""
    return {
        "diversity": train.diversity_loss,
        "reconstruction": train.reconstruction_loss,
        "writing": train.write_loss,
    }


def minimized(train: TrainConfig, losses: MemoryLosses) -> dict[str, Array]:
    """Return the losses that training minimizes; compiled programs compute no others."""
    weights = _loss_weights(train)
    return {
        name: loss
        for name, loss in losses._asdict().items()
        if loss is not None and weights[name] > 0
    }


def has_memory_losses(config: Config) -> bool:
    """Return whether the model has auxiliary losses on its memory."""
    return config.model.stack == "residual" and any(_loss_weights(config.train).values())


class Matching:
    """Distance of linear layers' attention from softmax attention (`train.match`).

    The memory is neither read nor changed.
    """

    weight_field: WeightField = "valid"

    def initial_state(
        self,
        model: LanguageModel,
        carried: State,
        rows: int,
        offset: Array | None,
        key: Array,
        step: Array,
    ) -> State:
        return carried

    def forward(
        self,
        model: LanguageModel,
        memory: State,
        batch: Batch[Array],
        ctx: Context,
        share: Array,
    ) -> tuple[State, MetricSums]:
        tokens = batch["tokens"]
        _, errors = model.stack.match_softmax(model.embed(tokens), model.with_tokens(ctx, tokens))
        return memory, sum_errors(errors, batch)


def make_objective(config: Config, token_bytes: np.ndarray) -> Objective:
    """Return the objective of a config.

    Args:
      token_bytes: [v], UTF-8 bytes of each token.
    """
    return Matching() if config.train.match else NextToken(config, token_bytes)


def sum_losses(
    model: LanguageModel, x: Array, batch: Batch[Array], token_bytes: np.ndarray, smoothing: float
) -> MetricSums:
    """Return the sums of one segment from the stack's output x [b t d].

    Args:
      smoothing: `train.label_smoothing`; applies to the loss only, not to the other metrics.
    """
    targets = batch["targets"]
    if not smoothing:
        return sum_metrics(*model.losses(x, targets), batch, token_bytes)
    nll, correct, smoothed = model.smoothed_losses(x, targets, smoothing)
    loss = (smoothed * batch["weights"]).sum(dtype=jnp.float32)
    return sum_metrics(nll, correct, batch, token_bytes)._replace(loss=loss)


def sum_metrics(
    nll: Array, correct: Array, batch: Batch[Array], token_bytes: np.ndarray
) -> MetricSums:
    """Return the sums of one segment from the two results [b t] of `LanguageModel.losses`."""
    targets, weights = batch["targets"], batch["weights"]
    full = weights >= 1
    right = full & correct
    counted = weights > 0
    total: dict[str, Any] = {
        "weight": weights,
        "loss": nll * weights,
        "answers": full,
        "right": right,
        "nats": jnp.where(counted, nll, 0),
        # an array of the host until here: a compiled program must not capture one of the device,
        # which accelerators would have to send to the host while it compiles
        "bytes": jnp.where(counted, jnp.asarray(token_bytes)[targets], 0),
        "tokens": batch["valid"],
    }
    sums = {name: value.sum(dtype=jnp.float32) for name, value in total.items()}
    return MetricSums.zeros()._replace(**sums)


def sum_errors(errors: Array, batch: Batch[Array]) -> MetricSums:
    """Return the sums for the matching errors [l b] of linear layers (`train.match`).

    Loss divided by weight is the mean over layers and rows. All tokens count, also those on which
    next-token prediction has no loss.
    """
    tokens = batch["valid"].sum(-1, dtype=jnp.float32)
    loss = (errors.mean(0).astype(jnp.float32) * tokens).sum()
    return MetricSums.zeros()._replace(weight=tokens.sum(), loss=loss, tokens=tokens.sum())

"""The state of a run at one step: all that a checkpoint holds except data cursor and config."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from famjax.core.types import Array, Params, PyTree, State


class MetricSums(NamedTuple):
    """Sums of metrics over the steps since the last log.

    They are kept on the device, so that the host does not have to wait for it.

    Attributes (all scalars, float32):
      steps: number of steps.
      weight, loss: sum of token weights, and sum of weighted negative log-likelihoods in nats, with
        label smoothing if it is on; with `train.match`, number of tokens and sum of their errors.
      answers, right: number of targets of full weight, and how many of them are the argmax.
      nats, bytes: negative log-likelihood of all targets of positive weight, and number of their
        UTF-8 bytes.
      tokens: number of valid tokens read.
      grad_norm: sum over steps of the global gradient norm before clipping.
    """

    steps: Array
    weight: Array
    loss: Array
    answers: Array
    right: Array
    nats: Array
    bytes: Array
    tokens: Array
    grad_norm: Array

    @classmethod
    def zeros(cls) -> MetricSums:
        return cls(*(jnp.zeros((), jnp.float32) for _ in cls._fields))


class TrainState(NamedTuple):
    """The training state, a pytree of arrays.

    Attributes:
      step: scalar int32, optimizer steps done.
      params: trainable parameters, float32.
      opt_state: state of the optax optimizer.
      memory: the part of the model state that is carried to the next step. With lanes, all of it;
        with packed rows and random state passing, the memories of row 0; otherwise ().
      key: [2] uint32, key data of the PRNG key.
      totals: sums of metrics since the last log.
      frozen: frozen parameters, see `partition_trainable`; not in checkpoints.
      bad: scalar int32, the first step with a non-finite loss, gradient, parameter or memory; 0 if
        there is none.
    """

    step: Array
    params: Params
    opt_state: PyTree
    memory: State  # existing checkpoints use this name
    key: Array
    totals: MetricSums
    bad: Array
    frozen: PyTree = ()


def to_tree(state: TrainState) -> dict[str, Any]:
    """Return the state as the tree that `Checkpoints` saves.

    Parameters are an entry of their own, for readers that need nothing else. All other arrays are
    one entry, since every entry costs a folder and the time to write it.
    """
    rest = state._asdict()
    del rest["frozen"]  # frozen weights are in `config.init`
    return {"params": rest.pop("params"), "rest": rest}


def from_tree(tree: dict[str, Any]) -> TrainState:
    return TrainState(params=tree["params"], **tree["rest"])

"""What a run is at one step: everything a checkpoint holds but the data cursor and the config."""

from __future__ import annotations

from typing import Any, NamedTuple

from famjax.core.types import Array, State


class MetricSums(NamedTuple):
    """Sums over the steps since the last log, on the device, so that the host need not wait.

    Attributes (all scalars, float32):
      steps: steps added up.
      weight, loss: sum of token weights, and of weighted negative log-likelihoods, nats; with
        `train.match` of 1 and of the error for each token.
      answers, right: targets of full weight, and how many of them were the likeliest token.
      nats, bytes: negative log-likelihood of all targets of positive weight, and their UTF-8 bytes.
      tokens: valid tokens read.
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


class TrainState(NamedTuple):
    """One pytree of arrays.

    Attributes:
      step: scalar int32, optimizer steps done.
      params: parameters that are trained, float32.
      opt_state: optax's.
      memory: the state carried to the next step. Lanes: all of it. Packed with random state
        passing: the FAMs of row 0. Packed without: ().
      key: [2] uint32, data of the random key.
      totals: metrics since the last log.
      frozen: parameters that are not, see `partition_trainable`; in no checkpoint.
      bad: scalar int32, the first step whose loss, gradient, new parameters or memory were not
        finite; 0 if there is none.
    """

    step: Array
    params: Any
    opt_state: Any
    memory: State
    key: Array
    totals: MetricSums
    bad: Array
    frozen: Any = ()


def to_tree(state: TrainState) -> dict[str, Any]:
    """Return the state as `Checkpoints` takes it: parameters by themselves, for who wants no more.

    The rest is one entry, as each costs a folder and its time.
    """
    rest = state._asdict()
    del rest["frozen"]  # they are in `config.init`
    return {"params": rest.pop("params"), "rest": rest}


def from_tree(tree: dict[str, Any]) -> TrainState:
    return TrainState(params=tree["params"], **tree["rest"])

"""The state of a run at one step: everything in a checkpoint except data cursor and config."""

from __future__ import annotations

from typing import Any, NamedTuple

from famjax.core.types import Array, Params, PyTree, State


class MetricSums(NamedTuple):
    """Metric sums over the steps since the last log, on the device, so that the host does not wait.

    Attributes (all scalars, float32):
      steps: number of steps.
      weight, loss: sum of token weights, and of weighted negative log-likelihoods in nats, with
        label smoothing if it is on; with `train.match`, number of tokens, and sum of their errors.
      answers, right: number of targets of full weight, and of those that are the argmax.
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
    """The training state, a pytree of arrays.

    Attributes:
      step: scalar int32, optimizer steps done.
      params: trainable parameters, float32.
      opt_state: of optax.
      memory: the model state carried to the next step. Lanes: all of it. Packed with random state
        passing: the FAMs of row 0. Packed without: ().
      key: [2] uint32, data of the random key.
      totals: metrics since the last log.
      frozen: frozen parameters, see `partition_trainable`; not in checkpoints.
      bad: scalar int32, the first step with a non-finite loss, gradient, parameter or memory; 0 if
        there is none.
    """

    step: Array
    params: Params
    opt_state: PyTree
    memory: State
    key: Array
    totals: MetricSums
    bad: Array
    frozen: PyTree = ()


def to_tree(state: TrainState) -> dict[str, Any]:
    """Return the state as `Checkpoints` takes it: parameters by themselves, for who wants no more.

    The rest is one entry, as each costs a folder and its time.
    """
    rest = state._asdict()
    del rest["frozen"]  # they are in `config.init`
    return {"params": rest.pop("params"), "rest": rest}


def from_tree(tree: dict[str, Any]) -> TrainState:
    return TrainState(params=tree["params"], **tree["rest"])

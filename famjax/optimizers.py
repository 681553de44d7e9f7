"""Optimizers and schedules, from optax."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from famjax.config.schema import OptimizerConfig
from famjax.core.types import Array, Params, PyTree
from famjax.parallel.sharding import path_name

# biases of memory gates and of the delta rule's rates: if they decayed towards 0, the gates would
# open, and the memory would forget
_NOT_DECAYED = re.compile(r"/(memory_gate/bias|rate_bias)$")


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the step, for a run of `steps` steps.

    The rate rises linearly from 0 over the first `warmup_steps`. Then "constant" keeps it, "cosine"
    decays it to the fraction `final_fraction` at the end of the run, and "wsd" keeps it and decays
    it linearly to 0 over the last `decay_fraction` of the run. "inverse_sqrt" multiplies it by
    sqrt(warmup_steps / step) (Vaswani et al., 2017, 5.3; fairseq). Cosine and wsd depend on
    `steps`: if `train.steps` is raised, the rate jumps when the run resumes.
    """
    rate, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "constant":
        fall = optax.constant_schedule(rate)
    elif config.schedule == "cosine":
        fall = optax.cosine_decay_schedule(rate, max(steps - warmup, 1), config.final_fraction)
    elif config.schedule == "inverse_sqrt":
        fall = _inverse_sqrt_schedule(rate, warmup)
    else:
        # the decay has at most the steps that the warm-up leaves
        decay = max(min(round(config.decay_fraction * steps), steps - warmup), 1)
        hold = max(steps - warmup - decay, 0)
        fall = optax.join_schedules(
            [optax.constant_schedule(rate), optax.linear_schedule(rate, 0.0, decay)], [hold]
        )
    if not warmup:
        return fall
    return optax.join_schedules([optax.linear_schedule(0.0, rate, warmup), fall], [warmup])


def _inverse_sqrt_schedule(rate: float, warmup: int) -> optax.Schedule:
    """Return the learning rate as a function of the number of steps after the warm-up."""
    # optax also calls it with the negative numbers of steps before the end of the warm-up
    return lambda step: rate * jnp.sqrt(warmup / (warmup + jnp.maximum(step, 0)))


class OptimizerSpec(NamedTuple):
    """An optimizer.

    Attributes:
      make: function from the config and the learning rate schedule to the transformation, without
        clipping.
      moments: number of arrays of a parameter's size that the optimizer keeps; a factored moment
        does not count.
      unused: config keys that have no effect with this optimizer.
    """

    make: Callable[[OptimizerConfig, optax.Schedule], optax.GradientTransformation]
    moments: int
    unused: tuple[str, ...] = ()


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Return gradient clipping, the optimizer and its schedule as one transformation.

    Weight decay applies to every trained parameter, including norm scales, biases and embeddings,
    as with PyTorch's optimizers for a model's `parameters()`. The biases of memory gates and of the
    delta rule's rates are excepted, since they are timescales.
    """
    optimizer = OPTIMIZERS[config.name].make(config, make_schedule(config, steps))
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(clip, optimizer)


def _adamw(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2),
        _add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(schedule),
    )


def _nag(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return SGD with Nesterov momentum, as in fairseq (T2R, Tables 3 and 4).

    Fairseq's momentum buffer is optax's trace times the learning rate. Weights decay outside of it.
    """
    trace = optax.trace(decay=config.beta1, nesterov=True)
    decay = _add_decayed_weights(config.weight_decay)

    def update(updates: PyTree, state: PyTree, params: Params | None = None) -> Any:
        updates, state = trace.update(updates, state, params)
        return decay.update(updates, optax.EmptyState(), params)[0], state

    decayed_trace = optax.GradientTransformation(trace.init, update)
    # nested as in existing checkpoints
    nag = optax.chain(decayed_trace, optax.scale_by_learning_rate(schedule))
    return optax.chain(optax.identity(), nag)


def _adafactor(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return Adafactor (Shazeer & Stern, 2018) with momentum and second-moment decay up to beta2.

    TransformerFAM 3.1 uses beta1 0.9 and beta2 0.99. With a constant decay and no bias correction
    the first steps would be ten times too large, so the decay rises as 1 - t^-0.8 up to beta2.
    """

    def decay(step: Array, _: float) -> Array:
        t = jnp.asarray(step, jnp.float32) + 1.0
        return jnp.minimum(config.beta2, 1.0 - t**-0.8)

    scaled = optax.chain(
        optax.scale_by_factored_rms(decay_rate_fn=decay),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )
    return optax.chain(
        _per_layer(scaled),
        optax.ema(config.beta1, debias=False),
        _add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(schedule),
    )


def _add_decayed_weights(rate: float) -> optax.GradientTransformation:
    """Return `optax.add_decayed_weights` for all parameters except those in `_NOT_DECAYED`.

    The mask of `optax.add_decayed_weights` would change the structure of the optimizer state, and
    so of checkpoints.
    """

    def add(updates: PyTree, params: Params | None) -> PyTree:
        def add_decayed(path: Any, update: Array, param: Array) -> Array:
            return update if _NOT_DECAYED.search(path_name(path)) else update + rate * param

        return jax.tree_util.tree_map_with_path(add_decayed, updates, params)

    return optax.stateless(add)


def _per_layer(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply a transformation that uses statistics of whole arrays to each layer separately.

    Stacks and encoders keep equal layers in one array [repeats ...]. Without the `vmap`, all layers
    together would have one parameter scale, and Adafactor could factor over the layers. An encoder
    is a group of its own, since it may have another number of layers.
    """

    def init(params: Params) -> PyTree:
        empty = not jax.tree.leaves(params)
        return transformation.init(params) if empty else jax.vmap(transformation.init)(params)

    def update(updates: PyTree, state: PyTree, params: Params = None) -> Any:
        empty = not jax.tree.leaves(updates)
        apply = transformation.update if empty else jax.vmap(transformation.update)
        return apply(updates, state, params)

    layers = optax.GradientTransformation(init, update)

    def label(path: Any, _: Any) -> str:
        name = f"/{path_name(path)}"
        if "/layers/" not in name:
            return "others"
        return "encoder" if name.startswith("/encoder/") else "layers"

    labels = functools.partial(jax.tree_util.tree_map_with_path, label)

    def partition(params: Params) -> optax.GradientTransformation:
        groups = {"layers": layers, "others": transformation}
        # the state of a model without an encoder has no such group
        if "encoder" in jax.tree.leaves(labels(params)):
            groups["encoder"] = layers
        return optax.partition(groups, labels)

    return optax.GradientTransformation(
        lambda params: partition(params).init(params),
        lambda updates, state, params=None: partition(updates).update(updates, state, params),
    )


OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": OptimizerSpec(_adamw, moments=2),
    "adafactor": OptimizerSpec(_adafactor, moments=1),
    "nag": OptimizerSpec(_nag, moments=1, unused=("optimizer.beta2",)),
}

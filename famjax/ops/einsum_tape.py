"""Einsum tapes: record, replay and collect the einsums of a scan body, to defer weight gradients.

In the backward pass of y = einsum(x, W), the kernel's gradient needs only x and d_y. In a scan over
t steps, plain differentiation accumulates that gradient t times, each time by a product for one
token:

    d_W = sum_i x_i^T d_y_i          t small products, W's size read and written t times
        = X^T d_Y                    one product over all tokens, after the scan

`famjax.ops.token_scan` and `famjax.ops.deferred_scan` trace their body three times, each time with
another tape in `famjax.ops.weight_einsum.TAPE`. The tape handles every einsum with a kernel or with
the history (`is_weight_equation` distinguishes them by the equation):

    RecordTape    y = einsum(x, W); outputs.append(y)         forward: outputs are residuals
    ReplayTape    y = next(outputs) + next(probes)            backward of one step: y is not
                  d_x = einsum(d_y, W^T); d_probe = d_y       recomputed, d_W not computed
    CollectTape   inputs.append(x); y = next(outputs)         all steps, by vmap: gives X
    d_W = einsum(X, D_Y)                                      D_Y: the probes' stacked gradients

A cotangent probe is a zero that acts as if it were added to an einsum's output, so that the probe's
gradient is the output's cotangent (as in `nnx.Module.perturb`). `_replay` defines this gradient
without computing the sum.

Related work: cuDNN's RNNs split the backward pass likewise (cudnnRNNBackwardData,
cudnnRNNBackwardWeights); zero-bubble pipelines schedule weight gradients separately (Qi et al.,
2024, arXiv 2401.10241).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Float

from famjax.core.types import Array, acc_dtype
from famjax.ops.weight_einsum import TAPE, Tape, is_weight_equation

AnyTape = TypeVar("AnyTape", bound=Tape)
Params = TypeVar("Params")  # a pytree of kernels


def history_einsum(
    equation: str, x: Float[Array, "..."], entries: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Return einsum(equation, x, entries) of one token and the history before its block.

    The result is in float32 or wider.

    Args:
      equation: such as "bge,bgse->bgs": all dimensions are named, in any order.

    Raises:
      ValueError: the equation has the form of one with a kernel (`is_weight_equation`).
    """
    if is_weight_equation(equation):
        raise ValueError(f"history_einsum: {equation!r} is of a kernel; use weight_einsum")
    tape = TAPE.get()
    return einsum(equation, x, entries) if tape is None else tape(equation, x, entries)


def einsum(
    equation: str, x: Float[Array, "..."], kernel: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Return the einsum, in x's dtype with a kernel, in float32 or wider with the history."""
    out_dtype = x.dtype if is_weight_equation(equation) else acc_dtype(x)
    return jnp.einsum(equation, x, kernel, preferred_element_type=out_dtype)


class RecordTape:
    """The forward pass: computes every einsum and records its output."""

    def __init__(self) -> None:
        self.outputs: list[Array] = []

    def __call__(self, equation: str, x: Array, kernel: Array) -> Array:
        self.outputs.append(einsum(equation, x, kernel))
        return self.outputs[-1]


class ReplayTape:
    """The backward pass of one step: replays outputs; the probes' gradients are their cotangents.

    Args:
      transposed: the kernels of the weight einsums as matrices [fan_out fan_in].
      outputs: recorded outputs of all einsums.
      probes: cotangent probes, one for each output.
    """

    def __init__(self, transposed: list[Array], outputs: list[Array], probes: list[Array]):
        self._transposed = iter(transposed)
        self._pending = iter(zip(outputs, probes, strict=True))

    def __call__(self, equation: str, x: Array, kernel: Array) -> Array:
        transposed = next(self._transposed) if is_weight_equation(equation) else kernel
        return _replay(equation, x, transposed, *next(self._pending))


class CollectTape:
    """For the kernels' gradients: collects the input and the kernel of every einsum."""

    def __init__(self, outputs: list[Array]):
        self._pending = iter(outputs)
        self.used: list[WeightEinsum] = []

    def __call__(self, equation: str, x: Array, kernel: Array) -> Array:
        self.used.append(WeightEinsum(equation, x, kernel))
        return next(self._pending)


@contextmanager
def use_tape(tape: AnyTape) -> Iterator[AnyTape]:
    """Let a tape handle the einsums that are traced in the body."""
    token = TAPE.set(tape)
    try:
        yield tape
    finally:
        TAPE.reset(token)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _replay(equation: str, x: Array, transposed: Array, outputs: Array, probe: Array) -> Array:
    """Return `outputs`, which are einsum(equation, x, kernel); their cotangent goes to the probe.

    Args:
      transposed: the history's entries, or the transposed kernel.
    """
    return outputs


def _replay_forward(
    equation: str, x: Array, transposed: Array, outputs: Array, probe: Array
) -> tuple[Array, tuple[Array, Array]]:
    # a residual must be an array: this one has x's shape and dtype but no elements
    return outputs, (jnp.zeros((0, *x.shape), x.dtype), transposed)


def _replay_backward(
    equation: str, residuals: tuple[Array, Array], grad: Array
) -> tuple[Array, None, None, Array]:
    like, transposed = residuals
    if is_weight_equation(equation):
        d_x = (grad.reshape(-1, len(transposed)) @ transposed).reshape(like.shape[1:])
    else:
        inputs, entries, output = _subscripts(equation)
        d_x = jnp.einsum(f"{output},{entries}->{inputs}", grad, transposed)
    return d_x.astype(like.dtype), None, None, grad


_replay.defvjp(_replay_forward, _replay_backward)


class WeightEinsum(NamedTuple):
    """An einsum with the history or with a kernel.

    A kernel "abcd" of "...ab,abcd->...cd" is treated as a matrix [ab cd], [fan_in fan_out].
    """

    equation: str
    x: Array
    kernel: Array

    @property
    def is_weight(self) -> bool:
        return is_weight_equation(self.equation)

    @property
    def size(self) -> tuple[int, int]:
        """Return (fan_in, fan_out)."""
        shape, summed = self.kernel.shape, len(_subscripts(self.equation)[0].removeprefix("..."))
        return math.prod(shape[:summed]), math.prod(shape[summed:])

    def transposed(self) -> Array:
        """Return the kernel as [fan_out fan_in]."""
        return self.kernel.reshape(self.size).T

    def gradient(self, x: Array, grad: Array) -> Array:
        """Return the gradient of the kernel or the history from a block, with x and grad [c ...].

        A kernel's gradient is transposed if fan_in > fan_out: XLA on CPU writes out the transpose
        of the first factor, so the narrower factor comes first.
        """
        if not self.is_weight:
            inputs, entries, output = _subscripts(self.equation)
            equation = f"z{inputs},z{output}->{entries}"
            return jnp.einsum(equation, x, grad, preferred_element_type=acc_dtype(x))
        fan_in, fan_out = self.size
        x, grad = x.reshape(-1, fan_in), grad.reshape(-1, fan_out)
        first, second = (x, grad) if fan_in <= fan_out else (grad, x)
        return jnp.einsum("ri,ro->io", first, second, preferred_element_type=acc_dtype(x))

    def zero_gradient(self) -> Array:
        """Return 0 in the shape and dtype of a kernel's `gradient`."""
        return jnp.zeros(sorted(self.size), acc_dtype(self.kernel))

    def untransposed(self, grad: Array) -> Array:
        """Return a kernel's `gradient`, or a sum of them, in the kernel's shape and dtype."""
        fan_in, fan_out = self.size
        grad = grad if fan_in <= fan_out else grad.T
        return grad.reshape(self.kernel.shape).astype(self.kernel.dtype)


def _subscripts(equation: str) -> tuple[str, str, str]:
    """Return "X", "Y" and "Z" of "X,Y->Z"."""
    factors, output = equation.split("->")
    inputs, kernel = factors.split(",")
    return inputs, kernel, output


def used_weights(
    f: Callable[[Params], object], outputs: list[Array], matmul_params: Params
) -> tuple[list[WeightEinsum], Callable[[list[Array]], Params]]:
    """Return f's weight einsums, and a function from their gradients to those of `matmul_params`.

    Args:
      f: a function of `matmul_params`.
      outputs: recorded outputs of f's einsums.
    """
    used: list[WeightEinsum] = []

    def kernels(matmul_params: Params) -> list[Array]:
        with use_tape(CollectTape(outputs)) as tape:
            f(matmul_params)
        used[:] = [op for op in tape.used if op.is_weight]
        return [op.kernel for op in used]

    weights, kernels_vjp = jax.vjp(kernels, matmul_params)
    einsums = [op._replace(kernel=kernel) for op, kernel in zip(used, weights, strict=True)]

    def params_vjp(grads: list[Array]) -> Params:
        untransposed = [op.untransposed(a) for op, a in zip(einsums, grads, strict=True)]
        return kernels_vjp(untransposed)[0]

    return einsums, params_vjp

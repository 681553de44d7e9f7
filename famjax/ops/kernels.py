"""Whether traced programs use Pallas kernels, and in which precision."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

from famjax.parallel.traced import target_device

_allowed = contextvars.ContextVar("kernels_allowed", default=True)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Trace programs without Pallas kernels, forward and backward, for comparison with the kernels.

    Functions that JAX has already traced keep their cached programs: pass new function objects.
    """
    token = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(token)


def kernel_platform() -> str:
    """Return the platform whose kernels programs traced now may use: tpu, gpu, or "" for none."""
    device = target_device()
    return device.platform if _allowed.get() and _has_kernels(device) else ""


def kernel_precision() -> jax.lax.Precision:
    """Return the precision of products in kernels, from JAX's configured matmul precision.

    Kernels support only DEFAULT and HIGHEST (full float32).
    """
    configured = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    is_default = configured in (None, "default", "fastest", "bfloat16")
    return jax.lax.Precision.DEFAULT if is_default else jax.lax.Precision.HIGHEST


def _has_kernels(device: jax.Device) -> bool:
    """Return whether the device has kernels; GPUs before Ampere have no bfloat16 products."""
    if device.platform == "gpu":
        # AMD GPUs have names like gfx942
        major = str(getattr(device, "compute_capability", "")).partition(".")[0]
        return major.isdecimal() and int(major) >= 8
    return device.platform == "tpu"

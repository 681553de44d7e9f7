"""The Pallas kernels in interpret mode against the XLA form and the oracle."""

import functools
import importlib.util
import os
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from contracts.harness import jit
from oracles import linear as oracle

from famjax.config.schema import MeshConfig
from famjax.ops import kernels
from famjax.ops import linear_attention_kernel as kernel
from famjax.ops.linear_attention import Sums, chunkwise_attention
from famjax.parallel import sharding, traced

PLATFORMS = ["tpu", "cuda"]
# 9 chunks of 16 are two chunks on TPU, the second one padded, and three on GPU
B, G, R, C, K, E = 2, 2, 2, 16, 16, 32
T = 140
# sums of 300 terms in different orders
ROUNDING = 2e-6


def random_inputs(dtype="float32", t=T, b=B, g=G, r=R, k=K, e=E):
    """Return positive features, values, sums over earlier tokens, and starts of documents.

    Documents of lane 0 start at the first token, within a chunk, at adjacent tokens, and at the
    first and last token of a chunk; lane 1 has none.
    """
    rng = np.random.default_rng(0)
    q, key, z = (rng.random(shape) for shape in ((b, t, g, r, k), (b, t, g, k), (b, g, k)))
    v, s = rng.normal(size=(b, t, g, e)), rng.normal(size=(b, g, k, e))
    reset = np.zeros((b, t), bool)
    reset[0, [n for n in (0, 37, 38, 63, 64, 128) if n < t]] = True
    start = np.maximum.accumulate(np.where(reset, np.arange(t), -1), axis=1).astype(np.int32)
    q, key, v = (jnp.asarray(a, dtype) for a in (q, key, v))
    sums = Sums(jnp.asarray(s, jnp.float32), jnp.asarray(z, jnp.float32))
    return q, key, v, sums, jnp.asarray(start)


@pytest.fixture
def one_device(monkeypatch):
    """Use one of the fake devices."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def with_kernels(platform, f):
    """Return f with the kernels of a platform, run in interpret mode."""
    on, asked = kernel.platform_kernels(interpret=True)[platform], []

    def supported_kernels(*args):
        asked.append(on.supports(*args))
        return {"cpu": on}

    def run(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "supported_kernels", supported_kernels)
            patch.setattr(kernels, "target_device", lambda: Device("tpu"))
            results = f(*args)
        assert asked
        assert all(asked)
        return results

    return run


def read(q, k, v, sums, start):
    return chunkwise_attention(q, k, v, sums, start, C)


def close(a, b, tolerance=ROUNDING):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert np.abs(x - y).max() <= tolerance * np.abs(y).max()


def results_and_gradients(f, q, k, v, sums, start):
    """Return results and all gradients, for random cotangents of the results."""
    results, backward = jax.vjp(lambda *args: f(*args, start), q, k, v, sums)
    rng = np.random.default_rng(1)
    to = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), results)
    return results, backward(to)


training = functools.partial(results_and_gradients, read)


@functools.cache
def xla_results(dtype):
    """Return results and gradients of the XLA form."""
    return jit(training)(*random_inputs(dtype))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_results_and_gradients_equal_xla(one_device, platform):
    ours = jit(with_kernels(platform, training))(*random_inputs())
    close(ours, xla_results("float32"))


@pytest.mark.long
@pytest.mark.parametrize("platform", PLATFORMS)
def test_bfloat16_results_are_close_to_xla(one_device, platform):
    """Both round pairs to bfloat16: results differ where float32 sums round differently."""
    ours, gradients = jit(with_kernels(platform, training))(*random_inputs("bfloat16"))
    theirs, to = xla_results("bfloat16")
    close(ours, theirs, 0.01)
    close(gradients, to, 0.01)
    close(ours[1], theirs[1])


@pytest.mark.parametrize("platform", PLATFORMS)
def test_error_to_the_float64_oracle(one_device, platform):
    # the oracle needs values as wide as keys
    q, k, v, sums, start = random_inputs(e=K)
    empty = jax.tree.map(jnp.zeros_like, sums)
    y, last = jit(with_kernels(platform, read))(q, k, v, empty, start)
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    for lane in range(B):
        begin = np.asarray(start)[lane].clip(0)
        for i in range(0, T, 9):
            seen = slice(begin[i], i + 1)
            theirs = oracle.attend(same, q[lane, i].reshape(-1, K), k[lane, seen], v[lane, seen])
            np.testing.assert_allclose(y[lane, i].reshape(-1, K), theirs, rtol=0, atol=4e-6)
        seen = slice(begin[-1], None)
        close(last.s[lane], jnp.float32(oracle.state(same, k[lane, seen], v[lane, seen])))


def same(head, x):
    """Return q and k unchanged: they are features."""
    return x


@pytest.mark.parametrize("platform", PLATFORMS)
def test_padding_adds_nothing_to_the_sums(one_device, platform):
    """Rows of zeros in k and v add nothing, for any q."""
    q, k, v, sums, start = random_inputs()
    valid = (np.arange(T) < 131)[:, None, None]
    f = jit(with_kernels(platform, read))
    _, padded = f(q, k * valid, v * valid, sums, start)
    shorter = [a[:, :131] for a in (q, k, v, start)]
    close(padded, jit(read)(*shorter[:3], sums, shorter[3])[1])


@pytest.mark.parametrize("platform", PLATFORMS)
def test_one_key_head_for_all_queries(one_device, platform):
    args = random_inputs(t=128, b=1, g=1, r=4)
    close(jit(with_kernels(platform, read))(*args), jit(read)(*args))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    "sizes", [(2, 2, 2, 1), pytest.param((1, 2, 2, 2), marks=pytest.mark.long)]
)
def test_sharded_rows_and_heads(platform, sizes):
    """On 8 devices: rows over 2 x 2 and key heads over 2; or tokens over 2 of them."""
    args = random_inputs(t=128 * sizes[3], b=4, r=1)
    mesh = sharding.make_mesh(MeshConfig(*sizes))
    tokens, sums = ("batch", None, "kv_heads"), ("batch", "kv_heads")
    axes = (tokens, tokens, tokens, Sums(sums, sums), ("batch",))
    leaves, tree = jax.tree.flatten(args)
    names = jax.tree.leaves(axes, is_leaf=sharding.is_axes)
    places = [
        sharding.named_sharding(mesh, (*of, *(None,) * (a.ndim - len(of))), a.shape)
        for of, a in zip(names, leaves, strict=True)
    ]
    f = jit(traced.with_mesh(mesh, with_kernels(platform, training)))
    ours = f(*jax.device_put(args, jax.tree.unflatten(tree, places)))
    if sizes[3] == 1:
        assert ours[0][0].sharding.spec[0] == ("data", "fsdp")
    close(ours, jit(training)(*args))


# kernel selection


def kernels_in(platform, dtype="float32", chunk=C, **sizes):
    """Count the forward and backward kernels in a program lowered for a platform.

    It is traced as on a machine that supports the kernels.
    """
    unsafe = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), random_inputs(dtype, **sizes)
    )
    f = jax.jit(
        functools.partial(
            results_and_gradients, functools.partial(chunkwise_attention, chunk=chunk)
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "target_device", lambda: Device("tpu"))
        exported = jax.export.export(f, platforms=[platform], disabled_checks=unsafe)(*shapes)
    text = exported.mlir_module()
    return text.count("@tpu_custom_call("), text.count("@__gpu$xla.gpu.triton(")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_programs_for_tpu_and_cuda_have_kernels_and_those_for_cpu_have_none(one_device, dtype):
    shape = {"t": 256, "g": 8, "r": 1, "k": 32, "e": 128, "chunk": 32, "dtype": dtype}
    assert kernels_in("tpu", **shape) == (3, 0)
    assert kernels_in("cuda", **shape) == (0, 3)
    assert kernels_in("cpu", **shape) == (0, 0)


@pytest.mark.parametrize(
    ("sizes", "tpu", "cuda"),
    [
        ({"t": 100}, 0, 3),  # shorter than a TPU chunk
        ({"k": 4}, 0, 0),
        ({"k": 20}, 3, 0),  # not a power of 2
        ({"k": 64, "e": 128}, 3, 0),  # exceeds shared memory
        ({"r": 1, "chunk": 128}, 3, 0),
        ({"r": 3}, 3, 0),
        ({"chunk": 48}, 0, 0),
        ({"chunk": 128, "r": 64, "e": 128}, 0, 0),  # exceeds both memories
    ],
)
def test_unsupported_sizes_use_xla(one_device, sizes, tpu, cuda):
    assert kernels_in("tpu", **sizes) == (tpu, 0)
    assert kernels_in("cuda", **sizes) == (0, cuda)


def test_several_devices_without_a_mesh_use_xla():
    assert kernels_in("tpu") == (0, 0)


class Device:
    def __init__(self, platform, capability=None):
        self.platform = platform
        if capability:
            self.compute_capability = capability


@pytest.mark.parametrize(
    ("device", "has"),
    [
        (Device("cpu"), False),
        (Device("tpu"), True),
        (Device("gpu", "7.5"), False),
        (Device("gpu", "9.0"), True),
        (Device("gpu", "12.0"), True),
        (Device("gpu", "gfx942"), False),
        (Device("gpu"), False),
    ],
)
def test_kernels_are_used_on_supported_devices(device, has):
    assert kernels._has_kernels(device) is has


def test_programs_can_be_traced_without_kernels(one_device):
    """Also between two traces with kernels: no trace is taken from another's cache."""
    with_them = kernels_in("cuda")
    with kernels.without_kernels():
        assert kernels_in("cuda") == (0, 0)
    assert kernels_in("cuda") == with_them
    assert with_them[1] > 0


def test_float64_uses_xla(one_device):
    shapes = (9, B, G, R, C, K), (9, B, G, C, K), (9, B, G, C, E), (B, G, K, E)
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    assert kernel.supported_kernels(*args).keys() == {"tpu", "cuda"}
    assert not kernel.supported_kernels(*args[:3], jax.ShapeDtypeStruct(shapes[3], "float64"))
    assert not kernel.supported_kernels(jax.ShapeDtypeStruct(shapes[0], "float64"), *args[1:])


_COMPILE = """
import jax
from jax.experimental import topologies
from famjax.parallel import sharding, traced
from ops.test_linear_attention_kernel import random_inputs, training

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = sharding.make_mesh(sharding.MeshConfig(data=1, fsdp=2, tensor=2), devices)
everywhere = sharding.replicated(mesh)
shapes = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), random_inputs()
)
f = jax.jit(traced.with_mesh(mesh, training))
text = f.lower(*shapes).compile().as_text()
print("kernels:", text.count('custom_call_target="tpu_custom_call"'))
"""


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_kernels_compile_for_four_tpus():
    """In another process, as libtpu cannot be unloaded."""
    path = os.pathsep.join(p for p in sys.path if p)
    of_its_own = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        env=os.environ | of_its_own,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "kernels: 3" in done.stdout, done.stderr[-2000:]

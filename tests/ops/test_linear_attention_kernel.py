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
from famjax.ops import linear_attention as plain
from famjax.ops import linear_attention_kernel as kernel
from famjax.ops.linear_attention import Sums, chunkwise_attention
from famjax.parallel import sharding

PLATFORMS = ["tpu", "cuda"]
# 9 chunks of 16 are two of a TPU's chunks, the second of them padded, and three of a GPU's
B, G, R, C, K, E = 2, 2, 2, 16, 16, 32
T = 140
# sums of 300 terms in another order
ROUNDING = 2e-6


def drawn(dtype="float32", t=T, b=B, g=G, r=R, k=K, e=E):
    """Features that are positive, values, sums of what was read before, and where documents begin.

    In lane 0 at the first token, within a chunk and next to each other, at a chunk's first and
    last token; in lane 1 nowhere.
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
def alone(monkeypatch):
    """Of the fake devices there is one."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def by_kernel(platform, f):
    """Return f as this machine would run it if it took the kernels of a platform; interpreted."""
    on, asked = kernel.platform_kernels(interpret=True)[platform], []

    def supported_kernels(*args):
        asked.append(on.supports(*args))
        return {"cpu": on}

    def run(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "supported_kernels", supported_kernels)
            patch.setattr(plain, "_has_kernels", lambda device: True)
            results = f(*args)
        assert asked
        assert all(asked)
        return results

    return run


def read(q, k, v, sums, start):
    return chunkwise_attention(q, k, v, sums, start, C)


def close(a, b, apart=ROUNDING):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert np.abs(x - y).max() <= apart * np.abs(y).max()


def both_ways(f, q, k, v, sums, start):
    """Return the results and the gradients of everything, for random gradients of the results."""
    results, backward = jax.vjp(lambda *args: f(*args, start), q, k, v, sums)
    rng = np.random.default_rng(1)
    to = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), results)
    return results, backward(to)


training = functools.partial(both_ways, read)


@functools.cache
def compiled(dtype):
    """What XLA's form gives, and takes as gradients."""
    return jit(training)(*drawn(dtype))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_results_and_gradients_equal_xla(alone, platform):
    ours = jit(by_kernel(platform, training))(*drawn())
    close(ours, compiled("float32"))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_in_bfloat16_too(alone, platform):
    """Both round pairs to bfloat16: these differ where float32 sums fall on either side."""
    ours, gradients = jit(by_kernel(platform, training))(*drawn("bfloat16"))
    theirs, to = compiled("bfloat16")
    close(ours, theirs, 0.01)
    close(gradients, to, 0.01)
    close(ours[1], theirs[1])


@pytest.mark.parametrize("platform", PLATFORMS)
def test_error_to_the_float64_oracle(alone, platform):
    # the oracle's values are as wide as its keys
    q, k, v, sums, start = drawn(e=K)
    empty = jax.tree.map(jnp.zeros_like, sums)
    y, last = jit(by_kernel(platform, read))(q, k, v, empty, start)
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
    """q and k are features already."""
    return x


@pytest.mark.parametrize("platform", PLATFORMS)
def test_padding_adds_nothing_to_the_sums(alone, platform):
    """Zeros in k and v add nothing, for any q."""
    q, k, v, sums, start = drawn()
    valid = (np.arange(T) < 131)[:, None, None]
    f = jit(by_kernel(platform, read))
    _, padded = f(q, k * valid, v * valid, sums, start)
    shorter = [a[:, :131] for a in (q, k, v, start)]
    close(padded, jit(read)(*shorter[:3], sums, shorter[3])[1])


@pytest.mark.parametrize("platform", PLATFORMS)
def test_one_key_head_for_all_queries(alone, platform):
    args = drawn(t=128, b=1, g=1, r=4)
    close(jit(by_kernel(platform, read))(*args), jit(read)(*args))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("sizes", [(2, 2, 2, 1), (1, 2, 2, 2)])
def test_sharded_rows_and_heads(platform, sizes):
    """Of 8: rows over 2 x 2 and key heads over 2; or tokens over 2 of them."""
    args = drawn(t=128 * sizes[3], b=4, r=1)
    mesh = sharding.make_mesh(MeshConfig(*sizes))
    tokens, sums = ("batch", None, "kv_heads"), ("batch", "kv_heads")
    axes = (tokens, tokens, tokens, Sums(sums, sums), ("batch",))
    leaves, tree = jax.tree.flatten(args)
    names = jax.tree.leaves(axes, is_leaf=sharding.is_axes)
    places = [
        sharding.named_sharding(mesh, (*of, *(None,) * (a.ndim - len(of))), a.shape)
        for of, a in zip(names, leaves, strict=True)
    ]
    f = jit(sharding.with_mesh(mesh, by_kernel(platform, training)))
    ours = f(*jax.device_put(args, jax.tree.unflatten(tree, places)))
    if sizes[3] == 1:
        assert ours[0][0].sharding.spec[0] == ("data", "fsdp")
    close(ours, jit(training)(*args))


# kernel selection ---------------------------------------------------------------------------------


def kernels_in(platform, dtype="float32", chunk=C, **sizes):
    """Count the kernels of the program, forward and backward, that is lowered for a platform.

    It is traced as on a machine that has kernels.
    """
    unsafe = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), drawn(dtype, **sizes))
    f = jax.jit(functools.partial(both_ways, functools.partial(chunkwise_attention, chunk=chunk)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "_has_kernels", lambda device: True)
        exported = jax.export.export(f, platforms=[platform], disabled_checks=unsafe)(*shapes)
    text = exported.mlir_module()
    return text.count("@tpu_custom_call("), text.count("@__gpu$xla.gpu.triton(")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_programs_for_tpu_and_cuda_have_kernels_and_those_for_cpu_have_none(alone, dtype):
    shape = {"t": 256, "g": 8, "r": 1, "k": 32, "e": 128, "chunk": 32, "dtype": dtype}
    assert kernels_in("tpu", **shape) == (3, 0)
    assert kernels_in("cuda", **shape) == (0, 3)
    assert kernels_in("cpu", **shape) == (0, 0)


@pytest.mark.parametrize(
    ("sizes", "tpu", "cuda"),
    [
        ({"t": 100}, 0, 3),  # less than a TPU's chunk
        ({"k": 4}, 0, 0),
        ({"k": 20}, 3, 0),  # no power of 2
        ({"k": 64, "e": 128}, 3, 0),  # too much shared memory
        ({"r": 1, "chunk": 128}, 3, 0),
        ({"r": 3}, 3, 0),
        ({"chunk": 48}, 0, 0),
        ({"chunk": 128, "r": 64, "e": 128}, 0, 0),  # no room
    ],
)
def test_unsupported_sizes_use_xla(alone, sizes, tpu, cuda):
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
def test_devices_that_have_kernels(device, has):
    assert plain._has_kernels(device) is has


def test_float64_uses_xla(alone):
    shapes = (9, B, G, R, C, K), (9, B, G, C, K), (9, B, G, C, E), (B, G, K, E)
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    assert kernel.supported_kernels(*args).keys() == {"tpu", "cuda"}
    assert not kernel.supported_kernels(*args[:3], jax.ShapeDtypeStruct(shapes[3], "float64"))
    assert not kernel.supported_kernels(jax.ShapeDtypeStruct(shapes[0], "float64"), *args[1:])


_COMPILE = """
import jax
from jax.experimental import topologies
from famjax.parallel import sharding
from ops.test_linear_attention_kernel import drawn, training

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = sharding.make_mesh(sharding.MeshConfig(data=1, fsdp=2, tensor=2), devices)
everywhere = sharding.replicated(mesh)
shapes = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), drawn()
)
f = jax.jit(sharding.with_mesh(mesh, training))
text = f.lower(*shapes).compile().as_text()
print("kernels:", text.count('custom_call_target="tpu_custom_call"'))
"""


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_it_compiles_for_four_tpus():
    """By a process of its own: libtpu stays where it is loaded."""
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

"""The Pallas kernel of softmax attention in interpret mode against XLA's form and float64."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from contracts.harness import jit
from flax import nnx

from famjax.config.schema import MeshConfig, ModelConfig
from famjax.core.types import Context
from famjax.models.language_model import LanguageModel
from famjax.ops import attention, attention_kernel, kernels
from famjax.parallel import sharding, traced

# four tiles of 32 queries, six of keys
B, T, S, H, G, E = 2, 128, 192, 4, 2, 16
# sums of 200 terms in different orders
ROUNDING = 2e-6


class Gpu:
    platform, compute_capability = "gpu", "9.0"


@pytest.fixture
def gpu(monkeypatch):
    """Trace as on one GPU, whose kernels are interpreted."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(kernels, "target_device", Gpu)
    interpreted = {
        name: functools.partial(getattr(attention_kernel, name), interpret=True)
        for name in ("forward", "backward")
    }

    def platform_dependent(*args, cuda, default):
        return interpreted[cuda.__name__](*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", platform_dependent)


def random_inputs(dtype="float32", lead=(B,), t=T, s=S, h=H, g=G, e=E, rows=True):
    """Return q, k, v, a mask in which each query sees a key, and the cotangent of the result."""
    rng = np.random.default_rng(0)
    shapes = ((*lead, t, h, e), (*lead, s, g, e), (*lead, s, g, e), (*lead, t, h, e))
    q, k, v, to = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    mask = rng.random((*(lead if rows else (1,) * len(lead)), t, s)) < 0.3
    # some queries see no key of the first tiles, and some only those
    mask[..., : t // 4, : s // 2] = False
    mask[..., -t // 4 :, s // 2 :] = False
    mask[..., 0, -1] = mask[..., -1, 0] = True
    visible = mask.any(-1)
    mask[..., -1] |= ~visible
    return q, k, v, jnp.asarray(mask), to


def training(q, k, v, mask, to):
    """Return the results and the gradients of q, k and v."""
    out, backward = jax.vjp(lambda *args: attention.attend(*args, mask), q, k, v)
    return out, *backward(to)


def close(ours, theirs, tolerance=ROUNDING):
    for x, y in zip(ours, theirs, strict=True):
        assert x.shape == y.shape
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert np.isfinite(x).all()
        assert np.abs(x - y).max() <= tolerance * np.abs(y).max()


def exact(q, k, v, mask, to):
    """Return the results and gradients in float64, by the equations."""
    q, k, v, to = (np.asarray(a, np.float64) for a in (q, k, v, to))
    r, scale = q.shape[-2] // k.shape[-2], q.shape[-1] ** -0.5
    k, v = (np.repeat(a, r, -2) for a in (k, v))
    x = np.einsum("bthe,bshe->bhts", q, k) * scale
    p = np.where(np.asarray(mask)[:, None], np.exp(x), 0)
    p /= p.sum(-1, keepdims=True)
    out = np.einsum("bhts,bshe->bthe", p, v)
    d_p = np.einsum("bthe,bshe->bhts", to, v)
    d_x = p * (d_p - (p * d_p).sum(-1, keepdims=True)) * scale
    d_q = np.einsum("bhts,bshe->bthe", d_x, k)
    d_k, d_v = np.einsum("bhts,bthe->bshe", d_x, q), np.einsum("bhts,bthe->bshe", p, to)
    d_k, d_v = (a.reshape(*a.shape[:2], -1, r, a.shape[-1]).sum(-2) for a in (d_k, d_v))
    return out, d_q, d_k, d_v


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {
            "s": 80,
            "g": 4,
            "rows": False,
        },  # keys padded to three tiles, heads of their own, one mask
        pytest.param({"t": 32, "h": 3, "g": 1, "e": 32}, marks=pytest.mark.long),
    ],
)
def test_results_and_gradients_are_those_of_the_equations(gpu, sizes):
    args = random_inputs(**sizes)
    close(jit(training)(*args), exact(*args), 4e-6)


def test_bfloat16_results_are_close_to_xla(gpu):
    args = random_inputs("bfloat16")
    ours = jit(training)(*args)
    with kernels.without_kernels():
        theirs = jit(lambda *args: training(*args))(*args)  # a new function is traced anew
    assert ours[0].dtype == jnp.bfloat16
    close(ours, theirs, 0.02)


def test_leading_axes_and_a_mask_for_all_rows(gpu):
    args = random_inputs(lead=(2, 3), t=32, s=64, rows=False)
    ours = jit(training)(*args)
    with kernels.without_kernels():
        close(ours, jit(lambda *args: training(*args))(*args))


def test_no_mask_sees_all_keys(gpu):
    q, k, v, mask, to = random_inputs(t=32, s=64)
    close(jit(training)(q, k, v, None, to), jit(training)(q, k, v, jnp.ones_like(mask), to))


def test_a_program_for_gpus_is_equal_on_a_cpu(monkeypatch):
    """Its residuals are the kernel's, and its products XLA's."""
    args = random_inputs()
    theirs = jit(lambda *args: training(*args))(*args)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(kernels, "target_device", Gpu)
    # a new function, which is traced anew
    close(jit(lambda *args: training(*args))(*args), theirs)


def test_sharded_rows_and_heads(gpu):
    args = random_inputs(lead=(4,), t=32, s=64)
    mesh = sharding.make_mesh(MeshConfig(2, 2, 2, 1))
    heads, mask = ("batch", None, "kv_heads", None), ("batch", None, None)
    places = [
        sharding.named_sharding(mesh, axes, a.shape)
        for axes, a in zip((heads, heads, heads, mask, heads), args, strict=True)
    ]
    ours = jit(traced.with_mesh(mesh, training))(*jax.device_put(args, tuple(places)))
    assert ours[0].sharding.spec[0] == ("data", "fsdp")
    assert ours[1].sharding.spec[2] == "tensor"
    with kernels.without_kernels():
        close(ours, jit(lambda *args: training(*args))(*args))


def test_devices_that_share_tokens_do_not_compute_all_of_them(gpu):
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    q, k = of((8, 256, 8, 64)), of((8, 256, 2, 64))
    for sizes, expected in (((4, 1, 2, 1), True), ((2, 1, 2, 2), False)):
        mesh = sharding.make_mesh(MeshConfig(*sizes))
        assert traced.with_mesh(mesh, attention_kernel.supports)(q, k, k) == expected


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", pytest.param("attention", marks=pytest.mark.long)])
def test_a_model_with_kernels_has_the_same_gradients(gpu, remat):
    model = ModelConfig(
        vocab_size=11,
        mixer="fam",
        layers=2,
        width=32,
        heads=2,
        mlp_width=32,
        block_len=32,
        memory_segments=1,
        fam_len=32,
        remat=remat,
    )
    graph, params = nnx.split(LanguageModel(model, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(11, size=(2, 96))

    def gradients(params):
        def loss(params):
            model = nnx.merge(graph, params)
            x, _ = model.stack(model.embed(tokens), model.init_state(2), Context())
            return model.logits(x).std()

        return jax.grad(loss)(params)

    assert "pallas_call" in str(jax.make_jaxpr(gradients)(params))
    ours = jit(gradients)(params)
    with kernels.without_kernels():
        theirs = jit(lambda params: gradients(params))(params)
    close(jax.tree.leaves(ours), jax.tree.leaves(theirs), 1e-4)


def kernels_in(monkeypatch, platform="cuda", dtype="float32", bias=None, cap=0.0, **sizes):
    """Count the kernels in a program lowered for a platform, traced as on a GPU."""
    unsafe = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    *shapes, to = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in random_inputs(dtype, **sizes))

    def f(q, k, v, mask, to):
        out, backward = jax.vjp(lambda *qkv: attention.attend(*qkv, mask, cap, bias), q, k, v)
        return out, backward(to)

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "target_device", Gpu)
        patch.setattr(jax, "device_count", lambda: 1)
        exported = jax.export.export(jax.jit(f), platforms=[platform], disabled_checks=unsafe)
        return exported(*shapes, to).mlir_module().count("@__gpu$xla.gpu.triton(")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_programs_for_cuda_have_kernels_and_those_for_cpu_have_none(monkeypatch, dtype):
    assert kernels_in(monkeypatch, dtype=dtype) == 3
    assert kernels_in(monkeypatch, "cpu", dtype=dtype) == 0
    with kernels.without_kernels():
        assert kernels_in(monkeypatch, dtype=dtype) == 0


@pytest.mark.parametrize(
    "call",
    [
        {"e": 24},  # not a power of 2
        {"e": 8},
        {"t": 1},
        {"dtype": "float32", "e": 256},  # tiles of 16
        {"e": 2**15, "t": 32, "s": 32},  # no tiles
        {"s": 24},
        {"cap": 30.0},
        {"bias": jnp.zeros((T, S))},
        {"dtype": "float16"},
    ],
)
def test_unsupported_calls_use_xla(monkeypatch, call):
    assert kernels_in(monkeypatch, **call) == 0


@pytest.mark.parametrize(
    ("dtype", "e", "tile"),
    [("bfloat16", 128, 64), ("bfloat16", 256, 32), ("float32", 64, 32), ("float32", 128, 32)],
)
def test_tiles_fit_into_shared_memory(dtype, e, tile):
    q = jax.ShapeDtypeStruct((1, 1024, 8, e), jnp.dtype(dtype))
    k = jax.ShapeDtypeStruct((1, 4160, 8, e), jnp.dtype(dtype))
    assert attention_kernel.choose_tiles(q, k, k) == (tile, tile)


def test_offsets_fit_into_32_bits(gpu):
    """The mask of these calls has 2**31 elements, of which four devices have a quarter each."""
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    q, k = of((8, 2**14, 8, 64)), of((8, 2**14, 2, 64))
    assert not attention_kernel.supports(q, k, k)
    mesh = sharding.make_mesh(MeshConfig(2, 2, 2, 1))
    assert traced.with_mesh(mesh, attention_kernel.supports)(q, k, k)


def test_several_devices_without_a_mesh_use_xla(monkeypatch):
    monkeypatch.setattr(kernels, "target_device", Gpu)
    q, k, v, *_ = random_inputs()
    assert not attention_kernel.supports(q, k, v)

"""Costs parsed from HLO text, for programs with known costs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from famjax.plan import hlo, hlo_cost

N = 16


def text(f: Callable[..., Any], *args: Any) -> str:
    return jax.jit(f).lower(*args).compile().as_text() or ""


def cost(f: Callable[..., Any], *args: Any) -> hlo_cost.HloCost:
    return hlo_cost.count_cost(hlo.parse(text(f, *args)))


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def test_matmuls_in_loops_count_once_per_iteration():
    def body(x, w):
        return jnp.tanh(x @ w), None

    def f(x, ws):
        return jax.lax.scan(body, x, ws)[0]

    counted = cost(f, shape(4, N), shape(7, N, N))
    assert counted.flops == 7 * 2 * 4 * N * N
    assert counted.unknown_loops == 0


def test_nested_loops_multiply():
    def outer(x, w):
        inner = lambda y, _: (jnp.tanh(y @ w), None)  # noqa: E731
        return jax.lax.scan(inner, x, None, length=3)[0], None

    counted = cost(lambda x, ws: jax.lax.scan(outer, x, ws)[0], shape(4, N), shape(5, N, N))
    assert counted.flops == 5 * 3 * 2 * 4 * N * N


def test_batched_matmuls():
    counted = cost(
        lambda x, y: jnp.einsum("bthe,bshe->bhts", x, y), shape(2, 5, 3, N), shape(2, 9, 3, N)
    )
    assert counted.flops == 2 * (2 * 3 * 5 * 9 * N)


def test_a_loop_of_unknown_length_is_reported():
    def f(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 1e3, lambda x: jnp.tanh(x @ x), x)

    counted = cost(f, shape(N, N))
    assert counted.unknown_loops == 1
    assert counted.flops == 2 * N**3


def test_the_most_expensive_branch_counts():
    def f(n, x):
        branches = (lambda x: x, lambda x: x @ x, lambda x: x @ x @ x)
        return jax.lax.switch(n, branches, x)

    counted = cost(f, jax.ShapeDtypeStruct((), jnp.int32), shape(N, N))
    assert counted.flops == 2 * 2 * N**3


COLLECTIVES = {
    # the shape on one device is [4], 16 bytes
    "all-reduce": (lambda x: jax.lax.psum(x, "i"), 2 * 16 * 7 / 8),
    "all-gather": (lambda x: jax.lax.all_gather(x, "i"), 16 * 7),
    "reduce-scatter": (lambda x: jax.lax.psum_scatter(jnp.tile(x, 2), "i", tiled=True), 32 * 7 / 8),
    "collective-permute": (
        lambda x: jax.lax.ppermute(x, "i", [(n, (n + 1) % 8) for n in range(8)]),
        16,
    ),
    "all-to-all": (
        lambda x: jax.lax.all_to_all(jnp.tile(x, 2), "i", 0, 0, tiled=True),
        32 * 7 / 8,
    ),
}


def on_eight(f: Callable[..., Any], axes: tuple[int, ...] = (8,)) -> Callable[..., Any]:
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(axes, ("i", "j")[: len(axes)], kinds)
    return jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives_are_counted(kind):
    f, sent = COLLECTIVES[kind]
    (row,) = hlo_cost.collective_rows(cost(on_eight(lambda x: f(x).reshape(-1)), shape(32)))
    assert (row["kind"], row["group"], row["count"]) == (kind, 8, 1)
    assert row["bytes"] == row["largest"] == sent


def test_collectives_in_loops_count_once_per_iteration():
    def f(x):
        body = lambda y, _: (jax.lax.psum(y, "i") / 8 + 1, None)  # noqa: E731
        return jax.lax.scan(body, x, None, length=5)[0]

    (row,) = hlo_cost.collective_rows(cost(on_eight(f), shape(32)))
    assert row["count"] == 5
    assert row["bytes"] == 5 * row["largest"] == 5 * 2 * 16 * 7 / 8


def test_groups_of_one_axis():
    f = on_eight(functools.partial(jax.lax.psum, axis_name="i"), (2, 4))
    (row,) = hlo_cost.collective_rows(cost(f, shape(32)))
    assert row["group"] == 2
    assert row["bytes"] == 2 * 64 * 1 / 2


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("replica_groups={{0,1},{2,3}}", 2),
        ("replica_groups=[4,2]<=[8]", 2),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
        ("replica_groups=mesh['a'=2,'b'=4,'c'=3] {'a','c'}, dimensions={1}", 6),
        ("source_target_pairs={{0,1},{1,2},{2,0}}, metadata={}", 3),
        ("source_target_pairs={{0,0},{1,1}}, metadata={}", 1),
    ],
)
def test_group_sizes(attributes, size):
    assert hlo_cost.group_size(attributes) == size


def test_memory_traffic_is_inputs_plus_outputs():
    counted = cost(lambda x, y: jnp.tanh(x) * y + 1, shape(64, 64), shape(64, 64))
    assert counted.bytes == 3 * 64 * 64 * 4


def test_an_iteration_reads_its_slice_of_stacked_inputs():
    """Otherwise 512 layers would count 512 times."""

    def f(x, ws):
        return jax.lax.scan(lambda x, w: (x * w, None), x, ws)[0]

    counted = cost(f, shape(256), shape(512, 256))
    once = 512 * 256 * 4
    assert once < counted.bytes < 10 * once


def test_an_iteration_writes_its_slice_of_stacked_outputs():
    def f(x):
        return jax.lax.scan(lambda x, _: (x * 2, x), x, None, length=512)[1]

    counted = cost(f, shape(256))
    once = 512 * 256 * 4
    assert once < counted.bytes < 10 * once


def test_time_is_the_maximum_of_compute_and_memory():
    program = hlo.parse(text(lambda x: jnp.tanh(x @ x), shape(64, 64)))
    flops, moved = 2 * 64**3, hlo_cost.count_cost(program).bytes
    assert hlo_cost.count_cost(program, peak=1.0, bandwidth=1e30).seconds == pytest.approx(flops)
    assert hlo_cost.count_cost(program, peak=1e30, bandwidth=1.0).seconds == pytest.approx(moved)


# In libtpu's format: trip counts are parsed from the condition, products are convolutions, some
# arrays are in on-chip memory, and one asynchronous collective spans several fusions.
TPU = """HloModule jit_f, is_scheduled=true

%start (p.1: bf16[8,4]) -> (bf16[8,4], bf16[64,4]) {
  %p.1 = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[64,4]{1,0} all-gather(%p.1), channel_id=5, replica_groups=[1,8]<=[8]
  ROOT %custom-call.1 = (bf16[8,4]{1,0}, bf16[64,4]{1,0}) custom-call(%all-gather.1), \
custom_call_target="AsyncCollectiveStart"
}

%done (p.2: bf16[8,4]) -> bf16[64,4] {
  %p.2 = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.2 = bf16[64,4]{1,0} all-gather(%p.2), channel_id=5, replica_groups=[1,8]<=[8]
}

%body (arg.1: (s32[], bf16[8,4], f32[3,8,16], s32[])) -> (s32[], bf16[8,4], f32[3,8,16], s32[]) {
  %arg.1 = (s32[]{:T(128)}, bf16[8,4]{1,0}, f32[3,8,16]{2,1,0}, /*index=3*/s32[]) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  %x.1 = bf16[8,4]{1,0} get-tuple-element(%arg.1), index=1
  %y.1 = f32[3,8,16]{2,1,0:T(8,128)S(1)} get-tuple-element(%arg.1), index=2
  %two.1 = s32[]{:T(128)} get-tuple-element(%arg.1), index=3
  %two.2 = s32[] constant(2)
  %add.1 = s32[]{:T(128)S(6)} add(%i.1, %two.2)
  %fusion.1 = (bf16[8,4]{1,0:S(1)}, bf16[64,4]{1,0:S(1)}) fusion(%x.1), kind=kCustom, calls=%start
  %fusion.2 = bf16[64,4]{1,0:S(1)} fusion(%x.1), kind=kCustom, calls=%done
  %convolution.1 = f32[3,8,16]{2,1,0:S(1)} convolution(%y.1, %z.1), \
window={size=3 stride=2 lhs_dilate=3}, dim_labels=0bf_0io->0bf
  ROOT %tuple.1 = (s32[], bf16[8,4]{1,0}, f32[3,8,16]{2,1,0}, s32[]) \
tuple(%add.1, %x.1, %y.1, %two.1)
}

%condition (arg.2: (s32[], bf16[8,4], f32[3,8,16], s32[])) -> pred[] {
  %arg.2 = (s32[]{:T(128)}, bf16[8,4]{1,0}, f32[3,8,16]{2,1,0}, /*index=3*/s32[]) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%arg.2), index=0
  %limit.1 = s32[]{:T(128)} constant(17)
  ROOT %compare.1 = pred[]{:T(512)} compare(%i.2, %limit.1), direction=LT
}

ENTRY %main (x: bf16[8,4], y: f32[3,8,16]) -> (s32[], bf16[8,4], f32[3,8,16], s32[]) {
  %x = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  %y = f32[3,8,16]{2,1,0} parameter(1)
  %start.1 = s32[] constant(1)
  %copy.1 = s32[]{:T(128)} copy(%start.1)
  %two = s32[] constant(2)
  %tuple.2 = (s32[], bf16[8,4]{1,0}, f32[3,8,16]{2,1,0}, s32[]) tuple(%copy.1, %x, %y, %two)
  ROOT %while.1 = (s32[], bf16[8,4]{1,0}, f32[3,8,16]{2,1,0}, s32[]) while(%tuple.2), \
condition=%condition, body=%body
}
""".replace("\\\n", "").replace("%y.1, %z.1", "%y.1, %y.1")


def test_costs_of_a_tpu_program():
    counted = hlo_cost.count_cost(hlo.parse(TPU))
    # from 1 by 2 to below 17
    turns = 8
    (row,) = hlo_cost.collective_rows(counted)
    assert (row["kind"], row["group"], row["count"]) == ("all-gather", 8, turns)
    assert row["largest"] == 7 * 8 * 4 * 2
    # each of the 3 products of the batch [8 16] [8 16] meets once, at o=2k's third of the holes
    assert counted.flops == turns * 2 * 8 * 16 * 8 * 3
    # fusions read x and write on-chip memory only; a counter is copied once
    assert counted.bytes == turns * 2 * 8 * 4 * 2 + turns * 2 * 4 + 2 * 4


@pytest.mark.parametrize(
    "window",
    [
        {"window_strides": (1,), "padding": [(0, 0)]},
        {"window_strides": (2,), "padding": [(2, 1)]},
        {"window_strides": (1,), "padding": [(3, 3)], "lhs_dilation": (2,)},
        {"window_strides": (1,), "padding": [(2, 2)], "rhs_dilation": (3,)},
    ],
)
def test_convolutions_do_not_count_padding_and_holes(window):
    size, kernel = 11, 4
    x, w = np.ones((1, 1, size)), np.ones((1, 1, kernel))

    def f(x, w):
        return jax.lax.conv_general_dilated(x, w, **window)

    # each pair of an element and a weight that meet adds one
    pairs = np.asarray(f(x, w)).sum()
    assert cost(f, shape(5, 3, size), shape(7, 3, kernel)).flops == 2 * pairs * 5 * 3 * 7


def test_an_asynchronous_collective_may_span_a_loop():
    """It starts before the loop and is carried through its iterations."""
    begun = TPU.replace(
        "  %tuple.2 =",
        "  %fusion.0 = (bf16[8,4]{1,0}, bf16[64,4]{1,0}) fusion(%x), calls=%start\n  %tuple.2 =",
    )
    (row,) = hlo_cost.collective_rows(hlo_cost.count_cost(hlo.parse(begun)))
    assert row["count"] == 1
    assert row["bytes"] == row["largest"]


def test_float32_copies_of_bfloat16_arguments() -> None:
    def f(x, narrow, wide):
        y, _ = jax.lax.scan(lambda y, w: (y @ w, None), x, narrow)
        return jax.lax.scan(lambda y, w: (y @ w, None), y.astype(jnp.float32), wide)[0]

    x, narrow = (jax.ShapeDtypeStruct(dims, jnp.bfloat16) for dims in ((64, 64), (5, 64, 64)))
    module = hlo.parse(text(f, x, narrow, shape(3, 64, 64)))
    assert hlo_cost.widened_bytes(module) == 5 * 64 * 64 * 4


def test_text_that_is_not_hlo_is_rejected():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("module @jit_f {}")

"""Contract 9 in training: results on eight devices, with any mesh, equal those on one."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from memories import MEMORIES
from small import rows, texts

from famjax.config.schema import AXES, Config, MeshConfig
from famjax.core.errors import UserError
from famjax.experiment.load import override
from famjax.parallel import sharding
from famjax.train import loop
from famjax.train.checkpoint import Checkpoints
from famjax.train.program import TrainProgram, make_program
from famjax.train.resolve import resolve
from famjax.train.state import TrainState, from_tree, to_tree
from famjax.train.warmup import halve_memory

ROWS, LENGTH, VOCABULARY, STEPS = 8, 32, 64, 5
SHAPE = (
    f"model.vocab_size={VOCABULARY} model.layers=2 model.width=16 model.heads=4 model.kv_heads=2 "
    "model.mlp_width=32 model.block_len=4 model.fam_len=2 model.tied=false model.scan_layers=false "
    "model.mixer=bswa,fam "
    f"data.batch={ROWS} data.length={LENGTH} optimizer.schedule=constant optimizer.warmup_steps=0"
).split()
LANES = ("data.layout=lanes",)
# one key/value head cannot be sharded: it is replicated; learned positions depend on the offset of
# each row
PACKED = (
    *("data.layout=packed", "train.rsp=1", "train.accumulate=2", "model.kv_heads=1"),
    *("model.remat=attention", "train.rpo=true"),
    *("model.arch.positions=learned", "model.capacity=64"),
)
OFFSETS = (*LANES, "train.rpo=true", "model.arch.positions=learned", "model.capacity=64")
DELTA = (
    *(*LANES, "model.mixer=delta", "model.smeared_keys=true", "model.scan_layers=true"),
    "train.write_loss=0.5",
)
GATED = (*LANES, "model.fam_update=gated", "model.smeared_keys=true", "train.write_loss=0.5")
LOSSES = (*LANES, "train.diversity_loss=0.1", "train.reconstruction_loss=0.1")
ADAPTERS = (*LANES, "model.lora.rank=2", "model.lora.dropout=0.3")
# more FAM blocks than a device has; dropout masks do not depend on the sharding
DROPOUT = (
    *LANES, "model.dropout.attention=0.2", "model.dropout.hidden=0.2", "model.dropout.layer=0.2",
    "model.remat=block", "model.memory_segments=2", "model.fam_previous=3",
)  # fmt: skip
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

ONE = (1, 1, 1, 1)
MESHES = [(2, 2, 2, 1), (8, 1, 1, 1), (1, 4, 2, 1), (1, 1, 1, 8)]
# of those that CI runs, each axis of a mesh is divided at least once, and each layout has one mesh;
# packed rows have offsets too
QUICK = [((2, 2, 2, 1), LANES)]
LONG = [((8, 1, 1, 1), LANES), ((1, 1, 1, 8), LANES)]
LONG += [((2, 2, 2, 1), PACKED), ((2, 2, 2, 1), DELTA)]
LONG += [((2, 2, 2, 1), LOSSES), ((1, 1, 1, 8), LOSSES)]
SLOW = [((1, 4, 2, 1), LANES), ((2, 2, 2, 1), OFFSETS)]
SLOW += [(mesh, PACKED) for mesh in [*MESHES[1:], (1, 2, 2, 2)]]
SLOW += [
    (mesh, layout)
    for mesh in [(1, 1, 1, 8), (1, 2, 2, 2)]
    for layout in (ADAPTERS, DROPOUT, OFFSETS, DELTA, GATED)
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]
CASES += [
    pytest.param(MESHES[0], (*LANES, *keys.split()), marks=pytest.mark.slow, id=name)
    for name, keys in MEMORIES.items()
]


Sizes = tuple[int, int, int, int]


class Trained(NamedTuple):
    program: TrainProgram
    step: Any
    states: list[TrainState]


def batch(seed: int) -> dict[str, np.ndarray]:
    """Return random rows; in lanes documents start and end within a call, followed by padding.

    The last document of row 5 ends within a block, before blocks of padding; row 6 is all
    padding.
    """
    rng = np.random.default_rng(seed)
    shape = (ROWS, LENGTH)
    reset = np.zeros(shape, bool)
    reset[3, [8, 20]] = True
    reset[5, [0, 4]] = True
    valid = np.ones(shape, bool)
    valid[5, 14:] = valid[6] = False
    return {
        "tokens": rng.integers(0, VOCABULARY, shape, np.int32),
        "targets": rng.integers(0, VOCABULARY, shape, np.int32),
        "weights": rng.choice([0, 0.1, 1], shape).astype(np.float32),
        "valid": valid,
        "reset": reset,
    }


def config_on(mesh: Sizes, overrides: tuple[str, ...]) -> Config:
    axes = zip(AXES, mesh, strict=True)
    return override(Config(), [*SHAPE, *overrides, *(f"mesh.{n}={size}" for n, size in axes)])


@pytest.fixture
def float64() -> Iterator[None]:
    """Use float64: a float32 sum in another order may flip the sign of an Adam update."""
    with jax.enable_x64(True):
        yield


@functools.cache
def train_with_source(mesh: Sizes, overrides: tuple[str, ...]) -> Trained:
    """Return the states after 0 to 5 steps."""
    devices = jax.devices()[: int(np.prod(mesh))]
    with pytest.MonkeyPatch.context() as patch:
        make_mesh = functools.partial(sharding.make_mesh, devices=devices)
        patch.setattr(sharding, "make_mesh", make_mesh)
        config = resolve(config_on(mesh, overrides), None, len(devices))
        program = make_program(config, np.ones(VOCABULARY, np.float32))
    state = program.start.lower().compile(compiler_options=FAST)()  # type: ignore[attr-defined]
    lowered = program.step.lower(state, upload(program, 0))  # type: ignore[attr-defined]
    step = lowered.compile(compiler_options=FAST)
    states = [copy(program, state)]
    for seed in range(STEPS):
        state = step(state, upload(program, seed))
        states.append(copy(program, state))
    return Trained(program, step, states)


def upload(program: TrainProgram, seed: int) -> dict[str, jax.Array]:
    return jax.device_put(batch(seed), program.batch)


def copy(program: TrainProgram, state: Any) -> Any:
    """Return a copy of the state that may be donated."""
    host = jax.tree.map(lambda a: np.array(a), state)
    return jax.device_put(host, program.shardings)


def assert_close(state: TrainState, other: TrainState, tolerance: float = 1e-5) -> None:
    """Check equality up to the order of sums, relative to each leaf's largest absolute value."""

    def compare(path: Any, x: Any, y: Any) -> None:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        atol = tolerance * np.abs(y).max(initial=1e-6)
        np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(compare, state, other)


@pytest.mark.long
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("mesh", "layout"), CASES)
def test_eight_devices_equal_one(mesh: Sizes, layout: tuple[str, ...]) -> None:
    """From one random start, parameters, both Adam moments, memory and losses agree after every
    step, and so do tokens generated from the memory."""
    one, many = train_with_source(ONE, layout), train_with_source(mesh, layout)
    for before, after in zip(one.states, many.states, strict=True):
        assert_close(after, before)
    if layout in (LANES, DELTA):
        np.testing.assert_array_equal(generate(many), generate(one))


def generate(of: Trained) -> np.ndarray:
    """Return the greedy tokens that follow the rows of the last step."""
    state = of.states[-1]

    def write(params: Any, memory: Any, token: jax.Array) -> jax.Array:
        model = nnx.merge(of.program.inference_graph, params)

        def one(carry: Any, _: None) -> Any:
            logits, memory = model.step(carry[0], carry[1])
            token = logits.argmax(-1).astype(np.int32)
            return (token, memory), token[:, 0]

        return jax.lax.scan(one, (token, memory), length=6)[1]

    tokens = batch(STEPS - 1)["targets"][:, -1:]
    return np.asarray(jax.jit(write)(state.params, state.memory, tokens))


def spec(leaf: jax.Array) -> tuple[P, tuple[int, ...]]:
    """Return the PartitionSpec of a leaf and its shape on one device."""
    return leaf.sharding.spec, leaf.addressable_shards[0].data.shape


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_the_state_is_sharded() -> None:
    """Each device holds only its shard of parameters, moments and memory."""
    state = train_with_source((2, 2, 2, 1), LANES).states[3]
    divided = {
        "embedding": (P("tensor", "fsdp"), (32, 8)),
        "head/kernel": (P("fsdp", "tensor"), (8, 32)),
        "q/kernel": (P(None, "fsdp", "tensor", None), (1, 8, 2, 4)),
        "k/kernel": (P(None, "fsdp", "tensor", None), (1, 8, 1, 4)),
        "out/kernel": (P(None, "tensor", None, "fsdp"), (1, 2, 4, 8)),
        "up/kernel": (P(None, "fsdp", "tensor"), (1, 8, 16)),
        "down/kernel": (P(None, "tensor", "fsdp"), (1, 16, 8)),
    }
    moments = state.opt_state[1][0]
    for tree in (state.params, moments.mu, moments.nu):
        found = paths(tree)
        for end, expected in divided.items():
            names = [name for name in found if name.endswith(f"/{end}")]
            assert names
            assert {spec(found[name]) for name in names} == {expected}
    memory = state.memory[1]
    axes = ("data", "fsdp")
    assert spec(memory.fam) == (P(None, axes, None, None), (1, 2, 2, 16))
    # [r b p f g e]
    assert spec(memory.k) == (P(None, axes, None, None, "tensor", None), (1, 2, 1, 2, 1, 4))
    assert spec(memory.window.k)[1] == (1, 2, 2, 4, 1, 4)


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_a_delta_memory_is_sharded_by_key_heads() -> None:
    state = train_with_source((2, 2, 2, 1), DELTA).states[3]
    # [r b g k e]
    assert spec(state.memory[0].s) == (
        P(None, ("data", "fsdp"), "tensor", None, None),
        (2, 2, 1, 16, 4),
    )
    found = paths(state.params)
    for end, expected in {
        "delta_memory/rate_weight": (P(None, "tensor", None), (2, 1, 8)),
        "delta_memory/rate_bias": (P(None, "tensor"), (2, 1)),
        "delta_memory/gain": (P(None, "tensor"), (2, 2)),
    }.items():
        assert {spec(leaf) for name, leaf in found.items() if name.endswith(end)} == {expected}


def paths(tree: Any) -> dict[str, Any]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {"/" + sharding.path_name(path): leaf for path, leaf in flat}


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_one_key_value_head_is_replicated() -> None:
    state = train_with_source((2, 2, 2, 1), PACKED).states[1]
    found = paths(state.params)
    keys = [leaf for name, leaf in found.items() if name.endswith("/k/kernel")]
    assert [leaf.sharding.spec for leaf in keys] == [P(None, "fsdp", None, None)] * 2
    axes = sharding.named_sharding(
        sharding.make_mesh(MeshConfig(2, 2, 2, 1)), ("batch", None, "kv_heads"), (8, 3, 1)
    )
    assert axes.spec == P(("data", "fsdp"), None, None)


def test_optimizer_leaves_are_sharded_as_their_parameter() -> None:
    """If the names of two parameters end alike, the full path decides."""
    mesh = sharding.make_mesh(MeshConfig(1, 4, 2, 1))
    shape = lambda *s: jax.ShapeDtypeStruct(s, np.float32)  # noqa: E731
    params = {"q": {"kernel": shape(16, 2, 4)}, "mixer": {"q": {"kernel": shape(3, 16, 2, 4)}}}
    placed = sharding.optimizer_shardings(mesh, params, {"mu": params, "count": shape()})
    assert placed["mu"]["q"]["kernel"].spec == P("fsdp", "tensor", None)
    assert placed["mu"]["mixer"]["q"]["kernel"].spec == P(None, "fsdp", "tensor", None)
    assert placed["count"].spec == P()


@pytest.mark.long
@pytest.mark.usefixtures("float64")
def test_a_checkpoint_moves_to_another_mesh(tmp_path: Path) -> None:
    first, second = train_with_source((2, 2, 2, 1), LANES), train_with_source((8, 1, 1, 1), LANES)
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(3, to_tree(first.states[3]), {})
    checkpoints.wait()
    template = to_tree(second.states[0])
    _, tree, _ = checkpoints.restore(template)
    state = from_tree(tree)
    assert_close(state, first.states[3], 0)
    same = jax.tree.map(lambda a, b: a.sharding == b.sharding, state, second.states[0])
    assert all(jax.tree.leaves(same))
    after = second.step(copy(second.program, state), upload(second.program, 3))
    assert_close(after, train_with_source(ONE, LANES).states[4])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mesh", [(2, 2, 2, 1), pytest.param((8, 1, 1, 1), marks=pytest.mark.long)])
def test_halving_the_lanes_moves_no_row(mesh: Sizes) -> None:
    """Halving the lanes (BPTT warm-up) keeps half of the rows on each device; with one lane per
    device, the remaining lanes are replicated."""
    program, _, states = train_with_source(mesh, LANES)
    memory = copy(program, states[2]).memory
    half = jax.tree.map(lambda a: np.asarray(a)[:, ::2], memory)
    axes = nnx.merge(program.inference_graph, states[2].params).state_axes()
    places = sharding.state_shardings(program.mesh, axes, half)
    halve_batch = jax.jit(halve_memory, out_shardings=places).lower(memory).compile()
    jax.tree.map(np.testing.assert_array_equal, halve_batch(memory), half)
    found = halve_batch(memory)[1].fam
    if mesh == (8, 1, 1, 1):
        assert spec(found) == (P(None, None, None, None), (1, 4, 2, 16))
        return
    assert spec(found) == (P(None, ("data", "fsdp"), None, None), (1, 1, 2, 16))
    moves = "all-gather|all-to-all|collective-permute|all-reduce"
    assert re.search(moves, halve_batch.as_text()) is None


@pytest.mark.slow
def test_bptt_warm_up_on_eight_devices_equals_one(tmp_path: Path) -> None:
    """Equal to one device up to rounding: 16 rows of 8 tokens, then 8 of 16, resumed in between."""
    data = f"data.files={texts(tmp_path / 'texts')}"
    shape = [
        *SHAPE, data, "model.vocab_size=0", "train.log_every=2", "train.checkpoint_every=3",
        "train.bptt_start=8", "train.bptt_double_every=4",
    ]  # fmt: skip
    tables = []
    for name, mesh, ends in (("one", ONE, (7,)), ("eight", (2, 2, 2, 1), (4, 7))):
        devices = jax.devices()[: int(np.prod(mesh))]
        with pytest.MonkeyPatch.context() as patch:
            make_mesh = functools.partial(sharding.make_mesh, devices=devices)
            patch.setattr(sharding, "make_mesh", make_mesh)
            for steps in ends:
                axes = zip(AXES, mesh, strict=True)
                given = [*shape, f"train.steps={steps}", *(f"mesh.{n}={size}" for n, size in axes)]
                loop.train(override(Config(), given), tmp_path / name, quiet=True)
        tables.append(rows(tmp_path / name))
    assert [row["length"] for row in tables[0]] == [8, 8, 16, 16]
    for one, other in zip(*tables, strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.slow
def test_a_run_moves_to_another_mesh(tmp_path: Path) -> None:
    """The whole loop on eight devices, resumed with another mesh."""
    data = f"data.files={texts(tmp_path / 'texts')}"
    shape = [
        *SHAPE, data, "model.vocab_size=0", "train.log_every=2", "train.checkpoint_every=3",
    ]  # fmt: skip
    tables = []
    for name, meshes in (("once", ["mesh.data=8", "mesh.data=8"]),
                         ("again", ["mesh.data=8", "mesh.tensor=2,mesh.fsdp=4"])):  # fmt: skip
        for steps, mesh in zip((5, 9), meshes, strict=True):
            axes = ["mesh.data=-1", *mesh.split(",")]
            config = override(Config(), [*shape, f"train.steps={steps}", *axes])
            loop.train(config, tmp_path / name, quiet=True)
        tables.append(rows(tmp_path / name))
    for one, other in zip(*tables, strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ((3, 1, 1, 1), "mesh: data=3 x fsdp=1 x tensor=1 x sequence=1 does not fit 8 devices"),
        ((-1, 3, 1, 1), "mesh: data=-1 x fsdp=3 x tensor=1 x sequence=1 does not fit 8 devices"),
        ((8, 1, 1, 2), "mesh: data=8 x fsdp=1 x tensor=1 x sequence=2 does not fit 8 devices"),
        ((-1, -1, 1, 3), "mesh: data=-1 x fsdp=-1 x tensor=1 x sequence=3 does not fit 8 devices"),
    ],
)
def test_a_mesh_that_does_not_fit_is_rejected(mesh: Sizes, said: str) -> None:
    with pytest.raises(UserError) as error:
        sharding.make_mesh(MeshConfig(*mesh))
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_an_axis_of_minus_one_takes_the_remaining_devices() -> None:
    mesh = sharding.make_mesh(MeshConfig(-1, 2, 2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2, "sequence": 1}

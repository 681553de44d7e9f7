"""Automatic meshes; errors and warnings about meshes that do not divide a config."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from famjax.config.resolved import ResolvedConfig
from famjax.config.schema import Config, MeshConfig
from famjax.core.errors import UserError
from famjax.experiment.load import load_config, override
from famjax.experiment.mesh_checks import check_divides, check_rows, duplicated_work
from famjax.parallel import sharding
from famjax.parallel.mesh import MeshDemand, choose_mesh, describe
from famjax.train.resolve import resolve

AUTO = MeshConfig(-1, -1, -1, -1)
SMALL = MeshDemand(weights=100, rows=8, tensor=(4, 2, 32), blocks=16, limit=100)


@pytest.mark.parametrize(
    ("changes", "mesh"),
    [
        # rows first; weights are replicated while they fit
        ({}, (8, 1, 1, 1)),
        ({"rows": 24}, (8, 1, 1, 1)),
        ({"weights": 101}, (4, 2, 1, 1)),
        ({"weights": 399}, (2, 4, 1, 1)),
        ({"weights": 800}, (1, 8, 1, 1)),
        # rows of the carried state are sharded too
        ({"weights": 60, "state": 320}, (8, 1, 1, 1)),
        ({"weights": 60, "state": 321}, (4, 2, 1, 1)),
        # then all that tensor divides, then blocks
        ({"rows": 4}, (4, 1, 2, 1)),
        ({"rows": 2}, (2, 1, 2, 2)),
        ({"rows": 1}, (1, 1, 2, 4)),
        ({"rows": 1, "tensor": (4, 1, 32)}, (1, 1, 1, 8)),
        ({"rows": 1, "tensor": (8, 8, 32)}, (1, 1, 8, 1)),
        ({"rows": 4, "weights": 800}, (1, 4, 2, 1)),
        # for odd sizes some devices duplicate work
        ({"rows": 3, "tensor": (3,), "blocks": 5}, (8, 1, 1, 1)),
        # the largest memory savings if nothing fits
        ({"weights": 10_000}, (1, 8, 1, 1)),
    ],
)
def test_automatic_mesh(changes: dict, mesh: tuple[int, ...]) -> None:
    assert choose_mesh(AUTO, 8, replace(SMALL, **changes)) == MeshConfig(*mesh)


@pytest.mark.parametrize(
    ("given", "mesh"),
    [
        ((-1, -1, 2, 1), (4, 1, 2, 1)),
        ((1, -1, -1, -1), (1, 8, 1, 1)),
        ((1, 1, -1, -1), (1, 1, 2, 4)),
        ((-1, 2, 2, 1), (2, 2, 2, 1)),
        ((1, 1, -1, 1), (1, 1, 8, 1)),  # rejected later, by axis
        ((2, 2, 2, 1), (2, 2, 2, 1)),
    ],
)
def test_explicit_sizes_are_kept(given: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    assert choose_mesh(MeshConfig(*given), 8, SMALL) == MeshConfig(*mesh)


def test_one_device() -> None:
    assert choose_mesh(AUTO, 1, replace(SMALL, weights=10_000)) == MeshConfig(1, 1, 1, 1)


def test_description_of_the_chosen_mesh() -> None:
    mesh = MeshConfig(2, 4, 1, 1)
    told = (
        "mesh=auto: data=2 x fsdp=4 x tensor=1 x sequence=1; 2 GiB of weights and state per device"
    )
    fits = MeshDemand(weights=8 * 2**30)
    assert describe(mesh, fits) == told
    assert describe(mesh, replace(fits, limit=2**30)).startswith(f"{told}, more than their 1 GiB")


def test_auto_on_the_command_line() -> None:
    for given in (["mesh=auto"], ["--mesh=auto"], ["--mesh", "auto"]):
        assert load_config("text_fam", given).mesh == AUTO
    mixed = override(Config(), ["mesh=auto", "mesh.tensor=2"])
    assert mixed.mesh == MeshConfig(-1, -1, 2, -1)


def resolved(mesh: tuple[int, ...], *overrides: str) -> ResolvedConfig:
    given = config(mesh, "model.vocab_size=64", *overrides)
    return resolve(given, None, math.prod(mesh))


def config(mesh: tuple[int, ...], *overrides: str) -> Config:
    given = ["model.block_len=8", "data.length=64", "data.batch=8", *overrides]
    return replace(override(Config(), given), mesh=MeshConfig(*mesh))


@pytest.mark.parametrize(
    ("mesh", "overrides", "said"),
    [
        (
            (1, 1, 3, 1),
            [],
            "mesh.tensor=3 does not divide model.heads=4; take one of 1, 2, 4",
        ),
        (
            (1, 1, 4, 1),
            ["model.mlp_width=6"],
            "mesh.tensor=4 does not divide model.mlp_width=6; take one of 1, 2, 3, 6",
        ),
        (
            (1, 1, 3, 1),
            ["model.stack=lstm", "model.width=4"],
            "mesh.tensor=3 does not divide model.width=4; take one of 1, 2, 4",
        ),
        (
            (1, 1, 1, 3),
            [],
            "mesh.sequence=3 does not divide the 8 blocks of a call; take one of 1, 2, 4, 8",
        ),
        ((1, 1, 1, 8), ["train.bptt_segments=2"], "mesh.sequence=8 does not divide the 4 blocks"),
        ((1, 1, 1, 8), ["train.bptt_start=16"], "mesh.sequence=8 does not divide the 2 blocks"),
        ((1, 1, 1, 16), ["model.mixer=full,bswa"], "mesh.sequence=16 does not divide the 8 blocks"),
    ],
)
def test_a_mesh_that_does_not_divide_is_rejected(
    mesh: tuple[int, ...], overrides: list[str], said: str
) -> None:
    with pytest.raises(UserError) as error:
        check_divides(resolved(mesh, *overrides))
    assert str(error.value).startswith(said)


def test_a_mesh_that_divides_is_accepted() -> None:
    check_divides(resolved((1, 1, 2, 8)))
    # without windows every token is a block
    check_divides(resolved((1, 1, 1, 16), "model.mixer=full"))


@pytest.mark.parametrize(
    ("mesh", "overrides", "said"),
    [
        ((4, 2, 1, 1), ["data.batch=8"], None),
        ((-1, 1, 1, 1), ["data.batch=3"], None),  # the user did not choose the number of devices
        ((3, 1, 1, 1), ["data.batch=4"], None),  # another error: 3 does not divide the devices
        (
            (4, 2, 1, 1),
            ["data.batch=8", "train.accumulate=2"],
            "data.batch=8: 4 rows at a time do not divide by mesh.data=4 x mesh.fsdp=2; take a "
            "multiple of 16, or a larger mesh.tensor or mesh.sequence",
        ),
        (
            (-1, 4, 1, 1),
            ["data.batch=6"],
            "data.batch=6: 6 rows at a time do not divide by mesh.fsdp=4; take a multiple of 4, or "
            "a larger mesh.tensor or mesh.sequence",
        ),
    ],
)
def test_rows_must_divide_over_explicit_axes(
    mesh: tuple[int, ...], overrides: list[str], said: str | None
) -> None:
    if said is None:
        check_rows(config(mesh, *overrides), 8)
        return
    with pytest.raises(UserError) as error:
        check_rows(config(mesh, *overrides), 8)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("mesh", "overrides", "said"),
    [
        ((4, 2, 1, 1), ["data.batch=8"], None),
        ((4, 2, 1, 1), ["data.batch=6"], "duplicate work; take a multiple of 8"),
        ((4, 2, 1, 1), ["data.batch=8", "train.accumulate=2"], "take a multiple of 16"),
        ((4, 2, 1, 1), ["data.batch=16", "train.accumulate=2"], None),
        ((1, 1, 2, 1), ["model.kv_heads=1"], "the keys and values of all heads"),
        ((1, 1, 2, 1), ["model.kv_heads=2"], None),
        ((1, 1, 2, 1), [], None),
    ],
)  # fmt: skip
def test_warnings_about_duplicated_work(
    mesh: tuple[int, ...], overrides: list[str], said: str | None
) -> None:
    lines = list(duplicated_work(resolved(mesh, *overrides)))
    assert len(lines) == (said is not None)
    assert said is None or lines[0].endswith(said)


def test_large_replicated_parameters() -> None:
    shapes = {
        "embedding": jax.ShapeDtypeStruct((300_001, 5), np.float32),
        "head": {"kernel": jax.ShapeDtypeStruct((8, 200_000), np.float32)},
        "norm": {"scale": jax.ShapeDtypeStruct((8,), np.float32)},
    }
    whole = ["embedding (300001, 5)"]
    assert sharding.replicated_parameters(sharding.make_mesh(MeshConfig(2, 2, 2)), shapes) == whole
    assert sharding.replicated_parameters(sharding.make_mesh(MeshConfig(8)), shapes) == []
    assert sharding.replicated_parameters(sharding.make_mesh(MeshConfig(1, 1, 1, 8)), shapes) == []

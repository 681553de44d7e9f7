"""Checkpoints are restored bitwise; instead of a damaged one, an older one is restored."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from famjax.core.errors import UserError
from famjax.train import checkpoint, checkpoint_arrays, manifest
from famjax.train.checkpoint import Checkpoints
from famjax.train.hooks import Hook
from famjax.train.saving import _add


class Memory(NamedTuple):
    keys: jax.Array
    fam: jax.Array


def tree_of(seed: int):
    """Return a tree with all dtypes and ranks of a run, and bits that arithmetic would lose."""
    key = jax.random.key(seed)
    odd = jnp.asarray(np.array([0x7FC12345, 0x80000000, 1], np.uint32).view(np.float32))
    return {
        "params": {"layers": [{"w": jax.random.normal(key, (6, 4))}], "bias": odd},
        "memory": (Memory(jnp.zeros((2, 0, 3)), jnp.full((2, 4), -0.0, jnp.bfloat16)), ()),
        "optimizer": {"count": jnp.int32(seed), "mask": jnp.array([True, False]), "none": None},
        "key": jax.random.key_data(key),
    }


def bits(tree):
    return jax.tree.map(lambda x: (x.dtype, x.shape, np.asarray(x).tobytes()), tree)


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def save_steps(folder, *steps, keep=9, every=1):
    checkpoints = Checkpoints(folder, keep, every)
    for step in steps:
        checkpoints.save(step, tree_of(step), {"step": step})
    checkpoints.wait()
    return checkpoints


@pytest.fixture(scope="module")
def checkpoint_pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair") / "checkpoints"
    save_steps(folder, 10, 20)
    return folder


@pytest.fixture
def folder(checkpoint_pair, tmp_path):
    """Checkpoints of steps 10 and 20 that may be damaged."""
    return shutil.copytree(checkpoint_pair, tmp_path / "checkpoints")


def test_restore_is_bitwise_equal(checkpoint_pair):
    step, tree, extra = Checkpoints(checkpoint_pair).restore(shapes(tree_of(0)))
    assert (step, extra) == (20, {"step": 20})
    assert bits(tree) == bits(tree_of(20))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))


def test_restore_accepts_arrays_as_template_and_a_step(checkpoint_pair):
    step, tree, _ = Checkpoints(checkpoint_pair).restore(tree_of(0), step=10)
    assert step == 10
    assert bits(tree) == bits(tree_of(10))


def test_plain_orbax_reads_a_checkpoint(checkpoint_pair):
    with ocp.PyTreeCheckpointer() as orbax:
        params = orbax.restore(checkpoint_pair / "000000020" / "params")
    np.testing.assert_array_equal(
        params["layers"]["0"]["w"], tree_of(20)["params"]["layers"][0]["w"]
    )


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    checkpoints = save_steps(tmp_path, 1, 2, 3, 4, keep=2)
    assert checkpoints.steps() == [3, 4]
    assert checkpoints.latest() == 4
    assert sorted(os.listdir(tmp_path)) == ["000000003", "000000004"]


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ((10, 20, 23, 30), [20, 30]),
        # the newest one is kept in any case
        ((10, 20, 23), [10, 20, 23]),
        ((10, 13, 15, 17), [10, 17]),
        ((3, 5, 7), [5, 7]),
    ],
)
def test_checkpoints_between_regular_ones_do_not_displace_them(tmp_path, steps, kept):
    assert save_steps(tmp_path, *steps, keep=2, every=10).steps() == kept


def test_params_are_restored_without_other_items(folder):
    """Only params are read and verified: other items may even be damaged."""
    shutil.rmtree(folder / "000000020" / "optimizer")
    template = {"params": shapes(tree_of(0)["params"])}
    step, tree, _ = Checkpoints(folder).restore(template, report=pytest.fail)
    assert step == 20
    assert bits(tree) == bits({"params": tree_of(20)["params"]})


def largest_file(path):
    return max(
        (p for p in (path / "params").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: largest_file(p).unlink(), "is missing"),
        (lambda p: truncate(largest_file(p)), "bytes instead of"),
        (lambda p: flip_bit(largest_file(p)), "other contents"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda p: truncate(p / "manifest.json"), "manifest.json cannot be read"),
        (lambda p: (p / "manifest.json").write_text('{"files": {}}'), "does not list tree.json"),
        (lambda p: (p / "extra.json").unlink(), "extra.json is missing"),
        (lambda p: flip_bit(p / "tree.json"), "tree.json has other contents"),
        (lambda p: shutil.rmtree(p / "optimizer"), "optimizer/.* is missing"),
    ],
)
def test_damage_falls_back_to_the_previous_one(folder, damage, words):
    damage(folder / "000000020")
    lines: list[str] = []
    step, tree, extra = Checkpoints(folder).restore(shapes(tree_of(0)), report=lines.append)
    assert (step, extra) == (10, {"step": 10})
    assert bits(tree) == bits(tree_of(10))
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert "000000020 is damaged" in lines[0]
    assert re.search(words, lines[0])


def test_restore_fails_if_no_checkpoint_is_valid(folder, tmp_path, capsys):
    truncate(largest_file(folder / "000000020"))
    with pytest.raises(UserError, match="no valid checkpoint"):
        Checkpoints(folder).restore(shapes(tree_of(0)), step=20)
    truncate(largest_file(folder / "000000010"))
    with pytest.raises(UserError, match=r"no valid checkpoint.*\[10, 20\]"):
        Checkpoints(folder).restore(shapes(tree_of(0)))
    assert capsys.readouterr().err.count("is damaged") == 3
    with pytest.raises(UserError, match=r"no checkpoint in .*train"):
        Checkpoints(tmp_path / "nowhere").restore(shapes(tree_of(0)))
    with pytest.raises(UserError, match=r"no checkpoint of step 15 .*\[10, 20\]"):
        Checkpoints(folder).restore(shapes(tree_of(0)), step=15)


def test_error_names_leaves_that_do_not_match_the_template(checkpoint_pair):
    def refusal(template):
        with pytest.raises(UserError) as caught:
            Checkpoints(checkpoint_pair).restore(template)
        assert "\n" not in str(caught.value)
        assert "config" in str(caught.value)
        return str(caught.value)

    wide = {"params": {"layers": [{"w": jnp.zeros((6, 5))}], "bias": jnp.zeros(3)}}
    assert "params/layers/0/w is float32[6, 4] in it and float32[6, 5] here" in refusal(wide)
    half = {"params": {"layers": [{"w": jnp.zeros((6, 4), jnp.bfloat16)}], "bias": jnp.zeros(3)}}
    assert "float32[6, 4] in it and bfloat16[6, 4] here" in refusal(half)
    fewer = {"params": {"layers": [], "bias": jnp.zeros(3)}}
    assert "params/layers/0/w is float32[6, 4] in it and absent here" in refusal(fewer)
    more = {"ema": jnp.zeros(3)}
    assert "ema is absent in it and float32[3] here" in refusal(more)


def test_save_is_asynchronous_and_snapshots_its_values(tmp_path, monkeypatch):
    let_go = threading.Event()
    real = checkpoint.write_arrays
    monkeypatch.setattr(checkpoint, "write_arrays", lambda *a: (let_go.wait(), real(*a)))
    checkpoints, extra = Checkpoints(tmp_path, 1), {"cursor": [1]}
    state = {"params": jnp.arange(8.0)}
    checkpoints.save(1, state, extra)
    assert checkpoints.latest() is None
    jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)(state)
    extra["cursor"].append(2)
    let_go.set()
    checkpoints.wait()
    _, tree, noted = checkpoints.restore({"params": jax.ShapeDtypeStruct((8,), jnp.float32)})
    np.testing.assert_array_equal(tree["params"], np.arange(8.0))
    assert noted == {"cursor": [1]}


FULL = "RESOURCE_EXHAUSTED: Failed to write 9 bytes: No space left on device [os_error_code='28']"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError(FULL), "disk full while saving checkpoint .*000000030; .* step 20"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "disk full while .* step 20"),
        (PermissionError(errno.EACCES, "Permission denied"), "cannot save .* step 20"),
    ],
)
def test_a_failed_save_raises_at_the_next_call_and_keeps_older_steps(
    folder, monkeypatch, error, words
):
    checkpoints = Checkpoints(folder, 2)

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_arrays", fail)
        checkpoints.save(30, tree_of(30), {})
        with pytest.raises(UserError, match=words):
            checkpoints.save(31, tree_of(31), {})
    assert sorted(os.listdir(folder)) == ["000000010", "000000020"]
    checkpoints.save(40, tree_of(40), {})
    checkpoints.wait()
    assert checkpoints.steps() == [20, 40]


def test_a_failed_save_names_the_last_complete_checkpoint(folder, monkeypatch):
    truncate(largest_file(folder / "000000020"))
    monkeypatch.setattr(checkpoint, "write_manifest", lambda folder: os.mkdir(folder))
    checkpoints = Checkpoints(folder, 2)
    checkpoints.save(30, tree_of(30), {})
    with pytest.raises(UserError, match=r"cannot save .*the last valid one is step 10"):
        checkpoints.wait()


def test_bugs_keep_their_exception_type(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "write_manifest", lambda folder: 1 / 0)
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(1, tree_of(1), {})
    with pytest.raises(ZeroDivisionError):
        checkpoints.wait()
    with pytest.raises(TypeError):
        checkpoints.save(1, tree_of(1), {"not json": object()})
    with pytest.raises(ValueError, match="name a folder"):
        checkpoints.save(1, {"../x": jnp.zeros(1)}, {})


def test_orbax_does_not_log_what_it_raises(caplog):
    with checkpoint_arrays.suppress_tracebacks(), caplog.at_level(logging.ERROR, "absl"):
        logging.getLogger("absl").error("_SignalingThread.run() raised an exception: full")
        logging.getLogger("absl").error("another")
    assert [record.getMessage() for record in caplog.records] == ["another"]


def test_leftovers_of_killed_saves_are_removed(folder):
    """Saves killed while writing, between two renames of a replacement, or while removing."""
    (folder / "tmp-000000030").mkdir()
    shutil.copytree(folder / "000000010", folder / "old-000000010")
    (folder / "000000020").rename(folder / "old-000000020")
    assert Checkpoints(folder).steps() == [10]
    assert (folder / "tmp-000000030").exists(), "a reader must leave files of a writer alone"
    assert Checkpoints(folder, 2).steps() == [10, 20]
    assert sorted(os.listdir(folder)) == ["000000010", "000000020"]
    Checkpoints(folder).restore(shapes(tree_of(0)), report=pytest.fail)


def test_saving_after_a_fallback_replaces_later_checkpoints(folder):
    checkpoints = save_steps(folder, 30, keep=9)
    truncate(largest_file(folder / "000000020"))
    truncate(largest_file(folder / "000000030"))
    assert checkpoints.restore(shapes(tree_of(0)), report=lambda line: None)[0] == 10
    checkpoints = save_steps(folder, 20, keep=1)
    assert checkpoints.steps() == [20]
    assert checkpoints.restore(shapes(tree_of(0)), report=pytest.fail)[0] == 20


def test_read_only_checkpoints_cannot_save(tmp_path):
    with pytest.raises(ValueError, match="reading only"):
        Checkpoints(tmp_path / "none").save(1, tree_of(1), {})
    assert not (tmp_path / "none").exists()


SAVER = """
import os, signal, sys, jax, jax.numpy as jnp
from pathlib import Path
from famjax.train.checkpoint import Checkpoints
def tree(n): return {"params": {"w": jnp.full((64, 64), n, jnp.float32)}, "count": jnp.int32(n)}
checkpoints, step = Checkpoints(Path(sys.argv[1]), 2), 0
if checkpoints.latest() is not None:
    def damaged(line): raise SystemExit(line)
    step, read, extra = checkpoints.restore(tree(0), report=damaged)
    assert extra == {"step": step} and int(read["count"]) == step, (step, extra, read)
    assert (read["params"]["w"] == step).all()
print(step, flush=True)
left = int(sys.argv[2])
def die_before(event, args):
    global left
    if event == "os.rename":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
def save(n):
    checkpoints.save(n, tree(n), {"step": n})
save(step + 1)
checkpoints.wait()
print(step + 1, flush=True)
sys.addaudithook(die_before)
for n in range(step + 2, step + 10**6):
    save(n)
"""


def run_until_killed(folder, renames=0, seconds=0.0):
    """Return the step a saver restored and the last step it saved; kill it at a rename or here."""
    command = [sys.executable, "-c", SAVER, str(folder), str(renames)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        steps = [int(process.stdout.readline()) for _ in range(2)]
        if not renames:
            time.sleep(seconds)
            process.kill()
    assert process.returncode == -signal.SIGKILL
    return steps


@pytest.mark.long
def test_a_save_may_be_killed_at_any_moment(tmp_path):
    """Each process verifies what the previous one left when killed, and continues saving."""
    chance, sure = random.Random(), 0
    # A save renames four times: twice in Orbax, once to the step's name, once when removing a step.
    moments = [{"renames": count} for count in (2, 3, 4, 5)]
    moments += [{"seconds": chance.uniform(0, 0.2)} for _ in range(2)]
    for moment in moments:
        restored, after = run_until_killed(tmp_path, **moment)
        assert restored >= sure
        sure = after
    checkpoints = Checkpoints(tmp_path, 2)
    assert checkpoints.latest() >= sure
    assert all(name.isdigit() for name in os.listdir(tmp_path))


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, sys
from pathlib import Path
from jax.sharding import NamedSharding, PartitionSpec as P
from famjax.train.checkpoint import Checkpoints
def on(shape, names, spec):
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    return NamedSharding(mesh, spec)
x = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
state = {"params": jax.device_put(x, on((8,), ("data",), P("data"))),
         "key": jax.device_put(np.uint32([1, 2]), on((8,), ("data",), P()))}
checkpoints = Checkpoints(Path(sys.argv[1]), 1)
checkpoints.save(1, state, {})
checkpoints.wait()
for sharding in (on((2, 4), ("fsdp", "tensor"), P("fsdp", "tensor")), state["params"].sharding,
                 jax.sharding.SingleDeviceSharding(jax.devices()[3]), None):
    template = {"params": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                "key": state["key"]}
    _, tree, _ = checkpoints.restore(template)
    wanted = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert tree["params"].sharding == wanted, tree["params"].sharding
    assert tree["key"].sharding == state["key"].sharding
    assert np.asarray(tree["params"]).tobytes() == x.tobytes()
print("ok")
"""


def test_restore_onto_another_mesh(tmp_path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", SHARDED, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr
    assert done.stderr == ""


def test_manifest_names_every_file(checkpoint_pair):
    path = checkpoint_pair / "000000020"
    files = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert files - {"manifest.json"} == set(listed)
    assert {"size", "sha256"} == set(listed["tree.json"])


@pytest.mark.parametrize("name", ["params/../../../secret", "/etc/passwd", "params//x", "../x"])
def test_a_manifest_cannot_open_files_outside_the_checkpoint(folder, monkeypatch, name):
    path = folder / "000000020" / "manifest.json"
    listed = json.loads(path.read_text())
    listed["files"] = {name: {"size": 0, "sha256": ""}, **listed["files"]}
    path.write_text(json.dumps(listed))
    measured = []
    measure = manifest.file_info
    monkeypatch.setattr(manifest, "file_info", lambda path: measured.append(path) or measure(path))
    lines: list[str] = []
    step, *_ = Checkpoints(folder).restore(shapes(tree_of(0)), report=lines.append)
    assert step == 10
    assert f"manifest.json names {name!r}, which is not in its folder" in lines[0]
    assert all(folder / "000000010" in path.parents for path in measured)


@pytest.mark.parametrize("files", ["[1]", '{"tree.json": 5, "extra.json": 5}', "5", '"abc"'])
def test_a_manifest_of_wrong_types_is_rejected(folder, files):
    (folder / "000000020" / "manifest.json").write_text('{"files": ' + files + "}")
    step, *_ = Checkpoints(folder).restore(shapes(tree_of(0)), report=lambda line: None)
    assert step == 10


def write_with_manifest(path, name, content):
    """Write a file of a checkpoint and a manifest that matches it."""
    (path / name).write_text(content)
    listed = json.loads((path / "manifest.json").read_text())
    about = {"size": len(content), "sha256": hashlib.sha256(content.encode()).hexdigest()}
    listed["files"][name] = about
    (path / "manifest.json").write_text(json.dumps(listed))


@pytest.mark.parametrize("name", ["tree.json", "extra.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, "[1]", "9" * 5000, "null", "{"])
def test_forged_tables_are_rejected(folder, name, content):
    write_with_manifest(folder / "000000020", name, content)
    with pytest.raises(UserError, match=rf"{name}: damaged \(.*restore the folder from a copy"):
        Checkpoints(folder).restore(shapes(tree_of(0)))


def test_a_deeply_nested_manifest_and_a_pipe_are_rejected(folder):
    (folder / "000000020" / "manifest.json").write_text("[" * 100_000)
    lines: list[str] = []
    assert Checkpoints(folder).restore(shapes(tree_of(0)), report=lines.append)[0] == 10
    assert "manifest.json cannot be read" in lines[0]
    path = folder / "000000010"
    listed = json.loads((path / "manifest.json").read_text())
    listed["files"]["params/pipe"] = {"size": 0, "sha256": ""}
    (path / "manifest.json").write_text(json.dumps(listed))
    os.mkfifo(path / "params" / "pipe")
    with pytest.raises(UserError, match="no valid checkpoint"):
        Checkpoints(folder).restore(shapes(tree_of(0)), report=lines.append)
    assert "params/pipe is not a regular file" in lines[-1]


def update_manifest(path):
    """Rewrite the manifest of a checkpoint to match its modified files."""
    files = {p for p in path.rglob("*") if p.is_file() and p.name != "manifest.json"}
    listed = {p.relative_to(path).as_posix(): manifest.file_info(p) for p in files}
    (path / "manifest.json").write_text(json.dumps({"files": listed}))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: truncate(largest_file(path)),
        lambda path: largest_file(path).write_bytes(b"made up"),
        lambda path: shutil.rmtree(path / "params"),
        lambda path: (path / "params" / "_METADATA").write_text("{"),
        lambda path: (path / "params" / "manifest.ocdbt").unlink(),
        lambda path: (path / "params" / "manifest.ocdbt").write_bytes(b""),
    ],
)
def test_forged_arrays_are_rejected(folder, damage):
    """Errors of Orbax and TensorStore for files with valid checksums are reported in one line."""
    path = folder / "000000020"
    damage(path)
    update_manifest(path)
    template = {"params": shapes(tree_of(0))["params"]}
    with pytest.raises(UserError, match=r"params: damaged \(.*restore the folder from") as error:
        Checkpoints(folder).restore(template)
    assert "\n" not in str(error.value)


def test_a_manifest_without_the_arrays_is_rejected(folder):
    path = folder / "000000020" / "manifest.json"
    listed = json.loads(path.read_text())["files"]
    kept = {name: about for name, about in listed.items() if not name.startswith("params/")}
    path.write_text(json.dumps({"files": kept}))
    lines: list[str] = []
    template = {"params": shapes(tree_of(0))["params"]}
    assert Checkpoints(folder).restore(template, report=lines.append)[0] == 10
    assert "manifest.json lists nothing of params" in lines[0]


def test_pipes_do_not_block_restore(folder):
    for name in ("manifest.json", "extra.json"):
        (folder / "000000020" / name).unlink()
        os.mkfifo(folder / "000000020" / name)
    assert Checkpoints(folder).extra(20) == {}
    lines: list[str] = []
    assert Checkpoints(folder).restore(shapes(tree_of(0)), report=lines.append)[0] == 10
    assert "manifest.json cannot be read" in lines[0]


def test_only_nine_digit_names_are_steps(folder):
    for name in ("٣٣٣٣٣٣٣٣٣", "0000000030", "-00000030"):
        (folder / name).mkdir()
    assert Checkpoints(folder).steps() == [10, 20]


def test_hooks_with_the_same_checkpoint_name_are_rejected():
    class Counter(Hook):
        def state_dict(self, session):
            return {"count": 1}

    extra = {"data": 0}
    _add(extra, Counter(), None)
    assert extra == {"data": 0, "count": 1}
    with pytest.raises(ValueError, match=r"Counter\.state_dict: count is already in the check"):
        _add(extra, Counter(), None)

"""State files: bitwise exact, of constant size, and rejected in one line when invalid."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from famjax.core.errors import UserError
from famjax.eval.state_file import load_state, save_state
from famjax.eval.streaming import Streamer, StreamState


@pytest.fixture(scope="module")
def state() -> StreamState:
    stream = Streamer(tiny.run().model, 1, chunk=16)
    stream.read(np.arange(45, dtype=np.int32)[None])
    return stream.state


@pytest.fixture(scope="module")
def file(state: StreamState, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("state") / "book.state"
    save_state(path, state, tiny.run())
    return path


def bits(state: Any) -> list[tuple[Any, Any, bytes]]:
    return [(x.shape, x.dtype, np.asarray(x).tobytes()) for x in jax.tree.leaves(state)]


def error_of(path: Path, run: Any = None) -> str:
    with pytest.raises(UserError) as caught:
        load_state(path, run or tiny.run())
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_round_trip_is_bit_for_bit(file: Path, state: StreamState) -> None:
    loaded = load_state(file, tiny.run())
    assert jax.tree.structure(loaded.memory) == jax.tree.structure(state.memory)
    assert bits(loaded.memory) == bits(state.memory)
    assert loaded.tokens == 45


def test_bfloat16_round_trip(tmp_path: Path) -> None:
    run = tiny.run_with("fam", dtype="bfloat16")
    memory = jax.tree.map(lambda x: jnp.full_like(x, 3), run.model.init_state(1))
    save_state(tmp_path / "s", StreamState(memory, 7), run)
    loaded = load_state(tmp_path / "s", run)
    assert bits(loaded.memory) == bits(memory)
    assert jnp.dtype("bfloat16") in {x.dtype for x in jax.tree.leaves(loaded.memory)}


def test_size_does_not_depend_on_the_document(file: Path, tmp_path: Path) -> None:
    stream = Streamer(tiny.run().model, 1, chunk=16)
    stream.read(np.zeros((1, 1000), np.int32))
    save_state(tmp_path / "s", stream.state, tiny.run())
    assert abs((tmp_path / "s").stat().st_size - file.stat().st_size) <= 8


def test_a_state_is_a_safetensors_file(file: Path, state: StreamState) -> None:
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert header.pop("__metadata__")["format"] == "famjax-state"
    assert size % 8 == 0
    ends = [about["data_offsets"][1] for about in header.values()]
    assert max(ends) == len(content) - 8 - size
    assert set(header) == {
        "0/window/k",
        "0/window/v",
        "0/window/blocks",
        "0/window/tokens",
        "0/fam",
        "0/k",
        "0/v",
        "0/updates",
    }


@settings(max_examples=60)
@given(data=st.data())
def test_every_changed_bit_is_rejected(file: Path, data: st.DataObject) -> None:
    content = bytearray(file.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    where = data.draw(st.integers(0, header) | st.integers(0, len(content) - 1))
    content[where] ^= 1 << data.draw(st.integers(0, 7))
    changed = file.with_name("changed")
    changed.write_bytes(content)
    assert "damaged" in error_of(changed)


@settings(max_examples=20)
@given(data=st.data())
def test_every_truncation_is_rejected(file: Path, data: st.DataObject) -> None:
    content = file.read_bytes()
    cut = file.with_name("cut")
    cut.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    assert "damaged" in error_of(cut)


def test_trailing_data_is_rejected(file: Path, tmp_path: Path) -> None:
    (tmp_path / "longer").write_bytes(file.read_bytes() + b"\0")
    assert "damaged" in error_of(tmp_path / "longer")


@pytest.mark.parametrize(
    "content",
    [b"", b"some text that is no state", b"\x02\0\0\0\0\0\0\0{}", b"\x04" + b"\0" * 7 + b"null"],
)
def test_other_files_are_rejected(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(content)
    assert "not a famjax state" in error_of(tmp_path / "other")


def write_with_header(file: Path, target: Path, change: Any) -> Path:
    """Write a state with a changed header and a matching checksum."""
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header["__metadata__"]["sha256"] = "0" * 64
    change(header)
    text = json.dumps(header).encode()
    blank = len(text).to_bytes(8, "little") + text + content[begin:]
    digest = hashlib.sha256(blank).hexdigest()
    target.write_bytes(blank.replace(b"0" * 64, digest.encode(), 1))
    return target


def first_array(header: dict[str, Any]) -> dict[str, Any]:
    return next(about for name, about in header.items() if name != "__metadata__")


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["__metadata__"].update(tokens="-5"),
        lambda h: h["__metadata__"].update(tokens="9" * 5000),
        lambda h: h["__metadata__"].update(tokens=None),
        lambda h: h["__metadata__"].pop("tokens"),
        lambda h: h["__metadata__"].pop("version"),
        lambda h: h["__metadata__"].pop("model"),
        lambda h: h["__metadata__"].update(config="["),
        lambda h: h["__metadata__"].update(config="[]"),
        lambda h: h.update(x=5),
        lambda h: first_array(h).update(shape=[10**12]),
        lambda h: first_array(h).update(shape="x"),
        lambda h: first_array(h).update(data_offsets=[0, 10**30]),
        lambda h: first_array(h).update(data_offsets=[-8, "a"]),
        lambda h: first_array(h).update(dtype="F7"),
        lambda h: first_array(h).update(dtype=[]),
        lambda h: first_array(h).pop("dtype"),
    ],
)
def test_a_forged_header_is_rejected(file: Path, tmp_path: Path, change: Any) -> None:
    assert "read the document again" in error_of(
        write_with_header(file, tmp_path / "made.state", change)
    )


def test_endless_files_are_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in error_of(tmp_path / "pipe")
    assert "not a regular file" in error_of(Path("/dev/zero"))
    with (tmp_path / "hole").open("wb") as stream:
        stream.truncate(10**12)
    assert "not a famjax state of this model" in error_of(tmp_path / "hole")
    deep = b"[" * 100_000
    (tmp_path / "deep").write_bytes(len(deep).to_bytes(8, "little") + deep)
    assert "not a famjax state, or damaged" in error_of(tmp_path / "deep")


def test_missing_files_and_folders_are_rejected(tmp_path: Path) -> None:
    assert "No such file" in error_of(tmp_path / "none")
    assert "directory" in error_of(tmp_path)


def test_other_parameters_config_and_tokenizer_are_rejected(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny.run()
    assert "another model" in error_of(file, tiny.run_with("fam", seed=1))
    for key, value, default in (("rope_base", 500.0, 10000.0), ("fam_update", "static", "sum")):
        model = replace(run.config.model, **{key: value})
        told = error_of(file, replace(run, config=replace(run.config, model=model)))
        assert f"belongs to a model with model.{key}={default}, and the run has {value}" in told
    monkeypatch.setattr(run.tokenizer, "fingerprint", "0")
    assert "another tokenizer" in error_of(file)


def test_a_file_without_the_config_is_rejected_too(file: Path, tmp_path: Path) -> None:
    old = write_with_header(
        file, tmp_path / "s", lambda header: header["__metadata__"].pop("config")
    )
    assert "belongs to another model" in error_of(old, tiny.run_with("fam", seed=1))
    assert load_state(old, tiny.run()).tokens == 45


def test_another_version_is_rejected(file: Path, tmp_path: Path) -> None:
    new = write_with_header(
        file, tmp_path / "s", lambda header: header["__metadata__"].update(version="2")
    )
    assert "format 2" in error_of(new)


def test_a_failed_save_keeps_the_previous_file(
    file: Path, state: StreamState, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_state(file, state, tiny.run())
    assert file.read_bytes() == before
    assert not [path for path in file.parent.iterdir() if path.name.startswith(".")]


def test_invalid_paths_and_states_are_rejected(state: StreamState, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        save_state(tmp_path / "none" / "s", state, tiny.run())
    with pytest.raises(UserError, match="directory"):
        save_state(tmp_path, state, tiny.run())
    two = Streamer(tiny.run().model, 2, chunk=16).state
    with pytest.raises(ValueError, match="one lane"):
        save_state(tmp_path / "s", two, tiny.run())

"""The doctor reports what is installed, what is missing, and whether the device works."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from famjax.cli import doctor
from famjax.cli.main import main
from famjax.processes import runtime


@pytest.fixture(autouse=True)
def quiet_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the compilation cache of the tests."""
    monkeypatch.setattr("famjax.processes.runtime.setup", lambda: None)


def test_a_working_installation_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert list(report["required"]) == list(doctor.REQUIRED)
    assert sum(device["count"] for device in report["devices"]) >= 1
    assert report["device_works"].startswith("yes")
    assert report["host_memory"]["total"] > report["host_memory"]["available"] > 0


def test_the_table_lists_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in doctor.REQUIRED)
    assert all(name in out for name, _, _ in doctor.OPTIONAL)
    assert "ready" in out


def test_a_missing_required_part_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "REQUIRED", (*doctor.REQUIRED, "no-such-part"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "MISSING" in out
    assert "not ready" in out


def test_a_missing_optional_part_does_not_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL", (("no_such_part", "no tea", "pip install tea"),))
    assert main(["doctor"]) == 0
    assert "missing: no tea; pip install tea" in capsys.readouterr().out


def test_a_broken_device_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(a: object, b: object) -> None:
        raise RuntimeError("no\ndevice")

    monkeypatch.setattr(jnp, "matmul", fail)
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["device_works"] == "no: no device"


def test_the_compilation_cache_folder_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/cache")
    assert runtime.cache_folder() == "gs://bucket/cache"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert runtime.cache_folder() == str(tmp_path / "famjax" / "jax")
    assert runtime.is_writable(runtime.cache_folder())


def test_an_unwritable_compilation_cache_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert main(["doctor"]) == 0
    assert "(not writable" in " ".join(capsys.readouterr().out.split())

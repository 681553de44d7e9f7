"""Gloo's messages are dropped on CPU; other output is passed on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import jax
import pytest

from famjax.processes import gloo_messages

CODE = """
import os, subprocess
from famjax.processes.gloo_messages import filter_gloo_lines
print("before", flush=True)
with filter_gloo_lines():
    gloo = b" is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\\n"
    os.write(1, b"[Gloo] Rank 0" + gloo + b"kept\\n17\\n")
    os.write(1, b"[Gloo] Rank [Gloo] Rank 10 is connected to 1" + gloo)
    os.write(1, b"\\n peer ranks. 1\\n1\\n")
    print("of Python", flush=True)
    subprocess.run(["echo", "of a child"])
print("after")
"""


def test_gloo_messages_are_dropped() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["before", "kept", "17", "of Python", "of a child", "after"]
    assert done.stderr == ""


def test_a_closed_reader_does_not_block_writers() -> None:
    """Writers do not block when nobody reads the output."""
    code = (
        "import os\nfrom famjax.processes.gloo_messages import filter_gloo_lines\n"
        "with filter_gloo_lines():\n    for _ in range(2000):\n"
        "        os.write(1, b'x' * 99 + b'\\n')\n"
        "os._exit(7)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(20) == 7


@pytest.fixture
def platforms() -> Iterator[None]:
    before = jax.config.jax_platforms
    yield
    jax.config.update("jax_platforms", before)


@pytest.mark.usefixtures("platforms")
@pytest.mark.parametrize(
    ("named", "on_cpu"),
    [("cpu", True), ("cpu,cuda", True), ("cuda", False), ("tpu,cpu", False), ("gpu", False)],
)
def test_standard_output_is_a_pipe_on_cpus_only(named: str, on_cpu: bool) -> None:
    jax.config.update("jax_platforms", named)
    before = os.fstat(1)
    with gloo_messages.filter_on_cpu():
        assert os.path.samestat(os.fstat(1), before) != on_cpu


@pytest.mark.usefixtures("platforms")
@pytest.mark.parametrize("installed", ["libtpu", "jax_plugins", ""])
def test_without_named_platforms_installed_software_decides(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax.config.update("jax_platforms", None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(gloo_messages.importlib.util, "find_spec", lambda name: name == installed)
    monkeypatch.setattr(gloo_messages, "entry_points", lambda **_: ())
    assert gloo_messages.uses_gloo() == (not installed)


def test_platform_detection_starts_no_backend() -> None:
    code = (
        "from famjax.processes.gloo_messages import uses_gloo\nuses_gloo()\n"
        "from jax._src import xla_bridge\nassert not xla_bridge.backends_are_initialized()\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    for named in ({}, {"JAX_PLATFORMS": "cpu"}):
        subprocess.run([sys.executable, "-c", code], env=environment | named, check=True)

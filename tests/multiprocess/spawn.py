"""Real processes on this machine that train together, with devices of the CPU and gloo."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# `famjax`, which takes a process for gone after seconds instead of a minute
FAMJAX = """
import sys
from famjax.processes import collective
collective.HEARTBEAT_TIMEOUT, collective.INIT_TIMEOUT = {heartbeat}, {patience}
{more}
from famjax.cli.main import main
sys.exit(main())
"""


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def flags(index: int, count: int, port: int) -> list[str]:
    address = f"127.0.0.1:{port}"
    return [f"--coordinator={address}", f"--process-id={index}", f"--process-count={count}"]


def start(
    arguments: Sequence[str],
    devices: int = 1,
    heartbeat: int = 10,
    patience: int = 120,
    more: str = "",
) -> subprocess.Popen[str]:
    """Run `famjax train` with so many devices in another process; `more` is run before it."""
    kept = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    count = f"--xla_force_host_platform_device_count={devices}"
    code = FAMJAX.format(heartbeat=heartbeat, patience=patience, more=more)
    return subprocess.Popen(
        [sys.executable, "-c", code, "train", *arguments],
        env=os.environ | {"XLA_FLAGS": f"{kept} {count}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_all(
    config: Path,
    run: Path,
    count: int,
    devices: int,
    *overrides: str,
    more: dict[int, str] | None = None,
    **named: int,
) -> list[subprocess.Popen[str]]:
    """Start `count` processes that train one run; `more` is what some do before it."""
    port = free_port()
    where = [flags(i, count, port) if count > 1 else [] for i in range(count)]
    arguments = [str(config), f"--run={run}", *overrides]
    before = [(more or {}).get(i, "") for i in range(count)]
    return [
        start([*arguments, *w], devices, more=code, **named)
        for w, code in zip(where, before, strict=True)
    ]


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Wait for all, which say nothing on standard output; return status and standard error."""
    try:
        said = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [out for out, _ in said] == [""] * len(said), said  # pytest rewrites tests' asserts only
    errors = [error for _, error in said]
    return [(p.returncode, error) for p, error in zip(processes, errors, strict=True)]


def trained(
    config: Path, run: Path, count: int, devices: int, *overrides: str
) -> list[tuple[int, str]]:
    """Train with so many processes of so many devices, all of which end well."""
    done = ended(start_all(config, run, count, devices, *overrides))
    assert [status for status, _ in done] == [0] * count, done
    return done

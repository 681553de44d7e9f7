"""Gloo's lines are dropped, all others are passed on."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, subprocess
from famjax.core.chatter import without_gloo
print("before", flush=True)
with without_gloo():
    os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number ...\\nkept\\n")
    print("of Python", flush=True)
    subprocess.run(["echo", "of a child"])
print("after")
"""


def test_what_is_dropped() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["before", "kept", "of Python", "of a child", "after"]
    assert done.stderr == ""


def test_a_reader_that_left() -> None:
    """Writers are not held up when nobody reads what is passed on."""
    code = (
        "import os\nfrom famjax.core.chatter import without_gloo\n"
        "with without_gloo():\n    for _ in range(2000):\n        os.write(1, b'x' * 99 + b'\\n')\n"
        "os._exit(7)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(20) == 7

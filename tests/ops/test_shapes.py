"""The shape annotations of famjax/ops are correct; they are checked only in these tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# with `--shapes`; tests of whole models also pass NumPy arrays, which are not checked
CHECKED = ("checked_shapes.py", "test_attention.py", "test_weight_einsum.py")


@pytest.mark.long
def test_annotated_shapes_hold() -> None:
    argv = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--shapes"]
    paths = [str(HERE / name) for name in CHECKED]
    # which have the shapes of the same tests in float64
    argv += ["-k", "not bfloat16"]
    done = subprocess.run([*argv, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_annotations_are_not_checked_by_default() -> None:
    code = (
        "import sys; from famjax.ops import rotary; import numpy as np\n"
        "rotary.rotate(np.ones((2, 4), np.float32), np.ones(2, np.float32))\n"
        "assert 'beartype' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

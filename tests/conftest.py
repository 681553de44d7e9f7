"""Eight fake CPU devices, quick compilation, a persistent compilation cache, strict warnings."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jaxtyping
import pytest
from xla_flags import known_flags

# Compilation takes most of the time: a third of it optimizes code that runs for milliseconds, two
# fifths of the rest fuses with MLIR, and no core is left to compile one program in parallel. With
# `--slow`, programs run for long and are compiled with the default options.
_FLAGS = {"--xla_force_host_platform_device_count": "8"}
_QUICK = {
    "--xla_backend_optimization_level": "0",
    "--xla_cpu_use_fusion_emitters": "false",
    "--xla_cpu_parallel_codegen_split_count": "1",
}


# with the concurrent schedule, fake devices may start independent collectives in different orders,
# and wait for each other for ever
_FLAGS |= known_flags({"--xla_cpu_enable_concurrency_optimized_scheduler": "false"})
# workers inherit the flags of the process that started them
if "--slow" not in sys.argv and "PYTEST_XDIST_WORKER" not in os.environ:
    _FLAGS |= known_flags(_QUICK)

# set before JAX is imported; processes started by tests inherit them
for _flag, _value in _FLAGS.items():
    if _flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}={_value}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".cache" / "jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Python locations of operations are not used in tests, and cost a twentieth of the time
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# several threads for matrices of 16 numbers made PyTorch wait for its threads most of the time
os.environ.setdefault("OMP_NUM_THREADS", "1")
# shells start background jobs with SIGINT ignored, and processes started by tests inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
# TFDS looks for datasets in the cloud, and TensorFlow then for a machine there: 10 to 20 s
os.environ.setdefault("NO_GCE_CHECK", "true")
# pytest-xdist sets it to the terminal's width; tests of widths set it themselves
os.environ.pop("COLUMNS", None)

# PyTorch for CUDA imports triton, which aborts if it is loaded after TensorFlow
with contextlib.suppress(ImportError):
    importlib.import_module("triton")

# with `--shapes`, annotated shapes in these modules are checked at every call
_CHECKED = (
    "attention",
    "einsum_tape",
    "linear_attention",
    "lookup",
    "losses",
    "positions",
    "relative",
    "rotary",
    "weight_einsum",
)
if "--shapes" in sys.argv:
    jaxtyping.install_import_hook([f"famjax.ops.{name}" for name in _CHECKED], "beartype.beartype")

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


# traced programs are millions of long-lived objects: scanning them repeatedly took an eighth of the
# time
gc.set_threshold(200_000, 20, 100)


# bytes of memory, and number of its maps, above which a process drops its compiled programs. Linux
# allows a process 65,530 maps; with the default options one file alone takes 20,000.
_MUCH_MEMORY, _MANY_MAPS = 3 * 2**30, 20_000


@pytest.fixture(autouse=True, scope="module")
def _forget_programs() -> Iterator[None]:
    """After a file, drop compiled programs if they take much memory (7 GB in total) or many maps.

    Otherwise they are kept: files share operations, and models of the same shapes.
    """
    yield
    if _resident_bytes() > _MUCH_MEMORY or _map_count() > _MANY_MAPS:
        import jax

        jax.clear_caches()
        # glibc keeps what is freed: the process would stay as large, and forget after every file
        with contextlib.suppress(AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module")
def one_device() -> Iterator[None]:
    """Train on one of the eight devices, which compiles sooner, and each program once."""
    from small import shared_programs

    with shared_programs():
        yield


@pytest.fixture(scope="module")
def remote_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Import the code of exported folders from a folder of this module's, then forget it.

    transformers imports it as the package `transformers_modules`. That package would stay in its
    first folder, where the next test module's code is not, or be the user's own.
    """
    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
        patch.setattr(sys, "path", list(sys.path))
        _forget_remote_code()
        yield
        _forget_remote_code()


def _forget_remote_code() -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]


def _resident_bytes() -> float:
    """Return the resident memory of this process; infinity without /proc."""
    status = Path("/proc/self/statm")
    if not status.exists():
        return float("inf")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _map_count() -> int:
    """Return the number of memory maps of this process; 0 without /proc."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests marked slow or long as well")
    parser.addoption("--shapes", action="store_true", help="check the shapes of famjax/ops")


def pytest_configure(config: pytest.Config) -> None:
    # A warning caused by famjax is an error; those of other packages are not.
    config.addinivalue_line("filterwarnings", r"error:::famjax(\.|\Z)")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, run all contracts in one process: they share models and programs."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return "contracts" if "/contracts/" in path else path

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """In CI, report the files that took the most time."""
    if not os.environ.get("CI"):
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section("seconds by file")
    for path, taken in seconds.most_common(15):
        terminalreporter.line(f"{taken:6.1f} {path}")
    terminalreporter.line(f"{sum(seconds.values()):6.1f} all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # the longest files start first, so that two processes end together; without
    # --no-loadscope-reorder, pytest-xdist would start with the files with the most tests
    first = ("multiprocess", "train", "contracts", "stacks", "tests")
    items.sort(key=lambda item: (*first, item.path.parent.name).index(item.path.parent.name))
    if config.getoption("--slow"):
        return
    left_out = {"slow": "run by make test-slow"}
    if not os.environ.get("CI"):
        left_out["long"] = "run by CI and by make test-slow"
    for item in items:
        for tier, where in left_out.items():
            if item.get_closest_marker(tier):
                item.add_marker(pytest.mark.skip(reason=f"{tier}: {where}"))

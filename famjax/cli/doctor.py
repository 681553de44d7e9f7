"""`famjax doctor [--json]`: versions, devices, memory, optional packages, and a device check."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from famjax.cli.main import parse
from famjax.cli.tables import Output, Table
from famjax.core.errors import EXIT_FAILED
from famjax.core.host_memory import available_bytes, ram_bytes
from famjax.core.optional import install_command
from famjax.processes import runtime

REQUIRED = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "safetensors",
    "flatbuffers",
    "sentencepiece",
    "tokenizers",
    "jinja2",
    "jaxtyping",
    "tyro",
    "rich",
    "tensorboardX",
    "matplotlib",
    *(("backports.zstd",) if sys.version_info < (3, 14) else ()),
)

_MISSING_COSTS = {
    "tensorflow": "no seqio tasks and no TFDS data sets",
    "seqio": "data.seqio does not work",
    "tensorflow_datasets": "data.tfds does not work",
    "torch": "conversions and exports are not compared with Hugging Face's code",
    "transformers": "conversions and exports are not compared with Hugging Face's code",
    "peft": "exported adapters are not compared with peft",
    "lm_eval": "no short tasks, famjax eval --tasks lm_eval:NAMES",
    "rouge_score": "no scores of answers and summaries by ROUGE",
    "sacrebleu": "no scores of translations",
    "pyarrow": "Parquet files are not read",
    "jax_cuda13_plugin": "an NVIDIA GPU is not used",
    "libtpu": "no TPU, and no famjax plan for TPUs",
}
# module, consequence of its absence, and the command that installs it from a famjax checkout
OPTIONAL = tuple((name, costs, install_command((name,))) for name, costs in _MISSING_COSTS.items())


@dataclass(frozen=True)
class Arguments:
    """Show versions, devices, memory and missing packages; exit 1 if a required one fails."""

    json: bool = False
    """Print JSON instead of a table."""


def run(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, "famjax doctor")
    report = examine()
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)
    return 0 if report["ok"] else EXIT_FAILED


def examine() -> dict[str, Any]:
    """Return the whole report; "ok" is whether the required packages and the device work."""
    versions = {name: _version(name) for name in REQUIRED}
    report: dict[str, Any] = {
        "famjax": _version("famjax"),
        "python": platform.python_version(),
        "required": versions,
        "devices": [],
        "host_memory": _host_memory(),
        "compile_cache": runtime.cache_folder(),
        "compile_cache_writable": runtime.is_writable(runtime.cache_folder()),
        "optional": [
            {
                "name": name,
                "found": importlib.util.find_spec(name) is not None,
                "missing_costs": costs,
                "install": command,
            }
            for name, costs, command in OPTIONAL
        ],
    }
    try:
        runtime.setup()
        report["devices"] = _devices()
        report["device_works"] = _check_device()
    except Exception as error:  # any failure here belongs in the report
        message = runtime.describe_missing_device(error) or " ".join(str(error).split())
        report["device_works"] = f"no: {message or type(error).__name__}"
    report["ok"] = None not in versions.values() and report["device_works"].startswith("yes")
    return report


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _host_memory() -> dict[str, int | None]:
    """Return total and available bytes; None if the system does not report them."""
    return {"total": ram_bytes(), "available": available_bytes()}


def _devices() -> list[dict[str, Any]]:
    """Return a row for each kind of device."""
    import jax

    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for device in jax.local_devices():
        row = rows.setdefault(
            (device.platform, device.device_kind),
            {"platform": device.platform, "kind": device.device_kind, "count": 0, "memory": None},
        )
        row["count"] += 1
        limit = (device.memory_stats() or {}).get("bytes_limit")
        row["memory"] = limit if limit is not None else row["memory"]
    return list(rows.values())


def _check_device() -> str:
    """Multiply two matrices on the default device and compare with NumPy."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    a = np.arange(64 * 64).reshape(64, 64) % 5
    start = time.perf_counter()
    with jax.default_matmul_precision("float32"):
        out = jax.jit(jnp.matmul)(jnp.asarray(a, jnp.float32), jnp.asarray(a.T, jnp.float32))
    if not np.array_equal(np.asarray(out), a @ a.T):
        return "no: a matrix product has the wrong result"
    return f"yes: compiled and multiplied in {time.perf_counter() - start:.2f} s"


def _show(report: dict[str, Any]) -> None:
    table = Table("", ("", ""), words=(0, 1))
    for name, text in _rows(report):
        table.add_row(name, text)
    Output().print(table)


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("famjax", report["famjax"] or "not installed"), ("python", report["python"])]
    missing = f"MISSING: {os.path.basename(sys.executable)} -m pip install -e ."
    rows += [(name, version or missing) for name, version in report["required"].items()]
    rows += [
        (
            f"device {d['platform']}",
            f"{d['count']} x {d['kind']}{_format_size(', {} each', d['memory'])}",
        )
        for d in report["devices"]
    ]
    rows.append(("device works", report["device_works"]))
    memory = report["host_memory"]
    total, available = (
        _format_size("{}", memory["total"]),
        _format_size(", {} available", memory["available"]),
    )
    rows.append(("host memory", f"{total}{available}" or "unknown"))
    unwritable = "" if report["compile_cache_writable"] else " (not writable: nothing is cached)"
    rows.append(("compile cache", report["compile_cache"] + unwritable))
    for part in report["optional"]:
        absent = f"missing: {part['missing_costs']}; {part['install']}"
        rows.append((f"optional {part['name']}", "found" if part["found"] else absent))
    rows.append(("verdict", "ready" if report["ok"] else "not ready: see above"))
    return rows


def _format_size(template: str, size: int | None) -> str:
    return "" if size is None else template.format(f"{size / 2**30:.1f} GiB")

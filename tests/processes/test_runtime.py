"""The program restarts itself exactly once to use huge pages."""

import os
import subprocess
import sys

import pytest

from famjax.processes import runtime

STARTS = """
import os, sys
print("start", os.getpid(), flush=True)
if "clear" in sys.argv:
    os.environ.pop("GLIBC_TUNABLES", None)
from famjax.processes.runtime import use_huge_pages
use_huge_pages(keep="keep" in sys.argv)
print("runs", os.environ.get("GLIBC_TUNABLES"), sys.argv[1:])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
@pytest.mark.parametrize(
    ("given", "argument", "starts", "runs"),
    [
        ({}, "a b", 2, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, "x", 1, "glibc.malloc.arena_max=2"),
        ({}, "clear", 2, "None"),
        ({}, "keep", 2, f"{runtime._HUGE}:{runtime._KEEP}"),
    ],
)
def test_the_program_restarts_once_for_huge_pages(
    given: dict[str, str], argument: str, starts: int, runs: str
) -> None:
    names = ("GLIBC_TUNABLES", "FAMJAX_STARTED")
    env = {k: v for k, v in os.environ.items() if k not in names} | given
    done = subprocess.run(
        [sys.executable, "-c", STARTS, argument],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    *process_ids, ran = done.stdout.splitlines()
    assert len(process_ids) == starts
    assert len(set(process_ids)) == 1  # one process
    assert ran == f"runs {runs} ['{argument}']"


def test_an_unwritable_cache_is_reported(tmp_path, monkeypatch, capsys) -> None:
    import jax

    given = jax.config.jax_compilation_cache_dir
    (tmp_path / "file").write_text("")
    try:
        for folder in (tmp_path / "file", tmp_path / "file" / "below"):
            monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
            runtime.setup()
            said = capsys.readouterr().err
            assert said.startswith(f"famjax: {folder} is not writable: compiled programs are not")
            assert said.count("\n") == 1
            assert jax.config.jax_compilation_cache_dir is None
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
        runtime.setup()
        assert capsys.readouterr().err == ""
    finally:
        jax.config.update("jax_compilation_cache_dir", given)

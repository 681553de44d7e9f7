"""A missing library is reported in one line with the command that installs it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

import famjax
from famjax.cli import doctor
from famjax.cli.main import main
from famjax.core import optional

HOME = Path(famjax.__file__).parent
PROJECT = tomllib.loads((HOME.parent / "pyproject.toml").read_text())["project"]
# module -> its distribution, where their names differ
DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "backports": "backports.zstd"}
# dependencies of imported libraries, imported only if installed, or Python's own since 3.14
BROUGHT = {"absl", "triton", "jaxlib", "scipy", "compression"}


def required() -> set[str]:
    return {re.split(r"[<>=\[]", name)[0] for name in PROJECT["dependencies"]}


def imports() -> Iterator[tuple[Path, str, bool]]:
    """Yield (file, top module, whether importing the file needs it) for all third-party imports."""
    for path in HOME.rglob("*.py"):
        if "pytorch" in path.parts:  # for exported folders
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            for module in modules:
                top = module.partition(".")[0]
                if top not in sys.stdlib_module_names | {"famjax", "configs"}:
                    yield path, top, node in tree.body


def test_every_import_is_a_dependency_or_has_an_install_command() -> None:
    known = required() | BROUGHT
    unknown = {
        f"{path}: {top}"
        for path, top, _ in imports()
        if DISTRIBUTIONS.get(top, top) not in known and top not in optional._PACKAGES
    }
    assert not unknown


# modules with a class of a library's, which are imported by name only when their task is evaluated
LAZY = ("harness.py",)


def test_optional_libraries_are_imported_lazily() -> None:
    assert not [
        f"{path}: {top}"
        for path, top, first in imports()
        if first and top in OPTIONAL and not str(path).endswith(LAZY)
    ]


OPTIONAL = set(optional._PACKAGES)


def test_jax_for_cuda_12_serves_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: set[str] = set()
    find = lambda name: name if name in installed else None  # noqa: E731
    monkeypatch.setattr(optional.importlib.util, "find_spec", find)
    assert optional.missing_modules(["jax_cuda13_plugin"]) == ["jax_cuda13_plugin"]
    installed.add("jax_cuda12_plugin")
    assert optional.missing_modules(["jax_cuda13_plugin"]) == []


def test_the_doctor_checks_every_dependency() -> None:
    assert required() <= set(doctor.REQUIRED)


def test_extras_in_install_commands_exist() -> None:
    extras = set(re.findall(r"\.\[(\w+)\]", " ".join(optional._PACKAGES.values())))
    assert extras <= PROJECT["optional-dependencies"].keys()


def test_one_command_installs_several_libraries() -> None:
    assert optional.install_command(("seqio", "tensorflow")) == "pip install -e '.[seqio]'"
    said = optional.missing_message(["torch", "transformers", "peft"])
    assert said == (
        "torch, transformers and peft not installed; pip install torch transformers peft"
    )


@pytest.mark.parametrize("name", ["seqio", "tensorflow", "tensorflow_datasets"])
@pytest.mark.parametrize("given", ["data.seqio=any", "data.tfds=pg19"])
def test_training_without_the_library_of_a_data_set_is_an_error(
    name: str,
    given: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "text_fam", given]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"famjax: seqio and TFDS data sets need {name}; pip install -e '.[seqio]'"


@pytest.mark.long
def test_a_new_dependency_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkout that was updated but not reinstalled."""
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    monkeypatch.delitem(sys.modules, "jax._src.export.serialization", raising=False)
    dest = tmp_path / "out"
    assert main(["export", str(tiny.folder()), str(dest), "--format", "stablehlo"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("famjax: a library cannot be imported: Please install 'flatbuffers'")
    assert said.endswith("-m pip install -e . in famjax's checkout")
    assert not list(tmp_path.iterdir())


def test_a_missing_module_of_famjax_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "famjax.cli.doctor", None)
    with pytest.raises(ImportError):
        main(["doctor"])


def test_a_version_that_is_too_old_counts_as_missing(monkeypatch):
    installed = {"transformers": "4.57.1", "torch": "2.13.0"}
    monkeypatch.setattr(optional.metadata, "version", installed.__getitem__)
    monkeypatch.setattr(optional.importlib.util, "find_spec", lambda name: installed.get(name))
    assert optional.missing_modules(["torch", "transformers"]) == ["transformers"]
    said = "transformers 4.57.1 is too old; pip install -U transformers"
    assert optional.missing_message(["transformers"]) == said
    both = optional.missing_message(optional.missing_modules(["transformers", "peft"]))
    assert both == (
        "transformers 4.57.1 is too old, peft not installed; pip install -U transformers peft"
    )
    installed["transformers"] = "5.0.0rc1"
    assert optional.missing_modules(["torch", "transformers"]) == []

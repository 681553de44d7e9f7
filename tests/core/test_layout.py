"""Import order: each package imports only earlier packages (docs/architecture.md)."""

import ast
from pathlib import Path

import famjax

# a row may import earlier rows and itself
ORDER = (
    {"core"},
    {"config"},
    {"processes"},
    {"parallel"},
    {"optimizers"},
    {"ops"},
    {"layers"},
    {"mixers"},
    {"stacks"},
    {"models"},
    {"tokenizers"},
    {"data"},
    {"tasks"},
    {"experiment"},
    {"pipeline"},
    {"train"},
    {"eval"},
    {"convert"},
    {"export"},
    {"plan"},
    {"bench"},
    {"reproduce"},
    {"cli"},
    {"demo"},
    {"demo_finetune", "demo_text", "demo_translation"},
)


def imported_packages(path: Path) -> set[str]:
    """Return the packages of famjax that a file imports anywhere."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            # in `from famjax import demo` the package is the second name
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    return {module.split(".")[1] for module in modules if module.startswith("famjax.")}


def test_packages_import_only_those_before_them() -> None:
    home = Path(famjax.__file__).parent
    rank = {name: i for i, row in enumerate(ORDER) for name in row}
    wrong = []
    for path in home.rglob("*.py"):
        package = path.relative_to(home).parts[0].removesuffix(".py")
        # modules for exported folders import each other, as transformers requires
        if package == "__init__" or "pytorch" in path.parts:
            continue
        assert package in rank, f"{path}: {package} is not in the order"
        wrong += [
            f"{path}: {name}" for name in imported_packages(path) if rank[name] > rank[package]
        ]
    assert not wrong

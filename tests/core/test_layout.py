"""Import order: each package imports only earlier packages (docs/architecture.md)."""

import ast
import itertools
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


def importers() -> dict[str, set[str]]:
    """Return the packages that import each package, the demos as one."""
    home = Path(famjax.__file__).parent
    found: dict[str, set[str]] = {}
    for path in home.rglob("*.py"):
        package = path.relative_to(home).parts[0].removesuffix(".py").split("_")[0]
        if package and "pytorch" not in path.parts:
            for name in imported_packages(path) - {package}:
                found.setdefault(name, set()).add(package)
    return found


def reachable(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the packages that can be reached from each package by any number of arrows."""
    found = {name: set(others) for name, others in arrows.items()}
    for row in reversed(ORDER):
        for name in row & set(found):
            found[name] |= set().union(*(found.get(other, set()) for other in found[name]))
    return found


def test_the_figure_has_the_imports_that_do_not_follow_from_others() -> None:
    page = Path(famjax.__file__).parents[1] / "docs" / "architecture.md"
    drawn: dict[str, set[str]] = {}
    for line in page.read_text().splitlines():
        if "-->" in line:
            for below, above in itertools.pairwise(line.strip().split(" --> ")):
                drawn.setdefault(below, set()).add(above)
    assert reachable(drawn) == reachable(importers())
    everywhere = reachable(drawn)
    for below, aboves in drawn.items():
        for above in aboves:
            others = set().union(*(everywhere.get(other, set()) for other in aboves - {above}))
            assert above not in others, f"{below} --> {above} follows from other arrows"

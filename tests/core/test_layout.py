"""Who may import whom: each package only what stands before it (docs/design.md)."""

import ast
from pathlib import Path

import famjax

# a row may import earlier rows and itself
ORDER = (
    {"core"},
    {"ops"},
    {"layers"},
    {"mixers"},
    {"stacks"},
    {"models"},
    {"data", "tasks"},
    {"train"},
    {"eval"},
    {"bench"},
    {"cli"},
    {"demo"},
)


def imported(path: Path) -> set[str]:
    """Return the packages of famjax that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("famjax."):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("famjax.")}
    return names


def test_packages_import_only_what_stands_before_them() -> None:
    home = Path(famjax.__file__).parent
    rank = {name: i for i, row in enumerate(ORDER) for name in row}
    wrong = []
    for path in home.rglob("*.py"):
        package = path.relative_to(home).parts[0].removesuffix(".py")
        if package == "__init__":
            continue
        wrong += [f"{path}: {name}" for name in imported(path) if rank[name] > rank[package]]
    assert not wrong

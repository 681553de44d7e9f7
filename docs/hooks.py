"""What MkDocs does besides: README and its like become pages, and each package an API page."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# files above docs/ -> their pages
TOP = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files in docs/."""
    for name, page in TOP.items():
        if (ROOT / name).exists():
            text = _with_links((ROOT / name).read_text(), "")
            files.append(File.generated(config, page, content=text))
    for package in sorted((ROOT / "famjax").iterdir()):
        if package.is_dir() and (package / "__init__.py").exists():
            page = f"api/{package.name}.md"
            files.append(File.generated(config, page, content=_api(package)))
    config.nav = _fill_nav(config.nav, files)
    return files


def _fill_nav(nav: list[Any], files: Files) -> list[Any]:
    """Replace folders in the navigation, such as api/, by their pages, the index first."""
    pages = sorted(
        (f.src_uri for f in files.documentation_pages()),
        key=lambda u: (not u.endswith("index.md"), u),
    )
    filled: list[Any] = []
    for entry in nav:
        title, place = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        if isinstance(place, list):
            filled.append({title: _fill_nav(place, files)})
        elif place.endswith("/"):
            filled.append({title: [page for page in pages if page.startswith(place)]})
        else:
            filled.append(entry)
    return filled


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links that lead out of docs/."""
    path = page.file.src_uri
    folder = posixpath.join("docs", posixpath.dirname(path))
    return markdown if page.file.generated_by else _with_links(markdown, folder)


def _with_links(text: str, folder: str) -> str:
    """Point links to other files of the repository at pages; what has no page is text."""

    def link(match: re.Match[str]) -> str:
        label, target = match.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return match.group()
        name, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, name))
        if path in TOP:
            page = TOP[path]
        elif path.startswith("docs/"):
            page = path.removeprefix("docs/")
        else:
            return label
        return f"[{label}]({page}{'#' * bool(anchor)}{anchor})"

    return _LINK.sub(link, text)


def _api(package: Path) -> str:
    """Return a page with the public modules of a package."""
    name = f"famjax.{package.name}"
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(package.rglob("*.py"))
        if not path.stem.startswith("_") or path.stem == "__init__"
    ]
    shown = [module for module in modules if ".export.pytorch" not in module]
    return f"# {name}\n\n" + "\n\n".join(f"::: {module}" for module in shown) + "\n"

"""Pairs for summarization from Python's standard library."""

import sysconfig
import zlib
from pathlib import Path

import pytest

from famjax.core.errors import UserError
from famjax.data import docstrings
from famjax.data.docstrings import write_docstrings

DOCUMENTED = '''
class Box:
    async def size{0}(self, scale):
        """Return the size,
        in pixels é.
        \x20
        The box is scaled.

        Args: a scale, which is not a part of the summary.
        """
        # not part of the function
        return self.width * {0} * scale

    def undocumented(self):
        return 1

    def empty(self):
        """Do nothing."""

    def blank(self):
        """   """
        return 2

    def long(self):
        """One paragraph that has more words than a summary may have."""
        return 3
'''
SUMMARY = "Return the size, in pixels é. The box is scaled."


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Return the folder of an empty library, within another Python's packages."""
    folder = tmp_path / "site-packages" / "library"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    return folder


def write_module(library: Path, name: str, number: int) -> None:
    path = library / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(DOCUMENTED.format(number), encoding="utf-8")


def write_modules(library: Path) -> None:
    for number in range(30):
        write_module(library, f"package/m{number}.py", number)


def read(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def function(number: int) -> str:
    return f"async def size{number}(self, scale): return self.width * {number} * scale"


SPLITS = ("train", "val", "test")


def split_of(name: str) -> str:
    return {0: "test", 1: "val"}.get(zlib.crc32(name.encode()) % 10, "train")


def test_pairs_are_functions_and_the_first_paragraphs_of_their_docstrings(library, tmp_path):
    write_modules(library)
    write_docstrings(tmp_path / "pairs", words=100, summary_words=10)
    expected: dict[str, list[str]] = {split: [] for split in SPLITS}
    for number in range(30):
        expected[split_of(f"package/m{number}.py")].append(function(number))
    assert len(expected["train"]) > 20
    found = {split: read(tmp_path / "pairs" / f"{split}.functions") for split in SPLITS}
    assert all(expected.values())
    for split in SPLITS:
        assert sorted(found[split]) == sorted(expected[split])
    for split, functions in found.items():
        assert read(tmp_path / "pairs" / f"{split}.summaries") == [SUMMARY] * len(functions)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs", "site-packages"]


def test_a_module_more_changes_no_others(library, tmp_path):
    write_modules(library)
    write_docstrings(tmp_path / "before", 100, 10)
    write_module(library, "a.py", 100)
    write_docstrings(tmp_path / "after", 100, 10)
    for split in SPLITS:
        before = read(tmp_path / "before" / f"{split}.functions")
        assert set(before) == set(read(tmp_path / "after" / f"{split}.functions")) - {function(100)}


def test_no_pair_is_in_two_splits(library, tmp_path):
    write_modules(library)
    (held_out, *_) = (n for n in range(30) if split_of(f"package/m{n}.py") == "test")
    # sorted before the others
    assert split_of("copy0.py") == "train"
    write_module(library, "copy0.py", held_out)
    write_docstrings(tmp_path / "pairs", 100, 10)
    assert function(held_out) in read(tmp_path / "pairs" / "train.functions")
    assert function(held_out) not in read(tmp_path / "pairs" / "test.functions")


def test_what_cannot_be_read_is_left_out(library, tmp_path):
    write_modules(library)
    write_docstrings(tmp_path / "before", 100, 10)
    (library / "broken.py").write_text("def broken(:\n")
    (library / "plain.py").write_text("x = 1\n")
    (library / "zero.py").write_text("def f():\n    '''A \\0.'''\n    return 1\n")
    (library / "surrogate.py").write_text("def f():\n    '''A \\ud800.'''\n    return 1\n")
    (library / "folder.py").mkdir()
    for name in ("test/m.py", "package/tests/m.py", "dist-packages/m.py"):
        write_module(library, name, 99)
    write_docstrings(tmp_path / "after", 100, 10)
    for name in ("train.functions", "train.summaries", "test.functions", "test.summaries"):
        assert read(tmp_path / "before" / name) == read(tmp_path / "after" / name)


def test_functions_are_cut(library, tmp_path):
    write_modules(library)
    write_docstrings(tmp_path / "pairs", 3, 10)
    assert "async def size0(self," in read(tmp_path / "pairs" / "train.functions")


def test_files_that_are_there_are_kept(library, tmp_path):
    write_modules(library)
    write_docstrings(tmp_path / "pairs", 100, 10)
    before = read(tmp_path / "pairs" / "train.functions")
    write_module(library, "a.py", 100)
    write_docstrings(tmp_path / "pairs", 100, 10)
    assert read(tmp_path / "pairs" / "train.functions") == before


def test_another_process_may_be_faster(library, tmp_path, monkeypatch):
    write_modules(library)
    find = docstrings._find_pairs

    def find_late(*arguments):
        found = find(*arguments)
        monkeypatch.setattr(docstrings, "_find_pairs", find)
        write_docstrings(tmp_path / "pairs", 100, 10)
        return found

    monkeypatch.setattr(docstrings, "_find_pairs", find_late)
    write_docstrings(tmp_path / "pairs", 100, 10)
    assert len(read(tmp_path / "pairs" / "train.functions")) > 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs", "site-packages"]


def test_a_library_without_source_code_is_told(library, tmp_path):
    with pytest.raises(UserError, match="has too few functions with docstrings"):
        write_docstrings(tmp_path / "pairs", 100, 10)
    assert not (tmp_path / "pairs").exists()

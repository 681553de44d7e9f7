"""Pairs for summarization from Python's standard library."""

import sysconfig
from pathlib import Path

from famjax.data.docstrings import write_docstrings

DOCUMENTED = '''
class Box:
    def size{0}(self, scale):
        """Return the size,
        in pixels.

        Args: scale.
        """
        # not part of the function
        return self.width * {0} * scale

    def undocumented(self):
        return 1

    def empty(self):
        """Do nothing."""
'''


def write_library(folder: Path, modules: int) -> None:
    folder.mkdir()
    for number in range(modules):
        (folder / f"m{number:02}.py").write_text(DOCUMENTED.format(number))
    (folder / "n_bad.py").write_text("def broken(:\n")
    (folder / "n_plain.py").write_text("x = 1\n")
    # the same pair again
    (folder / "n_same.py").write_text(DOCUMENTED.format(0))
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "other.py").write_text(DOCUMENTED.format(99))


def read(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def test_pairs_are_functions_and_the_first_paragraphs_of_their_docstrings(tmp_path, monkeypatch):
    write_library(tmp_path / "library", 18)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "library")})
    write_docstrings(tmp_path / "pairs", 100)
    functions = read(tmp_path / "pairs" / "train.functions")
    assert functions[0] == "def size0(self, scale): return self.width * 0 * scale"
    # the sixteenth module is held out, and the copy of the first has nothing new
    numbers = [*range(15), 16, 17]
    assert functions == [functions[0].replace("0", str(number)) for number in numbers]
    assert read(tmp_path / "pairs" / "train.summaries") == ["Return the size, in pixels."] * 17
    (held_out,) = read(tmp_path / "pairs" / "test.functions")
    assert held_out == functions[0].replace("0", "15")
    assert len(read(tmp_path / "pairs" / "test.summaries")) == 1
    # files that are there are kept, also if the library has changed
    (tmp_path / "library" / "m00.py").unlink()
    write_docstrings(tmp_path / "pairs", 100)
    assert read(tmp_path / "pairs" / "train.functions") == functions


def test_functions_are_cut(tmp_path, monkeypatch):
    write_library(tmp_path / "library", 16)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "library")})
    write_docstrings(tmp_path / "pairs", 3)
    assert read(tmp_path / "pairs" / "train.functions")[0] == "def size0(self, scale):"

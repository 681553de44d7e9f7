"""Files and folders that are never seen incomplete."""

import os

import pytest

from famjax.core.atomic import fill_folder, write_file


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_when_it_is_full(tmp_path):
    folder = tmp_path / "new" / "data"
    with fill_folder(folder) as partial:
        (partial / "one").touch()
        assert not folder.exists()
    assert names(folder) == ["one"]
    assert names(tmp_path / "new") == ["data"]
    # readable for others, as new folders are
    assert folder.stat().st_mode == (tmp_path / "new").stat().st_mode


def test_an_error_leaves_nothing(tmp_path):
    def interrupted():
        with fill_folder(tmp_path / "data") as partial:
            (partial / "one").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == []


def test_the_folder_of_a_faster_process_is_kept(tmp_path):
    folder = tmp_path / "data"
    with fill_folder(folder, shared=True) as partial:
        (partial / "late").touch()
        with fill_folder(folder) as other:
            (other / "early").touch()
    assert names(folder) == ["early"]
    assert names(tmp_path) == ["data"]


def test_a_folder_with_files_is_not_replaced(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "early").touch()

    def fill():
        with fill_folder(folder) as partial:
            (partial / "late").touch()

    with pytest.raises(OSError, match="not empty"):
        fill()
    assert names(folder) == ["early"]
    assert names(tmp_path) == ["data"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_file(path, "ä")
    assert path.read_bytes() == "ä".encode()

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_file(path, b"new")
    assert path.read_bytes() == "ä".encode()
    assert names(tmp_path) == ["file"]


def test_an_error_of_the_file_system_is_raised(tmp_path):
    (tmp_path / "data").touch()
    with pytest.raises(FileExistsError), fill_folder(tmp_path / "data" / "sub"):
        pass

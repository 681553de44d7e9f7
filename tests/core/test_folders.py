"""Folders that are filled before they get their name."""

import pytest

from famjax.core.folders import fill_folder


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
    with fill_folder(folder) as partial:
        (partial / "late").touch()
        with fill_folder(folder) as other:
            (other / "early").touch()
    assert names(folder) == ["early"]
    assert names(tmp_path) == ["data"]


def test_an_error_of_the_file_system_is_raised(tmp_path):
    (tmp_path / "data").touch()
    with pytest.raises(FileExistsError), fill_folder(tmp_path / "data" / "sub"):
        pass

"""Texts for the tests of data."""

import pytest


@pytest.fixture
def folder(tmp_path):
    """Return a folder of thirty short documents."""
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text(f"document {i}")
    return tmp_path


@pytest.fixture
def small_pieces(monkeypatch):
    """Have texts be read in pieces of 8 bytes."""
    monkeypatch.setattr("famjax.data.files.PIECE_BYTES", 8)

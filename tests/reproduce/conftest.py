"""Processes of experiments that train nothing."""

import os

import pytest


@pytest.fixture
def fake(monkeypatch):
    """Have processes write results without a training."""
    home = os.path.dirname(__file__)
    monkeypatch.setattr("famjax.reproduce.runner._PROCESS", "fake_cell")
    monkeypatch.setattr("famjax.reproduce.runner._POLL_SECONDS", 0.01)
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)

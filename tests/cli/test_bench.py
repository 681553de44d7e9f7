"""`famjax bench fam`: the tables, and the mistakes; the figures themselves are not tested."""

import json

import pytest

from famjax.bench import fam
from famjax.cli import bench
from famjax.cli.main import main
from famjax.core.config import ModelConfig

TINY = ModelConfig(vocab_size=11, layers=1, width=8, heads=2, mlp_width=8, block_len=4, fam_len=2)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(bench, "_SMALL", TINY)
    monkeypatch.setattr(fam, "SIZES", ((4, 2), (8, 2)))
    monkeypatch.setattr(fam, "CHUNK", 16)
    monkeypatch.setattr(fam, "GENERATED", 3)
    monkeypatch.setattr(fam, "LENGTHS", (19, 35))


def test_every_size_and_length_is_measured(tiny, capsys, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert main(["bench", "fam", "--batch", "2", "--length", "16", "--turns", "2", "--json"]) == 0
    printed = capsys.readouterr()
    assert "GLIBC_TUNABLES was set already" in printed.err
    report = json.loads(printed.out)
    assert [cost["floor"] for cost in report["costs"]] == [1.5, 1.25]
    for cost in report["costs"]:
        for pair in (cost["training"], cost["streaming"]):
            assert pair["first"] > 0
            assert pair["second"] > 0
    assert [row["tokens"] for row in report["lengths"]] == [19, 35]


def test_the_paper_lengths_are_whole_chunks_and_what_is_generated():
    rounded = [round(tokens, -3) for tokens in fam.LENGTHS]
    assert rounded == [25_000, 33_000, 66_000, 129_000, 258_000, 1_000_000]
    assert all((tokens - fam.GENERATED) % fam.CHUNK == 0 for tokens in fam.LENGTHS)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--turns", "1"], "--turns 1: a spread takes at least 2"),
        (["--batch", "0"], "--batch 0: must be at least 1"),
        (["--length", "1000"], "--length 1000: must be a multiple of the largest block, 512"),
    ],
)
def test_mistakes(flags, line, capsys):
    assert main(["bench", "fam", *flags]) == 2
    assert line in capsys.readouterr().err

"""`famjax bench fam` and `feedback`: the tables, and the mistakes; not the figures themselves."""

import json

import pytest

from famjax.bench import fam, feedback, feedback_peers
from famjax.cli import bench
from famjax.cli.main import main
from famjax.core.config import FeedbackConfig, ModelConfig

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


SMALL_FEEDBACK = ModelConfig(
    vocab_size=11, layers=2, width=8, heads=2, mlp_width=8, feedback=FeedbackConfig(span=4)
)


def test_feedback_is_measured_beside_every_other(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "_SMALL_FEEDBACK", SMALL_FEEDBACK)
    monkeypatch.setattr(feedback, "SPANS", (4, 8))
    monkeypatch.setattr(feedback, "BATCHES", (1,))
    monkeypatch.setattr(feedback, "SWEEPS", (2,))
    monkeypatch.setattr(feedback, "TOKENS", 2)
    monkeypatch.setattr(feedback_peers, "installed", lambda: False)
    drawn = tmp_path / "bench.png"
    sizes = ["--batch", "2", "--length", "6", "--turns", "2", "--width", "16"]
    assert main(["bench", "feedback", *sizes, "--json", "--plot", str(drawn)]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    steps = {step["name"]: step for step in report["steps"]}
    assert len(steps) == 6
    assert steps["transformer"]["transformer"]["ratio"] == 1
    assert steps["feedback, 2 sweeps"]["sweep_change"] > 0
    assert steps["feedback"]["floor"] < 1
    assert report["plain_autodiff_apart"] < 1e-5
    for row in report["generation"]:
        assert row["ratio"] > 0
        if row["equal"] == "bytes":
            assert row["batch"] == 2 * row["other_batch"]
            assert abs(row["state_bytes"] / row["other_state_bytes"] - 1) < 0.1
    assert "needs torch, feedback_transformer_pytorch" in printed.err
    assert "training step / transformer's" in printed.err
    assert drawn.stat().st_size


@pytest.mark.skipif(not feedback_peers.installed(), reason="needs " + feedback_peers.NAME)
def test_the_peer_reads_the_same_from_the_same_weights():
    assert feedback_peers.check_peer(SMALL_FEEDBACK, 2, 7) < 1e-4


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


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--length", "0"], "--length 0: must be at least 1"),
        (["--span", "0"], "--span 0: must be at least 1"),
        (["--width", "30"], "--width 30: must be a multiple of the 4 heads"),
        (["--plot", "a.txt"], "--plot a.txt: must end in .png, .svg or .pdf"),
    ],
)
def test_mistakes_with_feedback(flags, line, capsys):
    assert main(["bench", "feedback", *flags]) == 2
    assert line in capsys.readouterr().err

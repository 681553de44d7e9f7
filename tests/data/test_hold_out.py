"""data/hold_out.py, which makes the folders of `python -m famjax.demo_text --data`."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "data" / "hold_out.py"


def hold_out(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def texts(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.iterdir())]


def test_every_third_document_is_held_out(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("one", "no", "two", "äöü"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("three", "four"):
        (tmp_path / f"{name}.txt").write_text(name)
    files = [tmp_path / name for name in ("a.jsonl.gz", "three.txt", "four.txt")]
    out = tmp_path / "out"
    done = hold_out(out, *files, "--every", 3, "--min-bytes", 3, "--held-out-bytes", 5)
    # a held-out document is not cut within a character
    assert texts(out / "held_out") == ["äö"]
    assert texts(out / "training") == ["one", "two", "three", "four"]
    folders = f"{out}/training:{out}/held_out"
    assert done.stdout == (
        f"5 documents, 15 bytes to train on, 4 held out: --data NAME={folders}\n"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("out a.jsonl --every 1", "--every 1: give at least 2"),
        ("out a.jsonl none.txt", "none.txt is not a file"),
        (". a.jsonl", "exists already"),
        ("out a.jsonl --every 3", "2 documents: none would be held out"),
        ("out b.jsonl", 'b.jsonl, line 2: no JSON object with a "text"'),
    ],
)
def test_mistakes_have_one_line(
    arguments: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    Path("b.jsonl").write_text('{"text": "a"}\n["b"]\n')
    done = hold_out(*arguments.split())
    assert done.returncode != 0
    assert told in done.stderr.strip().splitlines()[-1]
    assert not Path("out").exists()

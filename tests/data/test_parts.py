"""Parts of documents, each a document of its own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from famjax.core.errors import UserError
from famjax.data.parts import TextParts
from famjax.data.sources import TextSource
from famjax.experiment.load import load_config
from famjax.pipeline import make_source
from famjax.tokenizers.load import load_tokenizer

TOKENIZER = load_tokenizer("bytes")


def make_parts(files: Path, seed: int = 0) -> TextParts:
    return TextParts(str(files), TOKENIZER, seed, 0, part_bytes=300)


def read_epoch(source: TextParts, epoch: int, lanes: int = 1) -> list[tuple[str, int, str]]:
    """Return path, first byte and text of all parts of an epoch, in the order of reading."""
    found = []
    for lane in range(lanes):
        size = source.epoch_size(lane, lanes)
        for k in range(epoch * size, (epoch + 1) * size):
            key = json.loads(json.dumps(source.key(lane, lanes, k)))
            tokens = np.concatenate([piece.tokens for piece in source.open(key)])
            found.append((key[0], key[2], TOKENIZER.decode(tokens)))
    return found


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, str]:
    """A long text, a short one, and one in JSON lines; by path."""
    long, short = (" ".join(f"word{i}" for i in range(n)) for n in (400, 10))
    lines = [" ".join(f"line{i}" for i in range(n, 2 * n)) for n in (90, 80)]
    (tmp_path / "long.txt").write_text(long)
    (tmp_path / "short.txt").write_text(short)
    rows = (json.dumps({"text": line}) + "\n" for line in lines)
    (tmp_path / "lines.jsonl").write_text("".join(rows))
    return {"long.txt": long, "short.txt": short, "lines.jsonl": "".join(lines)}


def test_a_compressed_text_is_decompressed_once(
    tmp_path: Path, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """Not three times for each part, which takes quadratic time."""
    for name in texts:
        (tmp_path / name).unlink()
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(texts["long.txt"].encode()))
    source = make_parts(tmp_path)
    opened: list[str] = []
    gzip_open = gzip.open
    monkeypatch.setattr(gzip, "open", lambda path, mode: opened.append(path) or gzip_open(path))
    parts = read_epoch(source, 0)
    for name in ("a", "b"):
        own = [part[1:] for part in parts if part[0].endswith(f"{name}.txt.gz")]
        assert len(own) > 2
        assert "".join(part for _, part in sorted(own)) == texts["long.txt"]
    assert len(opened) == 2


@pytest.mark.parametrize("lanes", [1, 3])
def test_an_epoch_reads_every_document_once(tmp_path: Path, texts: dict[str, str], lanes: int):
    source = make_parts(tmp_path)
    epochs = [read_epoch(source, epoch, lanes) for epoch in range(2)]
    for parts in epochs:
        for name, text in texts.items():
            own = [part[1:] for part in parts if part[0].endswith(name)]
            if name == "lines.jsonl":  # two documents
                assert sorted("".join(t for _, t in sorted(own))) == sorted(text)
            else:
                assert "".join(part for _, part in sorted(own)) == text
        sizes = [len(text) for path, _, text in parts if not path.endswith("short.txt")]
        assert len(sizes) > 10
        assert 100 < min(sizes) < max(sizes) < 600
        # in random order, and cut between words
        assert [b for _, b, _ in parts] != sorted(b for _, b, _ in parts)
        assert all(text.startswith((" ", "word0", "line")) for _, _, text in parts)
    # at other places in each epoch
    first, second = ({begin for path, begin, _ in e if path.endswith("long.txt")} for e in epochs)
    assert first & second == {0}


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_eos_is_a_target_only_at_the_end_of_a_document(
    tmp_path: Path, texts: dict[str, str], suffix: str
) -> None:
    if suffix:
        (tmp_path / "long.txt.gz").write_bytes(gzip.compress(texts["long.txt"].encode()))
        (tmp_path / "long.txt").unlink()
    source = make_parts(tmp_path)
    weights, ends = [], 0
    for k in range(source.epoch_size(0, 1)):
        pieces = list(source.open(source.key(0, 1, k)))
        assert pieces[-1].tokens.tolist() == [TOKENIZER.eos_id]
        text = TOKENIZER.decode(np.concatenate([piece.tokens for piece in pieces]))
        ends += (is_end := text.endswith(("word399", "word9", "line179", "line159")))
        weights.append((is_end, *pieces[-1].weights))
    assert ends == 4
    assert len(weights) > 6
    assert set(weights) == {(False, 0), (True, 1)}


def test_eos_is_no_target_where_the_rest_is_held_out(tmp_path: Path, texts: dict[str, str]) -> None:
    for parts in ({}, {"part_bytes": 300}):
        of = TextParts if parts else TextSource
        for holdout, weight in ((0, 1), (10, 0)):
            source = of(str(tmp_path / "long.txt"), TOKENIZER, 0, holdout, **parts)
            keys = [source.key(0, 1, k) for k in range(source.epoch_size(0, 1))]
            weights = [list(source.open(key))[-1].weights.item() for key in keys]
            assert sum(weights) == weight
    held_out = TextSource(str(tmp_path / "long.txt"), TOKENIZER, 0, 10, "holdout")
    assert list(held_out.open(held_out.key(0, 1, 0)))[-1].weights == 1


def test_lines_have_parts_by_their_own_length(tmp_path: Path):
    texts = [" ".join(f"word{i}" for i in range(n)) for n in (600, *[3] * 20)]
    rows = (json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "lines.jsonl").write_text("".join(rows))
    found = [text for _, _, text in read_epoch(make_parts(tmp_path), 0)]
    assert sorted("".join(found)) == sorted("".join(texts))
    # all short lines are whole, and the long one is in parts
    assert found.count(texts[1]) == 20
    assert 150 < min(len(t) for t in found if t != texts[1]) < max(map(len, found)) < 600


def test_a_run_trains_on_parts_and_is_evaluated_on_documents(
    tmp_path: Path, texts: dict[str, str]
) -> None:
    config = load_config("text_fam", [f"data.files={tmp_path}", "data.part_bytes=300"])
    assert isinstance(make_source(config, TOKENIZER), TextParts)
    held_out = make_source(config, TOKENIZER, "holdout")
    assert not isinstance(held_out, TextParts)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data.part_bytes=20"], "take 0 .* or at least 256"),
        (["data.part_bytes=-1"], "part_bytes=-1"),
        (["data.part_bytes=300", "data.seqio=famjax_x"], "part_bytes.*data.seqio=famjax_x"),
    ],
)
def test_parts_that_cannot_be_are_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        load_config("text_fam", overrides)

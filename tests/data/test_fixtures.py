"""Files in data/ can be read as the README there describes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_tokenizers

from famjax.data.sources import TextSource
from famjax.tokenizers.load import load_tokenizer

DATA = Path(__file__).parents[2] / "data"
FILES = sorted(p for p in DATA.glob("*/*") if p.name != "LICENSE")


def tokens(source: TextSource, documents: int) -> list[tuple[int, float]]:
    """Return (number of tokens, sum of weights) of the first documents."""
    key, found = None, []
    for k in range(documents):
        key = source.key(0, 1, k, key)
        pieces = list(source.open(key))
        found.append((sum(len(p.tokens) for p in pieces), sum(p.weights.sum() for p in pieces)))
    return found


def test_the_readme_lists_every_folder_with_its_licence() -> None:
    readme = (DATA / "README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith("| `")]
    for folder in {path.parent.name for path in FILES}:
        (row,) = [line for line in rows if line.startswith(f"| `{folder}/")]
        _, licence, source = [cell.strip() for cell in row.strip("|").split("|")[1:]]
        assert licence
        assert source


def test_files_are_small() -> None:
    assert len(FILES) == 13
    assert sum(path.stat().st_size for path in FILES) < 100_000


@pytest.mark.parametrize(
    ("files", "documents"), [("books/*.txt", 6), ("proofs/*.thy", 5), ("talks", 40)]
)
def test_files_can_be_read(files: str, documents: int) -> None:
    source = TextSource(str(DATA / files), load_tokenizer("bytes"), seed=0, holdout=0)
    assert len(source) == documents
    read = tokens(source, documents)
    # at least one token of an answer counts, all of a book
    assert all(0 < weight <= count - 1 for count, weight in read)


def test_conversations_are_read_with_a_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_tokenizers.byte_level(tmp_path)))
    source = TextSource(str(DATA / "chats"), tokenizer, seed=0, holdout=0)
    lines = (DATA / "chats/conversations.jsonl").read_text().splitlines()
    assert len(source) == len(lines)
    for count, weight in tokens(source, len(lines)):
        assert 0 < weight < count - 1


def test_conversations_start_with_a_user_or_the_system() -> None:
    for line in (DATA / "chats/conversations.jsonl").read_text().splitlines():
        roles = [message["role"] for message in json.loads(line)["messages"]]
        assert roles[0] in ("system", "user")
        assert roles[-1] == "assistant"


def test_proofs_keep_their_copyright() -> None:
    for path in (DATA / "proofs").glob("*.thy"):
        head = path.read_text()[:300]
        assert "Copyright" in head
        assert "SPDX-License-Identifier: BSD-2-Clause" in head
    assert "THIS SOFTWARE IS PROVIDED" in (DATA / "proofs/LICENSE").read_text()

"""Write documents to OUT/training and OUT/held_out, one file each, for famjax.demo_text.

    python data/hold_out.py OUT FILE ... [--every 10] [--min-bytes 0] [--held-out-bytes 0]

A FILE is a text, which is one document, or JSON lines, each with a document in "text"; both also
compressed with gzip. Documents are counted in the order given, and the last of every `--every` is
held out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


def read_documents(path: Path) -> Iterator[bytes]:
    """Yield the documents of a file."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if ".jsonl" not in path.suffixes:
        yield data
        return
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            yield json.loads(line)["text"].encode()
        except (ValueError, KeyError, TypeError, AttributeError):
            raise SystemExit(f'{path}, line {number}: no JSON object with a "text"') from None


def cut(document: bytes, size: int) -> bytes:
    """Return the first `size` bytes, or all if it is 0, without a character that is cut."""
    return document[:size].decode(errors="ignore").encode() if size else document


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="data/hold_out.py", description="Hold out documents.")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--min-bytes", type=int, default=0, help="shorter documents are left out")
    parser.add_argument(
        "--held-out-bytes", type=int, default=0, help="held-out documents are cut here; 0 = not"
    )
    arguments = parser.parse_args(given)
    if arguments.every < 2:
        parser.error(f"--every {arguments.every}: give at least 2")
    if missing := [str(path) for path in arguments.files if not path.is_file()]:
        parser.error(f"{missing[0]} is not a file")
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists already; give another folder")
    documents = [
        document
        for path in arguments.files
        for document in read_documents(path)
        if len(document) >= arguments.min_bytes
    ]
    if len(documents) < arguments.every:
        parser.error(f"{len(documents)} documents: none would be held out; lower --every")
    for part in ("training", "held_out"):
        (arguments.out / part).mkdir(parents=True)
    sizes = {"training": 0, "held_out": 0}
    for number, document in enumerate(documents):
        is_held_out = number % arguments.every == arguments.every - 1
        part = "held_out" if is_held_out else "training"
        data = cut(document, arguments.held_out_bytes) if is_held_out else document
        (arguments.out / part / f"{number:05}.txt").write_bytes(data)
        sizes[part] += len(data)
    folders = ":".join(str(arguments.out / part) for part in sizes)
    print(
        f"{len(documents)} documents, {sizes['training']:,} bytes to train on, "
        f"{sizes['held_out']:,} held out: --data NAME={folders}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

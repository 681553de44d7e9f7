"""Parts of long documents in random order, instead of whole documents.

A lane that reads whole documents reads few of them: a book of 500 kB takes 90 rows of 2,048 tokens.
The model then learns for a long time from the few books that are open, and a pretrained model
forgets other texts. Parts begin anywhere in a document, so that a batch has as many texts as rows.
"""

from __future__ import annotations

import bisect
from typing import Any, BinaryIO

import numpy as np

from famjax.data.files import ReadProgress, is_compressed, is_jsonl, open_text, wrap_read_errors
from famjax.data.plain_text import PlainText, PlainTextWriter
from famjax.data.sources import Key, TextSource

# bytes decompressed between reports of progress
_COPY_BYTES = 1 << 20


class TextParts(TextSource):
    """Parts of about `part_bytes` bytes of a `TextSource`'s documents, each a document of its own.

    Each epoch reads every document once, in a new permutation of all parts, which are cut at other
    places than before. If possible, a part begins at a space.

    Args:
      part_bytes: approximate number of bytes of text in a part. If a file of text is compressed,
        the sizes of documents are taken from those of the files. Such a file is decompressed to a
        temporary file when one of its parts is first read. Conversations that are longer than this
        are cut too.
    """

    def __init__(self, *arguments: Any, part_bytes: int, **options: Any):
        # compressed files whose parts were asked for: most parts are far into the text
        self._copies: dict[str, PlainText] = {}
        super().__init__(*arguments, **options)
        if (sizes := self.document_sizes()) is None:
            means = np.array(self._sizes) / np.diff(self._starts)
            sizes = np.repeat(means, np.diff(self._starts))[self._documents]
        self._counts = np.maximum(np.rint(sizes / part_bytes).astype(int), 1)
        # number of the first part of each document, and at the end the number of all parts
        self._first_parts = np.cumsum([0, *self._counts])

    def document_count(self) -> int:
        return int(self._first_parts[-1])

    def _indexed_key(self, index: int, epoch: int, group: int) -> Key:
        document = bisect.bisect_right(self._first_parts, index) - 1
        part, count = index - self._first_parts[document], self._counts[document]
        key = self.whole_key(document)
        if count == 1:
            return key
        path = key[0]
        if is_compressed(path) and not is_jsonl(path) and path not in self._copies:
            self._copies[path] = _decompress(path)
        first, last = key[2], self._text_size(key) if self._end is None else self._end
        # equal for all parts of a document, so that each begins where the previous one ends
        shift = np.random.default_rng([self._seed, epoch, group, document]).uniform(0, 0.5)

        def cut(i: int) -> int | None:
            if i in (0, count):
                return self._end if i else first
            return self._find_boundary(key, first + int((last - first) * (i - shift) / count))

        return [*key[:2], cut(part), cut(part + 1)]

    def _open_file(self, path: str) -> BinaryIO:
        copy = self._copies.get(path)
        return open_text(copy.path if copy else path)


def _decompress(path: str) -> PlainText:
    """Write the text of a compressed file to a temporary file."""
    writer, progress = PlainTextWriter(path), ReadProgress()
    with wrap_read_errors(path), open_text(path) as stream:
        while data := stream.read(_COPY_BYTES):
            writer.write(data)
            progress.add(path, len(data))
    writer.close()
    return writer.plain

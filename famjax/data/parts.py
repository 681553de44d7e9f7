"""Parts of long documents in random order, instead of whole documents.

A lane that reads whole documents opens few of them: a book of 500 kB takes 90 rows of 2,048 tokens.
What a model learns from a lane is then of the books that are open, and a pretrained one forgets the
others. Parts begin anywhere, so that a batch has as many texts as rows.
"""

from __future__ import annotations

import bisect
import os
from typing import Any

import numpy as np

from famjax.data.sources import Key, TextSource


class TextParts(TextSource):
    """Parts of about `part_bytes` bytes of a `TextSource`'s documents, each a document of its own.

    Each epoch reads every document once, in a new permutation of all parts, cut at other places. A
    part begins at a space where there is one.

    Args:
      part_bytes: of the text. Of files that are compressed, and of lines of .jsonl, the number of
        parts is estimated from the size of the file. A conversation longer than that is cut too.
    """

    def __init__(self, *arguments: Any, part_bytes: int, **options: Any):
        super().__init__(*arguments, **options)
        shares = (
            os.path.getsize(path) / int(rows)
            for path, rows in zip(self._paths, np.diff(self._starts), strict=True)
            for _ in range(rows)
        )
        sizes = np.array(list(shares))[self._documents]
        self._counts = np.maximum(np.rint(sizes / part_bytes).astype(int), 1)
        # number of the first part of each document, and at the end the number of all parts
        self._first_parts = np.cumsum([0, *self._counts])

    def document_count(self) -> int:
        return int(self._first_parts[-1])

    def _indexed_key(self, index: int, epoch: int, group: int) -> Key:
        document = bisect.bisect_right(self._first_parts, index) - 1
        part, count = index - self._first_parts[document], self._counts[document]
        key = self._make_key(int(self._documents[document]))
        if count == 1:
            return key
        first, last = key[2], self._text_size(key) if self._end is None else self._end
        # the same for all parts of a document, so that they meet
        shift = np.random.default_rng([self._seed, epoch, group, document]).uniform(0, 0.5)

        def cut(i: int) -> int:
            if i in (0, count):
                return last if i else first
            return self._find_boundary(key, first + int((last - first) * (i - shift) / count))

        return [*key[:2], cut(part), cut(part + 1)]

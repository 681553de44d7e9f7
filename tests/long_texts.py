"""Files for tasks on long documents."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from famjax.tasks.long.document import LongTask, Material
from famjax.tokenizers.load import load_tokenizer

STORY = """1 Mary moved to the bathroom.
2 John went to the hall.
3 Where is Mary? \tbathroom\t1
4 Daniel went back to the hall.
5 Mary took the milk there.
6 Where is Daniel? \thall\t4

1 Sandra got the milk and the apple.
2 What is Sandra carrying?\tmilk,apple\t1
"""


@functools.cache
def facts() -> str:
    """Return the file of a task of bAbI."""
    file = Path(tempfile.mkdtemp(prefix="famjax-tests-")) / "qa1_test.txt"
    file.write_text(STORY)
    return str(file)


def load(task: LongTask, files: str) -> Material:
    """Return what a task reads, with bytes for tokens."""
    return task.load(files, facts() if task.has_facts else "", load_tokenizer("bytes"))

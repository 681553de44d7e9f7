"""The passkey at any depth of the document, with the generated answers.

`passkey` (`famjax.tasks.passkey`) reads each document once for all lengths, and only checks whether
each token of the key is the likeliest.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from famjax.tasks.long.document import Content, LongTask, Material, Question, Room
from famjax.tasks.passkey import FILLER, NEEDLE, QUESTION
from famjax.tasks.task import EvaluationTask

_DIGITS = 5


class PasskeyDepth(EvaluationTask, LongTask):
    """The paper's needle, filler and question (TransformerFAM D.1), at any depth."""

    name = "passkey_depth"
    source = "TransformerFAM, arXiv 2404.09173"
    instead = "train on passkey with data.passkey.needle_within"
    # more than the key, so that a wrong answer can be seen
    answer_tokens = 16

    def make_content(self, rng: np.random.Generator, material: Material) -> Content:
        key = "".join(map(str, rng.integers(0, 10, _DIGITS)))
        # sentences end with a space and are encoded with it, as those of `passkey`
        needle = NEEDLE.format(key=key)
        return Content("", (needle,), (Question(QUESTION, (key,), (0,)),), separator="")

    def make_filler(
        self, rng: np.random.Generator, content: Content, material: Material, room: Room
    ) -> Iterator[str]:
        number = int(rng.integers(len(FILLER)))
        while True:
            yield FILLER[number % len(FILLER)]
            number += 1

"""BABILong: the facts of a bAbI story among the sentences of books (arXiv 2406.10149).

A bAbI file (arXiv 1502.05698) has lines `N text`, where N counts from 1 in each story, and
questions `N question<TAB>answer<TAB>numbers of the supporting facts`. A document has one of the
questions, and all facts of its story that come before the question, in their order.
"""

from __future__ import annotations

import re

import numpy as np

from famjax.core.errors import UserError
from famjax.data.files import read_text_pieces
from famjax.tasks.long.document import Content, LongTask, Material, Question

_HEAD = "Somewhere in this text are facts, and at its end is a question about them.\n"
_PATH = 3
_LINE = re.compile(r"(\d+) ([^\t]*)(?:\t([^\t]*)\t([\d ]*))?")


class BabiLong(LongTask):
    """A question about the facts of a story; the answer is one of a few words."""

    name = "babilong"
    source = "BABILong, arXiv 2406.10149"
    answer_tokens = 20
    switches = ("data.files", "data.holdout", "data.long.facts")
    options = ("lengths", "examples", "questions", "facts", "ablate")
    facts_hint = "--facts FILE or data.long.facts=FILE: a task of bAbI, such as qa1_..._test.txt"

    @property
    def has_files(self) -> bool:
        return True

    @property
    def has_facts(self) -> bool:
        return True

    def make_content(self, rng: np.random.Generator, material: Material) -> Content:
        return material.contents[rng.integers(len(material.contents))]

    def read_facts(self, facts: str) -> tuple[Content, ...]:
        """Return a content for each question of a bAbI file.

        Raises:
          UserError: a line is not in bAbI's format, or the file has no question.
        """
        stories = parse_stories("".join(read_text_pieces(facts)), facts)
        labels = {label for _, question in stories for label in question.references}
        contents = []
        for told, question in stories:
            # a label that is in the question is not wrong in the answer: it may be repeated there
            wrong = {
                label
                for label in labels - {*question.references}
                if not re.search(rf"\b{re.escape(label)}\b", question.text, re.IGNORECASE)
            }
            closed = question._replace(wrong=tuple(sorted(wrong)))
            contents.append(Content(_HEAD, told, (closed,), in_order=True))
        return tuple(contents)


def parse_stories(text: str, name: str) -> list[tuple[tuple[str, ...], Question]]:
    """Return each question with the facts before it.

    Args:
      text: content of a bAbI file.
      name: name of the file, for errors.
    """
    found: list[tuple[tuple[str, ...], Question]] = []
    told: dict[int, str] = {}
    for row, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip("\r\n"))
        if match is None:
            raise UserError(f"{name}:{row}: not a line of bAbI, 'N text'; give a file of it")
        number, sentence, answer, needed = match.groups()
        if int(number) == 1:
            told = {}
        if answer is None:
            told[int(number)] = sentence.strip()
            continue
        places = {n: i for i, n in enumerate(told)}
        facts = [int(n) for n in needed.split()]
        if not facts or not set(facts) <= places.keys():
            raise UserError(f"{name}:{row}: its facts {needed!r} are not in the story before it")
        asked = Question(
            f"\nQuestion: {sentence.strip()} Answer:",
            # a path such as n,w is one answer; milk,apple are two
            (answer,) if len(answer) <= _PATH else tuple(answer.split(",")),
            tuple(places[n] for n in facts),
        )
        found.append((tuple(told.values()), asked))
    if not found:
        raise UserError(f"{name}: has no questions of bAbI, 'N question<TAB>answer<TAB>facts'")
    return found

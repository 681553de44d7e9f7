"""RULER's questions about documents, from SQuAD (`qa_1`) and HotpotQA (`qa_2`) (arXiv 2404.06654).

The context is a numbered list with the documents that a question is about, among other documents of
the same file, in random order. If the list is longer than the file, the other documents are
repeated with new numbers, as in RULER, but not those that the question is about.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from famjax.core.errors import UserError
from famjax.core.json_files import parse_json
from famjax.data.files import read_text_pieces
from famjax.tasks.long.document import Content, LongTask, Material, Question, Room
from famjax.tasks.long.filler import shuffle_forever

_TASK = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)
_HEAD = f"{_TASK}\n\nThe following are given documents.\n\n"
_LABEL = "Document {}:\n"
# version of how documents are arranged in the list. It is part of the material's version, so that
# an evaluation is not continued with another arrangement. 2: other paragraphs of the article come
# first among the distractors
_ARRANGEMENT = 2


class DocumentQuestions(LongTask):
    """A question about one or several documents of a list.

    Args:
      name: name of the task.
      file: description of the file that it reads, for errors.
      parse: called with the parsed JSON of a file; returns its contents. A missing field raises a
        KeyError.
    """

    source = "RULER, arXiv 2404.06654"
    answer_tokens = 32
    switches = ("data.long.facts",)
    options = ("lengths", "examples", "questions", "facts", "ablate")

    def __init__(self, name: str, file: str, parse: Callable[[Any], list[Content]]):
        self.name, self._file, self._parse = name, file, parse
        self.facts_hint = f"--facts FILE or data.long.facts=FILE: {file}"

    @property
    def has_facts(self) -> bool:
        return True

    def make_content(self, rng: np.random.Generator, material: Material) -> Content:
        content = material.contents[rng.integers(len(material.contents))]
        order = rng.permutation(len(content.questions))
        return content._replace(questions=tuple(content.questions[i] for i in order))

    def arrange_facts(self, material: Material, facts: str) -> Material:
        every = dict.fromkeys(
            text for content in material.contents for text in (*content.facts, *content.near)
        )
        if any(every.keys() <= set(content.facts) for content in material.contents):
            raise UserError(
                f"{facts}: all its documents belong to one question, so that there are no others "
                "to put it among; give a larger file"
            )
        return material._replace(
            texts=shuffle_forever(list(every)), version=[*material.version, _ARRANGEMENT]
        )

    def read_facts(self, facts: str) -> tuple[Content, ...]:
        """Return a content for each document, or group of documents, with questions.

        Raises:
          UserError: the file is not in the data set's format, or has no question with an answer.
        """
        try:
            contents = self._parse(parse_json("".join(read_text_pieces(facts))))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{facts}: {reason}; give {self._file}") from None
        if not contents:
            raise UserError(f"{facts}: has no question with an answer; give {self._file}")
        return tuple(contents)

    def make_filler(
        self,
        rng: np.random.Generator,
        content: Content,
        material: Material,
        room: Room,
    ) -> Iterator[str]:
        """Yield the near documents at random places among others; if not all fit, those that do."""
        assert material.texts is not None
        near = [text for text in dict.fromkeys(content.near) if text not in content.facts]
        free = max(room.tokens - sum(map(room.size, near)), 0)
        # how many tokens of other documents come before each near document
        places = np.sort(rng.random(len(near))) * free
        waiting = deque(zip(places, (near[i] for i in rng.permutation(len(near))), strict=True))
        used = 0
        for text in _without(material.texts(rng), content.facts, near):
            used += room.size(text)
            # `Document` ends the context at the first text that does not fit, so near documents
            # must come before it
            while waiting and waiting[0][0] < used:
                yield waiting.popleft()[1]
            yield text


def parse_squad(file: Any) -> list[Content]:
    """Return a content for each paragraph of SQuAD 1.1 or 2.0, with its answerable questions.

    As in RULER, the first distractors are the other paragraphs of the same article.
    """
    contents = []
    for article in file["data"]:
        paragraphs = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            asked = [
                _question(each["question"], [answer["text"] for answer in each["answers"]], (0,))
                for each in paragraph["qas"]
                if any(answer["text"].strip() for answer in each["answers"])
                and not each.get("is_impossible")
            ]
            if asked:
                contents.append(_content((paragraph["context"],), asked, tuple(paragraphs)))
    return contents


def parse_hotpot(file: Any) -> list[Content]:
    """Return a content for each question of HotpotQA, with all documents that it comes with."""
    contents = []
    for row in file:
        titles = [title for title, _ in row["context"]]
        documents = tuple(f"{title}\n{''.join(lines)}" for title, lines in row["context"])
        told = {title for title, _ in row["supporting_facts"]}
        facts = tuple(i for i, title in enumerate(titles) if title in told)
        if row["answer"].strip() and facts:
            asked = _question(row["question"], [row["answer"]], facts)
            contents.append(_content(documents, [asked]))
    return contents


def _question(text: str, answers: Sequence[str], facts: tuple[int, ...]) -> Question:
    references = tuple(dict.fromkeys(answer for answer in answers if answer.strip()))
    return Question(f"{_TASK}\n\nQuestion: {text.strip()} Answer:", references, facts, any_of=True)


def _content(
    documents: tuple[str, ...], asked: Sequence[Question], near: tuple[str, ...] = ()
) -> Content:
    return Content(_HEAD, documents, tuple(asked), separator="\n\n", label=_LABEL, near=near)


def _without(texts: Iterator[str], own: Sequence[str], near: Sequence[str]) -> Iterator[str]:
    """Yield texts without those in `own`, and without the first occurrence of those in `near`."""
    left = set(near)
    for text in texts:
        if text in left:
            left.remove(text)
        elif text not in own:
            yield text


QUESTIONS = {
    task.name: task
    for task in (
        DocumentQuestions("qa_1", "a JSON file of SQuAD, such as dev-v2.0.json", parse_squad),
        DocumentQuestions(
            "qa_2", "a JSON file of HotpotQA, such as hotpot_dev_distractor_v1.json", parse_hotpot
        ),
    )
}

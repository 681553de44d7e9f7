"""The page docs/samples.md: an example of each task of `famjax eval` on long documents.

    PYTHONPATH=tests/tasks python -m samples > docs/samples.md

writes it anew. `tests/tasks/test_samples.py` holds the page to what the tasks generate.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from famjax.tasks import TASKS
from famjax.tasks.long.document import LongTask
from famjax.tasks.passkey import Passkey
from famjax.tasks.questions.question_set import QuestionSet
from famjax.tokenizers.load import load_tokenizer

_INTRODUCTION = """\
# What the tasks ask

An example of each task of `famjax eval` on long documents ([evaluation.md](evaluation.md)), as a
model with the byte tokenizer reads it: the document, the question, and what counts as its answer.
Lines are broken here at 100 characters. The documents are short; longer ones have more filler.
`famjax report RUN` shows those that a run was asked, with its answers.
"""

_STORY = (
    "The ferry left at seven. Nobody on the pier waved. A boy counted the crates twice and wrote a "
    "number on his hand. Behind the lighthouse the fog was already thinning. The captain drank his "
    "tea cold. At noon they passed the wreck. Gulls sat on it in a row. The boy washed the number "
    "off before they landed."
)


def _paragraph(text: str, *asked: tuple[str, list[str]]) -> dict[str, Any]:
    """Return a paragraph of SQuAD with questions and their answers."""
    qas = [{"question": q, "answers": [{"text": a} for a in answers]} for q, answers in asked]
    return {"context": text, "qas": qas}


_SQUAD = {
    "data": [
        {
            "paragraphs": [
                _paragraph(
                    "The lighthouse of the island was built in 1843.",
                    ("When was the lighthouse built?", ["1843", "in 1843"]),
                ),
                _paragraph("Its lamp burnt oil until the war."),
                _paragraph("Its last keeper lived in the tower."),
            ]
        },
        {
            "paragraphs": [
                _paragraph(
                    "The first ferry carried forty people.",
                    ("How many people did the first ferry carry?", ["forty"]),
                ),
                _paragraph("On Sundays there is no ferry."),
                _paragraph("A bridge was planned, and never built."),
            ]
        },
    ]
}

_HOTPOT = [
    {
        "question": "In which town was the author of The Wreck born?",
        "answer": "Leith",
        "supporting_facts": [["The Wreck", 0], ["Ann Muir", 0]],
        "context": [
            ["The Wreck", ["The Wreck is a novel by Ann Muir."]],
            ["Ann Muir", ["Ann Muir was born in Leith.", " She wrote four novels."]],
            ["Lamps", ["The oil lamp is older than the gas lamp."]],
            ["Leith", ["Leith is a port."]],
            ["The Ferry", ["The Ferry is a play in three acts."]],
        ],
    },
    {
        "question": "What is older than the gas lamp?",
        "answer": "the oil lamp",
        "supporting_facts": [["Lamps", 0]],
        "context": [
            ["Lamps", ["The oil lamp is older than the gas lamp."]],
            ["Islands", ["On this island there is one road."]],
            ["The Pier", ["The pier was built of stone."]],
        ],
    },
]

_BABI = """\
1 Mary moved to the bathroom.
2 John went to the hall.
3 Where is Mary?\tbathroom\t1
"""

# tokens of the shown document, and its file of facts
_LONG: dict[str, tuple[int, Any]] = {
    "niah_single_1": (620, None),
    "niah_single_2": (700, None),
    "niah_single_3": (760, None),
    "niah_multikey_1": (900, None),
    "niah_multikey_2": (820, None),
    "niah_multikey_3": (1000, None),
    "niah_multivalue": (960, None),
    "niah_multiquery": (1100, None),
    "vt": (900, None),
    "cwe": (2600, None),
    "fwe": (1100, None),
    "qa_1": (640, _SQUAD),
    "qa_2": (700, _HOTPOT),
    "babilong": (420, _BABI),
    "passkey_depth": (480, None),
}

# a record, as a line of a file
_RECORDS: dict[str, dict[str, Any]] = {
    "narrativeqa": {
        "passage": "Ann keeps the light. In the storm she rows out to the wreck, and saves nine.",
        "question": "Who is saved?",
        "answer": ["Nine people from the wreck", "the shipwrecked"],
    },
    "qasper": {
        "input": "Which data do they use?\n\nWe train on the log books of 40 lighthouses.",
        "output": "log books of lighthouses",
    },
    "quality": {
        "article": "The boy counted the crates twice and wrote a number on his hand.",
        "questions": [
            {
                "question": "What did the boy count?",
                "options": ["gulls", "crates", "passengers", "lamps"],
                "gold_label": 2,
            }
        ],
    },
    "squality": {
        "document": "Ann keeps the light. In the storm she rows out to the wreck, and saves nine.",
        "questions": [
            {
                "question_text": "What is the plot of the story?",
                "responses": [{"response_text": "A lighthouse keeper saves nine people."}],
            }
        ],
    },
    "xlsum": {
        "text": "The ferry to the island is back after two weeks of storm.",
        "summary": "Ferry to the island runs again",
    },
    "longbench": {
        "dataset": "multifieldqa_en",
        "context": "The lighthouse was built in 1843.",
        "input": "When was the lighthouse built?",
        "answers": ["1843"],
        "length": 12,
        "all_classes": None,
    },
    "leval": {
        "input": "The lighthouse was built in 1843.",
        "instructions": ["When was the lighthouse built?"],
        "outputs": ["In 1843."],
        "evaluation": "f1",
        "source": "wiki",
    },
}


def render() -> str:
    """Return the page."""
    parts = [_INTRODUCTION, "## Facts in filler\n", _passkey()]
    with tempfile.TemporaryDirectory() as folder:
        parts += [_long(name, Path(folder)) for name in _LONG]
        parts.append("## Questions in files\n\nA line of the file, and what the model reads.\n")
        parts += [_questions(name, Path(folder)) for name in _RECORDS]
    return "\n".join(parts)


def _passkey() -> str:
    tokenizer = load_tokenizer("bytes")
    read = list(Passkey(tokenizer, digits=5).document(np.random.default_rng(0), 480))
    text = "".join(tokenizer.decode(piece.tokens) for piece in read)
    asked = text[: text.rindex(" ") + 1]
    answer = text.removeprefix(asked)
    return _section("passkey", "passkey", "--lengths 480", asked, [answer])


def _long(name: str, folder: Path) -> str:
    task, tokenizer = TASKS[name], load_tokenizer("bytes")
    assert isinstance(task, LongTask)
    length, facts = _LONG[name]
    story, file = folder / "story.txt", ""
    story.write_text(_STORY)
    if facts is not None:
        path = folder / f"{name}.facts"
        path.write_text(facts if isinstance(facts, str) else json.dumps(facts))
        file = str(path)
    material = task.load(str(story) if task.has_files else "", file, tokenizer)
    document = task.evaluated_document(tokenizer, length, 0, 1, material)
    read = itertools.islice(document.tokens(), 1, None)
    head = tokenizer.decode(next(document.tokens())[1:])
    question = document.content.questions[0]
    text = head + "".join(map(tokenizer.decode, read)) + question.text
    given = f"{name}:FILES" if task.has_files else name
    options = f"--lengths {length}" + (" --facts FILE" if facts is not None else "")
    return _section(name, given, options, text, question.references, question.any_of)


def _questions(name: str, folder: Path) -> str:
    task = TASKS[name]
    assert isinstance(task, QuestionSet)
    line = json.dumps(_RECORDS[name])
    (folder / f"{name}.jsonl").write_text(line)
    ((document,), _) = task.load(str(folder / f"{name}.jsonl"), skip_broken=False)
    asked = document.questions[0]
    return _section(
        name, f"{name}:FILE", "", document.text + asked.prompt, asked.references, True, line
    )


def _section(
    name: str,
    given: str,
    options: str,
    text: str,
    references: Sequence[str],
    any_of: bool = False,
    record: str = "",
) -> str:
    parts = [f"### {name}\n", f"`famjax eval RUN --tasks {' '.join([given, options]).strip()}`\n"]
    if record:
        parts.append(_block(record))
    parts.append(_block(text))
    kind = "Answer, any of" if any_of and len(references) > 1 else "Answer"
    parts.append(f"{kind}: {', '.join(f'`{each}`' for each in references)}\n")
    return "\n".join(parts)


def _block(text: str) -> str:
    return "\n".join(["```text", *_wrap(text), "```\n"])


def _wrap(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        yield from textwrap.wrap(line, 100, break_on_hyphens=False) or [""]


if __name__ == "__main__":
    print(render(), end="")

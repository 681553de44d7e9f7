"""Files for tasks on long documents."""

from __future__ import annotations

import functools
import json
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


# as SQuAD 2.0 has it
ARTICLES = [
    {
        "title": "Cats",
        "paragraphs": [
            {
                "context": f"Cat {i} has {i + 2} paws and sits.",
                "qas": [
                    {
                        "question": f"How many paws has cat {i}?",
                        "answers": [{"text": f"{i + 2}"}, {"text": f"{i + 2} paws"}],
                        "is_impossible": False,
                    },
                    {"question": "Who runs?", "answers": [], "is_impossible": True},
                ],
            }
            for i in range(3)
        ],
    },
    {
        "title": "Dogs",
        "paragraphs": [
            {
                "context": "A dog runs.",
                "qas": [{"question": "Who runs?", "answers": [{"text": "A dog"}]}],
            },
            {"context": "Nobody is asked of this.", "qas": []},
        ],
    },
]
# as HotpotQA has it
HOPS = [
    {
        "question": "Where was the author of A born?",
        "answer": "Rome",
        "context": [
            ["A", ["A is a book. ", "B wrote it."]],
            ["C", ["C is a town."]],
            ["B", ["B was born in Rome."]],
        ],
        "supporting_facts": [["A", 1], ["B", 0]],
    },
    {
        "question": "Is D older than E?",
        "answer": "yes",
        "context": [["D", ["D is 9."]], ["E", ["E is 8."]], ["F", ["F is 7."]]],
        "supporting_facts": [["D", 0], ["E", 0]],
    },
]
_FACTS = {
    "babilong": STORY,
    "qa_1": json.dumps({"version": "v2.0", "data": ARTICLES}),
    "qa_2": json.dumps(HOPS),
}


@functools.cache
def facts(task: str = "babilong") -> str:
    """Return the file of facts of a task."""
    file = Path(tempfile.mkdtemp(prefix="famjax-tests-")) / f"{task}.txt"
    file.write_text(_FACTS[task])
    return str(file)


def load(task: LongTask, files: str) -> Material:
    """Return what a task reads, with bytes for tokens."""
    return task.load(files, facts(task.name) if task.has_facts else "", load_tokenizer("bytes"))

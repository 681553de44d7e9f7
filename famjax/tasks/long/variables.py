"""Variable tracking: a chain of assignments in noise, RULER's `vt` (arXiv 2404.06654, 3 and B)."""

from __future__ import annotations

import string

import numpy as np

from famjax.tasks.long.document import Content, LongTask, Material, Question

_HEAD = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
# "assgined" is RULER's spelling
_QUESTION = (
    "\nQuestion: Find all variables that are assigned the value {value} in the text above. "
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables "
    "are assgined the value {value}, they are: "
)


class VariableTracking(LongTask):
    """A chain of assignments: a number to a variable, that one to the next, and so on for 5 names.

    RULER puts a solved example before the text. Here there is none: trained models do not need it.
    """

    name = "vt"
    source = "RULER, arXiv 2404.06654"
    answer_tokens = 30
    hops = 4

    def make_content(self, rng: np.random.Generator, material: Material) -> Content:
        names: list[str] = []
        while len(names) <= self.hops:
            name = "".join(rng.choice(list(string.ascii_uppercase), 5))
            if name not in names:
                names.append(name)
        value = str(rng.integers(10_000, 100_000))
        sources = [value, *(f"VAR {name}" for name in names[:-1])]
        facts = tuple(f"VAR {name} = {source}" for name, source in zip(names, sources, strict=True))
        text = _QUESTION.format(value=value, count=len(names))
        question = Question(text, tuple(names), tuple(range(len(names))))
        return Content(_HEAD, facts, (question,), in_order=True)

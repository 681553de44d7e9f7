"""L-Eval (arXiv 2307.11088), whose records say in `evaluation` how their answers are scored.

The metrics are those of its repository, `Evaluation/auto_eval.py`. Its prompts are different for
each model; here the questions have the same prompts as in other question sets.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from famjax.core.errors import UserError, did_you_mean
from famjax.tasks.questions.question_set import QuestionSet
from famjax.tasks.questions.records import Asked, AskedDocument, parse_leval

# names of data sets, by the `source` of their records, where this is different
_NAMES = {
    "financial": "financial_qa",
    "paper_review": "paper_assistant",
    "quality_raw": "quality",
    "SFGram": "sci_fi",
    "toefl_tpo": "tpo",
    "topic_retrieval": "topic_retrieval_longchat",
    "wiki": "natural_question",
    **{f"coursera_{part}": "coursera" for part in "abcd"},
}
# "B", "ACD", "(B) a text"
_CHOICE = re.compile(r"\(?([A-D]+)\)?(?![\w-])")
# whether a statement is true in a novel, and whether it is true in the world
_JUDGEMENT = re.compile(r"(True|False) \[fact: (True|False)\]")
_NOVEL = "the world described in the document"
_WORLD = "the real-world knowledge and facts up until your last training"


class _Scoring(NamedTuple):
    """How the answers of a record are scored.

    Attributes:
      metric: name of a metric of `famjax.eval.answer_scores`.
      stop: string before which an answer ends; "" is none.
      name: name of the data set, if it follows from the way of scoring; else "".
      is_prompt: whether an instruction of the record is the whole prompt.
    """

    metric: str
    stop: str = "\n"
    name: str = ""
    is_prompt: bool = False


_F1 = _Scoring("f1")
_ROUGE = _Scoring("rouge_l_unstemmed", stop="")
# where several letters may be right, all lines count, up to the next question that the model writes
_LETTER, _LETTERS = _Scoring("letter"), _Scoring("letters", stop="Question")
_TRUTH = _Scoring("truth")
_TEXT = _Scoring("contains")
# answers are reasoned step by step, in any number of paragraphs; records of GSM8K have no source,
# so their data set is named here
_MATH = _Scoring("final_number", stop="", name="gsm100", is_prompt=True)
_CODE = _Scoring("printed", stop="", name="codeU", is_prompt=True)


def _parse(record: dict[str, Any]) -> AskedDocument:
    how = record["evaluation"]
    if how in ("LLM", "human"):
        # nothing is lost: the same files repeat these documents and questions with f1 or rouge
        reason = f"evaluation {how!r}: a model or a person judges its answers"
        return AskedDocument(record["input"], (), left_out=reason)
    if how not in ("f1", "rouge", "exam"):
        raise UserError(
            f"evaluation {how!r} has no metric here{did_you_mean(how, ('f1', 'rouge', 'exam'))}"
        )
    document = parse_leval(record)
    answers = [asked.references[0].strip() for asked in document.questions]
    scoring = {"f1": _F1, "rouge": _ROUGE}.get(how) or _exam(record["instructions"], answers)
    source = record.get("source") or "without source"
    questions = document.questions
    if scoring is _TRUTH:
        questions = tuple(each for asked in questions for each in _in_both_worlds(asked))
    if scoring.is_prompt:
        pairs = zip(questions, record["instructions"], strict=True)
        questions = tuple(asked._replace(prompt=f"\n\n{prompt}") for asked, prompt in pairs)
    return document._replace(
        questions=tuple(
            asked._replace(
                metric=scoring.metric,
                stop=scoring.stop,
                subset=scoring.name or _NAMES.get(source, source),
            )
            for asked in questions
        )
    )


def _exam(questions: list[str], answers: list[str]) -> _Scoring:
    """Return how the answers of an exam are scored, by the form of its answers and questions."""
    if all(map(_JUDGEMENT.fullmatch, answers)):
        return _TRUTH
    choices = [_CHOICE.match(answer) for answer in answers]
    if all(choices):
        return _LETTERS if any(len(choice[1]) > 1 for choice in choices if choice) else _LETTER
    if all("step by step" in question for question in questions):
        if all("output of the code" in question for question in questions):
            return _CODE
        if all(map(str.isdigit, answers)):
            return _MATH
    return _TEXT


def _in_both_worlds(asked: Asked) -> tuple[Asked, Asked]:
    """Return a question about the novel, and the same question about the world."""
    judged = _JUDGEMENT.fullmatch(asked.references[0].strip())
    assert judged
    world = asked.prompt.replace(_NOVEL, _WORLD)
    if world == asked.prompt:
        question = asked.prompt.removesuffix("\nAnswer:")
        world = f"{question} Answer this question based on {_WORLD}.\nAnswer:"
    return (
        asked._replace(references=(judged[1],)),
        asked._replace(prompt=world, references=(judged[2],)),
    )


L_EVAL = QuestionSet("leval", "arXiv 2307.11088", _parse, (), answer_tokens=512)

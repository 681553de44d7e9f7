"""LongBench (arXiv 2308.14508) and L-Eval (arXiv 2307.11088): records name their own metric."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from famjax.core.errors import UserError, nearest
from famjax.tasks.questions.question_set import QuestionSet
from famjax.tasks.questions.records import AskedDocument, parse_leval, parse_longbench

# the benchmark's own prompts
_BRIEF = "Answer the question based on the given {what}. Only give me the answer and do not output "
_PASSAGES = _BRIEF.replace("{what}", "passages") + "any other words.\n\n"
_MULTIPLE = (
    f"{_PASSAGES}The following are given passages.\n{{context}}\n\n{_PASSAGES}"
    "Question: {input}\nAnswer:"
)
_STORY = (
    "Answer the question asconcisely as you can, using a single phrase if possible. Do not provide "
    "any explanation.\n\n"
)
_PAPER = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question "
    'cannot be answered based on the information in the article, write "unanswerable". If the '
    'question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide '
    "any explanation.\n\n"
)


class _Set(NamedTuple):
    """A data set of LongBench.

    Attributes:
      metric: of `famjax.eval.answer_scores`.
      answer_tokens: most of an answer.
      template: of the prompt.
      is_line: an answer ends with its line.
    """

    metric: str
    answer_tokens: int
    template: str
    is_line: bool = False


_SETS = {
    "narrativeqa": _Set(
        "f1",
        128,
        "You are given a story, which can be either a novel or a movie script, and a question. "
        f"{_STORY}Story: {{context}}\n\nNow, answer the question based on the story "
        f"{_STORY.removeprefix('Answer the question ')}Question: {{input}}\n\nAnswer:",
    ),
    "qasper": _Set(
        "f1",
        128,
        f"You are given a scientific article and a question. Answer the question {_PAPER}"
        "Article: {context}\n\n Answer the question based on the above article "
        f"{_PAPER}Question: {{input}}\n\nAnswer:",
    ),
    "multifieldqa_en": _Set(
        "f1",
        64,
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
        "question based on the above text, only give me the answer and do not output any other "
        "words.\n\nQuestion: {input}\nAnswer:",
    ),
    "hotpotqa": _Set("f1", 32, _MULTIPLE),
    "2wikimqa": _Set("f1", 32, _MULTIPLE),
    "musique": _Set("f1", 32, _MULTIPLE),
    "gov_report": _Set(
        "rouge_l",
        512,
        "You are given a report by a government agency. Write a one-page summary of the report."
        "\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
    ),
    "qmsum": _Set(
        "rouge_l",
        512,
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the "
        "query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
    ),
    "multi_news": _Set(
        "rouge_l",
        512,
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
    ),
    "trec": _Set(
        "classes",
        64,
        "Please determine the type of the question below. Here are some examples of questions."
        "\n\n{context}\n{input}",
        is_line=True,
    ),
    "triviaqa": _Set(
        "f1",
        32,
        _BRIEF.replace("{what}", "passage")
        + "any other words. The following are some examples.\n\n{context}\n{input}",
        is_line=True,
    ),
    "samsum": _Set(
        "rouge_l",
        128,
        "Summarize the dialogue into a few short sentences. The following are some examples."
        "\n\n{context}\n{input}",
        is_line=True,
    ),
    "passage_count": _Set(
        "numbers",
        32,
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
        "Please carefully read these paragraphs and determine how many unique paragraphs there are "
        "after removing duplicates. In other words, how many non-repeating paragraphs are there in "
        "total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after removing "
        "duplicates. The output format should only contain the number, such as 1, 2, 3, and so on."
        "\n\nThe final answer is:",
    ),
    "passage_retrieval_en": _Set(
        "numbers",
        32,
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
        "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}"
        "\n\nPlease enter the number of the paragraph that the abstract is from. The answer format "
        'must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is:',
    ),
    "lcc": _Set("code", 64, "Please complete the code given below. \n{context}Next line of code:"),
    "repobench-p": _Set(
        "code", 64, "Please complete the code given below. \n{context}{input}Next line of code:"
    ),
}
# whose metrics split words as jieba does
_CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
_LEVAL = {"f1": "f1", "rouge": "rouge_l", "exam": "exact"}
# of a multiple-choice question: "B", "ACD", "(B) a text"
_CHOICE = re.compile(r"\(?[A-D]+\)?(?![\w-])")


def _parse_longbench(record: dict[str, Any]) -> AskedDocument:
    name = record["dataset"].removesuffix("_e")
    if name in _CHINESE:
        raise UserError(f"dataset {name!r} is Chinese, whose metrics are not here")
    if name not in _SETS:
        raise UserError(f"dataset {name!r} has no metric here{nearest(name, _SETS)}")
    found = _SETS[name]
    record = {"prompt_template": found.template, **record}
    return _with_metric(
        parse_longbench(record), found.metric, found.answer_tokens, name, found.is_line
    )


def _parse_leval(record: dict[str, Any]) -> AskedDocument:
    name = record["evaluation"]
    if name in ("LLM", "human"):
        raise UserError(
            f"evaluation {name!r}: a model or a person judges its answers, not a metric"
        )
    if name not in _LEVAL:
        raise UserError(f"evaluation {name!r} has no metric here{nearest(name, _LEVAL)}")
    document, metric = parse_leval(record), _LEVAL[name]
    answers = [asked.references[0] for asked in document.questions]
    if name == "exam" and all(_CHOICE.match(answer.strip()) for answer in answers):
        metric = "letters"
    # a summary has lines
    return _with_metric(document, metric, None, record.get("source", ""), metric != "rouge_l")


def _with_metric(
    document: AskedDocument, metric: str, tokens: int | None, subset: str, is_line: bool
) -> AskedDocument:
    stop = "\n" if is_line else ""
    for asked in document.questions:
        for reference in asked.references:
            if metric == "numbers" and not re.search(r"\d", reference):
                raise UserError(f"the reference {reference!r} has no number")
            if metric == "classes" and reference not in asked.options:
                raise UserError(f"the reference {reference!r} is none of all_classes")
    questions = (
        asked._replace(metric=metric, stop=stop, answer_tokens=tokens, subset=subset)
        for asked in document.questions
    )
    return document._replace(questions=tuple(questions))


LONG_BENCH = QuestionSet("longbench", "arXiv 2308.14508", _parse_longbench, (), answer_tokens=128)
L_EVAL = QuestionSet("leval", "arXiv 2307.11088", _parse_leval, (), answer_tokens=256)

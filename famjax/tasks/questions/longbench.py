"""LongBench (arXiv 2308.14508), whose data sets have their own prompts, metrics and answer lengths.

These are taken from its repository: `config/dataset2prompt.json`, `config/dataset2maxlen.json` and
`eval.py`. Records of LongBench-E have the same fields.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from famjax.core.errors import UserError, did_you_mean
from famjax.tasks.questions.question_set import QuestionSet
from famjax.tasks.questions.records import Asked, AskedDocument, parse_longbench

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
      metric: name of a metric of `famjax.eval.answer_scores`.
      answer_tokens: maximum number of tokens of an answer.
      template: template of the prompt.
      is_line: whether an answer ends at the end of its line.
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
        "rouge_l_unique",
        512,
        "You are given a report by a government agency. Write a one-page summary of the report."
        "\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
    ),
    "qmsum": _Set(
        "rouge_l_unique",
        512,
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the "
        "query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
    ),
    "multi_news": _Set(
        "rouge_l_unique",
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
        + "any other words. The following are some examples.\n\n{context}\n\n{input}",
        is_line=True,
    ),
    "samsum": _Set(
        "rouge_l_unique",
        128,
        "Summarize the dialogue into a few short sentences. The following are some examples."
        "\n\n{context}\n\n{input}",
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
        "\n\nThe final answer is: ",
    ),
    "passage_retrieval_en": _Set(
        "numbers",
        32,
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
        "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}"
        "\n\nPlease enter the number of the paragraph that the abstract is from. The answer format "
        'must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
    ),
    "lcc": _Set(
        "code", 64, "Please complete the code given below. \n{context}Next line of code:\n"
    ),
    "repobench-p": _Set(
        "code", 64, "Please complete the code given below. \n{context}{input}Next line of code:\n"
    ),
    "lsht": _Set(
        "classes",
        64,
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
        is_line=True,
    ),
    "passage_retrieval_zh": _Set(
        "numbers",
        32,
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"
        "下面是一个摘要\n\n{input}\n\n"
        '请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
    ),
}
# data sets whose metrics split words with jieba
_SEGMENTED = ("multifieldqa_zh", "dureader", "vcsum")


def _parse(record: dict[str, Any]) -> AskedDocument:
    name = record["dataset"].removesuffix("_e")
    if name in _SEGMENTED:
        raise UserError(
            f"dataset {name!r}: its metric needs Chinese word segmentation, which is not here; "
            "leave it out"
        )
    if name not in _SETS:
        raise UserError(f"dataset {name!r} has no metric here{did_you_mean(name, _SETS)}")
    known, words = _SETS[name], record.get("length")
    if words is not None and not isinstance(words, int):
        raise UserError(f"length {words!r:.40} is not a number of words")
    document = parse_longbench({"prompt_template": known.template, **record})
    questions = [
        asked._replace(
            metric=known.metric,
            stop="\n" if known.is_line else "",
            answer_tokens=known.answer_tokens,
            subset=name,
            words=words,
        )
        for asked in document.questions
    ]
    for asked in questions:
        _check_references(asked)
    return document._replace(questions=tuple(questions))


def _check_references(asked: Asked) -> None:
    for reference in asked.references:
        if asked.metric == "numbers" and not re.search(r"\d", reference):
            raise UserError(f"the reference {reference!r} has no number")
        if asked.metric == "classes" and reference not in asked.options:
            raise UserError(f"the reference {reference!r} is none of all_classes")


LONG_BENCH = QuestionSet("longbench", "arXiv 2308.14508", _parse, (), answer_tokens=128)

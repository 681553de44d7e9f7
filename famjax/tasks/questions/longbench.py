"""LongBench (arXiv 2308.14508) and L-Eval (arXiv 2307.11088): records name their own metric."""

from __future__ import annotations

from typing import Any

from famjax.core.errors import UserError, nearest
from famjax.tasks.questions.question_set import QuestionSet
from famjax.tasks.questions.records import AskedDocument, parse_leval, parse_longbench

_LONGBENCH = {
    **dict.fromkeys(
        ["narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"],
        "f1",
    ),
    **dict.fromkeys(["gov_report", "qmsum", "multi_news", "samsum"], "rouge_l"),
    "trec": "classes",
    **dict.fromkeys(["passage_retrieval_en", "passage_count"], "numbers"),
}
_LEVAL = {"f1": "f1", "rouge": "rouge_l", "exam": "exact"}


def _parse_longbench(record: dict[str, Any]) -> AskedDocument:
    metric = _metric(record["dataset"].removesuffix("_e"), _LONGBENCH, "dataset")
    return _with_metrics(parse_longbench(record), metric)


def _parse_leval(record: dict[str, Any]) -> AskedDocument:
    metric = _metric(record["evaluation"], _LEVAL, "evaluation")
    return _with_metrics(parse_leval(record), metric)


def _with_metrics(document: AskedDocument, metric: str) -> AskedDocument:
    # a summary has lines
    stop = "" if metric == "rouge_l" else "\n"
    questions = (asked._replace(metric=metric, stop=stop) for asked in document.questions)
    return document._replace(questions=tuple(questions))


def _metric(name: str, known: dict[str, str], field: str) -> str:
    if name not in known:
        raise UserError(f"{field} {name!r} has no metric here{nearest(name, known)}")
    return known[name]


LONG_BENCH = QuestionSet("longbench", "arXiv 2308.14508", _parse_longbench, (), answer_tokens=128)
L_EVAL = QuestionSet("leval", "arXiv 2307.11088", _parse_leval, (), answer_tokens=256)

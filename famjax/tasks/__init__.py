"""Tasks: sources of training documents, and how runs are evaluated on them.

Each task has a file of its own, and is registered here. Synthetic documents are generated from a
seed and a number when they are read; nothing is downloaded.
"""

from __future__ import annotations

from famjax.tasks.harness import HarnessTask
from famjax.tasks.long.babilong import BabiLong
from famjax.tasks.long.frequencies import CommonWords, FrequentWords
from famjax.tasks.long.needles import NEEDLES
from famjax.tasks.long.passkey_depth import PasskeyDepth
from famjax.tasks.long.questions import QUESTIONS
from famjax.tasks.long.variables import VariableTracking
from famjax.tasks.passkey import PasskeyTask
from famjax.tasks.questions.leval import L_EVAL
from famjax.tasks.questions.longbench import LONG_BENCH
from famjax.tasks.questions.narrativeqa import NARRATIVE_QA
from famjax.tasks.questions.qasper import QASPER
from famjax.tasks.questions.quality import QUALITY
from famjax.tasks.questions.summaries import SQUALITY, XLSUM
from famjax.tasks.task import Task
from famjax.tasks.text import TextTask
from famjax.tasks.toy import TOYS, ToyTaskSpec
from famjax.tasks.translate import SummarizeTask, TranslateTask

TASKS: dict[str, Task] = {
    "text": TextTask(),
    "passkey": PasskeyTask(),
    **{name: ToyTaskSpec(toy) for name, toy in TOYS.items()},
    **NEEDLES,
    "vt": VariableTracking(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    **QUESTIONS,
    "babilong": BabiLong(),
    "passkey_depth": PasskeyDepth(),
    "narrativeqa": NARRATIVE_QA,
    "qasper": QASPER,
    "quality": QUALITY,
    "squality": SQUALITY,
    "xlsum": XLSUM,
    "longbench": LONG_BENCH,
    "leval": L_EVAL,
    "translate": TranslateTask(),
    "summarize": SummarizeTask(),
    "lm_eval": HarnessTask(),
}

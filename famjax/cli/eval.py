"""`famjax eval RUN --tasks passkey,copy,text:FILES --lengths 256,1024 [--json] [--plot]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from famjax.cli.arguments import RunArgument
from famjax.cli.eval_output import show_end, show_result, show_run
from famjax.cli.eval_plots import plot
from famjax.cli.eval_report import eval_folder, read_report, save_result
from famjax.cli.main import named_as_flags, parse
from famjax.core.errors import UserError
from famjax.core.json_files import dump_strictly
from famjax.core.paths import expanded
from famjax.processes import runtime

if TYPE_CHECKING:
    from famjax.tasks.task import Request, Task


@dataclass(frozen=True)
class Arguments:
    """Stream documents of any length through a run and evaluate it."""

    run: RunArgument
    """Folder of the run, or of a Hugging Face model."""
    tasks: str = ""
    """Tasks separated by commas. Default: the run's training task.
    passkey; toy tasks: random_walk, blocked_walk, copy, reverse, counting, algorithmic
    RULER's niah_single_1 to 3, niah_multikey_1 to 3,
    niah_multivalue, niah_multiquery, vt, cwe, fwe, qa_1, qa_2
    passkey_depth, babilong; with a text as filler: niah_single_2:FILES, babilong:FILES
    text:FILES (files, folders or globs separated by commas)
    text:holdout (the documents that training held out)
    questions in JSON lines: narrativeqa:FILES, qasper, quality, squality, xlsum, longbench, leval
    translate:SOURCES=TARGETS, summarize (lines of two files, or JSON lines of inputs and targets)
    lm_eval:NAMES (tasks of lm-evaluation-harness, or YAML files of such tasks)"""
    lengths: str = ""
    """Lengths of documents in tokens; of toy episodes in steps (digits, A's, actions, statements).
    Default: 256,1024,4096,16384 (passkey), 1024,4096,16384 (RULER), data.toy.test_steps (toy)."""
    examples: int | None = None
    """Number of documents or episodes of each length. Default: 20, or 1000 for toy tasks.
    For files with questions, the total number of documents, taken round robin from a collection's
    data sets; for translate and summarize, pairs; for lm_eval, questions per task. Default: all."""
    questions: int | None = None
    """Number of questions about each document, which is read once.
    Default: 1, or all for questions in files."""
    facts: str = ""
    """File with the facts for babilong (a file of bAbI, such as
    qa1_single-supporting-fact_test.txt), qa_1 (a JSON file of SQuAD) or qa_2 (one of HotpotQA)."""
    ablate: str = ""
    """Ablations, separated by commas, with which passkeys, documents with questions, and texts are
    evaluated once more:
    reset: reset the whole state at every block (always done for texts);
    memory: keep FAM, or another memory, at its initial value;
    segments: no memory segments."""
    skip_broken: bool = False
    """Leave out lines that cannot be read in files with questions, and report how many."""
    shots: int | None = None
    """Number of solved examples before each question of lm_eval. Default: the task's own."""
    chat: bool = False
    """Format the questions of lm_eval with the tokenizer's chat template."""
    beam: int | None = None
    """Beam size for translate and summarize. Default: 1, greedy decoding."""
    length_penalty: float | None = None
    """Length penalty x of beam search: the score is log p / length ** x. Default: 1."""
    no_repeat_ngram: int | None = None
    """Size of n-grams that must not occur twice in an output of beam search. Default: no limit."""
    tune: bool = False
    """Try length penalties from 0 to 2 in beam search, and take the best; for a development set."""
    max_tokens: int | None = None
    """Maximum tokens of a translation or summary, eos included.
    Default: twice the source's, rounded up to 16, 32, 48, 64, 96, 128, 192 ..., plus 16, but at
    most the longest target in training."""
    tokenized: bool = False
    """The files of translate are already tokenized, for example by Moses, so that BLEU does not
    tokenize them again."""
    window: int | None = None
    """Evaluate texts in windows of this many tokens, each with an empty memory, instead of whole.
    In files with questions, read only this many tokens from the end, with question and answer."""
    score: int | None = None
    """Score only this many predictions at the end of each --window. Default: all.
    Windows overlap so that every token is scored once; a document's first one is scored whole."""
    words: int | None = None
    """Published number of words of the texts, for word perplexity.
    Default: words are split at white space."""
    batch: int = 8
    """Maximum number of documents or windows in a batch."""
    mesh: str = ""
    """Shard the model and the documents over this machine's devices: auto, or sizes of axes, such
    as data=2,tensor=4. Default: use the first device."""
    json: bool = False
    """Print one JSON object instead of tables."""
    plot: bool = False
    """Plot accuracy by length and loss by position to files in RUN/plots."""


@named_as_flags(Arguments)
def run(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, "famjax eval")
    from famjax.tasks.parse import parse_lengths, parse_tasks  # JAX, for which --help need not wait

    tasks = parse_tasks(arguments.tasks)
    lengths = parse_lengths(arguments.lengths) if arguments.lengths else None
    for name in ("examples", "batch", "questions", "words", "max_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    report = evaluate(arguments, tasks, lengths)
    if arguments.json:
        print(dump_strictly(report))
    else:
        show_end(report)
    if arguments.plot:
        drawn = plot(report, expanded(arguments.run) / "plots")
        for path in drawn:
            print(f"wrote {path}", file=sys.stderr)
        if not drawn:
            print(
                "nothing to plot: results of these tasks do not depend on a length or position",
                file=sys.stderr,
            )
    return 0


def evaluate(
    arguments: Arguments, tasks: list[tuple[str, str]], lengths: list[int] | None
) -> dict[str, Any]:
    """Evaluate a run on all tasks; save each result in the run's folder, and print its tables.

    Returns:
      run, step, memory, and for each `Task.group` the list of its results; for passkey its rows.
    """
    runtime.setup()
    from famjax.convert.inference_mesh import inference_mesh
    from famjax.convert.open import open_model
    from famjax.eval.examples import weights_digest
    from famjax.eval.memory_usage import memory_report
    from famjax.tasks import TASKS
    from famjax.tasks.parse import HOLDOUT

    mesh = inference_mesh(arguments.run, arguments.mesh, arguments.batch)
    opened = open_model(arguments.run, mesh=mesh)
    if not opened.config.model.encoder.layers:  # those tasks fold feature maps first
        opened.cast_weights()
    tasks = tasks or [(opened.config.data.task, HOLDOUT)]
    _check_options(arguments, [TASKS[name] for name, _ in tasks])
    for note in ignored_options(arguments, [name for name, _ in tasks]):
        print(note, file=sys.stderr)
    folder = eval_folder(arguments.run)
    if folder:
        read_report(folder)  # a damaged one would be found after hours
        weights = weights_digest(folder.parent)
    report: dict[str, Any] = {
        "run": arguments.run,
        "step": opened.step,
        **{task.group: [] for task in TASKS.values() if task.group != "passkey"},
    }
    requests = [
        _request(arguments, name, part, lengths, folder)
        for name, files in tasks
        for part in _parts(TASKS[name], files)
    ]
    for request in requests:
        TASKS[request.task].check_request(opened, request)
    if len(requests) > 1:  # a single task checks its documents itself
        for request in requests:
            TASKS[request.task].check_documents(opened, request)
    for number, request in enumerate(requests):
        task = TASKS[request.task]
        try:
            result = task.evaluate(opened, request)
        except KeyboardInterrupt:
            if folder and folder.exists():
                kept = f"results of finished tasks are in {folder}"
                print(f"{kept}; questions answered there are not asked again", file=sys.stderr)
            raise
        if task.group == "passkey":
            report["passkey"] = result
        else:
            report.setdefault(task.group, []).append(result)
        if folder:
            # after each task, so that an error in a later one loses nothing
            save_result(folder, opened.step, weights, task.group, request.task, result)
        if not arguments.json:
            if not number:
                show_run(report)
            show_result(task.group, result)
    return {**report, "memory": memory_report()}


def _parts(task: Task, files: str) -> list[str]:
    """Return the parts of a task's files that have a result of their own."""
    named = [part for part in files.split(",") if part] if task.has_parts else []
    return named or [files]


def _request(
    arguments: Arguments, name: str, files: str, lengths: list[int] | None, folder: Path | None
) -> Request:
    from famjax.eval.ablations import parse_ablations
    from famjax.tasks.parse import HOLDOUT
    from famjax.tasks.task import Request

    return Request(
        name,
        None if files in ("", HOLDOUT) else files,
        lengths=lengths,
        examples=arguments.examples,
        batch=arguments.batch,
        window=arguments.window,
        score=arguments.score,
        words=arguments.words,
        questions=arguments.questions,
        facts=arguments.facts,
        ablate=parse_ablations(arguments.ablate),
        folder=folder,
        shots=arguments.shots,
        chat=arguments.chat,
        skip_broken=arguments.skip_broken,
        beam=1 if arguments.beam is None else arguments.beam,
        length_penalty=1.0 if arguments.length_penalty is None else arguments.length_penalty,
        no_repeat_ngram=arguments.no_repeat_ngram or 0,
        tune=arguments.tune,
        max_tokens=arguments.max_tokens,
        tokenized=arguments.tokenized,
    )


_OF_LONG_TASKS = "{given}: is for tasks on long documents; remove it"
_OF_TEXTS = "{given}: is for texts; remove it or add text:FILES"
_OF_HARNESS = "{given}: is for tasks of lm-evaluation-harness, lm_eval:NAMES"
_OF_PAIRS = "{given}: is for translate and summarize; remove it"
# options that only some tasks take, with the error if none of the given tasks does
_OPTIONS = {
    "lengths": (
        "--lengths is for passkey, RULER's, BABILong's and toy tasks; the given tasks have no "
        "lengths to choose; remove it, or add passkey to --tasks"
    ),
    "examples": "{given}: texts are read whole; name fewer files, and remove it",
    "questions": _OF_LONG_TASKS,
    "facts": _OF_LONG_TASKS,
    "ablate": "{given}: is for passkey, documents with questions and texts; remove it",
    "window": "{given}: is for texts, and for questions in files; remove it or add text:FILES",
    "score": _OF_TEXTS,
    "words": _OF_TEXTS,
    "shots": _OF_HARNESS,
    "chat": _OF_HARNESS,
    "skip_broken": "{given}: is for files with questions; remove it",
    "beam": _OF_PAIRS,
    "length_penalty": _OF_PAIRS,
    "no_repeat_ngram": _OF_PAIRS,
    "tune": _OF_PAIRS,
    "max_tokens": _OF_PAIRS,
    "tokenized": "{given}: is for translate; remove it",
}


def _check_options(arguments: Arguments, tasks: list[Task]) -> None:
    """Raise a `UserError` if an option is given that no task takes, or if two options clash."""
    for option, error in _OPTIONS.items():
        value = getattr(arguments, option)
        if _is_given(value) and not any(option in task.options for task in tasks):
            raise UserError(error.format(given=_as_flag(option, value)))
    if arguments.length_penalty is not None:
        if arguments.tune:
            raise UserError("--tune tries length penalties; leave out --length-penalty")
        if arguments.beam in (None, 1):
            raise UserError("--length-penalty: greedy decoding has none; give --beam 5")


def ignored_options(arguments: Arguments, tasks: list[str]) -> Iterator[str]:
    """Yield a line for each option that some of the tasks do not take."""
    from famjax.tasks import TASKS

    for option in _OPTIONS:
        value = getattr(arguments, option)
        others = [name for name in dict.fromkeys(tasks) if option not in TASKS[name].options]
        if _is_given(value) and others:
            yield f"{_as_flag(option, value)}: has no effect on {', '.join(others)}"


def _is_given(value: Any) -> bool:
    # compared by identity, since 0 == False, and 0 is a given value
    return not (value is None or value is False or value == "")


def _as_flag(option: str, value: Any) -> str:
    flag = f"--{option.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"

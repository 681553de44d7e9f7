"""Evaluation of encoder-decoders: BLEU and chrF of translations, ROUGE of summaries."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NotRequired, TypedDict

from famjax.core.errors import UserError
from famjax.data.pairs import Pairs
from famjax.eval import translation_scores
from famjax.eval.answer_scores import check_metrics, score_answer
from famjax.eval.examples import Example, Examples, digest, examples_name, weights_version
from famjax.eval.progress import TokenProgress
from famjax.eval.translator import Translation, Translator
from famjax.tasks.task import Request
from famjax.tokenizers.tokenizer import Tokenizer
from famjax.train.run import Run

# number of pairs whose outputs are stored together, for an evaluation that is stopped and continued
_GROUP = 512
# the length penalties that `request.tune` tries
PENALTIES = tuple(i / 5 for i in range(11))
_ROUGE = ("rouge_lsum", "rouge_l", "rouge_1", "rouge_2")


class BleuScores(TypedDict, total=False):
    """Scores of translations, see `famjax.eval.translation_scores`.

    Attributes:
      bleu, chrf, bleu_tokenized, bleu_compounds: the scores, from 0 to 100.
      signatures: sacrebleu's, for each score.
      tokenized: whether the files were taken as tokenized text.
    """

    bleu: float
    chrf: float
    bleu_tokenized: float
    bleu_compounds: float
    signatures: dict[str, str]
    tokenized: bool


class RougeScores(TypedDict, total=False):
    """Scores of summaries, from 0 to 1."""

    rouge_lsum: float
    rouge_l: float
    rouge_1: float
    rouge_2: float


class _Search(TypedDict):
    beam: int
    length_penalty: float
    no_repeat_ngram: int
    max_tokens: int | None


class _LostText(TypedDict):
    unread_sources: int
    unwritten_targets: int


class TranslationResult(_Search, _LostText, BleuScores, RougeScores):
    """The results of a search for outputs: scores of translations, or of summaries.

    Attributes:
      task: name of the task, translate or summarize.
      files: the files.
      examples: name of the examples file with the outputs.
      settings: a hash that identifies the outputs.
      beam, length_penalty, no_repeat_ngram, max_tokens: settings of the search.
      pairs, documents: number of pairs.
      empty_sources, empty_targets: number of pairs with an empty source or target.
      cut_sources: number of sources that were cut to source_words.
      source_words: the data's maximum number of words of a source; 0 is any.
      cut: number of outputs that reached their maximum number of tokens.
      longer: number of sources with more tokens than longest_trained.
      longest_trained: maximum number of tokens of a source in training; None if unknown.
      tokens: number of tokens of all outputs.
      seconds: time of the search.
      tokens_per_second: tokens in a second of the search; None for one of several length penalties.
      rows: a single row, with the number of pairs.
      unread_sources: number of sources with text that the tokenizer cannot read.
      unwritten_targets: number of targets with text that it cannot write.
      penalties: with `request.tune`, the pairs of a length penalty and its score.
    """

    task: str
    files: str
    examples: str
    settings: str
    pairs: int
    documents: int
    empty_sources: int
    empty_targets: int
    cut_sources: int
    source_words: int
    cut: int
    longer: int
    longest_trained: int | None
    tokens: int
    seconds: float
    tokens_per_second: float | None
    rows: list[dict[str, int]]
    penalties: NotRequired[list[list[float]]]


def read_pairs(files: str, task: str = "translate", source_words: int = 0) -> Pairs:
    """Return the pairs of files given as "SOURCES=TARGETS", or as files of JSON lines.

    Args:
      task: name of the task, for error messages.
      source_words: see `Pairs`.
    """
    source, _, target = files.partition("=")
    named = f"--tasks {task}:{files}"
    if not source:
        raise UserError(f"{named}: give the file of the sources before =")
    if "=" in target and not os.path.exists(target):
        raise UserError(f"{named}: write all sources before all targets, a.de,b.de=a.en,b.en")
    try:
        return Pairs(source, target, source_words)
    except UserError as error:
        message = str(error)
        for said, here in (
            ("give data.target, the file of the targets", "write SOURCES=TARGETS"),
            ("give them as data.source, without data.target", f"write {target} alone"),
            ("set data.target=", f"write {source} alone"),
            *((f"data.{option}=", "") for option in ("source", "target")),
            *((f"data.{option}", f"--tasks {task}") for option in ("source", "target")),
        ):
            message = message.replace(said, here)
        raise UserError(message) from None


def evaluate(run: Run, request: Request) -> TranslationResult:
    """Evaluate with one length penalty, or with the best of several (`request.tune`).

    Returns:
      a result of `evaluate_search`. With `request.tune` it is the result of the best penalty, and
      also has penalties, but no tokens_per_second.
    """
    if not request.tune:
        (found,) = evaluate_search(run, request, (request.length_penalty,))
        return found
    if request.beam == 1:
        raise UserError("--tune: greedy decoding has no length penalty; give --beam 5")
    searched = evaluate_search(run, request, PENALTIES)
    best = max(searched, key=_main_score)
    # the search ends when that of the last penalty does, so its speed is no single penalty's
    best["tokens_per_second"] = None
    best["penalties"] = [[each["length_penalty"], _main_score(each)] for each in searched]
    return best


def _main_score(result: TranslationResult) -> float:
    return result["rouge_lsum"] if result["task"] == "summarize" else result["bleu"]


def evaluate_search(
    run: Run, request: Request, length_penalties: Sequence[float]
) -> list[TranslationResult]:
    """Generate targets for the sources, and compare them with the targets in the files.

    Returns:
      a result for each length penalty, all from one search.

    Raises:
      UserError: the model has no encoder, the files are not pairs, or a library is missing.
    """
    assert request.files  # `needs_files`
    pairs = read_pairs(request.files, request.task, run.config.data.source_words)
    is_summary = request.task == "summarize"
    if is_summary:
        check_metrics(_ROUGE)
    else:
        translation_scores.check_library()
    translator = Translator(
        run.for_inference(),
        request.beam,
        length_penalties[0],
        no_repeat_ngram=request.no_repeat_ngram,
        batch=request.batch,
        max_tokens=request.max_tokens,
    )
    results = [
        _PenaltyResults(run, request, pairs, i, length_penalties)
        for i in range(len(length_penalties))
    ]
    count = min(request.examples or len(pairs), len(pairs))
    # before a training begins, all sources that its evaluations will read
    used = run.config.eval.examples or len(pairs) if request.is_trial else count
    translator.check(pairs[number][0] for number in range(min(used, len(pairs))))
    groups = [range(begin, min(begin + _GROUP, count)) for begin in range(0, count, _GROUP)]
    left = [group for group in groups if not all(each.has(group) for each in results)]
    if request.folder and len(left) < len(groups) and not request.quiet:
        known = count - sum(map(len, left))
        print(
            f"{known:,} of {count:,} outputs, and their speed, are those of an earlier evaluation; "
            f"to measure anew, remove {request.folder / results[0].name}",
            file=sys.stderr,
        )
    with TokenProgress(request.task, sum(map(len, left)), request.quiet) as progress:
        for i, numbers in enumerate(left):
            with nullcontext() if i else progress.compiling():
                tokens = _translate(translator, pairs, numbers, results)
            progress.advance(tokens, len(numbers))
    lost = _count_lost(run.tokenizer, (pairs[number] for number in range(count)))
    return [each.result(count, translator.longest, lost) for each in results]


def _count_lost(tokenizer: Tokenizer, pairs: Iterable[tuple[str, str]]) -> _LostText:
    """Count the sources and targets with text that the tokenizer cannot read or write."""
    unread = unwritten = 0
    for source, target in pairs:
        unread += not tokenizer.reads(tokenizer.encode_source(source))
        unwritten += not tokenizer.writes(tokenizer.encode_target(target), target)
    return {"unread_sources": unread, "unwritten_targets": unwritten}


class _PenaltyResults:
    """The outputs of a search with one of its length penalties, and their settings.

    `name` is the name of their file.

    Args:
      run: the run.
      request: the request.
      pairs: the sources and targets.
      number: index of this penalty in `length_penalties`.
      length_penalties: all penalties that share the search, and thus its time.
    """

    def __init__(
        self,
        run: Run,
        request: Request,
        pairs: Pairs,
        number: int,
        length_penalties: Sequence[float],
    ):
        length_penalty, is_tuned = length_penalties[number], len(length_penalties) > 1
        self.is_summary = request.task == "summarize"
        self.length_penalty, self._request, self._pairs = length_penalty, request, pairs
        self._search: _Search = {
            "beam": request.beam,
            "length_penalty": length_penalty,
            "no_repeat_ngram": request.no_repeat_ngram,
            "max_tokens": request.max_tokens,
        }
        self._settings: dict[str, Any] = {
            "run": repr(run.config),
            "weights": request.folder and weights_version(request.folder.parent, run.step),
            "task": request.task,
            "files": request.files,
            "pairs": pairs.digest(),
            **self._search,
            "tuned": is_tuned,
        }
        if run.tokenizer.first_id is not None:
            self._settings["first_id"] = run.tokenizer.first_id
        self.name = examples_name(self._settings)
        file = request.folder and request.folder / self.name
        # only the first penalty's results say which settings changed
        self._store = Examples(file, self._settings, quiet=number > 0)

    def has(self, numbers: range) -> bool:
        """Return whether the outputs for the pairs with these numbers are known."""
        return self._store.has((0, numbers), str(len(numbers)))

    def add(self, numbers: range, found: Sequence[Translation], seconds: float) -> None:
        """Add the outputs for the sources with these numbers."""
        examples = [
            _make_example(number, *self._pairs[number], each, self.is_summary)
            for number, each in zip(numbers, found, strict=True)
        ]
        times = {
            "tokens": sum(each.tokens for each in found),
            "read": 0.0,
            "answer": seconds,
            "version": str(len(numbers)),
        }
        self._store.add(((0, numbers), examples, times))

    def result(self, count: int, longest: int | None, lost: _LostText) -> TranslationResult:
        """Return the result over the first `count` pairs; see `evaluate_search`."""
        request = self._request
        examples, times = self._store.of_length(0, count)
        seconds, tokens = (sum(t[key] for t in times) for key in ("answer", "tokens"))
        scores: RougeScores | BleuScores = (
            _rouge(examples) if self.is_summary else _bleu(examples, request.tokenized)
        )
        assert request.files  # `needs_files`
        return {
            "task": request.task,
            "files": request.files,
            "examples": self.name,
            "settings": digest(self._settings),
            **self._search,
            "pairs": count,
            "documents": count,
            "empty_sources": sum(not example.prompt for example in examples),
            "empty_targets": sum(not example.references[0] for example in examples),
            "cut_sources": self._pairs.cut_sources(count),
            "source_words": self._pairs.source_words,
            "cut": sum(example.cut for example in examples),
            "longer": sum(longest is not None and example.tokens > longest for example in examples),
            "longest_trained": longest,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "rows": [{"pairs": count}],
            **scores,
            **lost,
        }


def _translate(
    translator: Translator,
    pairs: Pairs,
    numbers: range,
    results: Sequence[_PenaltyResults],
) -> int:
    """Generate targets for the sources with these numbers, and add them to the results.

    Returns:
      the number of tokens of the first penalty's targets.
    """
    before = translator.seconds
    by_penalty = translator.translate_each(
        [pairs[number][0] for number in numbers],
        [each.length_penalty for each in results],
    )
    for each, translations in zip(results, by_penalty, strict=True):
        each.add(numbers, translations, translator.seconds - before)
    return sum(each.tokens for each in by_penalty[0])


def _make_example(
    number: int, source: str, target: str, found: Translation, is_summary: bool
) -> Example:
    scores = _scores(found.text, target, is_summary)
    return Example(
        length=0,
        document=number,
        question=0,
        tokens=found.source_tokens,
        depth=None,
        prompt=source,
        references=[target],
        output=found.text,
        score=next(iter(scores.values())),
        cut=found.cut,
        scores=scores,
    )


def _scores(output: str, target: str, is_summary: bool) -> dict[str, float]:
    """Return the scores of one output, from 0 to 1; the first one is its main score."""
    if is_summary:
        return {name: score_answer(name, output, [target]) for name in _ROUGE}
    return {"chrf": translation_scores.chrf([output], [target]).value / 100}


def _rouge(examples: list[Example]) -> RougeScores:
    # computed anew, since stored examples may have scores of an earlier version
    scores = [_scores(example.output, example.references[0], True) for example in examples]

    def mean(name: str) -> float:
        return sum(each[name] for each in scores) / len(scores)

    return {
        "rouge_lsum": mean("rouge_lsum"),
        "rouge_l": mean("rouge_l"),
        "rouge_1": mean("rouge_1"),
        "rouge_2": mean("rouge_2"),
    }


def _bleu(examples: list[Example], tokenized: bool) -> BleuScores:
    outputs = [example.output for example in examples]
    references = [example.references[0] for example in examples]
    return bleu_scores(outputs, references, tokenized)


def bleu_scores(outputs: Sequence[str], references: Sequence[str], tokenized: bool) -> BleuScores:
    """Return the scores of translations, and their signatures."""
    how = "none" if tokenized else translation_scores.choose_tokenizer(references)
    scores = {
        "bleu": translation_scores.bleu(outputs, references, how),
        "chrf": translation_scores.chrf(outputs, references),
        "bleu_tokenized": translation_scores.tokenized_bleu(outputs, references, how),
        "bleu_compounds": translation_scores.compound_split_bleu(outputs, references, how),
    }
    return {
        "bleu": scores["bleu"].value,
        "chrf": scores["chrf"].value,
        "bleu_tokenized": scores["bleu_tokenized"].value,
        "bleu_compounds": scores["bleu_compounds"].value,
        "signatures": {name: score.signature for name, score in scores.items()},
        "tokenized": tokenized,
    }

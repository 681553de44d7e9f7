"""Evaluation of an encoder-decoder on pairs: BLEU and chrF of translations, ROUGE of summaries."""

from __future__ import annotations

from typing import Any

from famjax.core.errors import UserError
from famjax.data.pairs import Pairs
from famjax.eval import translation_scores
from famjax.eval.answer_scores import check_metrics, score_answer
from famjax.eval.examples import Example, Examples, digest, examples_name, weights_version
from famjax.eval.progress import TokenProgress
from famjax.eval.translator import Translator
from famjax.tasks.task import Request
from famjax.train.run import Run

# pairs whose outputs are kept together, should the evaluation be stopped
_GROUP = 512
# that are tried for the best
PENALTIES = tuple(i / 5 for i in range(11))
_ROUGE = ("rouge_l", "rouge_1", "rouge_2")


def read_pairs(files: str) -> Pairs:
    """Return the pairs of "SOURCES=TARGETS", or of files of JSON lines."""
    source, _, target = files.partition("=")
    try:
        return Pairs(source, target)
    except UserError as error:
        given = "give data.target, the file of the targets"
        said = str(error).replace(given, "write SOURCES=TARGETS")
        said = said.replace("set data.target=", f"write {source} alone")
        for option in ("data.source", "data.target"):
            said = said.replace(option, "--tasks")
        raise UserError(said) from None


def evaluate(run: Run, request: Request) -> dict[str, Any]:
    """Evaluate with a length penalty, or with the best of several (`request.tune`).

    Returns:
      What `evaluate_search` does; if tuned also penalties, (length penalty, score) of each.
    """
    if not request.tune:
        return evaluate_search(run, request)
    if request.beam == 1:
        raise UserError("--tune: greedy decoding has no length penalty; give --beam 5")
    found = [
        evaluate_search(run, request._replace(length_penalty=penalty)) for penalty in PENALTIES
    ]
    name = "rouge_l" if request.task == "summarize" else "bleu"
    best = max(found, key=lambda result: float(result[name]))
    return best | {"penalties": [[each["length_penalty"], each[name]] for each in found]}


def evaluate_search(run: Run, request: Request) -> dict[str, Any]:
    """Write the targets of the sources, and compare them with those of the files.

    Returns:
      task, files, examples (the name of the file of outputs), settings (what identifies them),
      beam, length_penalty, no_repeat_ngram; pairs, cut (outputs at their most tokens), longer
      (sources with more tokens than longest_trained), tokens (of all outputs), tokens_per_second,
      seconds; rows (one of them); of translate bleu, chrf, bleu_tokenized and bleu_compounds (see
      `famjax.eval.translation_scores`), from 0 to 100, signatures (of each, by sacrebleu) and
      tokenized (whether the files were taken to be); of summarize rouge_l, rouge_1 and rouge_2,
      from 0 to 1.

    Raises:
      UserError: a model without an encoder, files that are not pairs, or a missing library.
    """
    assert request.files  # `needs_files`
    pairs, is_summary = read_pairs(request.files), request.task == "summarize"
    if is_summary:
        check_metrics(_ROUGE)
    else:
        translation_scores.check_library()
    how: dict[str, Any] = {
        "beam": request.beam,
        "length_penalty": request.length_penalty,
        "no_repeat_ngram": request.no_repeat_ngram,
    }
    translator = Translator(
        run.with_folded_maps(),
        request.beam,
        request.length_penalty,
        request.no_repeat_ngram,
        request.batch,
    )
    settings = {
        "run": repr(run.config),
        "weights": request.folder and weights_version(request.folder.parent, run.step),
        "task": request.task,
        "pairs": pairs.digest(),
        **how,
    }
    name = examples_name(request.task, request.files, " ".join(map(str, how.values())))
    store = Examples(request.folder and request.folder / name, settings)
    count = min(request.examples or len(pairs), len(pairs))
    with TokenProgress(request.task, count, request.quiet) as progress:
        for begin in range(0, count, _GROUP):
            numbers = range(begin, min(begin + _GROUP, count))
            if not store.has((0, numbers), str(len(numbers))):
                store.add(_translate(translator, pairs, numbers, progress, is_summary))
    examples, times = store.of_length(0, count)
    seconds, tokens = (sum(t[key] for t in times) for key in ("answer", "tokens"))
    return {
        "task": request.task,
        "files": request.files,
        "examples": name,
        "settings": digest(settings),
        **how,
        "pairs": count,
        "documents": count,
        "cut": sum(example.cut for example in examples),
        "longer": sum(example.tokens > translator.longest for example in examples),
        "longest_trained": translator.longest,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "rows": [{"pairs": count}],
        **(_rouge(examples) if is_summary else _bleu(examples, request.tokenized)),
    }


def _translate(
    translator: Translator,
    pairs: Pairs,
    numbers: range,
    progress: TokenProgress,
    is_summary: bool,
) -> tuple[tuple[int, range], list[Example], dict[str, Any]]:
    """Return a batch of `Examples.add`: the pairs with these numbers."""
    texts = [pairs[number] for number in numbers]
    before = translator.seconds
    with progress.compiling():
        found = translator.translate([source for source, _ in texts])
    seconds = translator.seconds - before
    written = sum(each.tokens for each in found)
    progress.advance(written, len(numbers))
    examples = []
    for number, (source, target), each in zip(numbers, texts, found, strict=True):
        scores = _scores(each.text, target, is_summary)
        first = next(iter(scores.values()))
        examples.append(
            Example(
                length=0,
                document=number,
                question=0,
                tokens=each.source_tokens,
                depth=None,
                prompt=source,
                references=[target],
                output=each.text,
                score=first,
                cut=each.cut,
                scores=scores,
            )
        )
    times = {"tokens": written, "read": 0.0, "answer": seconds, "version": str(len(numbers))}
    return (0, numbers), examples, times


def _scores(output: str, target: str, is_summary: bool) -> dict[str, float]:
    """Return the scores of one output, from 0 to 1; the first is shown with it."""
    if is_summary:
        return {name: score_answer(name, output, [target]) for name in _ROUGE}
    return {"chrf": translation_scores.chrf([output], [target]).value / 100}


def _rouge(examples: list[Example]) -> dict[str, float]:
    return {
        name: sum(example.scores[name] for example in examples) / len(examples) for name in _ROUGE
    }


def _bleu(examples: list[Example], tokenized: bool) -> dict[str, Any]:
    outputs = [example.output for example in examples]
    references = [example.references[0] for example in examples]
    how: translation_scores.Tokenizer = "none" if tokenized else "13a"
    scores = {
        "bleu": translation_scores.bleu(outputs, references, how),
        "chrf": translation_scores.chrf(outputs, references),
        "bleu_tokenized": translation_scores.tokenized_bleu(outputs, references, how),
        "bleu_compounds": translation_scores.compound_split_bleu(outputs, references, how),
    }
    values: dict[str, Any] = {name: score.value for name, score in scores.items()}
    signatures = {name: score.signature for name, score in scores.items()}
    return values | {"signatures": signatures, "tokenized": tokenized}

"""Question sets as seqio tasks, for T5X and other users of seqio. Needs the extra seqio.

    from famjax.eval.seqio_questions import register
    register("qasper", {"test": "qasper/*.jsonl.gz"}, vocabulary)
    seqio.get_mixture_or_task("famjax_qasper")

Each question is an example: its document and prompt are the inputs, and its first reference is the
targets. Options are not ranked: an answer is right if it equals the right option.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from famjax.core.errors import UserError, did_you_mean
from famjax.core.optional import missing_message, missing_modules
from famjax.eval.answer_scores import score_answer
from famjax.tasks import TASKS
from famjax.tasks.questions.question_set import QuestionSet


def register(name: str, files: Mapping[str, str], vocabulary: Any) -> str:
    """Register `famjax_NAME` in seqio, and return that name.

    Args:
      name: name of a question set in `famjax.tasks.TASKS`, such as "qasper".
      files: for each split the files, in the form of `famjax eval --tasks NAME:FILES`.
      vocabulary: seqio vocabulary for inputs and targets.

    Raises:
      UserError: there is no such question set, a split cannot be read, or seqio is not installed.
    """
    if missing := missing_modules(["seqio", "tensorflow"]):
        raise UserError(f"seqio tasks: {missing_message(missing)}")
    import seqio
    import tensorflow as tf

    task = TASKS.get(name)
    if not isinstance(task, QuestionSet):
        known = [each for each, found in TASKS.items() if isinstance(found, QuestionSet)]
        raise UserError(f"{name}: is no set of questions{did_you_mean(name, known)}")
    examples = {split: list(_examples(task, where)) for split, where in files.items()}
    one, several = tf.TensorSpec((), tf.string), tf.TensorSpec((None,), tf.string)
    signature = {"inputs": one, "targets": one, "references": several, "options": several}
    signature["metrics"] = several

    def dataset(split: str, shuffle_files: bool, seed: int | None = None) -> Any:
        del shuffle_files, seed  # the questions keep their order
        return tf.data.Dataset.from_generator(
            lambda: iter(examples[split]), output_signature=signature
        )

    feature = seqio.Feature(vocabulary, add_eos=True)
    seqio.TaskRegistry.add(
        f"famjax_{name}",
        source=seqio.FunctionDataSource(dataset, splits=tuple(files)),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features={"inputs": feature, "targets": feature},
        postprocess_fn=_postprocess,
        metric_fns=[_measure],
    )
    return f"famjax_{name}"


def _examples(task: QuestionSet, files: str) -> Iterator[dict[str, Any]]:
    """Yield the questions in files as features.

    Lists are arrays of objects, so that empty ones count as lists of strings.
    """
    documents, _ = task.load(files, skip_broken=False)
    for document in documents:
        for asked in document.questions:
            metrics = [asked.metric] if asked.metric else task.metrics
            yield {
                "inputs": document.text + asked.prompt,
                "targets": asked.references[0],
                "references": np.array(asked.references, object),
                "options": np.array(asked.options, object),
                "metrics": np.array(["exact"] if "accuracy" in metrics else metrics, object),
            }


def _postprocess(output: str, example: Mapping[str, Any], is_target: bool = False) -> Any:
    """Return an output unchanged; in place of a target return what the output is scored with."""
    if not is_target:
        return output
    return {
        name: [value.decode() for value in np.asarray(example[name]).tolist()]
        for name in ("references", "options", "metrics")
    }


def _measure(targets: Sequence[Any], predictions: Sequence[str]) -> dict[str, float]:
    """Return the mean of each metric over the questions that have it."""
    scores: dict[str, list[float]] = {}
    for target, output in zip(targets, predictions, strict=True):
        for metric in target["metrics"]:
            arguments = (output, target["references"], target["options"])
            scores.setdefault(metric, []).append(score_answer(metric, *arguments))
    return {metric: float(np.mean(values)) for metric, values in scores.items()}

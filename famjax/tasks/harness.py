"""Tasks of lm-evaluation-harness, `famjax eval --tasks lm_eval:hellaswag,lambada_openai`."""

from __future__ import annotations

from typing import Any

from famjax.tasks.task import EvaluationTask


class HarnessTask(EvaluationTask):
    """Its `files` are names of the harness's tasks, or YAML files with tasks."""

    group = "lm_eval"
    options = ("examples", "shots", "chat")
    evaluation = "famjax.eval.harness:evaluate"
    request_check = "famjax.eval.harness:check_names"
    headline = "value"
    files = "hellaswag"
    needs_files = True
    has_parts = True

    def scores(self, results: Any) -> dict[str, float]:
        """Return the first metric of each task."""
        scores: dict[str, float] = results["scores"]
        return scores

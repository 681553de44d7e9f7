"""Plot of all scores of runs by their memory segments, like TransformerFAM's Figure 4."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from famjax.cli.figures import new_figure, save_figure
from famjax.core.errors import UserError
from famjax.core.units import counted

# for each `Task.group`, the key of a score that is better if higher; rows of results are averaged
_SCORES = {
    "text": "accuracy",
    "passkey": "key_accuracy",
    "toy": "episode_accuracy",
    "long": "score",
    "questions": "score",
}


def normalized_scores(
    found: Sequence[dict[str, Any]], shared: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return for every task the scores of the runs divided by the best run's, [runs].

    Args:
      found: results of each run by label, see `famjax.cli.report.read_results`.
      shared: labels of tasks that all runs have.
    """
    normalized = {}
    for label in shared:
        group = found[0][label]["group"]
        if group in _SCORES:
            scores = _scores(group, [results[label]["result"] for results in found])
            if scores.max() > 0:
                normalized[label] = scores / scores.max()
    return normalized


def _scores(group: str, results: Sequence[Any]) -> np.ndarray:
    """Return a score for each run, the mean over the lengths that all runs have."""
    name = _SCORES[group]
    if all(isinstance(result, dict) and name in result for result in results):
        return np.array([float(result[name]) for result in results])
    every = [
        {row.get("length"): row[name] for row in (r if isinstance(r, list) else r["rows"])}
        for r in results
    ]
    shared = set.intersection(*map(set, every))
    return np.array([np.mean([rows[n] for n in shared]) if shared else 0.0 for rows in every])


def draw_segments(
    found: Sequence[dict[str, Any]], shared: Sequence[str], runs: Sequence[Path], path: Path
) -> Path:
    """Plot the normalized scores by the number of memory segments, with a line for each mixer.

    Mixers without memory segments, such as full attention, have a horizontal line.

    Args:
      found: results of each run by label, see `famjax.cli.report.read_results`.
      shared: labels of tasks that all runs have.
      runs: folders of the runs.
      path: file to write.

    Raises:
      UserError: a folder is not a run, or there is no score above 0.
    """
    from famjax.config.resolved import resolve_model
    from famjax.mixers import mixer_specs
    from famjax.train.run_folder import read_run_config

    normalized = normalized_scores(found, shared)
    if not normalized:
        raise UserError("--segments: no task that all runs were evaluated on has a score above 0")
    mixers: dict[str, list[tuple[int | None, int]]] = {}
    for number, run in enumerate(runs):
        config = read_run_config(run)
        if config is None:
            raise UserError(
                f"--segments: {run} is not a run's folder, so that its number of memory segments "
                "is not known; leave it out"
            )
        model = resolve_model(config.model)
        has_segments = any("model.memory_segments" in spec.keys for spec in mixer_specs(model))
        own = model.memory_segments if has_segments else None
        name = model.mixer if model.stack == "residual" else model.stack
        mixers.setdefault(name, []).append((own, number))
    figure, axes = new_figure(size=(7, 4.5))
    every = np.array(list(normalized.values()))
    tasks = counted(len(every), "task")
    for i, (mixer, places) in enumerate(mixers.items()):
        # runs with the same number of segments, such as seeds, are averaged
        segments = sorted({m for m, _ in places if m is not None})
        if not segments:
            level = every[:, [number for _, number in places]].mean()
            axes.axhline(level, color=f"C{i}", linestyle=":", label=f"{mixer}, no segments")
            continue
        for m, number in places:
            axes.plot([m] * len(every), every[:, number], "o", color=f"C{i}", alpha=0.3, ms=4)
        means = [every[:, [n for m, n in places if m == at]].mean() for at in segments]
        axes.plot(segments, means, "o-", color=f"C{i}", label=f"{mixer}, mean of {tasks}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="memory segments", ylabel="score, of the best run's")
    axes.grid(alpha=0.3)
    axes.legend()
    return save_figure(figure, path)

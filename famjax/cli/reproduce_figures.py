"""Figures of `famjax reproduce`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from famjax.cli.figures import new_figure
from famjax.cli.reproduce_results import Results
from famjax.reproduce.experiment import Score, Variant
from famjax.reproduce.judge import mean_and_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# maximum number of scores that a figure has side by side
_PANELS = 3
# characters of a line of a figure's title
_TITLE_WIDTH = 70
# an axis is logarithmic if the largest x is at least this many times the smallest
_FAR_APART = 100
# it is also logarithmic if at least so many x have equal ratios of at least so much
_EQUAL_RATIOS = ((4, 0.0), (3, 4.0))
# maximum number of whole x that are all written on a linear axis
_MAX_TICKS = 10


def plot(results: Results) -> Figure:
    """Plot what the paper plots, with intervals over seeds.

    With an axis, this is a line for each variant over the points of the measure, if it has points,
    or else the drawn scores over the variants' x, side by side in rows of three. Without an axis,
    it is a row for each variant.
    """
    experiment = results.experiment
    scores = [experiment.score(name) for name in experiment.drawn] or [experiment.scores[0]]
    height = 4 if experiment.axis else 1.2 + 0.35 * len(experiment.variants)
    columns, rows = min(len(scores), _PANELS), -(-len(scores) // _PANELS)
    size = (7 if len(scores) == 1 else 10, height * rows)
    figure, axes = new_figure(rows, columns, size)
    title = f"{experiment.source}, here: {experiment.title}"
    figure.suptitle(textwrap.fill(title, _TITLE_WIDTH), fontsize="medium")
    panels = np.ravel(axes)
    for panel in panels[len(scores) :]:
        panel.remove()
    panels = panels[: len(scores)]
    for panel in panels:
        panel.grid(alpha=0.3, axis="y" if experiment.axis else "both")
    if experiment.axis and experiment.measure.points:
        _draw_points(panels[0], results)
        return figure
    for panel, score in zip(panels, scores, strict=True):
        _draw_score(panel, results, score)
    return figure


def _draw_score(axes: Any, results: Results, score: Score) -> None:
    """Draw a score of all variants, over their x if the experiment has an axis."""
    experiment = results.experiment
    factor = 100 if score.unit else 1
    done = [variant for variant in experiment.variants if results.values(variant.name, score.name)]
    points = [
        np.multiply(factor, mean_and_interval(results.values(v.name, score.name))) for v in done
    ]
    label = f"{score.name}, %" if score.unit else score.name
    if experiment.axis:
        _draw_lines(axes, done, points, score.unit)
        axes.set(xlabel=experiment.axis, ylabel=label)
    else:
        _draw_rows(axes, [variant.name for variant in done], points, score.unit)
        axes.set_xlabel(label)


def _draw_rows(axes: Any, names: Sequence[str], points: Sequence[np.ndarray], unit: str) -> None:
    """Draw a point with its interval for each name, one below the other."""
    mean, half = np.array(points).T
    bars = _error_bars(mean, half, unit)
    axes.errorbar(mean, names, xerr=bars, fmt="o", capsize=3)
    axes.invert_yaxis()
    axes.margins(y=0.5 / len(names))


def _draw_points(axes: Any, results: Results) -> None:
    """Draw a line for each variant over the points of the measure."""
    experiment = results.experiment
    points = experiment.measure.points
    unit = experiment.score(next(iter(points))).unit
    count = len(experiment.variants)
    for number, variant in enumerate(experiment.variants, 1):
        later = count - number  # number of lines drawn over this one
        values = [results.values(variant.name, name) for name in points]
        if values[0]:
            line = np.array([mean_and_interval(each) for each in values]) * (100 if unit else 1)
            mean, half = line.T
            bars = _error_bars(mean, half, unit)
            x = list(points.values())
            # wider and larger than those drawn over it, so that equal ones stay visible
            look = {"marker": "o", "markersize": 5 + later, "linewidth": 1.5 + later / 2}
            bar_look = {"capsize": 3, "elinewidth": 1.5, "label": variant.name}
            axes.errorbar(x, mean, yerr=bars, **look, **bar_look)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(points.values()), list(points))
    axes.set(xlabel=experiment.axis, ylabel=unit or "")
    axes.legend()


def _error_bars(mean: np.ndarray, half: np.ndarray, unit: str) -> np.ndarray:
    """Return the lengths of the error bars below and above means [n], [2 n].

    Shares end at 0 and 100%, which Student's interval of a few seeds may exceed.
    """
    half = np.nan_to_num(half)
    if unit != "%":
        return np.stack([half, half])
    return np.stack([np.minimum(half, mean), np.minimum(half, 100 - mean)])


def _draw_lines(
    axes: Any, variants: Sequence[Variant], points: Sequence[np.ndarray], unit: str
) -> None:
    """Draw a line for each `line` of the variants, and a horizontal one for those without x."""
    lines = list(dict.fromkeys(variant.line for variant in variants if variant.x is not None))
    for line in lines:
        own = [
            (variant.x, *point)
            for variant, point in zip(variants, points, strict=True)
            if variant.x is not None and variant.line == line
        ]
        x, mean, half = np.array(own).T
        bars = _error_bars(mean, half, unit)
        axes.errorbar(x, mean, yerr=bars, marker="o", capsize=3, label=line or None)
    places = sorted({variant.x for variant in variants if variant.x is not None})
    if _is_geometric(places):
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{x:g}" for x in places])
    elif places and min(places) > 0 and max(places) >= _FAR_APART * min(places):
        axes.set_xscale("log")
    elif places and len(places) <= _MAX_TICKS and all(x == round(x) for x in places):
        axes.set_xticks(places, [f"{x:g}" for x in places])
    level = [pair for pair in zip(variants, points, strict=True) if pair[0].x is None]
    for number, (variant, point) in enumerate(level, len(lines)):
        axes.axhline(point[0], linestyle=":", color=f"C{number}", label=variant.name)
    if len(lines) + len(level) > 1:
        axes.legend()


def _is_geometric(x: Sequence[float]) -> bool:
    """Return whether sorted x such as 8, 16, 32, 64 or 4, 16, 64 have equal ratios."""
    if len(x) < 2 or x[0] <= 0:
        return False
    ratio = x[1] / x[0]
    is_enough = any(len(x) >= count and ratio >= least for count, least in _EQUAL_RATIOS)
    return is_enough and bool(np.allclose(np.divide(x[1:], x[:-1]), ratio))

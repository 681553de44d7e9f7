"""Plots of `famjax analyze RUN --memory`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from famjax.cli.analyze_memory import doubling_spans, increases_by_part
from famjax.cli.figures import new_figure, save_figure

# a function that draws on axes
_Panel = Callable[[Any], None]
_PANELS_IN_ROW, _PANEL_SIZE = 5, (3.6, 3.5)


def plot_memory(report: dict[str, Any], path: Path) -> None:
    """Plot the measures by block, the gates by part, the losses, and the reach of the gradient."""
    panels = _layer_panels(report) if "layers" in report else []
    if "ngrams" in report:
        panels += _ngram_panels({**report["ngrams"], "has_answer": report["has_answer"]})
    rows, columns = -(-len(panels) // _PANELS_IN_ROW), min(len(panels), _PANELS_IN_ROW)
    width, height = _PANEL_SIZE
    figure, axes = new_figure(rows, columns, (width * columns, height * rows))
    for draw, axis in zip_longest(panels, np.ravel(axes)):
        if draw is None:
            axis.set_axis_off()
        else:
            draw(axis)
    save_figure(figure, path)


def _layer_panels(report: dict[str, Any]) -> list[_Panel]:
    """Return functions that each draw a panel about the memory of layers."""
    part, has_parts = report["part"], len(report["without_each"][0]) > 1
    titles = {
        "rms": "size (RMS)",
        "rotation": "rotation, degrees per block",
        "rank": "rank",
        "similarity": f"similarity of {part}s (cosine)",
        "mass": "memory's share of what is read",
    }
    if not has_parts:
        # of a single part there is no similarity, and the loss without it is that without all
        del titles["similarity"]
    panels: list[_Panel] = [
        functools.partial(_plot_measure, report, *each) for each in titles.items()
    ]
    if np.size(report["gates"]):
        panels.append(functools.partial(_plot_gates, report))
    panels.append(functools.partial(_plot_losses, report, "at its initial value"))
    panels.append(functools.partial(_plot_reach, report))
    if has_parts:
        panels.append(functools.partial(_plot_parts, report))
    return panels


def _ngram_panels(found: dict[str, Any]) -> list[_Panel]:
    """Return functions that each draw a panel about an n-gram memory."""
    return [
        functools.partial(_plot_contexts, found["contexts"]),
        functools.partial(_plot_losses, found, "without the n-grams so far"),
    ]


def _plot_measure(report: dict[str, Any], name: str, title: str, axis: Any) -> None:
    values = np.array(report[name])
    blocks = np.arange(1, len(values) + 1)
    for layer, of_layer in zip(report["layers"], values.T, strict=True):
        axis.plot(blocks, of_layer, label=f"layer {layer}", linewidth=1)
    axis.set(title=title, xlabel="block", xscale="log")
    if name in ("rms", "rotation") and values.min() > 0:
        axis.set_yscale("log")
    if name == "rms":
        axis.legend()


def _plot_losses(report: dict[str, Any], state: str, axis: Any) -> None:
    """Plot the loss along the document, with the memory and without: means over doubling spans."""
    loss, has_answer = np.array(report["loss"]), report["has_answer"]
    both = ((loss, "with the memory"), (loss + report["without"], state))
    for number, (values, label) in enumerate(both):
        if has_answer:
            # its loss is that of the answer alone
            axis.plot(len(loss), values[-1], f"C{number}*", label=f"the answer, {label}")
            values = values[:-1]
        spans = doubling_spans(len(values))
        # blocks are counted from 1
        centers = [span[0] + (len(span) + 1) / 2 for span in spans]
        means = [values[list(span)].mean() for span in spans]
        axis.plot(centers, means, f"C{number}.-", label=label)
    axis.set(title="loss, nats", xlabel="block", xscale="log")
    axis.legend(fontsize="small")


def _plot_reach(report: dict[str, Any], axis: Any) -> None:
    reach = np.array(report["reach"])
    axis.plot(np.arange(1, len(reach) + 1), np.maximum(reach, 1e-12))
    what = "answer's loss" if report["has_answer"] else "last block's loss"
    axis.set(title=f"gradient of the {what}", xlabel="blocks before", yscale="log")


def _plot_parts(report: dict[str, Any], axis: Any) -> None:
    increases, what = increases_by_part(report)
    axis.bar(np.arange(len(increases)), increases)
    axis.set(title=f"loss without one, nats,\n{what}", xlabel=report["part"])


def _plot_contexts(rows: list[dict[str, Any]], axis: Any) -> None:
    names = [str(row["context"]) if row["context"] else "none" for row in rows]
    shares = np.array([100 * row["share"] for row in rows])
    axis.bar(names, shares, color="C7", label="tokens")
    axis.bar(names, shares * [row["right"] for row in rows], color="C2", label="recalled right")
    axis.set(title="longest context found, %", xlabel="tokens of the context")
    axis.legend()


def _plot_gates(report: dict[str, Any], axis: Any) -> None:
    gates, layers = np.array(report["gates"]), report["layers"]
    axis.set(title=f"gates by layer and {report['part']}", xlabel="block")
    n, _, f = gates.shape
    shown = np.log10(np.maximum(gates.reshape(n, -1).T, 1e-3))
    # blocks are counted from 1, as in the other panels
    extent = (0.5, n + 0.5, len(shown) - 0.5, -0.5)
    image = axis.imshow(
        shown, aspect="auto", vmin=-3, vmax=0, interpolation="nearest", extent=extent
    )
    axis.set_yticks([f * i for i in range(len(layers))], [f"layer {layer}" for layer in layers])
    axis.figure.colorbar(image, ax=axis, label="log10")

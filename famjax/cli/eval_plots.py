"""Plots of `famjax eval`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from famjax.cli.eval_labels import depth_labels
from famjax.cli.figures import new_figure, save_figure
from famjax.eval.examples import digest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(report: dict[str, Any], folder: Path) -> list[Path]:
    """Plot the results to files in a folder, and return the files."""
    return [save_figure(figure, folder / f"{name}.png") for name, figure in figures(report)]


def figures(report: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Yield the name and the figure of each result that can be drawn."""
    if "passkey" in report:
        yield "passkey", _plot_passkey(report["passkey"])
    for toy in report["toy"]:
        yield toy["task"], _plot_toy(toy)
    for long in report["long"]:
        if any(share is not None for row in long["rows"] for share in row["by_depth"]):
            texts = [long["files"], long["facts"]]
            name = f"{long['task']}-{digest(texts)[:8]}" if any(texts) else long["task"]
            yield name, _plot_long(long)
    for i, text in enumerate(report["text"]):
        yield f"text_{i + 1}" if i else "text", _plot_text(text)


def _plot_passkey(rows: list[dict[str, Any]]) -> Figure:
    figure, axes = new_figure()
    lengths = [row["length"] for row in rows]
    axes.plot(lengths, [row["key_accuracy"] for row in rows], "o-", label="whole keys")
    axes.plot(lengths, [row["token_accuracy"] for row in rows], "o--", label="digits")
    axes.axhline(rows[0]["token_chance"], color="grey", linestyle=":", label="digits by chance")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens of the document", ylabel="accuracy", ylim=(-0.03, 1.03))
    axes.legend()
    return figure


def _plot_toy(toy: dict[str, Any]) -> Figure:
    figure, axes = new_figure()
    lengths = [row["length"] for row in toy["rows"]]
    axes.plot(lengths, [row["episode_accuracy"] for row in toy["rows"]], "o-", label="episodes")
    axes.plot(lengths, [row["accuracy"] for row in toy["rows"]], "o--", label="answers")
    guessed = [row["commonest_accuracy"] for row in toy["rows"]]
    axes.plot(lengths, guessed, ":", color="grey", label="the most common answer")
    axes.set(xlabel=f"steps of an episode of {toy['task']}", ylabel="accuracy", ylim=(-0.03, 1.03))
    axes.legend()
    return figure


def _plot_long(long: dict[str, Any]) -> Figure:
    """Plot the scores by depth and length, as a heat map."""
    rows = long["rows"]
    scores = np.array([row["by_depth"] for row in rows], float).T
    figure, axes = new_figure()
    image = axes.imshow(scores, aspect="auto", vmin=0, vmax=1, cmap="RdYlGn")
    axes.set_xticks(range(len(rows)), [f"{row['length']:,}" for row in rows])
    axes.set_yticks(range(len(scores)), depth_labels(len(scores)))
    axes.set(xlabel="tokens of the document", ylabel="depth of the fact", title=long["task"])
    figure.colorbar(image, label="score")
    return figure


def _plot_text(text: dict[str, Any]) -> Figure:
    figure, axes = new_figure()
    ends = [row["to"] + 1 for row in text["by_position"]]
    for key, label in {
        "loss": "with memory",
        "loss_without_memory": "reset at every block",
    }.items():
        axes.plot(ends, [row[key] for row in text["by_position"]], "o-", label=label)
    axes.set_xscale("log", base=2)
    whole = "window" if text["window"] else "document"
    axes.set(xlabel=f"position in the {whole}, up to", ylabel="loss (nats a token)")
    axes.legend()
    return figure

"""`famjax analyze RUN --memory`: how a memory changes along a document."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from famjax.cli.figures import new_figure, save_figure
from famjax.cli.tables import Output, Table

if TYPE_CHECKING:
    from famjax.eval.memory_trace import MemoryTrace
    from famjax.tokenizers.tokenizer import Tokenizer
    from famjax.train.run import Run

# number of blocks or tokens that are shown as those that opened the gates most
_OPENED = 5
# number of tokens that are shown before a token that opened the gates
_CONTEXT = 7
_MEASURES = ("rms", "rotation", "rank", "similarity", "mass")


def measure_memory(
    name: str, files: str | None, length: int, passkey: bool = False
) -> dict[str, Any]:
    """Measure the memory of a run along a document.

    Args:
      name: folder of the run.
      files, length, passkey: see `famjax.eval.memory_trace.memory_tokens`.

    Returns:
      run, step, block_len, tokens (their number), layers (the indices of those with a memory), and
      the measures of `famjax.eval.memory_trace`, each a list over blocks, of lists over layers;
      part, the name of a part of F; opened, the text of the blocks whose gates opened most, or the
      tokens with the highest rates and the text before them; reach, a list over the blocks before
      the last one, see `gradient_reach`.
    """
    from famjax.convert.open import open_language_model
    from famjax.eval.memory_trace import (
        gradient_reach,
        layers_with_memory,
        memory_tokens,
        trace_memory,
    )

    run = open_language_model(name)
    tokens = memory_tokens(run, files, length, passkey)
    trace = trace_memory(run, tokens)
    w = run.model.block_len
    report: dict[str, Any] = {
        "run": name,
        "step": run.step,
        "block_len": w,
        "tokens": len(tokens),
        "layers": layers_with_memory(run),
        **{name: np.asarray(value, float).tolist() for name, value in trace._asdict().items()},
        "part": "head" if trace.rates.size else "memory token",
        "reach": gradient_reach(run, tokens).tolist(),
    }
    if trace.gates.size:
        report["opened"] = _opened(run, tokens, trace)
    return report


def _opened(run: Run, tokens: np.ndarray, trace: MemoryTrace) -> list[dict[str, Any]]:
    """Return the blocks that opened the gates most, or the tokens, with the text before them."""
    w, by_token = run.model.block_len, trace.rates.size > 0
    # the gates of the first block are not used
    opening = trace.rates.reshape(-1) if by_token else trace.gates[1:].mean((1, 2))
    rows = []
    for i in np.argsort(-opening, stable=True)[:_OPENED]:
        start = int(i) if by_token else (int(i) + 1) * w
        row: dict[str, Any] = {"block": start // w, "gates": float(opening[i])}
        if by_token:
            row["text"] = run.tokenizer.decode(tokens[max(start - _CONTEXT, 0) : start])
            row["token"] = _name_token(run.tokenizer, int(tokens[start]))
        else:
            row["text"] = run.tokenizer.decode(tokens[start : start + w])
        rows.append(row)
    return rows


def _name_token(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token, or its id if it has no text, such as the end of a document."""
    return tokenizer.decode([token]) or f"<{token}>"


def show_memory(report: dict[str, Any]) -> None:
    """Print a table of blocks 1, 2, 4, ..., and the text that opened the gates most."""
    out = Output()
    out.print(f"{report['run']}, step {report['step']:,}")
    table = Table(
        f"memory along {report['tokens']:,} tokens; means over layers; rotation in degrees per "
        "block; loss in nats, and its increase with the memory at its initial value",
        ("block", *_MEASURES, *["gates"] * bool(_size(report["gates"])), "loss", "without"),
    )
    for i in _shown(len(report["loss"])):
        cells = [f"{np.mean(report[name][i]):.3g}" for name in _MEASURES]
        if _size(report["gates"]):
            cells.append(f"{np.mean(report['gates'][i]):.2g}")
        table.add_row(
            f"{i + 1:,}", *cells, f"{report['loss'][i]:.3f}", f"{report['without'][i]:.3f}"
        )
    out.print(table)
    slots = np.mean(report["without_each"], 0)
    worst = ", ".join(f"{i} ({slots[i]:.3g})" for i in np.argsort(-slots)[:_OPENED])
    out.print(f"{report['part']}s whose removal costs most, nats: {worst}")
    for opened in report.get("opened", []):
        text = " ".join(opened["text"].split())
        where = f"block {opened['block'] + 1:,}"
        # the token is shown apart, as a literal: it may be a newline or an indent
        shown = f"{text[-60:]} {opened['token']!r}" if "token" in opened else text[:70]
        out.print(f"{where} opened gates by {opened['gates']:.2f}: {shown}")


def _shown(n: int) -> list[int]:
    return sorted({min(2**k, n) - 1 for k in range(n.bit_length() + 1)})


def _size(value: list[Any]) -> int:
    return np.asarray(value).size


def plot_memory(report: dict[str, Any], path: Path) -> None:
    """Plot the measures by block, the gates by part, and the reach of the gradient."""
    figure, axes = new_figure(2, 4, (16, 7))
    part = report["part"]
    panels = dict(zip(("rms", "rotation", "rank", "similarity", "mass"), axes.flat, strict=False))
    titles = {
        "rms": "size (RMS)",
        "rotation": "rotation, degrees per block",
        "rank": "rank",
        "similarity": f"similarity of {part}s (cosine)",
        "mass": "share of the memory in what is read",
    }
    blocks = np.arange(1, len(report["loss"]) + 1)
    for name, axis in panels.items():
        values = np.array(report[name])
        for layer, of_layer in zip(report["layers"], values.T, strict=True):
            axis.plot(blocks, of_layer, label=f"layer {layer}", linewidth=1)
        axis.set(title=titles[name], xlabel="block", xscale="log")
        if name in ("rms", "rotation") and values.min() > 0:
            axis.set_yscale("log")
    axes[0, 0].legend()
    _plot_gates(figure, axes[1, 1], np.array(report["gates"]), report["layers"], part)
    reach = np.array(report["reach"])
    axes[1, 2].plot(np.arange(1, len(reach) + 1), np.maximum(reach, 1e-12))
    axes[1, 2].set(title="gradient of the last block's loss", xlabel="blocks before", yscale="log")
    axes[1, 3].bar(np.arange(len(report["without_each"][0])), np.mean(report["without_each"], 0))
    axes[1, 3].set(title=f"loss without a {part}, nats", xlabel=part)
    save_figure(figure, path)


def _plot_gates(figure: Any, axis: Any, gates: np.ndarray, layers: list[int], part: str) -> None:
    axis.set(title=f"gates by layer and {part}", xlabel="block")
    if not gates.size:
        axis.text(0.5, 0.5, "only model.fam_update=gated has some", ha="center")
        return
    n, _, f = gates.shape
    shown = np.log10(np.maximum(gates.reshape(n, -1).T, 1e-3))
    # blocks are counted from 1, as in the other panels
    extent = (0.5, n + 0.5, len(shown) - 0.5, -0.5)
    image = axis.imshow(
        shown, aspect="auto", vmin=-3, vmax=0, interpolation="nearest", extent=extent
    )
    axis.set_yticks([f * i for i in range(len(layers))], [f"layer {layer}" for layer in layers])
    figure.colorbar(image, ax=axis, label="log10")

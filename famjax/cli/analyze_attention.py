"""`famjax analyze RUN --attention`: where blocks and their feedback memory attend to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from famjax.cli.figures import new_figure, save_figure
from famjax.cli.tables import Output, Table

if TYPE_CHECKING:
    from famjax.mixers.mixer import BlockWeights

# number of heads that are drawn, and of layers if none are named
DRAWN = 8


def measure_attention_maps(
    name: str,
    files: str | None,
    length: int,
    passkey: bool = False,
    layers: Sequence[int] = (),
    max_layers: int | None = None,
) -> dict[str, Any]:
    """Measure where blocks and their memory attend to along a document.

    Args:
      name: folder of the run.
      files, length, passkey: see `famjax.eval.memory_trace.open_document`.
      layers: numbers of the layers whose maps are returned; if there are none, see `max_layers`.
      max_layers: number of layers, the first ones, whose maps are returned; None is all.

    Returns:
      run, step, block_len, tokens (their number), receptive_field (in tokens, None is unbounded),
      gradient and stopped_gradient (see `gradient_by_block` in `famjax.eval.attention_maps`), and
      layers: rows of layer, mixer, memories, segments, mass and memory_mass (see `LayerAttention`
      there), and for some layers the weights of the last block: map, of its tokens on memories,
      segments and the block, and memory_map, of the memory on itself and the block. Arrays are
      NumPy's.
    """
    from famjax.convert.open import open_language_model
    from famjax.eval.attention_maps import gradient_by_block, measure_attention
    from famjax.eval.memory_trace import open_document

    run = open_language_model(name)
    tokens = open_document(run, files, length, passkey).tokens
    found = measure_attention(run, tokens, layers)
    mapped = layers or [layer.number for layer in found][:max_layers]
    return {
        "run": name,
        "step": run.step,
        "block_len": run.model.block_len,
        "tokens": len(tokens),
        "layers": [
            {
                "layer": layer.number,
                "mixer": layer.mixer,
                "memories": layer.memories,
                "segments": layer.segments,
                "mass": layer.mass,
                "memory_mass": layer.memory_mass,
                **(_maps(layer.weights) if layer.number in mapped else {}),
            }
            for layer in found
        ],
        "receptive_field": run.model.stack.receptive_field,
        "gradient": gradient_by_block(run, tokens),
        "stopped_gradient": gradient_by_block(run, tokens, stop_gradient=True),
    }


def _maps(weights: BlockWeights) -> dict[str, np.ndarray | None]:
    import jax

    weights = jax.device_get(weights)
    parts = [weights.memory, weights.segments, weights.block]
    memory = weights.from_memory
    return {
        "map": np.concatenate(parts, -1),
        "memory_map": None if memory is None else np.asarray(memory),
    }


def show_attention(report: dict[str, Any]) -> None:
    """Print each layer's shares of the weights, and the head that attends most to the memory."""
    out = Output()
    blocks = report["tokens"] // report["block_len"]
    out.print(
        f"{report['run']}, step {report['step']:,}: shares of the attention weights, means over "
        f"heads and {blocks:,} blocks of {report['block_len']}"
    )
    columns = ("layer", "mixer", "segments", "own block")
    has_memory = any(layer["memories"] for layer in report["layers"])
    of_memory = ("memory", "most on memory", "memory on itself", "on block")
    table = Table("", (*columns, *(of_memory if has_memory else ())), words=(1,))
    for layer in report["layers"]:
        segments, _, block = layer["mass"].mean(0)
        cells = (f"{layer['layer']}", layer["mixer"], f"{segments:.1%}", f"{block:.1%}")
        table.add_row(*cells, *(_memory_cells(layer) if has_memory else ()))
    out.print(table)
    out.print(_gradient_table(report))


def _memory_cells(layer: dict[str, Any]) -> list[str]:
    """Return the shares on a layer's memory, and those of the memory's own queries."""
    if not layer["memories"]:
        return [""] * 4
    of_heads, own = layer["mass"][:, 1], layer["memory_mass"]
    head = int(of_heads.argmax())
    shares = ("", "") if own is None else (f"{share:.1%}" for share in np.mean(own, 0))
    return [f"{of_heads.mean():.1%}", f"{of_heads[head]:.1%}, head {head}", *shares]


def _gradient_table(report: dict[str, Any]) -> Table:
    """Return the table of the gradient of the last block's loss by earlier blocks.

    Gradients are relative to that of the last block itself.
    """
    field = report["receptive_field"]
    table = Table(
        "gradient of the last block's loss with respect to earlier blocks, relative to its own; "
        + ("receptive field unbounded" if field is None else f"receptive field {field:,} tokens"),
        ("blocks before", "tokens before", "gradient", "stopped at segments"),
    )
    own, stopped = report["gradient"], report["stopped_gradient"]
    for k in sorted({2**i for i in range(len(own).bit_length()) if 2**i < len(own)}):
        shares = (each[k] / each[0] if each[0] else 0.0 for each in (own, stopped))
        table.add_row(f"{k}", f"{k * report['block_len']:,}", *(f"{share:.2e}" for share in shares))
    return table


def plot_attention(report: dict[str, Any], path: Path) -> None:
    """Plot the last block's attention maps, with the memory at the bottom left, as in Figure 12.

    Queries are on the vertical axis, keys on the horizontal one. The first rows are the memory's
    queries, the others the block's. The first columns are the memory's keys, then come those of the
    memory segments, and those of the block.
    """
    layers = [layer for layer in report["layers"] if "map" in layer]
    heads = min(len(layers[0]["map"]), DRAWN)
    figure, axes = new_figure(len(layers), heads, (2.6 * heads, 2.6 * len(layers)))
    grid = np.asarray(axes, object).reshape(len(layers), heads)
    for i, layer in enumerate(layers):
        for head in range(heads):
            axis = grid[i, head]
            image, rows = _join(layer, head)
            # the square root, so that weights spread over many keys are visible beside peaks
            axis.imshow(np.sqrt(image), origin="lower", aspect="auto", cmap="viridis", vmin=0)
            for at in (layer["memories"], layer["memories"] + layer["segments"]):
                if at:
                    axis.axvline(at - 0.5, color="white", linewidth=0.5)
            if rows:
                axis.axhline(rows - 0.5, color="white", linewidth=0.5)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_title(f"layer {layer['layer']}, head {head}", fontsize=8)
    figure.supxlabel("keys: memory, segments, block")
    figure.supylabel("queries: memory, block")
    save_figure(figure, path)


def _join(layer: dict[str, Any], head: int) -> tuple[np.ndarray, int]:
    """Return a head's map with the memory's queries first, and the number of these."""
    tokens = layer["map"][head]
    if layer["memory_map"] is None:
        return tokens, 0
    memory = layer["memory_map"][head]
    f, block = len(memory), tokens.shape[0]
    rows = np.zeros((f, tokens.shape[1]))
    # a block attends to p memories; the newest, which attends to itself, is the last of them
    rows[:, layer["memories"] - f : layer["memories"]] = memory[:, :f]
    rows[:, -block:] = memory[:, f:]
    return np.concatenate([rows, tokens]), f

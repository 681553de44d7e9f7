"""`famjax analyze RUN --memory`: how a memory changes along a document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from famjax.cli.tables import Output, Table

if TYPE_CHECKING:
    from famjax.eval.memory_trace import MemoryTrace, TracedDocument
    from famjax.tokenizers.tokenizer import Tokenizer
    from famjax.train.run import Run

# number of blocks or tokens that are named, and of tokens that a block's memory read most
_NAMED, _READ = 5, 3
# number of tokens that are shown before a token that is named
_CONTEXT = 7
_MEASURES = ("rms", "rotation", "rank", "similarity", "mass")


def measure_memory(
    name: str, files: str | None, length: int, passkey: bool = False
) -> dict[str, Any]:
    """Measure the memory of a run along a document.

    Args:
      name: folder of the run.
      files, length, passkey: see `famjax.eval.memory_trace.open_document`.

    Returns:
      run, step, block_len, tokens (their number), has_answer, whether the document ends with the
      answer to a question, and skipped, whether the memories of layers differ in shape, so that
      only the n-gram memory is measured.
      With a memory in layers: layers (their indices) and the measures of
      `famjax.eval.memory_trace`, each a list over blocks, of lists over layers; part, the name of a
      part of F; opened, the blocks whose gates opened most, with the tokens that they read most, or
      the tokens with the highest rates; helped, the tokens whose loss the memory lowers most;
      reach, a list over the blocks before the last one, see `gradient_by_distance`.
      With an n-gram memory: ngrams, which has contexts, the rows of
      `famjax.eval.ngram_trace.by_longest`; loss and without, lists over blocks; and helped.
    """
    from famjax.convert.open import open_language_model
    from famjax.eval.memory_trace import check_has_memory, memory_shapes, open_document
    from famjax.eval.ngram_trace import has_ngrams

    run = open_language_model(name)
    is_ngrams = has_ngrams(run)
    shapes = memory_shapes(run)
    # of several shapes, only the n-grams can be measured
    has_layers = len(shapes) == 1 if is_ngrams else True
    if has_layers:
        check_has_memory(run)
    document = open_document(run, files, length, passkey)
    report: dict[str, Any] = {
        "run": name,
        "step": run.step,
        "block_len": run.model.block_len,
        "tokens": len(document.tokens),
        "has_answer": bool(document.answer.any()),
        "skipped": is_ngrams and len(shapes) > 1,
    }
    if has_layers:
        report |= _measure_layers(run, document)
    if is_ngrams:
        report["ngrams"] = _measure_ngrams(run, document)
    return report


def _measure_layers(run: Run, document: TracedDocument) -> dict[str, Any]:
    from famjax.eval.memory_trace import gradient_by_distance, layers_with_memory, trace_memory

    trace = trace_memory(run, document)
    report: dict[str, Any] = {
        "layers": layers_with_memory(run),
        **{name: np.asarray(value, float).tolist() for name, value in trace._asdict().items()},
        "part": "head" if trace.rates.size else "memory token",
        "reach": gradient_by_distance(run, document).tolist(),
        "helped": _helped(run, document.tokens, trace.gains),
    }
    if trace.gates.size:
        report["opened"] = _opened(run, document.tokens, trace)
    return report


def _measure_ngrams(run: Run, document: TracedDocument) -> dict[str, Any]:
    from famjax.eval.ngram_trace import by_longest, trace_ngrams

    trace = trace_ngrams(run, document)
    return {
        "contexts": by_longest(trace),
        "loss": np.asarray(trace.loss, float).tolist(),
        "without": np.asarray(trace.without, float).tolist(),
        "helped": _helped(run, document.tokens, trace.gains),
    }


def _helped(run: Run, tokens: np.ndarray, gains: np.ndarray) -> list[dict[str, Any]]:
    """Return the tokens whose loss a memory lowers most; `gains` [n w] are of the next tokens."""
    w, gains = run.model.block_len, gains.reshape(-1)
    chosen = np.argsort(-gains, stable=True)[:_NAMED]
    # the loss of a block's last token is that of predicting the next block's first one
    return [
        {"gain": float(gains[i]), **_place(run, tokens, int(i) + 1, w), "block": int(i) // w}
        for i in chosen
    ]


def _opened(run: Run, tokens: np.ndarray, trace: MemoryTrace) -> list[dict[str, Any]]:
    """Return the blocks that opened the gates most, or the tokens, with the text before them."""
    w = run.model.block_len
    if trace.rates.size:
        rates = trace.rates.reshape(-1)
        chosen = np.argsort(-rates, stable=True)[:_NAMED]
        return [{"gates": float(rates[i]), **_place(run, tokens, int(i), w)} for i in chosen]
    # the gates of the first block are not used
    opening, rows = trace.gates.mean((1, 2)), []
    for block in (1 + np.argsort(-opening[1:], stable=True)[:_NAMED]).tolist():
        own = tokens[block * w : (block + 1) * w]
        # none for a memory without queries, whose reads are [n 0]
        read = np.argsort(-trace.reads[block], stable=True)[:_READ]
        rows.append(
            {
                "block": block,
                "gates": float(opening[block]),
                "text": run.tokenizer.decode(own),
                "read": [_name_token(run.tokenizer, int(own[i])) for i in read],
            }
        )
    return rows


def _place(run: Run, tokens: np.ndarray, i: int, w: int) -> dict[str, Any]:
    """Return a token's block, its name, and the text before it."""
    before = run.tokenizer.decode(tokens[max(i - _CONTEXT, 0) : i])
    return {"block": i // w, "text": before, "token": _name_token(run.tokenizer, int(tokens[i]))}


def _name_token(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token, or its id if it has no text, such as the end of a document."""
    return tokenizer.decode([token]) or f"<{token}>"


def show_memory(report: dict[str, Any]) -> None:
    """Print tables of blocks 1, 2, 4, ..., and the text at which the memory changed or helped."""
    out = Output()
    out.print(f"{report['run']}, step {report['step']:,}")
    if report["has_answer"]:
        out.print("the document ends with the answer: the last block's losses are the answer's")
    if report["skipped"]:
        out.print("the layers' memories have different shapes and are not measured")
    if "layers" in report:
        _show_layers(report, out)
    if "ngrams" in report:
        _show_ngrams(report, out)


def _show_layers(report: dict[str, Any], out: Output) -> None:
    table = Table(
        f"memory along {report['tokens']:,} tokens; means over layers; rotation in degrees per "
        "block; loss in nats, and its increase with the memory at its initial value",
        ("block", *_MEASURES, *["gates"] * bool(np.size(report["gates"])), "loss", "without"),
    )
    for i in _shown(len(report["loss"])):
        cells = [f"{np.mean(report[name][i]):.3g}" for name in _MEASURES]
        if np.size(report["gates"]):
            cells.append(f"{np.mean(report['gates'][i]):.2g}")
        table.add_row(
            f"{i + 1:,}", *cells, f"{report['loss'][i]:.3f}", f"{report['without'][i]:.3f}"
        )
    out.print(table)
    parts, what = increases_by_part(report)
    worst = ", ".join(f"{i} ({parts[i]:.3g})" for i in np.argsort(-parts)[:_NAMED])
    out.print(f"{report['part']}s whose removal costs most, nats, {what}: {worst}")
    for opened in report.get("opened", []):
        text = _line(opened)
        if opened.get("read"):
            text += f"; read {', '.join(map(repr, opened['read']))}"
        out.print(f"block {opened['block'] + 1:,} opened gates by {opened['gates']:.2f}: {text}")
    _show_helped(report["helped"], "the memory", out)


def increases_by_part(report: dict[str, Any]) -> tuple[np.ndarray, str]:
    """Return the loss increase without each part, and of what it is: the answer, or all blocks."""
    each = np.array(report["without_each"])
    return (each[-1], "of the answer") if report["has_answer"] else (each.mean(0), "mean of blocks")


def _line(row: dict[str, Any]) -> str:
    text = " ".join(row["text"].split())
    # the token is shown apart, as a literal: it may be a newline or an indent
    return f"{text[-60:]} {row['token']!r}" if "token" in row else text[:70]


def _show_helped(rows: list[dict[str, Any]], what: str, out: Output) -> None:
    for row in rows:
        if row["gain"] > 0:
            block = f"block {row['block'] + 1:,}"
            out.print(f"{block}: {what} takes {row['gain']:.2f} nats off {_line(row)}")


def _show_ngrams(report: dict[str, Any], out: Output) -> None:
    found = report["ngrams"]
    table = Table(
        f"n-gram memory along {report['tokens']:,} tokens, by the longest context that was found; "
        "loss in nats, and its increase with a table that is emptied before the block",
        ("context", "tokens", "recalled right", "loss", "without"),
    )
    for row in found["contexts"]:
        context = f"{row['context']} tokens" if row["context"] else "none"
        right = f"{100 * row['right']:.1f}%" if row["context"] else ""
        share = f"{100 * row['share']:.1f}%"
        table.add_row(context, share, right, f"{row['loss']:.3f}", f"{row['without']:.3f}")
    out.print(table)
    title = "along the document, means over blocks; without: the increase of the loss"
    blocks = Table(title, ("blocks", "loss", "without"))
    # the last block's losses are the answer's
    spans = doubling_spans(len(found["loss"]) - report["has_answer"])
    for span in spans:
        means = (np.mean([found[name][i] for i in span]) for name in ("loss", "without"))
        ends = dict.fromkeys((span[0] + 1, span[-1] + 1))
        blocks.add_row(" to ".join(f"{end:,}" for end in ends), *(f"{mean:.3f}" for mean in means))
    if report["has_answer"]:
        blocks.add_row("answer", *(f"{found[name][-1]:.3f}" for name in ("loss", "without")))
    out.print(blocks)
    _show_helped(found["helped"], "the n-gram memory", out)


def doubling_spans(n: int) -> list[range]:
    """Return the spans of n blocks of 1, 2, 4, 8 ... blocks; the last one may be shorter."""
    starts = [2**k - 1 for k in range(n.bit_length()) if 2**k - 1 < n]
    return [range(a, min(2 * a + 1, n)) for a in starts]


def _shown(n: int) -> list[int]:
    return sorted({min(2**k, n) - 1 for k in range(n.bit_length() + 1)})

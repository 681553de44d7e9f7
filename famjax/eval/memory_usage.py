"""Memory in use, and a measurement of its growth while streaming."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from famjax.config.derived import has_blocks
from famjax.config.schema import Config
from famjax.eval.streaming import Streamer


def memory_report() -> dict[str, int]:
    """Return resident_bytes and peak_bytes of the accelerators here, or else of the process.

    Outside Linux, both are the peak of the process.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("peak_bytes_in_use" in each for each in stats):
        return {
            "resident_bytes": sum(each["bytes_in_use"] for each in stats),
            "peak_bytes": sum(each["peak_bytes_in_use"] for each in stats),
        }
    # kilobytes, but bytes on macOS
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    status = Path("/proc/self/status")
    if not status.exists():
        return {"resident_bytes": peak, "peak_bytes": peak}
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return {
        "resident_bytes": int(fields["VmRSS"].split()[0]) * 1024,
        "peak_bytes": int(fields["VmHWM"].split()[0]) * 1024,
    }


def measure_flatness(
    streamer: Streamer, tokens: np.ndarray, first: int = 2**14, last: int = 2**20
) -> dict[str, Any]:
    """Return the growth of the memory in use while streaming.

    Args:
      streamer: a stream; a new one like it is measured.
      tokens: [t], read again and again.
      first, last: numbers of tokens after which the peak is measured first and last.

    Returns:
      peaks, rows of tokens and peak_bytes at each doubling from `first` to `last`; growth, the last
      peak over the first, minus 1; state_bytes, a list of the size of the stream's state before and
      after.
    """
    stream = streamer.new_stream()
    before = stream.state_bytes()
    line = np.resize(tokens, (stream.batch, stream.chunk)).astype(np.int32)
    peaks = []
    mark = first
    while mark <= last:
        while stream.tokens < mark:
            stream.read(line)
        stream.logits.block_until_ready()
        peaks.append({"tokens": stream.tokens, "peak_bytes": memory_report()["peak_bytes"]})
        mark *= 2
    growth = peaks[-1]["peak_bytes"] / peaks[0]["peak_bytes"] - 1
    return {"peaks": peaks, "growth": growth, "state_bytes": [before, stream.state_bytes()]}


def update_tokens(config: Config) -> int:
    """Return the number of tokens between updates of the memory.

    This is a block, or the attention span of a stack without blocks.
    """
    model = config.model
    return model.block_len if has_blocks(model) else model.feedback.span

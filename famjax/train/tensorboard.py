"""Scalars for TensorBoard, written by the training's own thread.

tensorboardX's `SummaryWriter` writes from a thread of its own. If the disk is full, that thread
ends, and the training waits for it for ever; here the training gets the error.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _import_tensorboardx() -> tuple[Any, Any]:
    """Import tensorboardX's writer and messages, but not PyTorch.

    tensorboardX would import PyTorch if it is installed, to draw graphs of its modules. No run
    draws such graphs, and the import takes two seconds at every start.
    """
    hides_torch = "torch" not in sys.modules
    if hides_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]  # its import raises ImportError
    try:
        writer = importlib.import_module("tensorboardX.event_file_writer")
        messages = importlib.import_module("tensorboardX.proto.event_pb2")
    finally:
        if hides_torch:
            del sys.modules["torch"]
    return writer, messages


_writer, _messages = _import_tensorboardx()


class TensorBoard:
    """A file of events; every method but `__init__` raises an `OSError` if the disk is full.

    Args:
      folder: folder of the files of a run's sessions; created if missing.
      purge_step: TensorBoard hides earlier events from this step on.
    """

    def __init__(self, folder: Path, purge_step: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._events = _writer.EventsWriter(str(folder / "events"))
        start = _messages.SessionLog(status=_messages.SessionLog.START)
        self._write(purge_step, file_version="brain.Event:2")
        self._write(purge_step, session_log=start)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of a step to the disk."""
        values = [{"tag": name, "simple_value": value} for name, value in scalars.items()]
        self._write(step, summary={"value": values})
        self._events.flush()

    def close(self) -> None:
        self._events.close()

    def _write(self, step: int, **content: Any) -> None:
        event = _messages.Event(wall_time=time.time(), step=step, **content)
        self._events.write_event(event)

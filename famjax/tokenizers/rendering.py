"""Client of `chat_worker`: renders a chat template in a subprocess, within limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from famjax.core.errors import UserError
from famjax.core.json_files import parse_json
from famjax.tokenizers.chat_worker import HEAD_BYTES

# the folder that contains the famjax package
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


class RenderResult(NamedTuple):
    """The output of a template.

    Attributes:
      text: the text of all messages.
      cuts: for each requested prefix, its length if `text` starts with it, else None.
    """

    text: str
    cuts: list[int | None]


class Renderer:
    """Renders one template in a subprocess, which is started on first use.

    Args:
      label: name of the template in error messages.
      source: the template, in Jinja.
      variables: the template's variables besides the messages.
    """

    def __init__(self, label: str, source: str, variables: Mapping[str, str]):
        self._label = label
        self._setup = {"source": source, "variables": dict(variables)}
        self._process: subprocess.Popen[bytes] | None = None
        # both the data thread and the main thread render
        self._lock = threading.Lock()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        now: datetime | None = None,
        cuts: Sequence[tuple[int, bool]] = (),
    ) -> RenderResult:
        """Render a conversation.

        Args:
          messages: the messages, JSON-serializable.
          add_generation_prompt: append the header of an assistant message.
          now: the time that the template sees; None means the current time.
          cuts: prefixes to locate in the text, each as (number of messages,
            add_generation_prompt).

        Raises:
          UserError: the template is not valid Jinja, rejects the messages, or exceeds the limit of
            time or memory.
        """
        request = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "now": None if now is None else now.isoformat(),
            "cuts": list(cuts),
        }
        try:
            body = json.dumps(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"{self._label}: a message is not JSON ({error})") from None
        with self._lock:
            answer = self._exchange(body.encode())
        if "text" in answer:
            return RenderResult(answer["text"], answer["cuts"])
        raise UserError(f"{self._label}{_failure_message(answer)}")

    def _exchange(self, body: bytes) -> dict[str, Any]:
        """Send a request; return the answer, or {"ended": exit status} if the process ended."""
        process = self._process = self._process or self._start_process()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _write_message(process.stdin, body)
            head = process.stdout.read(HEAD_BYTES)
            size = int.from_bytes(head, "little")
            answer = process.stdout.read(size) if len(head) == HEAD_BYTES else b""
        except OSError:  # the process ended while the request was written
            size, answer = 1, b""
        except BaseException:  # such as Ctrl-C: otherwise the next request would get this answer
            self._process = None
            _stop_process(process)
            raise
        if not answer or len(answer) < size:
            self._process = None
            _stop_process(process)
            return {"ended": process.returncode}
        return parse_json(answer)

    def _start_process(self) -> subprocess.Popen[bytes]:
        paths = [_PACKAGE_ROOT, *(path for path in sys.path if path)]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "famjax.tokenizers.chat_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        weakref.finalize(self, _stop_process, process)
        assert process.stdin is not None
        _write_message(process.stdin, json.dumps(self._setup).encode())
        return process


def _write_message(stream: Any, body: bytes) -> None:
    stream.write(len(body).to_bytes(HEAD_BYTES, "little") + body)
    stream.flush()


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        try:
            assert pipe is not None
            pipe.close()
        except OSError:  # unwritten data is lost with the process
            pass


def _failure_message(answer: Mapping[str, Any]) -> str:
    """Return the error message for an answer without text."""
    if "syntax" in answer:
        return f", line {answer['line']}: {answer['syntax']}; fix it, or fetch it again"
    if "refused" in answer:
        return f": rejects the messages: {answer['refused']}"
    if "limit" in answer:
        return f": takes more than {answer['limit']}; use another template"
    if answer["ended"] == -signal.SIGPROF:
        return ": takes seconds to render one conversation and was stopped; use another template"
    return f": its process ended with status {answer['ended']}; use another template"

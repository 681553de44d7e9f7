"""The caller's side of `famjax.data.chat_worker`: a chat template in a process that has limits."""

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
from famjax.data.chat_worker import HEAD_BYTES

# where the package of famjax lies
_HOME = str(Path(__file__).resolve().parents[2])


class Rendered(NamedTuple):
    """What a template wrote.

    Attributes:
      text: of all messages.
      cuts: for each part asked for, its length, if `text` begins with it; else None.
    """

    text: str
    cuts: list[int | None]


class Renderer:
    """Renders one template in a process of its own, which is started when it is first needed.

    Args:
      called: what the template is called in messages.
      source: Jinja.
      variables: what the template sees besides the messages.
    """

    def __init__(self, called: str, source: str, variables: Mapping[str, str]):
        self._called = called
        self._setup = {"source": source, "variables": dict(variables)}
        self._process: subprocess.Popen[bytes] | None = None
        # data is read in one thread, and prompts in another
        self._lock = threading.Lock()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        now: datetime | None = None,
        cuts: Sequence[tuple[int, bool]] = (),
    ) -> Rendered:
        """Render a conversation.

        Args:
          messages: JSON-able.
          add_generation_prompt: end with the words that begin an answer.
          now: the time that the template is told; None is the clock's.
          cuts: (how many messages, add_generation_prompt) of parts whose texts shall be compared.

        Raises:
          UserError: the template is no Jinja, refuses the messages, or takes too much time or
            memory.
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
            raise UserError(f"{self._called}: a message is no JSON ({error})") from None
        with self._lock:
            answer = self._exchange(body.encode())
        if "text" in answer:
            return Rendered(answer["text"], answer["cuts"])
        raise UserError(f"{self._called}{_reason(answer)}")

    def _exchange(self, body: bytes) -> dict[str, Any]:
        """Send a request, and return the answer, or {"ended": exit status}."""
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process.stdin, body)
            head = process.stdout.read(HEAD_BYTES)
            size = int.from_bytes(head, "little")
            answer = process.stdout.read(size) if len(head) == HEAD_BYTES else b""
        except OSError:  # the process ended while it was told
            size, answer = 1, b""
        except BaseException:  # such as Ctrl-C: what comes next would be this request's answer
            self._process = None
            _end(process)
            raise
        if not answer or len(answer) < size:
            self._process = None
            _end(process)
            return {"ended": process.returncode}
        return parse_json(answer)

    def _started(self) -> subprocess.Popen[bytes]:
        paths = [_HOME, *(path for path in sys.path if path)]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "famjax.data.chat_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        weakref.finalize(self, _end, process)
        assert process.stdin is not None
        _send(process.stdin, json.dumps(self._setup).encode())
        return process


def _send(stream: Any, body: bytes) -> None:
    stream.write(len(body).to_bytes(HEAD_BYTES, "little") + body)
    stream.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and let go of its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        try:
            assert pipe is not None
            pipe.close()
        except OSError:  # what was not written is for nobody now
            pass


def _reason(answer: Mapping[str, Any]) -> str:
    """Return what to say of a template that wrote nothing."""
    if "syntax" in answer:
        return f", line {answer['line']}: {answer['syntax']}; fix it, or fetch it again"
    if "refused" in answer:
        return f": refuses the messages: {answer['refused']}"
    if "limit" in answer:
        return f": takes more than {answer['limit']}; take another template"
    if answer["ended"] == -signal.SIGPROF:
        return ": takes seconds to write one conversation and was stopped; take another template"
    return f": its process ended with status {answer['ended']}; take another template"

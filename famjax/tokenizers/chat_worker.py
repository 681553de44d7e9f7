"""A subprocess that renders one chat template within limits of time and memory.

    python -P -m famjax.tokenizers.chat_worker < requests > answers

A template comes with a tokenizer and is untrusted code: three nested loops over `range` take days,
'a' * 10**10 takes ten GB, and 9**9**9 does not return. A thread cannot be stopped in all of these
cases, since Python handles no signals during a multiplication; but the system can kill a process
anywhere. Requests and answers are JSON, each preceded by its length in eight bytes; see
`famjax.tokenizers.rendering`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from famjax.core.json_files import parse_json

# CPU seconds for one request; wall time would depend on the machine's load. 500 short messages take
# 0.3 s, including another rendering for each answer.
SECONDS = 3.0
SECONDS_PER_CUT = 0.002
MAX_SECONDS = 8.0
# limit of memory, in addition to what the interpreter uses at its start
MEMORY_BYTES = 512 << 20
# limit of the rendered text
TEXT_BYTES = 16 << 20
# bytes of the length before each message
HEAD_BYTES = 8


def main() -> None:
    _limit_memory()
    # the parent ends this process by closing its end of the pipe
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = receive(requests)
    template: Template | None = None
    while (request := receive(requests)) is not None:
        seconds = min(SECONDS + SECONDS_PER_CUT * len(request["cuts"]), MAX_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process
        try:
            template = template or make_environment().from_string(setup["source"])
            answer = _encode_answer(answer_request(template, setup["variables"], request))
        except TemplateSyntaxError as error:
            answer = _encode_answer({"syntax": _join_lines(error), "line": error.lineno})
        except MemoryError:
            answer = _encode_answer({"limit": f"{MEMORY_BYTES >> 20} MiB of memory"})
        except Exception as error:  # a template is a program and can raise anything
            answer = _encode_answer({"refused": _join_lines(error)})
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(len(answer).to_bytes(HEAD_BYTES, "little") + answer)
        answers.flush()


def receive(stream: BinaryIO) -> Any:
    """Return the next JSON value in a stream; None at the end of the stream."""
    head = stream.read(HEAD_BYTES)
    return parse_json(stream.read(int.from_bytes(head, "little"))) if head else None


def answer_request(template: Template, variables: dict[str, str], request: Any) -> dict[str, Any]:
    """Return the answer to a request: "text" and "cuts", or the "limit" that was exceeded."""
    now = request["now"]

    def write(count: int, add_generation_prompt: bool) -> str:
        return template.render(
            messages=request["messages"][:count],
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            strftime_now=_clock(now),
            **variables,
        )

    text = write(len(request["messages"]), request["add_generation_prompt"])
    if len(text.encode("utf-8", "surrogatepass")) > TEXT_BYTES:
        return {"limit": f"{TEXT_BYTES >> 20} MiB of text"}
    cuts = []
    for count, prompt in request["cuts"]:
        part = write(count, prompt)
        cuts.append(len(part) if text.startswith(part) else None)
    return {"text": text, "cuts": cuts}


def _clock(now: str | None) -> Callable[[str], str]:
    return lambda form: (datetime.fromisoformat(now) if now else datetime.now()).strftime(form)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment configured as in Hugging Face's `apply_chat_template`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    return environment


class _Generation(Extension):
    """The tag `{% generation %}`, which some templates put around answers; has no effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), True), lineno=line)


def _raise_exception(reason: str) -> None:
    raise TemplateError(reason)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _join_lines(error: Exception) -> str:
    return " ".join(str(error)[:1000].split()) or type(error).__name__


def _encode_answer(answer: dict[str, Any]) -> bytes:
    # lone surrogates stay escaped in JSON; the receiver rejects them
    return json.dumps(answer).encode()


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on all systems
        import resource

        initial = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (initial + MEMORY_BYTES, hard))


if __name__ == "__main__":
    main()

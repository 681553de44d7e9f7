"""`famjax VERB ...`: one module per verb, imported when it is called."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any, TypeVar

import famjax
from famjax.cli.layout import command, format_entries, help_width, wrap
from famjax.core.errors import (
    EXIT_FAILED,
    EXIT_PEER_LOST,
    EXIT_SIGNAL,
    EXIT_USER_ERROR,
    NotConnectedError,
    StopRequested,
    UserError,
    did_you_mean,
)
from famjax.core.paths import url_message
from famjax.experiment.hints import find_hint
from famjax.processes.runtime import describe_missing_device, start_program

VERBS = {
    "train": "train a model from a config, or continue a run",
    "eval": "stream documents of any length through a run and evaluate it",
    "compare": "compare runs on the tasks that all of them were evaluated on",
    "report": "write a page with the results of evaluations, and every example",
    "analyze": "measure the entropy of a run's attention and its distance from a teacher's",
    "generate": "generate text with a run, from a prompt or from a saved memory",
    "average": "average the parameters of a run's last checkpoints",
    "convert": "convert a pretrained Hugging Face model to one with memory",
    "export": "export a run for Hugging Face's transformers, Orbax or StableHLO",
    "tokenizer": "train a SentencePiece model, or make a word list, from text files",
    "plan": "estimate memory and time of a job on TPUs or GPUs without having them",
    "reproduce": "run experiments of the papers, and print the results next to the papers' numbers",
    "bench": "measure time and memory of layers, evaluation, beam search and meshes",
    "doctor": "show versions, devices, memory and missing packages",
}

# verbs that run in a single process, and variables that multi-process launchers set; if none is
# set, JAX need not be asked for the process count
_SINGLE_PROCESS_VERBS = ("eval", "analyze", "generate", "average", "convert", "export")
_MULTIPROCESS_VARIABLES = (
    "SLURM_NTASKS",
    "OMPI_COMM_WORLD_SIZE",
    "TPU_WORKER_HOSTNAMES",
    "MEGASCALE_NUM_SLICES",
)

# options whose value is a text, not a path
_TEXTS = ("--prompt", "--stop")

# maximum number of characters of an error line
_MAX_LINE = 1800

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status; see `run_guarded`."""
    return run_guarded(lambda: _dispatch(list(sys.argv[1:] if argv is None else argv)))


def script() -> None:
    """Run `main` as a program, and exit with its status."""
    # feedback's loop runs on several devices in parallel, and one malloc arena would serialize them
    start_program(keep=sys.argv[1:2] == ["bench"] and "feedback" not in sys.argv)
    status = main()
    if status == EXIT_SIGNAL + signal.SIGINT:
        # After Ctrl-C XLA's threads may still compile, and interpreter shutdown can then crash.
        # Everything is saved already, so exit at once.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


# errno of a full disk, and of a path without access
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_ACCESS_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)


def run_guarded(call: Callable[[], int]) -> int:
    """Call a function, catch expected errors, and return the exit status.

    The statuses are those of docs/architecture.md. Any other exception is a bug in famjax.
    """
    try:
        status = _catch_errors(call)
        # raises for a closed pipe here rather than at interpreter exit
        sys.stdout.flush()
        sys.stderr.flush()
        return status
    except BrokenPipeError:
        _drop_output()
        return EXIT_SIGNAL + signal.SIGPIPE


def _catch_errors(call: Callable[[], int]) -> int:
    try:
        return call()
    except UserError as error:
        return _fail(str(error))
    except NotConnectedError as error:
        return _fail(str(error), EXIT_PEER_LOST)
    except StopRequested as stop:
        return _fail(str(stop), EXIT_SIGNAL + stop.signal)
    except KeyboardInterrupt:
        return _fail("stopped by Ctrl-C", EXIT_SIGNAL + signal.SIGINT)
    except SystemExit as stop:
        # rich raises SystemExit if a pipe is closed
        if isinstance(stop.__context__, BrokenPipeError):
            raise stop.__context__ from None
        raise
    except ImportError as error:
        if not _is_missing_library(error):
            raise
        install = f"{os.path.basename(sys.executable)} -m pip install -e ."
        return _fail(f"a library cannot be imported: {error}; {install} in famjax's checkout")
    except MemoryError:
        return _fail("out of memory; use a smaller model or batch, or a machine with more memory")
    except (RuntimeError, AssertionError) as error:
        if line := describe_missing_device(error):
            return _fail(line)
        # JAX's exception class is not imported, for a fast start
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = str(error).splitlines()[0][:200]
        return _fail(
            f"out of memory ({message}); use a smaller model or batch, or a machine with more "
            "memory"
        )
    except OSError as error:
        if error.errno in _DISK_FULL:
            where = f" writing {error.filename}" if error.filename else ""
            return _fail(f"disk full:{where or ' no space left'}; free some space and run again")
        if error.errno == errno.EIO:  # network file systems: often transient
            where = f" at {error.filename}" if error.filename else ""
            return _fail(f"input/output error{where}; run again to continue", EXIT_FAILED)
        if error.errno in _ACCESS_DENIED and error.filename:
            # a fallback; most callers raise a more specific error
            return _fail(
                f"{error.filename}: {error.strerror}; check its permissions, or give another"
            )
        raise


def _drop_output() -> None:
    """Redirect standard output and error to devnull: the reader of one of them is gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        # a stream in a test may have no file descriptor
        with contextlib.suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _is_missing_library(error: ImportError) -> bool:
    """Return whether a third-party library failed to import, not a module of famjax."""
    named = (error.name or "").partition(".")[0]
    return named not in ("famjax", "configs")


def _dispatch(argv: list[str]) -> int:
    # before the first import of JAX
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0
    if argv == ["--version"]:
        print(f"famjax {famjax.__version__}")
        return 0
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS:
        hint = find_hint(verb, verb="") or did_you_mean(verb, VERBS)
        raise UserError(f"unknown command {verb!r}{hint} (known: {', '.join(VERBS)})")
    if (
        any(name in os.environ for name in _MULTIPROCESS_VARIABLES)
        and verb in _SINGLE_PROCESS_VERBS
    ):
        from famjax.processes.collective import check_single_process

        check_single_process(verb)
    _check_local_paths(rest)
    try:
        return importlib.import_module(f"famjax.cli.{verb}").run(rest)
    except SystemExit as stop:  # tyro raises it after --help
        if stop.code not in (None, 0):
            raise
        return 0


def _check_local_paths(argv: list[str]) -> None:
    """Raise a `UserError` for a URL in place of a path, before anything is read or written."""
    for before, token in pairwise(["", *argv]):
        # texts may have URLs in them
        is_text = before in _TEXTS or token.partition("=")[0] in _TEXTS
        if not is_text and (message := url_message(token)):
            raise UserError(message)


def _help() -> str:
    width = help_width()
    lines = [
        "usage: famjax COMMAND ...",
        "",
        *format_entries(VERBS, width),
        "",
        *command("example: famjax train text_fam data.files=book.txt train.steps=500", width),
        *wrap("help on a command: famjax COMMAND --help; the version: famjax --version", width),
    ]
    return "\n".join(lines)


def _fail(message: str, status: int = EXIT_USER_ERROR) -> int:
    # escape control characters, which may come from a file
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(message.split()))
    if len(line) > _MAX_LINE:
        line = f"{line[: _MAX_LINE // 2]} ... {line[-_MAX_LINE // 3 :]}"
    print(f"famjax: {line}", file=sys.stderr)
    return status


def split_overrides(argv: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the overrides, section.key=value, and the other arguments.

    Other arguments may have a = too, such as `--run runs/a=b`.
    """
    overrides = tuple(token for token in argv if re.match(r"[A-Za-z][\w.-]*=", token))
    return overrides, [token for token in argv if token not in overrides]


def parse(arguments: type[T], argv: Sequence[str], prog: str) -> T:
    """Parse `argv` with tyro into `arguments`, a flat dataclass of a verb's flags.

    Args:
      arguments: the dataclass. Its docstring is the help of the verb, and the docstring below each
        field that of the flag.
      argv: the arguments after `prog`.
      prog: the command before `argv`, such as "famjax eval".

    Raises:
      UserError: a flag is unknown, missing or has a value of the wrong type; the message is one
        line.
      SystemExit: the help was printed; the status is 0.
    """
    import tyro  # takes 60 ms, which `famjax --help` avoids

    _check_options(arguments, argv, prog)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                arguments, prog=prog, args=list(argv), config=(tyro.conf.FlagCreatePairsOff,)
            )
    except SystemExit as stop:
        if stop.code in (None, 0):
            raise
        raise UserError(f"{_unbox(complaint.getvalue())}; see {prog} --help") from None


@contextlib.contextmanager
def named_as_flags(arguments: type[Any]) -> Iterator[None]:
    """Name a flag as it was given where an error names the Python argument.

    "beam=0: must be ..." becomes "--beam 0: must be ...".
    """
    try:
        yield
    except UserError as error:
        named = re.match(r"(\w+)=(\S+): ", str(error))
        if not named or named[1] not in {field.name for field in fields(arguments)}:
            raise
        flag = f"--{named[1].replace('_', '-')}"
        raise UserError(f"{flag} {named[2]}: {str(error)[named.end() :]}") from None


def _check_options(arguments: Any, argv: Sequence[str], prog: str) -> None:
    known = ["--help", *(f"--{field.name.replace('_', '-')}" for field in fields(arguments))]
    for token, after in pairwise([*argv, ""]):
        flag = re.match(r"(--[a-z][\w-]*|-[a-z])(?==|$)", token)
        if not flag:
            continue
        value = token[flag.end() + 1 :] or ("" if after.startswith("-") else after)
        hint = find_hint(flag[0], value, prog.split()[1])
        is_known = flag[0].replace("_", "-") in known or not flag[0].startswith("--")
        if hint or not is_known:
            hint = hint or did_you_mean(flag[0], known)
            raise UserError(f"unknown option {flag[0]}{hint}; see {prog} --help")


def _unbox(text: str) -> str:
    """Return the text in tyro's error box: between its title and the next rule, UTF-8 or ASCII."""
    lines = [line.strip(" │") for line in text.splitlines()]
    rules = [i for i, line in enumerate(lines) if re.match(r"[╭╰]|[─-]{3,}$", line)]
    message = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    line = " ".join(" ".join(message).split()).rstrip(".")
    return _number_expected(line) or line or "cannot read the arguments"


def _number_expected(line: str) -> str:
    """Return a plain message if tyro complains that the value of a flag is not a number, or ""."""
    flag = re.search(r"Error parsing (--[\w-]+)", line)
    value = re.search(r"(base 10|string to float): (?:'(.*?)'|\"(.*?)\")(?= |$)", line)
    if not flag or not value:
        return ""
    kind = "a whole number" if value[1] == "base 10" else "a number"
    return f"{flag[1]} {value[2] or value[3] or ''}: must be {kind}"


if __name__ == "__main__":
    script()

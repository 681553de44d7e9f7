"""The exceptions of user errors and of requested stops, and the exit statuses.

`UserError` carries one line: what is wrong and how to fix it. The command line prints that line
and exits with status `EXIT_USER_ERROR`; any other exception is a bug in famjax and keeps its
traceback. The statuses are explained in docs/architecture.md, "Exit statuses".
"""

from __future__ import annotations

import difflib
import math
import os
import signal
from collections.abc import Iterable

# similarity from which one name is suggested for another; half of the letters are alike by chance
_CUTOFF = 0.65

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_PEER_LOST = 75  # sysexits' "try again later"
EXIT_SIGNAL = 128  # plus the signal's number, as a shell reports it


class UserError(Exception):
    """A mistake outside famjax. The message is one line: the subject, what is wrong, the fix."""


class NotConnectedError(Exception):
    """The processes of a training could not reach each other; a later try may succeed.

    The message is one line. The command line exits with `EXIT_PEER_LOST`.
    """


class StopRequested(Exception):
    """The run was asked to stop and has saved. The message is one line.

    Attributes:
      signal: number of the signal received; the command line exits with
        EXIT_SIGNAL + signal.
    """

    def __init__(self, number: int, step: int):
        super().__init__(f"stopped by {signal.Signals(number).name} at step {step}, saved")
        self.signal = number


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the known name closest to `name`, or "" if none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=_CUTOFF)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def did_you_mean_path(path: str) -> str:
    """Return a suggestion for a path that does not exist.

    "; did you mean 'FOLDER/NAME'?" for the closest name in its folder, a note if the folder does
    not exist either, or "" if no name is close.
    """
    folder, name = os.path.split(path.rstrip("/"))
    try:
        names = os.listdir(folder or ".")
    except FileNotFoundError:
        return f"; there is no folder {folder}"
    except OSError:
        return ""
    # compared without the ending, which most names in a folder share
    stem, _ = os.path.splitext(name)
    near = set(difflib.get_close_matches(stem, [os.path.splitext(n)[0] for n in names], 3, _CUTOFF))
    found = [n for n in names if os.path.splitext(n)[0] in near]
    matches = difflib.get_close_matches(name, found, n=1, cutoff=0)
    return f"; did you mean {os.path.join(folder, matches[0])!r}?" if matches else ""


def format_divisors(value: int) -> str:
    """Return the divisors of a number, formatted for an error."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    return ", ".join(str(n) for n in sorted({*small, *(value // n for n in small)}))


def format_multiples(value: int, of: int) -> str:
    """Return the multiples of a number around a value, formatted for an error."""
    below = value // of * of
    return f"{below} or {below + of}" if below else f"{of}"

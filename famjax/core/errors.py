"""One exception for every mistake a user can make.

`UserError` carries one line: what is wrong and how to mend it. The command line prints that
line and exits with status 2; anything else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
import os
import signal
from collections.abc import Iterable


class UserError(Exception):
    """A mistake outside our code. The message is one line: the thing, what is wrong, the mend."""


class StopRequested(Exception):
    """The run was asked to stop and has saved. The message is one line.

    Attributes:
      signal: number of the signal that asked; the command line exits with 128 more.
    """

    def __init__(self, number: int, step: int):
        super().__init__(f"stopped by {signal.Signals(number).name} at step {step}, saved")
        self.signal = number


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the known name closest to `name`, or "" if none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def nearest_path(path: str) -> str:
    """Return "; did you mean 'FOLDER/NAME'?" for the name in its folder closest to a path that is
    not there; or that there is no such folder; or "" if no name is close."""
    folder, name = os.path.split(path.rstrip("/"))
    try:
        names = os.listdir(folder or ".")
    except FileNotFoundError:
        return f"; there is no folder {folder}"
    except OSError:
        return ""
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {os.path.join(folder, matches[0])!r}?" if matches else ""

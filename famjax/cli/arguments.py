"""Types of arguments that several verbs have."""

from __future__ import annotations

from typing import Annotated

import tyro

RunArgument = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
RunsArgument = Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN ...")]

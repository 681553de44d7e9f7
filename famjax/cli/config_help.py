"""`famjax train --help CONFIG`: the description of a config, and the values that it sets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from famjax.cli.layout import command, format_entries, wrap
from famjax.config.keys import key_values
from famjax.config.schema import Config
from famjax.experiment.load import available_configs, read_config

# a label such as "Command: ", and the indent of the lines that belong to it
_LABEL = re.compile(r"[A-Z]\w+: ")
_INDENT = 4


def is_config(name: str) -> bool:
    """Return whether a word is a config's name, or the path of a .py or .json file."""
    return name in available_configs() or name.endswith((".py", ".json"))


def config_lines(name: str, width: int) -> list[str]:
    """Return a config's docstring and the values that differ from the defaults.

    Args:
      name: a name as `load_config` takes it. Only a Python file has a docstring.
      width: width of the lines.

    Raises:
      UserError: the file cannot be read, or is not a config.
    """
    path = available_configs().get(name, Path(name))
    config, defaults = key_values(read_config(name)), key_values(Config())
    text = docstring(path) if path.suffix == ".py" else ""
    lines = [f"{name}:", *_reflow(text, width), ""]
    lines += wrap("Keys that it sets to other values than the defaults:", width)
    own = {key: value for key, value in config.items() if value != defaults[key]}
    return lines + format_entries(
        {f"{key}={_text(own[key])}": f"default {_text(defaults[key])}" for key in own}, width
    )


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "''" if value == "" else str(value)


def _reflow(text: str, width: int) -> list[str]:
    """Return a docstring reflowed to lines of a width, with each command on lines of its own."""
    if all(len(line) <= width for line in text.splitlines()):
        return text.splitlines()
    lines: list[str] = []
    for line in _logical_lines(text):
        indent = " " * min(len(line) - len(line.lstrip()), _INDENT)
        if line.lstrip().startswith("famjax "):
            # in the string a backslash has joined lines, which leaves indents within the command
            shell, _, note = line.strip().partition("   #")
            if note:
                lines += wrap(f"#{note}", width, f"{indent}# ", indent)
            lines += [
                indent + part for part in command(" ".join(shell.split()), width - len(indent))
            ]
        else:
            lines += wrap(line.strip(), width, indent, indent) or [""]
    return lines


def _logical_lines(text: str) -> Iterator[str]:
    """Yield each paragraph, each command, and the text after each label as one line."""
    pending, commands = "", False
    for line in text.splitlines():
        label = _LABEL.match(line)
        indented = line.startswith(" " * _INDENT)
        own = indented and (commands or line.strip().startswith(("famjax ", "#")))
        if pending and line and not label and not own:
            pending = f"{pending} {line.strip()}"
            continue
        if pending:
            yield pending
        pending, commands = line, commands and bool(line)
        if label:
            commands = label[0] == "Command: "
        if label and commands:
            yield "Command:"
            pending = " " * _INDENT + line[label.end() :].strip()
        if not line:
            yield ""
    if pending:
        yield pending

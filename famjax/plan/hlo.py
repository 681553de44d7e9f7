"""The text of compiled HLO: computations, instructions, arrays."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

# bits of an element, for dtypes whose names do not contain them
_BITS = {"pred": 8, "token": 0, "opaque": 0}


class HloArray(tuple):
    """An array shape: (dtype, dimensions, whether it is in the device's main memory)."""

    @property
    def dtype(self) -> str:
        return str(self[0])

    @property
    def dims(self) -> tuple[int, ...]:
        return self[1]

    @property
    def bytes(self) -> float:
        dtype = self[0]
        digits = re.search(r"\d+", dtype)
        bits = _BITS.get(dtype, int(digits[0]) if digits else 8)
        return math.prod(self.dims) * bits / 8

    @property
    def main_bytes(self) -> float:
        """Number of bytes in main memory; 0 for an array in on-chip memory."""
        return self.bytes if self[2] else 0.0


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      arrays: arrays of the result; a tuple is flattened.
      operands: names of the operand instructions; for a constant, its value.
      attributes: the rest of the line.
    """

    name: str
    opcode: str
    arrays: tuple[HloArray, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    def called_computations(self, *attributes: str) -> list[str]:
        """Return the computations named by these attributes."""
        names = []
        for attribute in attributes:
            for match in re.finditer(
                rf"\b{attribute}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", self.attributes
            ):
                names += re.findall(r"[\w.\-]+", match[1] or match[2])
        return names


@dataclass
class Computation:
    """A computation: its instructions by name, in the order of the text."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.root)

    def parameters(self) -> list[Instruction]:
        parameters = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(parameters, key=lambda i: int(i.operands[0]))


@dataclass(frozen=True)
class HloModule:
    """An HLO module: its computations by name, and the name of the entry computation."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> HloModule:
    """Parse the text of an HLO module.

    Raises:
      ValueError: there is no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line)
        if head:
            current = computations[head[2]] = Computation(head[2])
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            instruction = _parse_instruction(line)
            current.instructions[instruction.name] = instruction
    if not entry:
        raise ValueError("no ENTRY computation: this is not the text of an HLO module")
    return HloModule(computations, entry)


def _parse_instruction(line: str) -> Instruction:
    left, _, right = re.sub(r"/\*.*?\*/", "", line).strip().partition(" = ")
    root = left.startswith("ROOT ")
    end = _closing_bracket(right, 0) + 1 if right.startswith("(") else right.index(" ")
    kind, rest = right[:end], right[end:].strip()
    begin = rest.index("(")
    close = _closing_bracket(rest, begin)
    inside, opcode = rest[begin + 1 : close], rest[:begin]
    literal = opcode in ("constant", "parameter")
    operands = (inside,) if literal else tuple(re.findall(r"%([\w.\-]+)", inside))
    name = left.removeprefix("ROOT ").lstrip("%")
    return Instruction(name, opcode, _parse_arrays(kind), operands, rest[close + 1 :], root)


def _closing_bracket(text: str, begin: int) -> int:
    """Return the index of the parenthesis that closes the one at `begin`."""
    depth = 0
    for i in range(begin, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if not depth:
            return i
    raise ValueError(f"no closing bracket: {text[:80]}")


def _parse_arrays(kind: str) -> tuple[HloArray, ...]:
    matches = re.finditer(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?", kind)
    return tuple(
        HloArray(
            (
                m[1],
                tuple(int(n.lstrip("<=")) for n in m[2].split(",") if n),
                re.search(r"S\([1-9]", m[3] or "") is None,
            )
        )
        for m in matches
    )

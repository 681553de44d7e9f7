"""Trip counts of loops in compiled HLO."""

from __future__ import annotations

import re

from famjax.plan.hlo import Computation, HloModule, Instruction


def trip_count(module: HloModule, within: Computation, loop: Instruction) -> int | None:
    """Return a loop's trip count, from the compiler's annotation or from its condition.

    The condition compares a limit with a counter in the carried tuple, to which the body adds a
    constant.
    """
    known = re.search(r'known_trip_count[^0-9]*"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition, body = (
        module.computations[loop.called_computations(name)[0]] for name in ("condition", "body")
    )
    comparison = _parse_comparison(module, condition)
    if comparison is None:
        return None
    index, limit, direction = comparison
    carried = within.instructions[loop.operands[0]]
    limit_value = (
        limit if isinstance(limit, int) else _initial_value(module, within, carried, -limit[0])
    )
    start = _initial_value(module, within, carried, index)
    step = _increment(module, body, index)
    if start is None or limit_value is None or not step:
        return None
    if direction == "NE":
        return abs(limit_value - start) // abs(step)
    distance = (limit_value - start) * (1 if step > 0 else -1)
    distance += direction in ("LE", "GE")
    return max(0, -(-distance // abs(step)))


def _parse_comparison(
    module: HloModule, condition: Computation
) -> tuple[int, int | tuple[int], str] | None:
    """Return (index of the counter in the carried tuple, the limit, direction).

    The limit is a number, or (-index,) if it is carried too.
    """
    inner, names = condition, dict[str, Instruction]()
    root = condition.root
    while root.opcode in ("fusion", "call", "copy", "bitcast"):
        if root.opcode in ("copy", "bitcast"):
            root = inner.instructions[root.operands[0]]
            continue
        called = module.computations[root.called_computations("calls", "to_apply")[0]]
        operands = [names.get(o, inner.instructions[o]) for o in root.operands]
        names = {p.name: g for p, g in zip(called.parameters(), operands, strict=True)}
        inner, root = called, called.root
    direction = re.search(r"direction=(\w\w)", root.attributes)
    if root.opcode != "compare" or not direction:
        return None
    sides: list[tuple[int] | int | None] = []
    for operand in root.operands:
        source = _trace_copies(inner, names.get(operand, inner.instructions[operand]), names)
        number = _constant_value(source)
        index = re.search(r"index=(\d+)", source.attributes)
        if number is not None:
            sides.append(number)
        elif source.opcode == "get-tuple-element" and index:
            sides.append((-int(index[1]),))
        else:
            return None
    first, second = sides
    comparison = direction[1]
    if not isinstance(first, tuple):
        first, second = second, first
        comparison = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(comparison, comparison)
    if not isinstance(first, tuple) or second is None:
        return None
    return -first[0], second, comparison


def _trace_copies(
    inner: Computation, source: Instruction, names: dict[str, Instruction] | None = None
) -> Instruction:
    """Trace copies and conversions back to their source."""
    names = names or {}
    while source.opcode in ("copy", "bitcast", "convert", "copy-done", "copy-start"):
        operand = source.operands[0]
        if operand not in inner.instructions:
            return source
        source = names.get(operand, inner.instructions[operand])
    return names.get(source.name, source) if source.opcode == "parameter" else source


def _constant_value(instruction: Instruction) -> int | None:
    whole = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.operands[0])
    return int(instruction.operands[0]) if whole else None


def _initial_value(
    module: HloModule, within: Computation, carried: Instruction, index: int
) -> int | None:
    """Return the initial value at an index of a loop's carried tuple, if it is constant."""
    carried = _trace_copies(within, carried)
    if carried.opcode != "tuple":
        return None
    return _constant_value(_trace_copies(within, within.instructions[carried.operands[index]]))


def _increment(module: HloModule, body: Computation, index: int) -> int | None:
    """Return the constant that the body adds to an element of the carried tuple."""
    root = body.root
    if root.opcode != "tuple":
        return None
    inner, source = body, _trace_copies(body, body.instructions[root.operands[index]])
    names: dict[str, Instruction] = {}
    if source.opcode == "fusion":
        called = module.computations[source.called_computations("calls")[0]]
        operands = [body.instructions[o] for o in source.operands]
        names = {p.name: g for p, g in zip(called.parameters(), operands, strict=True)}
        inner, source = called, called.root
    if source.opcode not in ("add", "subtract"):
        return None
    sides = [
        _trace_copies(
            body if o in body.instructions else inner, names.get(o, inner.instructions[o]), names
        )
        for o in source.operands
    ]
    numbers = [n for n in map(_constant_value, sides) if n is not None]
    if len(numbers) != 1:
        return None
    return numbers[0] if source.opcode == "add" else -numbers[0]

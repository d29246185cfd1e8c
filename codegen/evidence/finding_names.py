# SPDX-License-Identifier: Apache-2.0
"""What a generated kernel calls its barriers, its tiles and its warps, for the emulator's findings.

All of it is read from the text: SharedStorage says in which order barriers and tiles lie in shared
memory, the constants how many stages a ring has and what elements are, and the header which warps
have which role.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping

from ..emulator.barriers import NAMED_BARRIERS
from ..emulator.memory import RESERVED
from ..emulator.report import Names

_BYTES: Mapping[str, int] = {
    **{"Int64": 8, "Int32": 4, "Float32": 4},
    **{"BFloat16": 2, "Float16": 2, "Float8E4M3FN": 1},
}
"""By the DSL's name of an element type."""
_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_BARRIERS = "_mbar"
"""How the name of a ring's barriers ends; the full ones come first, then the empty ones."""
_BARRIER_BYTES = 8
_NAMED_BARRIER = "_BARRIER"
_SENTENCE = re.compile(r"^Roles: (.*?)\.$", re.M | re.S)
_WARPS = re.compile(r"(\d+)(?: to (\d+))?")


def names_of(text: str) -> Names:
    """The names in a generated kernel's text; none of what it does not have."""
    tree = ast.parse(text)
    constants, sizes = _constants(tree), {**_BYTES, **dict(_named_types(tree))}
    barriers: dict[int, str] = {}
    tiles: list[tuple[range, str]] = []
    for name, place in _storage(tree, constants, sizes):
        if not name.endswith(_BARRIERS):
            tiles.append((place, name))
            continue
        stages = len(place) // _BARRIER_BYTES // 2
        for stage in range(stages):
            for side, word in enumerate(("full", "empty")):
                offset = place.start + _BARRIER_BYTES * (side * stages + stage)
                ring = name.removesuffix(_BARRIERS)
                barriers[offset] = f"{ring} {word}, stage {stage}"
    roles = tuple(_roles(ast.get_docstring(tree) or ""))
    return Names(barriers, dict(_named_barriers(constants)), tuple(tiles), roles)


def _named_barriers(constants: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    """Each constant that ends so is the first of some: up to the next one's."""
    firsts = {
        number: name
        for name, number in sorted(constants.items(), key=lambda item: item[1])
        if name.endswith(_NAMED_BARRIER)
    }
    for number in range(min(firsts, default=NAMED_BARRIERS), NAMED_BARRIERS):
        first = max(each for each in firsts if each <= number)
        yield number, firsts[first] + (f" + {number - first}" if number > first else "")


def _roles(header: str) -> Iterator[tuple[range, str]]:
    """The warps of each role, and what they do: the first words of it."""
    sentence = _SENTENCE.search(header)
    for part in sentence[1].split(";") if sentence else ():
        words = " ".join(part.split())
        subject = re.match(r"warps? (?:\d+(?: to \d+)?(?: and )?)+ ", words)
        if subject is None:
            continue
        for first, last in _WARPS.findall(subject[0]):
            warps = range(int(first), int(last or first) + 1)
            yield warps, words[subject.end() :]


def _constants(tree: ast.Module) -> dict[str, int]:
    """Names of integers at the top level, computed ones too."""
    found: dict[str, int] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = _value(node.value, found)
            if value is not None:
                found[node.targets[0].id] = value
    return found


def _named_types(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """[bytes] Names of element types at the top level, such as DTYPE = cutlass.BFloat16."""
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(
            node.value, ast.Attribute
        ):
            continue
        target, size = node.targets[0], _BYTES.get(node.value.attr)
        if isinstance(target, ast.Name) and size is not None:
            yield target.id, size


def _value(node: ast.expr, known: Mapping[str, int]) -> int | None:
    """Of an expression; None when it is no integer that the constants decide."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, known), _value(node.right, known)
        if left is not None and right is not None:
            return _OPERATORS[type(node.op)](left, right)
    return None


def _storage(
    tree: ast.Module, constants: Mapping[str, int], sizes: Mapping[str, int]
) -> Iterator[tuple[str, range]]:
    """The fields of SharedStorage and their bytes in a CTA's shared memory."""
    end = RESERVED
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name != "SharedStorage":
            continue
        for line in node.body:
            if not isinstance(line, ast.AnnAssign):
                continue
            field = _field(line.annotation, constants, sizes)
            if field is None or not isinstance(line.target, ast.Name):
                return  # nobody knows where what follows lies
            size, alignment = field
            start = -(-end // alignment) * alignment
            end = start + size
            yield line.target.id, range(start, end)


def _field(
    node: ast.expr, constants: Mapping[str, int], sizes: Mapping[str, int]
) -> tuple[int, int] | None:
    """[bytes, bytes] The size of a field of SharedStorage and its alignment.

    sizes: of elements, by the name of their type.
    """
    if isinstance(node, ast.Name):
        size = sizes.get(node.id)
        return None if size is None else (size, size)
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Tuple):
        return None
    first, second = node.slice.elts
    number = _value(second, constants)
    inner = _field(first, constants, sizes)
    if number is None or inner is None or not isinstance(node.value, ast.Attribute):
        return None
    if node.value.attr == "Align":
        return inner[0], number
    return inner[0] * number, inner[1]

# SPDX-License-Identifier: Apache-2.0
"""Writes numbers into a spec's own text: comments, order and every other character stay.

A number stands on a line of its own afterwards: ``tile: {q: 128, kv: 128}`` is unfolded into a
block when one of its numbers changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import yaml
from yaml.nodes import MappingNode, Node

from ..errors import CheckFailed, SpecError, shown
from ..spec import specfile
from .space import Point

_INDENT = "  "
_LINE_BREAK = re.compile(r"\r\n|\r|\n")

Numbers = dict[str, int]  # of one mapping, by key


def write(text: str, point: Point) -> str:
    """Return a good spec's text with these values, by dotted field name such as ``tile.kv``.

    Raises CheckFailed when the text is too unusual to be edited; it then says what to write.
    """
    wanted = _data(text)
    blocks: dict[str, Numbers] = {}
    for field, value in point.items():
        name, _, key = field.partition(".")
        blocks.setdefault(name, {})[key] = value
    edited = text
    try:
        for name, numbers in blocks.items():
            edited = _write_block(edited, name, numbers)
            inner = wanted.get(name, {})
            assert isinstance(inner, Mapping)  # the spec is good
            wanted[name] = {**inner, **numbers}
        as_wanted = _data(edited) == wanted
    except (SpecError, yaml.YAMLError):
        as_wanted = False
    if not as_wanted:
        lines = ", ".join(f"{field}: {shown(value)}" for field, value in point.items())
        raise CheckFailed(f"cannot edit this spec; write by hand: {lines}")
    return edited


def _data(text: str) -> dict[str, object]:
    return dict(specfile.parse("", text).data)


def _write_block(text: str, name: str, numbers: Numbers) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, MappingNode)
    found = next(((key, block) for key, block in root.value if key.value == name), None)
    lines = [f"{key}: {shown(value)}" for key, value in numbers.items()]
    if found is None:
        margin = " " * root.start_mark.column
        block_lines = [f"{name}:", *(_INDENT + line for line in lines)]
        return _add_lines(text, root, [margin + line for line in block_lines])
    key, block = found
    known = {inner.value: value for inner, value in block.value}
    if all(n in known and known[n].value == shown(x) for n, x in numbers.items()):
        return text
    if block.flow_style and block.end_mark.line != key.start_mark.line:
        return text  # a person may unfold it: there may be comments in it
    if block.flow_style:
        pairs = {name: value.value for name, value in known.items()}
        pairs |= {name: shown(value) for name, value in numbers.items()}
        return _unfold(text, key, block, pairs)
    indent = " " * block.start_mark.column
    new = [one for n, one in zip(numbers, lines, strict=True) if n not in known]
    text = _add_lines(text, block, [indent + one for one in new])
    # From the last one on, so that the places of the others stay.
    for inner, value in reversed(block.value):
        if inner.value in numbers:
            start, end = value.start_mark.index, value.end_mark.index
            text = text[:start] + shown(numbers[inner.value]) + text[end:]
    return text


def _unfold(text: str, key: Node, block: Node, pairs: Mapping[str, str]) -> str:
    """``tile: {q: 128}  # why`` to a block; a comment stays with the mapping's name."""
    indent = " " * key.start_mark.column + _INDENT
    start, end = block.start_mark.index, block.end_mark.index
    stop = _line_end(text, end)
    head = text[:start].rstrip(" ") + text[end:stop].rstrip(" ")
    lines = [f"{indent}{name}: {value}" for name, value in pairs.items()]
    return head + "".join(_break(text) + line for line in lines) + text[stop:]


def _add_lines(text: str, block: MappingNode, lines: list[str]) -> str:
    """Add lines below the last one of a block mapping."""
    leaf: Node = block
    while isinstance(leaf, MappingNode) and not leaf.flow_style:
        leaf = leaf.value[-1][1]
    at = _line_end(text, leaf.end_mark.index)
    return text[:at] + "".join(_break(text) + line for line in lines) + text[at:]


def _line_end(text: str, at: int) -> int:
    found = _LINE_BREAK.search(text, at)
    return found.start() if found else len(text)


def _break(text: str) -> str:
    """The line break that the file uses."""
    found = _LINE_BREAK.search(text)
    return found.group() if found else "\n"

# SPDX-License-Identifier: Apache-2.0
"""Writes numbers into a spec's own text: comments, order and every other character stay.

A number stands on a line of its own afterwards: ``tile: {q: 128, kv: 128}`` is unfolded into a
block when one of its numbers changes. A mapping that cannot be unfolded, because it spans lines
or lies in another flow mapping, is changed where it stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import yaml
from yaml.nodes import MappingNode, Node

from .. import specfile
from ..errors import CheckFailed, shown
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
        block, _, key = field.rpartition(".")
        blocks.setdefault(block, {})[key] = value
    for name, numbers in blocks.items():
        text = _write_block(text, name, numbers) if name else _write_top(text, numbers)
        inner = wanted.get(name, {}) if name else wanted
        assert isinstance(inner, Mapping)  # the spec is good
        wanted |= {name: {**inner, **numbers}} if name else numbers
    if _data(text) != wanted:
        lines = ", ".join(f"{field}: {shown(value)}" for field, value in point.items())
        raise CheckFailed(f"cannot edit this spec; write by hand: {lines}")
    return text


def _data(text: str) -> dict[str, object]:
    return dict(specfile.parse("", text).data)


def _write_top(text: str, numbers: Numbers) -> str:
    for key, value in numbers.items():
        text = _write_one(text, _root(text), key, value)
    return text


def _write_block(text: str, name: str, numbers: Numbers) -> str:
    root = _root(text)
    found = _find(root, name)
    if found is None:
        return _add_block(text, root, name, numbers)
    key, block = found
    assert isinstance(block, MappingNode)
    known = {str(k.value): v.value for k, v in block.value}
    if all(known.get(k) == shown(v) for k, v in numbers.items()):
        return text
    if not root.flow_style and _is_folded(text, key, block):
        return _unfold(text, key, block, numbers)
    for inner, value in numbers.items():
        found = _find(_root(text), name)
        assert found is not None and isinstance(found[1], MappingNode)
        text = _write_one(text, found[1], inner, value)
    return text


def _write_one(text: str, block: MappingNode, key: str, value: int) -> str:
    """Replace a value of a mapping, or add it as its last one."""
    found = _find(block, key)
    if found is not None:
        start, end = _span(found[1])
        return text[:start] + shown(value) + text[end:]
    if block.flow_style:
        return _add_to_flow(text, block, f"{key}: {shown(value)}")
    indent = " " * block.value[0][0].start_mark.column
    return _add_lines(text, block, [f"{indent}{key}: {shown(value)}"])


def _add_block(text: str, root: MappingNode, name: str, numbers: Numbers) -> str:
    lines = [f"{key}: {shown(value)}" for key, value in numbers.items()]
    if root.flow_style:
        return _add_to_flow(text, root, f"{name}: {{{', '.join(lines)}}}")
    indent = " " * root.value[0][0].start_mark.column
    inner = [f"{indent}{_INDENT}{line}" for line in lines]
    return _add_lines(text, root, [f"{indent}{name}:", *inner])


def _unfold(text: str, key: Node, block: MappingNode, numbers: Numbers) -> str:
    """``tile: {q: 128}  # why`` to a block; a comment stays with the mapping's name."""
    start, end = _span(block)
    pairs = {_slice(text, k): _slice(text, v) for k, v in block.value}
    names = {str(k.value): _slice(text, k) for k, _ in block.value}
    for inner, value in numbers.items():
        pairs[names.get(inner, inner)] = shown(value)
    indent = " " * key.start_mark.column + _INDENT
    stop = _line_end(text, end)
    head = text[:start].rstrip(" ") + text[end:stop].rstrip(" ")
    lines = [f"{indent}{inner}: {value}" for inner, value in pairs.items()]
    return head + "".join(_break(text) + line for line in lines) + text[stop:]


def _is_folded(text: str, key: Node, block: MappingNode) -> bool:
    """Whether a mapping in braces shares one line with its key, which starts that line."""
    start, end = key.start_mark.index, block.end_mark.index
    before = _LINE_BREAK.split(text[:start])[-1]
    line = text[start:end]
    return (
        bool(block.flow_style) and not before.strip() and not _LINE_BREAK.search(line)
    )


def _add_to_flow(text: str, block: MappingNode, pair: str) -> str:
    if not block.value:
        at = block.start_mark.index + 1
        return text[:at] + pair + text[at:]
    at = block.value[-1][1].end_mark.index
    return f"{text[:at]}, {pair}{text[at:]}"


def _add_lines(text: str, block: MappingNode, lines: list[str]) -> str:
    """Add lines below the last one of a block mapping."""
    leaf: Node = block
    while isinstance(leaf, MappingNode) and not leaf.flow_style:
        leaf = leaf.value[-1][1]
    at = _line_end(text, _span(leaf)[1])
    return text[:at] + "".join(_break(text) + line for line in lines) + text[at:]


def _root(text: str) -> MappingNode:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, MappingNode)
    return root


def _find(block: MappingNode, name: str) -> tuple[Node, Node] | None:
    return next(((k, v) for k, v in block.value if k.value == name), None)


def _span(node: Node) -> tuple[int, int]:
    return node.start_mark.index, node.end_mark.index


def _slice(text: str, node: Node) -> str:
    start, end = _span(node)
    return text[start:end]


def _line_end(text: str, at: int) -> int:
    found = _LINE_BREAK.search(text, at)
    return found.start() if found else len(text)


def _break(text: str) -> str:
    """The line break that the file uses."""
    found = _LINE_BREAK.search(text)
    return found.group() if found else "\n"

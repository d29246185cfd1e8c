# SPDX-License-Identifier: Apache-2.0
"""Writes an x86-64 shared library whose functions are filled in after it is loaded.

Every exported function is one indirect jump through its slot of a table of addresses, which the
library exports too. A linker that resolves symbols from the library then calls whatever stands in
the table: functions of this process, for instance ctypes callbacks. No compiler is involved.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

TABLE = "function_table"  # the exported array: slot i is the target of function i
SLOT = 8  # [bytes] of an address

_PAGE = 0x1000
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC = struct.Struct("<QQ")

# jmp *offset(%rip), and two traps up to eight bytes
_JUMP = struct.Struct("<2si2s")
_JUMP_OPCODE, _TRAPS = b"\xff\x25", b"\xcc\xcc"
_JUMP_LENGTH = 6  # [bytes]: the offset counts from the end of the instruction

_ET_DYN, _EM_X86_64 = 3, 62
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_X, _W, _R = 1, 2, 4
_DT_NULL, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT = 0, 4, 5, 6, 10, 11
_GLOBAL_OBJECT, _GLOBAL_FUNCTION = 0x11, 0x12
_SOME_SECTION = 1  # there are none, but 0 would mean undefined


def shared_library(functions: Sequence[str]) -> bytes:
    """Return the library's bytes: ``functions`` and ``TABLE`` are its symbols, ASCII names.

    Two segments, at the same addresses as in the file: headers, symbols and jumps to read and
    execute; then, from the next page on, the dynamic section and the table, to read and write.
    """
    names = [*functions, TABLE]
    if len(set(names)) != len(names):
        raise ValueError("a symbol given twice")
    strings = b"\0" + b"".join(name.encode("ascii") + b"\0" for name in names)
    hashes = _one_bucket(len(names) + 1)

    segments = 4
    symbols_at = _HEADER.size + segments * _SEGMENT.size
    hash_at = symbols_at + _SYMBOL.size * (len(names) + 1)
    strings_at = hash_at + len(hashes)
    code_at = _up(strings_at + len(strings), 16)
    code_end = code_at + _JUMP.size * len(functions)
    dynamic_at = _up(code_end, _PAGE)
    dynamic = b"".join(
        _DYNAMIC.pack(tag, value)
        for tag, value in (
            (_DT_HASH, hash_at),
            (_DT_STRTAB, strings_at),
            (_DT_SYMTAB, symbols_at),
            (_DT_STRSZ, len(strings)),
            (_DT_SYMENT, _SYMBOL.size),
            (_DT_NULL, 0),
        )
    )
    table_at = dynamic_at + len(dynamic)
    table_bytes = SLOT * len(functions)
    end = table_at + table_bytes

    code = b"".join(
        _JUMP.pack(_JUMP_OPCODE, slot - (place + _JUMP_LENGTH), _TRAPS)
        for slot, place in zip(
            range(table_at, end, SLOT),
            range(code_at, code_end, _JUMP.size),
            strict=True,
        )
    )
    symbols = bytes(_SYMBOL.size)  # the first one is undefined
    name_at = 1
    for index, name in enumerate(names):
        kind, value, size = _GLOBAL_OBJECT, table_at, table_bytes
        if index < len(functions):
            kind, value = _GLOBAL_FUNCTION, code_at + _JUMP.size * index
            size = _JUMP.size
        symbols += _SYMBOL.pack(name_at, kind, 0, _SOME_SECTION, value, size)
        name_at += len(name) + 1

    headers = _HEADER.pack(
        b"\x7fELF\x02\x01\x01",  # 64 bits, little endian, version 1
        *(_ET_DYN, _EM_X86_64, 1, 0),
        *(_HEADER.size, 0, 0),  # where the segments are; no sections
        *(_HEADER.size, _SEGMENT.size, segments),
        *(0, 0, 0),
    )
    for kind, flags, start, stop, align in (
        (_PT_LOAD, _R | _X, 0, code_end, _PAGE),
        (_PT_LOAD, _R | _W, dynamic_at, end, _PAGE),
        (_PT_DYNAMIC, _R | _W, dynamic_at, table_at, 8),
        (
            _PT_GNU_STACK,
            _R | _W,
            0,
            0,
            16,
        ),  # without it, an executable stack is assumed
    ):
        length = stop - start
        headers += _SEGMENT.pack(kind, flags, *([start] * 3), length, length, align)

    library = bytearray(end)
    for place, part in (
        (0, headers),
        (symbols_at, symbols),
        (hash_at, hashes),
        (strings_at, strings),
        (code_at, code),
        (dynamic_at, dynamic),
    ):
        library[place : place + len(part)] = part
    return bytes(library)


def _one_bucket(symbols: int) -> bytes:
    """A hash table of one bucket: every lookup walks the chain n-1, n-2, ..., 1."""
    chain = [0, *range(symbols - 1)]
    return struct.pack(f"<{3 + symbols}I", 1, symbols, symbols - 1, *chain)


def _up(offset: int, align: int) -> int:
    return -(-offset // align) * align

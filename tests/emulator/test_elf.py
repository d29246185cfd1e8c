# SPDX-License-Identifier: Apache-2.0
"""The library written by hand: loaded, filled in and called."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from fmha_gen.emulator import elf, launch

SLOT = ctypes.c_void_p
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)


def load(folder: Path, names: list[str]) -> tuple[ctypes.CDLL, ctypes.Array[SLOT]]:
    path = folder / "library.so"
    path.write_bytes(elf.shared_library(names))
    library = ctypes.CDLL(str(path))
    return library, (SLOT * len(names)).in_dll(library, elf.TABLE)


@pytest.mark.parametrize("count", [1, 2, 10, 300])
def test_each_function_calls_what_its_slot_holds(tmp_path, count):
    names = [f"function_{number}" for number in range(count)]
    library, table = load(tmp_path, names)
    calls = []

    def recorder(number):
        def call(x, y):
            calls.append((number, x, y))
            return x - y

        return FUNCTION(call)

    callbacks = [recorder(number) for number in range(count)]
    for slot, callback in enumerate(callbacks):
        table[slot] = ctypes.cast(callback, SLOT).value
    for number, name in enumerate(names):
        assert getattr(library, name)(number, 7) == number - 7
    assert calls == [(number, number, 7) for number in range(count)]


def test_a_slot_can_be_filled_again(tmp_path):
    library, table = load(tmp_path, ["f"])
    for answer in (3, 4):
        callback = FUNCTION(lambda x, y, answer=answer: answer)
        table[0] = ctypes.cast(callback, SLOT).value
        assert library.f(0, 0) == answer


def test_what_was_not_asked_for_is_no_symbol(tmp_path):
    library, _ = load(tmp_path, ["f", "g"])
    with pytest.raises(AttributeError):
        library.h  # noqa: B018
    with pytest.raises(AttributeError):
        library.ff  # noqa: B018


def test_a_name_given_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        elf.shared_library(["f", "f"])
    with pytest.raises(ValueError, match="twice"):
        elf.shared_library([elf.TABLE])


def test_the_bytes_depend_on_the_names_alone():
    assert elf.shared_library(["f", "g"]) == elf.shared_library(["f", "g"])
    assert elf.shared_library(["f", "g"]) != elf.shared_library(["g", "f"])


def test_the_stack_stays_without_execution(tmp_path):
    """A library that asks for an executable stack is refused by hardened systems."""
    data = elf.shared_library(["f"])
    offset, size, count = 64, 56, int.from_bytes(data[56:58], "little")
    flags = {}
    for start in range(offset, offset + size * count, size):
        kind = int.from_bytes(data[start : start + 4], "little")
        flags[kind, len(flags)] = int.from_bytes(data[start + 4 : start + 8], "little")
    writable, executable = 2, 1
    assert any(kind == 0x6474E551 for kind, _ in flags)
    assert all(flag & (writable | executable) != 3 for flag in flags.values())


def test_this_machine_can_capture():
    launch.self_test()

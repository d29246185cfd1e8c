# SPDX-License-Identifier: Apache-2.0
"""Tensors with strides beyond 2^31, of which only the elements are in memory."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen.build import captures
from fmha_gen.build.calls import FIRST_ADDRESS, arguments
from fmha_gen.emulator import machine
from fmha_gen.emulator.lower import lower_kernels
from fmha_gen.emulator.memory import GlobalMemory, MemoryFault
from fmha_gen.evidence.coverage import tiles_of_case

from .rehearsals import tagged
from .walks import GENERATED

BASE = 0x5000_0000_0000
FAR = (1 << 36, 1 << 33, 4)  # [bytes] between batches, rows and columns


def far_memory() -> tuple[GlobalMemory, np.ndarray]:
    """[2, 3, 16] numbers of 4 bytes."""
    memory = GlobalMemory()
    array = np.arange(96, dtype=np.uint32).reshape(2, 3, 16)
    memory.add_strided("far", BASE, array, FAR)
    return memory, array


def addresses_of(*indices) -> np.ndarray:
    return np.array(
        [BASE + sum(i * s for i, s in zip(each, FAR, strict=True)) for each in indices]
    )


def test_elements_are_where_the_strides_say():
    memory, array = far_memory()
    (values,) = memory.load(addresses_of((0, 0, 0), (1, 2, 15), (1, 0, 3)), 4, 1)
    assert values.tolist() == [0, 95, 51]
    memory.store(addresses_of((1, 1, 2)), 4, [np.array([7], np.uint32)])
    assert array[1, 1, 2] == 7
    low, high = memory.load(addresses_of((0, 1, 2)), 4, 2)
    assert (low[0], high[0]) == (18, 19)


@pytest.mark.parametrize(
    "index", [(0, 0, 16), (0, 3, 0), (2, 0, 0), (0, 0, -1), (1, 2, 16)]
)
def test_between_the_elements_there_is_nothing(index):
    memory, _ = far_memory()
    with pytest.raises(MemoryFault):
        memory.load(addresses_of(index), 4, 1)


def test_an_access_that_leaves_its_row():
    memory, _ = far_memory()
    with pytest.raises(MemoryFault, match="between the elements of far"):
        memory.find(int(addresses_of((0, 0, 14))[0]), 16)


def test_axes_in_any_order_and_an_innermost_stride():
    memory = GlobalMemory()
    array = np.arange(24, dtype=np.uint32).reshape(2, 3, 4)
    strides = 8, 1 << 40, 64
    memory.add_strided("lse", BASE + 4, array, strides)
    for index in np.ndindex(array.shape):
        place = BASE + 4 + sum(i * s for i, s in zip(index, strides, strict=True))
        assert memory.load(np.array([place]), 4, 1)[0][0] == array[index]
    with pytest.raises(MemoryFault):
        memory.load(np.array([BASE + 8]), 4, 1)


def test_what_cannot_be_told_apart_is_refused():
    memory = GlobalMemory()
    array = np.zeros((4, 8), np.uint32)
    with pytest.raises(ValueError, match="smaller than the 32 bytes below it"):
        memory.add_strided("x", BASE, array, (16, 4))
    memory.add_strided("x", BASE, array, (1 << 20, 4))
    with pytest.raises(ValueError, match="overlaps"):
        memory.add("y", BASE + 4096, np.zeros(16, np.uint8))


def test_words_that_are_closer_together_than_their_alignment():
    memory = GlobalMemory()
    memory.add_strided("x", BASE, np.zeros((4, 3), np.uint32), (1 << 20, 4))
    with pytest.raises(ValueError, match="too close together"):
        memory.load(np.array([BASE + (1 << 20)]), 4, 2)


def test_a_kernel_computes_the_same_far_apart():
    """K, V, Q, O and LSE with huge strides of their own, each in its own order of the axes."""
    (ready,) = tagged(GENERATED / "sm90_d64_bf16_causal_lse.py", ["strided"])
    problem, spec, case = ready.problem, ready.spec, ready.case
    tensors = {each.name: each for each in (*problem.inputs, *problem.outputs)}
    orders = {"q": (0, 1, 2), "k": (2, 1, 0), "v": (0, 2, 1), "out": (1, 2, 0)}
    call = arguments(spec, case)
    memory, bits, tiles = GlobalMemory(), {}, {}
    for number, (name, tensor) in enumerate(tensors.items()):
        shape = tensor.view.shape
        bits[name] = np.ascontiguousarray(tensor.view)
        strides = [0, 0, 0, 2][: len(shape)]
        step = (1 << 28) + 16 * number
        for axis in reversed(orders.get(name, (0, 1, 2))):
            strides[axis], step = step, 1 << (step * shape[axis]).bit_length()
        address = FIRST_ADDRESS + (number << 43)
        size = bits[name].itemsize
        memory.add_strided(
            name, address, bits[name], strides, writable=name in ("out", "lse")
        )
        told = call["tensors"][name]
        told["address"], told["strides"] = address, [s // size for s in strides]
        assert max(strides) < 1 << 40  # [bytes] that a tensor map can say
        reach = sum(s * (n - 1) for s, n in zip(strides, shape, strict=True))
        assert reach // size > 1 << 31
        rows = ready.tiles.kv if name in ("k", "v") else ready.tiles.cluster_rows
        tiles[address] = (1, rows)
    text, (called,) = captures.capture(
        GENERATED / "sm90_d64_bf16_causal_lse.py", [call], arch=spec["arch"]
    )
    for name in ("out", "lse"):
        bits[name].fill(0)
    ran = machine.run(lower_kernels(text), called.launched, memory, tiles=tiles)
    assert ran.findings == ()
    near = machine.run(
        *(ready.programs, ready.launches, problem.memory()),
        tiles=tiles_of_case(ready.tiles, ready.spec, ready.case),
    )
    assert near.findings == ()
    for output in problem.outputs:
        assert (bits[output.name] == output.view).all()
    counts = ran.writes.counts(FIRST_ADDRESS + (3 << 43), bits["out"])
    assert (counts == 1).all()

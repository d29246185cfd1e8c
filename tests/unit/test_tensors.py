# SPDX-License-Identifier: Apache-2.0
"""Tensors at made-up addresses: where they lie, what surrounds them, what a kernel is told."""

from __future__ import annotations

import numpy as np
import pytest
from fmha_gen import tensors
from fmha_gen.emulator import launch
from fmha_gen.emulator.memory import MemoryFault
from fmha_gen.rehearsal_cases import Case

SPEC = {
    "dtype": "bf16",
    "q_per_kv": 2,
    "head_dim": {"qk": 64, "v": 32},
    "lse": True,
    "mask": "full",
}


def problem(layout="bshd", q=5, kv=5, **changes):
    case = Case("x", batch=2, kv_heads=3, q=q, kv=kv, sm_count=1, layout=layout)
    return case, tensors.make_problem({**SPEC, **changes}, case)


def test_second_rows_are_those_of_the_tiles():
    """The first row of a thread has negative queries: rows 0 to 7 of 16."""
    case = Case("x", 1, 2, 9, 40, sm_count=1, data="second_rows")
    for heads, packed in ((1, False), (4, False), (4, True), (16, True)):
        spec = {**SPEC, "q_per_kv": heads} | ({"pack_gqa": True} if packed else {})
        q = tensors.FROM_BITS["bf16"](tensors.make_problem(spec, case).q.view)
        for row, head in np.ndindex(9, 2 * heads):
            in_tile = row * heads + head % heads if packed else row
            assert ((q[:, row, head] <= 0) == (in_tile % 16 < 8)).all()


def read(memory, address, count, itemsize):
    buffer, offset = memory.find(address, count * itemsize)
    found = buffer.bytes[offset : offset + count * itemsize]
    return found.view(np.uint16 if itemsize == 2 else np.uint32)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "fused"])
@pytest.mark.parametrize("lengths", [(5, 5), (1, 7)])
def test_addresses_and_strides_find_every_row_of_every_tensor(layout, lengths):
    _, made = problem(layout, *lengths)
    memory = made.memory()
    for tensor in (*made.inputs, *made.outputs):
        view, itemsize = tensor.view, tensor.view.itemsize
        tensor.view[...] = np.arange(view.size).reshape(view.shape) % 65521
        for index in np.ndindex(*view.shape[:-1]):
            steps = zip(index, tensor.strides, strict=False)
            offset = sum(i * stride for i, stride in steps) * itemsize
            row = read(memory, tensor.address + offset, view.shape[-1], itemsize)
            np.testing.assert_array_equal(row, view[index])


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "fused"])
def test_tma_takes_every_tensor_that_it_moves(layout):
    _, made = problem(layout, 1, 1)
    for tensor in (*made.inputs, made.out):
        assert tensor.address % 16 == 0
        assert tensor.strides[3] == 1
        assert all(stride > 0 and stride % 8 == 0 for stride in tensor.strides[:3])


def test_layouts_are_what_they_say():
    _, plain = problem("bshd")
    _, transposed = problem("bhsd")
    _, fused = problem("fused")
    _, halves = problem("fused", 5, 7)
    assert plain.q.strides == (5 * 6 * 64, 6 * 64, 64, 1)
    assert transposed.q.strides == (5 * 6 * 64, 64, 5 * 64, 1)
    row = 6 * 64 + 3 * 64 + 3 * 32
    assert fused.q.strides == fused.k.strides == (5 * row, row, 64, 1)
    assert fused.v.strides == (5 * row, row, 32, 1)
    assert len(fused.memory().buffers) == 3  # qkv, out, lse
    assert len(halves.memory().buffers) == 4


def test_inputs_are_the_same_each_time_and_cannot_be_written():
    _, made = problem()
    _, again = problem()
    np.testing.assert_array_equal(made.k.view, again.k.view)
    with pytest.raises(MemoryFault, match="read-only"):
        address = np.array([made.q.address])
        made.memory().store(address, 2, np.array([1], np.uint16))


def test_an_output_shows_what_was_written_and_where():
    _, made = problem()
    for output in made.outputs:
        output.poison()
        values = output.view.view(np.float32 if output is made.lse else np.float16)
        assert np.isnan(values).all()
        assert output.outside() == ""
        output.view[...] = 0
        assert output.outside() == ""
        output.storage.bits[0, 1, 0] = 0
        assert f"outside {output.name} were written" in output.outside()
        output.poison()
        assert output.outside() == ""


def test_negative_scores_rise_and_fall_by_more_than_p_can_hold():
    """From seventh to seventh, in the order of the blocks, which are taken from the last one on."""
    case = Case("x", 1, 1, q=8, kv=7 * 64, sm_count=1, data="negative")
    made = tensors.make_problem(SPEC, case)
    q, k = (tensors.FROM_BITS["bf16"](x.view)[0, :, 0] for x in (made.q, made.k))
    scores = q @ k.T * tensors.scale_of(SPEC) / np.log(2)
    assert scores.max() < -0.5
    levels = scores.reshape(8, 7, 64).max(-1).mean(0)[::-1]
    steps = np.diff(levels)
    assert (steps > 128).any() and (steps < -128).any()


def test_only_second_rows_meet_larger_keys():
    """Of 16 rows the last eight; the first see nothing of these keys, nor do they stay negative."""
    case = Case("x", 1, 1, q=32, kv=100, sm_count=1, data="second_rows")
    made = tensors.make_problem(SPEC, case)
    q, k = (tensors.FROM_BITS["bf16"](x.view)[0, :, 0] for x in (made.q, made.k))
    scores = q @ k.T * tensors.scale_of(SPEC) / np.log(2)
    second = np.arange(32) // 8 % 2 == 1
    others = np.delete(scores, (25, 50), axis=1).max(axis=1)
    assert (scores[second, 50] > others[second] + 8).all()
    assert (scores[second, 25] > scores[second, 50] + 8).all()
    assert (scores[~second][:, (25, 50)] < 0).all() and (others[~second] > 0).all()


def test_a_huge_key_is_the_one_of_its_case():
    case = Case("x", 1, 1, q=8, kv=100, sm_count=1, data="huge_key")
    keys = tensors.FROM_BITS["bf16"](tensors.make_problem(SPEC, case).k.view)
    largest = np.abs(keys).max(axis=(0, 2, 3))
    assert largest.argmax() == 25 and largest[25] > 5 * np.sort(largest)[-2]


def test_what_a_kernel_is_told():
    case, made = problem()
    found = tensors.arguments(SPEC, case, made)
    told = found["tensors"]
    assert told["v"] == launch.tensor_at(
        SPEC["dtype"], made.v.address, made.v.view.shape, made.v.strides
    )
    assert made.lse is not None
    assert told["lse"] == launch.tensor_at(
        "fp32", made.lse.address, made.lse.view.shape, made.lse.strides
    )
    assert found["softmax_scale"] is None, "the default is the kernel's"
    assert found["stream"] not in (None, 0)
    assert found["sm_count"] == case.sm_count
    case, made = problem(lse=False)
    assert "lse" not in tensors.arguments(SPEC, case, made)["tensors"]

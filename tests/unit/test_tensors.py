# SPDX-License-Identifier: Apache-2.0
"""Tensors at made-up addresses: what is where in memory, and what a kernel is told."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from fmha_gen.build import calls
from fmha_gen.emulator import launch
from fmha_gen.emulator.memory import MemoryFault
from fmha_gen.evidence import tensors
from fmha_gen.ops.cases import Case, Tiles
from fmha_gen.ops.inputs import place_tensors

SPEC = {
    "dtype": "bf16",
    "op": "fmha_fwd",
    "q_per_kv": 2,
    "head_dim": {"qk": 64, "v": 32},
    "lse": True,
    "mask": "none",
}
TILES = Tiles(64, 64, (1, 1))
LAYOUTS = ("own", "bhsd", "mixed", "fused", "cache", "far", "plain")


def problem(layout="own", q=5, kv=5, scale_factor=1.0, **changes):
    case = Case("x", 2, 3, q, kv, 1, layout=layout, scale_factor=scale_factor)
    return case, tensors.make_problem({**SPEC, **changes}, TILES, case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [(5, 5), (1, 7)])
def test_addresses_and_strides_find_every_row_of_every_tensor(layout, lengths):
    case, made = problem(layout, *lengths)
    memory = made.memory()
    located = calls.locate(place_tensors(SPEC, case))
    for tensor in (*made.inputs, *made.outputs):
        view, itemsize = tensor.view, tensor.view.itemsize
        tensor.view[...] = np.arange(view.size).reshape(view.shape) % 65521
        strides = located[tensor.name].strides
        for index in np.ndindex(*view.shape):
            steps = zip(index, strides, strict=True)
            offset = sum(i * stride for i, stride in steps) * itemsize
            address = np.array([tensor.address + offset])
            kind = np.uint16 if itemsize == 2 else np.uint32
            found = memory.load(address, itemsize, 1)
            assert np.asarray(found).astype(kind).ravel()[0] == view[index]


def test_inputs_are_the_same_each_time_and_cannot_be_written():
    _, made = problem()
    _, again = problem()
    np.testing.assert_array_equal(made["k"].view, again["k"].view)
    with pytest.raises(MemoryFault, match="read-only"):
        address = np.array([made["q"].address])
        made.memory().store(address, 2, np.array([1], np.uint16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_beside_the_inputs_is_nan(layout):
    _, made = problem(layout)
    storages = {id(x.storage): x.storage for x in made.inputs if x.storage is not None}
    if layout == "far":
        assert not storages, "what nobody gave memory to has none"
        return
    inside = sum(x.view.size for x in made.inputs)
    values = [tensors.FROM_BITS["bf16"](storage) for storage in storages.values()]
    assert sum(np.isfinite(x).sum() for x in values) == inside


@pytest.mark.parametrize("layout", LAYOUTS)
def test_8_bit_inputs(layout):
    """What TMA takes: addresses and strides of 16 bytes; values rounded to e4m3, NaN beside."""
    _, wide = problem(layout, dtype="fp16")
    case, made = problem(layout, dtype="e4m3", out_dtype="bf16")
    spec = {**SPEC, "dtype": "e4m3", "out_dtype": "bf16"}
    located = calls.locate(place_tensors(spec, case))
    memory = made.memory()
    for tensor in made.inputs:
        assert tensor.view.dtype == np.uint8
        at = located[tensor.name]
        assert at.itemsize == 1 and tensor.address % 16 == 0
        # Slices of one tensor are as wide as its heads are.
        assert layout == "fused" or not any(x % 16 for x in at.strides[:-1])
        near = wide[tensor.name].numbers()
        np.testing.assert_allclose(tensor.numbers(), near, rtol=2.0**-4, atol=2.0**-10)
        found = memory.load(np.array([tensor.address]), 1, 1)
        assert np.asarray(found).ravel()[0] == tensor.view.flat[0]
        if tensor.storage is not None and layout != "fused":
            values = tensors.FROM_BITS["e4m3"](tensor.storage)
            assert np.isfinite(values).sum() == tensor.view.size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_output_shows_what_was_written_and_where(layout):
    _, made = problem(layout)
    for output in made.outputs:
        output.poison()
        values = output.view.view(np.float32 if output.name == "lse" else np.float16)
        assert np.isnan(values).all()
        assert output.outside() == ""
        output.view[...] = 0
        assert output.outside() == ""
        if output.storage is None:
            continue
        ends = [0, -1] if output.storage[0] != 0 else [-1]
        for place in ends:
            if output.storage[place] == 0:
                continue  # of the tensor itself
            output.storage[place] = 0
            assert f"1 elements outside {output.name} were written" in output.outside()
            output.poison()
            assert output.outside() == ""
            output.view[...] = 0


def test_storages_lie_far_apart_where_they_are_said_to():
    _, made = problem("far")
    addresses = sorted(x.address for x in (*made.inputs, *made.outputs))
    assert min(np.diff(addresses)) >= 2**42 - 2**40
    assert addresses[0] >= 2**33


def test_no_overrun_reaches_the_next_storage():
    _, made = problem()
    buffers = made.memory().buffers
    firsts = sorted(buffer.address for buffer in buffers)
    assert min(np.diff(firsts)) >= 2**32


def test_storages_of_many_batches_do_not_overlap_either():
    case = Case("x", 2**16 + 1, 1, q=1024, kv=1024, sm_count=1)
    located = calls.locate(place_tensors(SPEC, case))
    ends = {
        x.address: x.address + x.placed.strides[0] * case.batch * x.itemsize
        for x in located.values()
    }
    for first, second in itertools.pairwise(sorted(ends)):
        assert ends[first] < second


# --- what a kernel is told ------------------------------------------------------------------


def test_what_a_kernel_is_told():
    case, made = problem()
    found = calls.arguments(SPEC, case)
    assert list(found["tensors"]) == ["q", "k", "v", "out", "lse"]
    for name, tensor in (("v", made["v"]), ("out", made["out"])):
        told = found["tensors"][name]
        assert told == launch.tensor_at(
            "bf16", tensor.address, tensor.view.shape, tensor.placed.strides
        )
    assert found["tensors"]["lse"]["dtype"] == "fp32"
    assert found["scalars"] == {}, "the default is the kernel's"
    assert found["stream"] == calls.STREAM and found["torch"] is None
    assert found["sm_count"] == case.sm_count
    assert not found["keywords"]
    assert found["function"] == "fmha"
    assert found["outputs"] == {"out": 4, "lse": 3}
    assert "lse" not in calls.arguments({**SPEC, "lse": False}, case)["tensors"]


def test_another_scale_is_given():
    case, _ = problem(scale_factor=30.0)
    scale = calls.arguments(SPEC, case)["scalars"]["softmax_scale"]
    assert scale == calls.scale_of(SPEC, case) == pytest.approx(30 / 8)


def test_of_a_plain_case_fmha_makes_the_outputs():
    case, made = problem("plain")
    found = calls.arguments(SPEC, case)
    assert list(found["tensors"]) == ["q", "k", "v"]
    assert found["stream"] is None
    assert found["torch"] == {
        "stream": calls.STREAM,
        "out": made["out"].address,
        "lse": made["lse"].address,
    }


def test_the_arguments_come_by_name_in_one_layout():
    named = {
        layout: calls.arguments(SPEC, problem(layout)[0])["keywords"]
        for layout in LAYOUTS
    }
    assert [layout for layout, is_named in named.items() if is_named] == ["bhsd"]

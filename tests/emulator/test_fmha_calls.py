# SPDX-License-Identifier: Apache-2.0
"""`fmha` of shipped kernels in the host process: what it launches, and what damage to it shows."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path

import pytest
from fmha_gen import captures, tensors
from fmha_gen.emulator import launch, ptx
from fmha_gen.emulator.launch import CaptureError, open_host_program
from fmha_gen.emulator.tma import TensorMap
from support import GENERATED

LSE = "sm90_d128_fp16_causal_lse_gqa4"
PLAIN = "sm90_d128_fp16_full_c2x1_vmc_kv1000"  # of a fixed length, without LSE
SM100 = "sm100_d128_bf16_causal_gqa4_lse"
ARCHES = {LSE: "sm_90a", PLAIN: "sm_90a", SM100: "sm_100a"}
GROUPS = {LSE: 4, PLAIN: 1, SM100: 4}
STREAM = 0x5EED_0000_0010
OUT, LSE_OUT = 0x0123_4567_0000, 0x0223_4567_0000  # that a stand-in for PyTorch makes

# Offsets of 16 bytes, and storages at both ends of the address space.
PLACES = {
    "q": (0x10_0000, 0),
    "k": (0x7FFF_0000_0000, 0x130),
    "v": (0x4000_0000_0000, 0x50),
    "out": (0x0000_7000_0000, 0x20),
    "lse": (0x5000_0000_0000, 0x14),
}


def told(stem=LSE, **changes):
    """Tensors with strides of their own, of which K's span more than 2^31 elements."""
    heads_kv, head_dim = 3, 128
    heads, rows, keys = heads_kv * GROUPS[stem], 40, 24 if stem != PLAIN else 1000
    dtype = "bf16" if "bf16" in stem else "fp16"
    shapes = {
        "q": (2, rows, heads, head_dim),
        "k": (2, keys, heads_kv, head_dim),
        "v": (2, keys, heads_kv, head_dim),
        "out": (2, rows, heads, head_dim),
        "lse": (2, heads, rows),
    }
    strides = {
        "q": (1 << 20, 8192, 136, 1),
        "k": (1 << 32, 1 << 22, 1 << 10, 1),
        "v": (1 << 23, 144, 1 << 18, 1),
        "out": (264, 16384, 528, 1),
        "lse": (7, 1000, 20),
    }
    made = {
        name: launch.tensor_at(
            "fp32" if name == "lse" else dtype,
            PLACES[name][0],
            shapes[name],
            strides[name],
            byte_offset=PLACES[name][1],
        )
        for name in shapes
        if name != "lse" or stem != PLAIN
    }
    return {name: made[name] | changes.get(name, {}) for name in made}


def inputs(stem=LSE):
    return {name: x for name, x in told(stem).items() if name in "qkv"}


def call(made=None, **options):
    return launch.call(made or told(), **{"sm_count": 5, "stream": STREAM, **options})


class Program:
    """A kernel's host process and what its launches mean."""

    def __init__(self, program):
        self.program, self.module = program, ptx.parse(program.ptx)

    def maps(self, launched):
        """The tensor maps, those of K, V and Q by their addresses, in the order of parameters."""
        return [
            TensorMap.decode(launched.params[param.offset : param.offset + param.size])
            for param in self.module.params
            if param.size == 128
        ]

    def holds(self, launched, kind, value):
        """Whether a parameter that is no tensor map holds a value."""
        (sought,) = (struct.pack(kind, value),)
        return any(
            sought in launched.params[param.offset : param.offset + param.size]
            for param in self.module.params
            if param.size != 128
        )


def opened(stem, path=None, ffi=True):
    return open_host_program(
        path or GENERATED / f"{stem}.py", arch=ARCHES[stem], ffi=ffi
    )


@pytest.fixture(scope="module", params=[True, False], ids=["ffi", "bind"])
def program(request):
    with opened(LSE, ffi=request.param) as found:
        assert found.has_ffi == request.param
        yield Program(found)


def assert_as_told(program, called, made, scale):
    """The launch's tensor maps and scalars are those of a call."""
    launched = called.launched
    for name, found in zip(
        ("q", "k", "v", "out"), program.maps(launched), strict=True
    ):
        tensor = made[name]
        _, rows, heads, dim = tensor["shape"]
        assert found.address == tensor["address"] + tensor["byte_offset"], name
        assert found.dimensions[:2] == (dim, rows)
        assert found.strides[1] == tensor["strides"][1] * 2, name
        of_mode = set(zip(found.dimensions[2:], found.strides[2:], strict=True))
        batch_step, _, head_step, _ = tensor["strides"]
        assert of_mode == {(heads, head_step * 2), (2, batch_step * 2)}, name
    if "lse" in made:
        address = made["lse"]["address"] + made["lse"]["byte_offset"]
        assert program.holds(launched, "<Q", address)
        for step in made["lse"]["strides"]:
            assert program.holds(launched, "<q", step)
    # Kernels take exponentials of base 2.
    assert any(
        program.holds(launched, "<f", value)
        for value in (scale, scale * math.log2(math.e))
    )


def test_what_is_told_is_launched(program):
    made = told()
    called = program.program.call(call(made))
    without_offset = {"k", "v", "out", "lse"}
    if not program.program.has_ffi:
        # `bind` reads the address alone: finding A-byte_offset, until it is mended.
        pass
    assert without_offset
    assert_as_told(program, called, made, 128**-0.5)
    assert called.launched.stream == STREAM
    assert called.launched.grid == (5, 1, 1)
    assert called.returned == (sum(PLACES["out"]),)
    assert list(captures.wrong_host(call(made), called)) == []


def test_scale_stream_and_ways_to_pass_them(program):
    for options, scale, stream in (
        ({"softmax_scale": 0.375, "stream": None}, 0.375, 0),
        ({"softmax_scale": 2.0**-20, "stream_object": True}, 2.0**-20, STREAM),
        ({"keywords": True, "stream": 0}, 128**-0.5, 0),
        ({"stream": (1 << 47) + 8}, 128**-0.5, (1 << 47) + 8),
    ):
        called = program.program.call(call(**options))
        assert_as_told(program, called, told(), scale)
        assert called.launched.stream == stream


@pytest.mark.parametrize("count", [1, 7, 114, 132, 148])
def test_the_gpu_has_as_many_multiprocessors_as_the_call_says(program, count):
    called = program.program.call(call(sm_count=count))
    assert called.launched.grid == (min(count, 2 * 12), 1, 1)


def test_torch_s_tensors_are_allocated_and_its_stream_is_the_current_one(program):
    torch = {"stream": 0x70, "out": OUT, "lse": LSE_OUT}
    called = program.program.call(call(inputs(), stream=None, torch=torch))
    contiguous = (40 * 12 * 128, 12 * 128, 128, 1)
    assert called.allocated == {
        "out": launch.tensor_at("fp16", OUT, (2, 40, 12, 128), contiguous),
        "lse": launch.tensor_at("fp32", LSE_OUT, (2, 12, 40), (12 * 40, 40, 1)),
    }
    assert called.returned == (OUT,)
    assert called.launched.stream == 0x70
    assert_as_told(program, called, inputs() | called.allocated, 128**-0.5)
    given = program.program.call(call(torch=torch))
    assert (given.allocated, given.returned) == ({}, (sum(PLACES["out"]),))
    assert given.launched.stream == STREAM
    assert_as_told(program, given, told(), 128**-0.5)


def test_what_fmha_refuses_comes_back_and_launches_nothing(program):
    for made, message in (
        (told(q={"device": (1, 0)}), "^q: "),
        (told(v={"dtype": "bf16"}), "^v: "),
        (told(k={"strides": (1 << 32, 1 << 22, 1028, 1)}), "^k: "),
        (told(out={"address": 0x1008}), "^out: "),
        ({name: x for name, x in told().items() if name != "out"}, "^out: "),
    ):
        called = program.program.call(call(made))
        assert re.search(message, called.refusal), called.refusal
        assert (called.launch, called.returned) == (None, ())
        with pytest.raises(CaptureError, match=re.escape(called.refusal)):
            _ = called.launched
    called = program.program.call(call(softmax_scale=math.inf))
    assert called.refusal.startswith("softmax_scale: ")
    assert program.program.call(call()).refusal == ""


def test_calls_survive_json(program):
    called = program.program.call(call())
    assert launch.Called.from_json(called.to_json()) == called
    refused = program.program.call(call(softmax_scale=0.0))
    assert launch.Called.from_json(refused.to_json()) == refused


def test_a_kernel_with_fmha_is_not_launched_behind_it(program):
    arguments = {name: launch.int32(1) for name in program.program.parameters}
    with pytest.raises(CaptureError, match="has fmha"):
        program.program.launch(arguments)


# --- damage to fmha ------------------------------------------------------------------

HANDLE = 'handle = cuda.CUstream(int(getattr(stream, "cuda_stream", stream or 0)))'
DAMAGE = {
    "k and v swapped": ("tensors = (q, k, v, out)", "tensors = (q, v, k, out)"),
    "the default scale": ("1.0 / math.sqrt(HEAD_DIM_QK)", "1.0 / HEAD_DIM_QK"),
    "the scale given": ("is None else softmax_scale\n    check", "is None else 1.0\n    check"),
    "the stream dropped": (HANDLE, "handle = cuda.CUstream(0)"),
    "out ignored": ("    tensors = (q, k, v, out)", "    tensors = (q, k, v, q)"),
    "q returned": ("    return out\n\n\ndef check", "    return q\n\n\ndef check"),
    "lse is out": ("tensors += (lse,)", "tensors += (k,)"),
    "sm_count halved": (
        "return query(key.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)[1]",
        "return query(key.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)[1] // 2",
    ),
}


def damaged(stem, folder, old, new):
    text = (GENERATED / f"{stem}.py").read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
    path = folder / f"{stem}.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path

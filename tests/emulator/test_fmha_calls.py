# SPDX-License-Identifier: Apache-2.0
"""`fmha` of shipped kernels in the host process: what it launches, and what damage to it shows."""

from __future__ import annotations

import math
import re
import struct

import pytest
from fmha_gen import captures
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

# Storages at both ends of the address space.
ADDRESSES = {
    "q": 0x10_0000,
    "k": 0x7FFF_0000_0100,
    "v": 0x4000_0000_0000,
    "out": 0x7000_0000,
    "lse": 0x5000_0000_0014,
}
BYTE_OFFSETS = {"q": 0, "k": 0x130, "v": 0x50, "out": 0x20, "lse": 0x14}


def told(stem=LSE, changes=None):
    """Tensors with strides of their own, of which K's span more than 2^32 bytes.

    changes: by tensor, what `tensor_at` says otherwise.
    """
    rows, keys, heads_kv, dim = 40, 1000 if stem == PLAIN else 24, 3, 128
    heads = heads_kv * GROUPS[stem]
    dtype = "bf16" if "bf16" in stem else "fp16"
    layouts = {
        "q": ((2, rows, heads, dim), (1 << 20, 8192, 136, 1)),
        "k": ((2, keys, heads_kv, dim), (1 << 32, 1 << 22, 1 << 10, 1)),
        "v": ((2, keys, heads_kv, dim), (1 << 23, 144, 1 << 18, 1)),
        "out": ((2, rows, heads, dim), (264, 16384, 528, 1)),
        "lse": ((2, heads, rows), (7, 1000, 20)),
    }
    if stem == PLAIN:
        del layouts["lse"]
    return {
        name: {
            **launch.tensor_at(
                "fp32" if name == "lse" else dtype, ADDRESSES[name], *layout
            ),
            **(changes or {}).get(name, {}),
        }
        for name, layout in layouts.items()
    }


def inputs(stem=LSE):
    return {name: x for name, x in told(stem).items() if name in "qkv"}


def call(made=None, **options):
    return launch.call(made or told(), **{"sm_count": 5, "stream": STREAM, **options})


class Program:
    """A kernel's host process and what its launches mean."""

    def __init__(self, program):
        self.program, self.module = program, ptx.parse(program.ptx)

    def launch(self, made):
        """What the call did, and what of its launch is not as the call says, by name."""
        called = self.program.call(made)
        wrong = set() if called.launch is None else self.wrong(made, called)
        return called, wrong

    def wrong(self, made, called):
        """Names of tensors and arguments that a launch has otherwise."""
        launched, given = called.launched, called.allocated | made["tensors"]
        maps = [
            TensorMap.decode(launched.params[param.offset : param.offset + param.size])
            for param in self.module.params
            if param.size == 128
        ]
        found = {
            name
            for name, tensor_map in zip(("q", "k", "v", "out"), maps, strict=True)
            if not is_of(tensor_map, given[name])
        }
        if "lse" in given:
            lse = given["lse"]
            numbers = [lse["address"] + lse["byte_offset"], *lse["strides"]]
            if not all(self.holds(launched, "<Q", number) for number in numbers):
                found.add("lse")
        scale = made["softmax_scale"] or 128**-0.5
        # Kernels take exponentials of base 2.
        scales = (scale, scale * math.log2(math.e))
        if not any(self.holds(launched, "<f", number) for number in scales):
            found.add("scale")
        found |= {text.split()[0] for text in captures.wrong_host(made, called)}
        return found

    def holds(self, launched, kind, value):
        """Whether a parameter that is no tensor map holds a value."""
        sought = struct.pack(kind, value)
        return any(
            sought in launched.params[param.offset : param.offset + param.size]
            for param in self.module.params
            if param.size != 128
        )


def is_of(tensor_map, tensor):
    """Whether a tensor map is of a tensor; its modes behind rows may come in any order."""
    batch, rows, heads, dim = tensor["shape"]
    batch_step, row_step, head_step, _ = (step * 2 for step in tensor["strides"])
    steps = dict(zip(tensor_map.dimensions, tensor_map.strides, strict=True))
    return tensor_map.address == tensor["address"] + tensor[
        "byte_offset"
    ] and steps == {dim: 2, rows: row_step, heads: head_step, batch: batch_step}


def opened(stem, path=None, ffi=True):
    return open_host_program(
        path or GENERATED / f"{stem}.py", arch=ARCHES[stem], ffi=ffi
    )


@pytest.fixture(scope="module", params=[True, False], ids=["ffi", "bind"])
def program(request):
    with opened(LSE, ffi=request.param) as found:
        assert found.has_ffi == request.param
        yield Program(found)


def test_what_is_told_is_launched(program):
    made = call()
    called, wrong = program.launch(made)
    assert wrong == set()
    assert called.launched.grid == (5, 1, 1)
    assert called.returned == (ADDRESSES["out"],)


def test_scale_stream_and_ways_to_pass_them(program):
    for options, stream in (
        ({"softmax_scale": 0.375, "stream": None}, 0),
        ({"softmax_scale": 2.0**-20, "stream_object": True}, STREAM),
        ({"keywords": True, "stream": 0}, 0),
        ({"stream": (1 << 47) + 8}, (1 << 47) + 8),
    ):
        called, wrong = program.launch(call(**options))
        assert (wrong, called.launched.stream) == (set(), stream)


OFFSETS = {name: {"byte_offset": offset} for name, offset in BYTE_OFFSETS.items()}


def test_a_tensor_begins_at_its_byte_offset(program):
    called, wrong = program.launch(call(told(changes=OFFSETS)))
    assert (called.refusal, wrong) == ("", set())


@pytest.mark.parametrize("count", [1, 7, 114, 132, 148])
def test_the_gpu_has_as_many_multiprocessors_as_the_call_says(program, count):
    called = program.program.call(call(sm_count=count))
    assert called.launched.grid == (min(count, 2 * 12), 1, 1)


TORCH = {"stream": 0x70, "out": OUT, "lse": LSE_OUT}


def test_torch_s_tensors_are_allocated_and_its_stream_is_the_current_one(program):
    called, wrong = program.launch(call(inputs(), stream=None, torch=TORCH))
    contiguous = (40 * 12 * 128, 12 * 128, 128, 1)
    assert called.allocated == {
        "out": launch.tensor_at("fp16", OUT, (2, 40, 12, 128), contiguous),
        "lse": launch.tensor_at("fp32", LSE_OUT, (2, 12, 40), (12 * 40, 40, 1)),
    }
    assert (wrong, called.returned, called.launched.stream) == (set(), (OUT,), 0x70)
    given, wrong = program.launch(call(torch=TORCH))
    assert (wrong, given.allocated) == (set(), {})
    assert (given.returned, given.launched.stream) == ((ADDRESSES["out"],), STREAM)


def test_what_fmha_refuses_comes_back_and_launches_nothing(program):
    heads_apart = {"strides": (1 << 32, 1 << 22, 1028, 1)}
    for made, message in (
        (told(changes={"q": {"device": (1, 0)}}), "^q: "),
        (told(changes={"v": {"dtype": "bf16"}}), "^v: "),
        (told(changes={"k": heads_apart}), "^k: "),
        (told(changes={"out": {"address": 0x1008}}), "^out: "),
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

NEW_OUT = "out = q.new_empty(b, s, h, HEAD_DIM_V)"
NEW_LSE = "lse = q.new_empty(b, h, s, dtype=torch.float32)"
GIVEN = "if softmax_scale is None else softmax_scale"
HANDLE = 'handle = cuda.CUstream(int(getattr(stream, "cuda_stream", stream or 0)))'
COUNT = "return query(key.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)[1]"
# What -> the kernel, the text there and its damage, how it is called, what shows
DAMAGE = {
    "k and v swapped": (
        *(LSE, "tensors = (q, k, v, out)", "tensors = (q, v, k, out)"),
        *({}, {"k", "v"}),
    ),
    "the default scale": (
        *(SM100, "1.0 / math.sqrt(HEAD_DIM_QK)", "1.0 / HEAD_DIM_QK"),
        *({}, {"scale"}),
    ),
    "the scale given": (
        *(PLAIN, GIVEN, "if softmax_scale is None else 1.0"),
        *({"softmax_scale": 0.375}, {"scale"}),
    ),
    "the stream dropped": (
        *(PLAIN, HANDLE, "handle = cuda.CUstream(0)"),
        *({}, {"launched"}),
    ),
    "torch's stream dropped": (
        *(SM100, "if stream is None and torch:", "if False:"),
        *({"torch": TORCH, "stream": None}, {"launched"}),
    ),
    "out ignored": (
        *(LSE, f"{NEW_OUT} if out is None else out", NEW_OUT),
        *({"torch": TORCH}, {"out"}),
    ),
    "lse ignored": (
        *(LSE, f"{NEW_LSE} if lse is None else lse", NEW_LSE),
        *({"torch": TORCH}, {"lse"}),
    ),
    "q returned": (
        *(PLAIN, "    return out\n\n\ndef check", "    return q\n\n\ndef check"),
        *({}, {"fmha"}),
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_to_fmha_shows_in_what_is_captured(what, tmp_path):
    stem, old, new, options, shows = DAMAGE[what]
    text = (GENERATED / f"{stem}.py").read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
    path = tmp_path / f"{stem}.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with opened(stem, path) as program:
        _, wrong = Program(program).launch(call(told(stem), **options))
    assert wrong >= shows


@pytest.mark.parametrize("stem", [PLAIN, SM100])
def test_the_right_text_has_nothing_of_it(stem):
    with opened(stem) as program:
        for *_, options, _ in DAMAGE.values():
            called, wrong = Program(program).launch(call(told(stem), **options))
            assert (called.refusal, wrong) == ("", set())


def test_multiprocessors_miscounted(tmp_path):
    text = (GENERATED / f"{LSE}.py").read_text(encoding="utf-8")
    assert text.count(COUNT) == 1
    path = tmp_path / f"{LSE}.py"
    path.write_text(text.replace(COUNT, f"{COUNT} // 2"), encoding="utf-8")
    with opened(LSE, path) as program:
        assert program.call(call(sm_count=14)).launched.grid == (7, 1, 1)


def test_both_ways_do_the_same_and_a_difference_is_told(tmp_path):
    path = GENERATED / f"{LSE}.py"
    calls = [
        call(),
        call(inputs(), stream=None, torch=TORCH, softmax_scale=0.5),
        call(softmax_scale=-1.0),
        call(keywords=True, sm_count=132),
    ]
    assert captures.disagreements(path, calls, arch="sm90") == []
    text, launches = captures.checked(path, calls[:2], arch="sm90")
    assert [each.stream for each in launches] == [STREAM, TORCH["stream"]]
    assert ptx.parse(text).name == launches[0].kernel
    with pytest.raises(CaptureError, match=r"call 0: fmha refused .* softmax_scale: "):
        captures.checked(path, calls[2:3], arch="sm90")

    source, packed = (
        path.read_text(encoding="utf-8"),
        "address, *sizes.values(), *steps)",
    )
    assert source.count(packed) == 1
    other = tmp_path / path.name
    damage = "address, *sizes.values(), *steps[::-1])"
    other.write_text(source.replace(packed, damage), encoding="utf-8")
    found = captures.disagreements(other, calls[:1], arch="sm90")
    assert any("bind launch with different tensor maps" in text for text in found)
    assert any("bind launch with different parameters" in text for text in found)

# SPDX-License-Identifier: Apache-2.0
"""`fmha` of shipped kernels in the host process: what it launches, and what damage to it shows."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import struct

import pytest
from fmha_gen.build import captures
from fmha_gen.emulator import launch, ptx
from fmha_gen.emulator.launch import CaptureError, open_host_program
from fmha_gen.emulator.tma import TensorMap
from support import GENERATED

from .rehearsals import damaged, written

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


def call(made=None, stem=LSE, softmax_scale=None, **options):
    scalars = {} if softmax_scale is None else {"softmax_scale": softmax_scale}
    outputs = {"out": 4} if stem == PLAIN else {"out": 4, "lse": 3}
    how = {"function": "fmha", "outputs": outputs, "sm_count": 5, "stream": STREAM}
    return launch.call(made or told(), scalars=scalars, **{**how, **options})


class Program:
    """A kernel's host process and what its launches mean."""

    def __init__(self, program):
        self.program, self.module = program, ptx.parse(program.ptx)

    def launch(self, made):
        """What the call did, and what of its launch is not as the call says, by name."""
        called = self.program.call(made)
        wrong = self.wrong(made, called) if called.launches else set()
        return called, wrong

    def wrong(self, made, called):
        """Names of tensors and arguments that a launch has otherwise."""
        (launched,) = called.launched
        given = called.allocated | made["tensors"]
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
        scale = made["scalars"].get("softmax_scale") or 128**-0.5
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


def opened(stem, path=None):
    return open_host_program(path or GENERATED / f"{stem}.py", arch=ARCHES[stem])


@pytest.fixture(scope="module")
def programs():
    """The kernels, by name; each compiles when it is first asked for."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda stem: Program(stack.enter_context(opened(stem))))


@pytest.fixture
def program(programs):
    return programs(LSE)


def test_what_is_told_is_launched(program):
    made = call()
    called, wrong = program.launch(made)
    assert wrong == set()
    assert called.launched[0].grid == (5, 1, 1)
    assert called.returned == (ADDRESSES["out"], ADDRESSES["lse"])


def test_scale_stream_and_ways_to_pass_them(program):
    for options, stream in (
        ({"softmax_scale": 0.375, "stream": None}, 0),
        ({"softmax_scale": 2.0**-20, "stream_object": True}, STREAM),
        ({"keywords": ["q", "k", "v"], "stream": 0}, 0),
        ({"stream": (1 << 47) + 8}, (1 << 47) + 8),
    ):
        called, wrong = program.launch(call(**options))
        assert (wrong, called.launched[0].stream) == (set(), stream)


OFFSETS = {name: {"byte_offset": offset} for name, offset in BYTE_OFFSETS.items()}


def test_a_tensor_begins_at_its_byte_offset(program):
    called, wrong = program.launch(call(told(changes=OFFSETS)))
    assert (called.refusal, wrong) == ("", set())


@pytest.mark.parametrize("count", [1, 7, 114, 132, 148])
def test_the_gpu_has_as_many_multiprocessors_as_the_call_says(program, count):
    called = program.program.call(call(sm_count=count))
    assert called.launched[0].grid == (min(count, 2 * 12), 1, 1)


TORCH = {"stream": 0x70, "out": OUT, "lse": LSE_OUT}


def test_torch_s_tensors_are_allocated_and_its_stream_is_the_current_one(program):
    called, wrong = program.launch(call(inputs(), stream=None, torch=TORCH))
    contiguous = (40 * 12 * 128, 12 * 128, 128, 1)
    assert called.allocated == {
        "out": launch.tensor_at("fp16", OUT, (2, 40, 12, 128), contiguous),
        "lse": launch.tensor_at("fp32", LSE_OUT, (2, 12, 40), (12 * 40, 40, 1)),
    }
    assert (wrong, called.launched[0].stream) == (set(), 0x70)
    assert called.returned == (OUT, LSE_OUT)
    given, wrong = program.launch(call(torch=TORCH))
    assert (wrong, given.allocated) == (set(), {})
    assert given.launched[0].stream == STREAM


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
        assert (called.launches, called.returned) == ((), ())
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
    with pytest.raises(CaptureError, match="has a public function"):
        program.program.launch(arguments)


# --- damage to fmha ------------------------------------------------------------------

NEW_OUT = "out = q.new_empty(b, s, h, HEAD_DIM_V)"
NEW_LSE = "lse = q.new_empty(b, h, s, dtype=torch.float32)"
GIVEN = "if softmax_scale is None else softmax_scale"
HANDLE = 'handle = int(getattr(stream, "cuda_stream", stream))'
COUNT = "return query(key.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)[1]"
# What -> the kernel, the text there and its damage, how it is called, what shows
DAMAGE = {
    "k and v swapped": (
        *(LSE, "[q, k, v, out, lse]", "[q, v, k, out, lse]"),
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
        *(PLAIN, HANDLE, "handle = 0"),
        *({}, {"launched"}),
    ),
    "torch's stream dropped": (
        *(SM100, "if of_torch and stream is None:", "if False:"),
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
        *(PLAIN, "    return out\n\n\ndef run", "    return q\n\n\ndef run"),
        *({}, {"fmha"}),
    ),
}


@pytest.mark.parametrize("stem", ARCHES)
def test_damage_to_fmha_shows_in_what_is_captured(stem, tmp_path):
    """All of a kernel's damage at once: each shows in a call of its own."""
    text = (GENERATED / f"{stem}.py").read_text(encoding="utf-8")
    mine = {what: row[1:] for what, row in DAMAGE.items() if row[0] == stem}
    for old, new, *_ in mine.values():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    with opened(stem, written(tmp_path, text, stem)) as program:
        for what, (*_, options, shows) in mine.items():
            _, wrong = Program(program).launch(call(told(stem), stem, **options))
            assert wrong >= shows, what


@pytest.mark.parametrize("stem", ARCHES)
def test_the_right_text_has_nothing_of_it(stem, programs):
    for *_, options, _ in DAMAGE.values():
        called, wrong = programs(stem).launch(call(told(stem), stem, **options))
        assert (called.refusal, wrong) == ("", set())


def test_multiprocessors_miscounted(tmp_path):
    with opened(LSE, damaged(tmp_path, LSE, COUNT, f"{COUNT} // 2")) as program:
        assert program.call(call(sm_count=14)).launched[0].grid == (7, 1, 1)


def test_checked_calls_are_right(tmp_path):
    path = GENERATED / f"{LSE}.py"
    calls = [
        call(),
        call(inputs(), stream=None, torch=TORCH, softmax_scale=0.5),
        call(softmax_scale=-1.0),
    ]
    text, launches = captures.checked(path, calls[:2], arch="sm90")
    assert [each.stream for (each,) in launches] == [STREAM, TORCH["stream"]]
    assert ptx.parse(text).name == launches[0][0].kernel
    with pytest.raises(CaptureError, match=r"call 0: fmha refused .* softmax_scale: "):
        captures.checked(path, calls[2:], arch="sm90")


# --- what fmha refuses ---------------------------------------------------------------

Q, KV, ROWS = (2, 40, 12, 128), (2, 24, 3, 128), (2, 12, 40)
SHAPES = {"q": Q, "k": KV, "v": KV, "out": Q, "lse": ROWS}
PLACES = {name: number << 40 for number, name in enumerate(SHAPES, 1)}


def at(name, shape=None, strides=None, *, dtype=None, address=0, **options):
    """A tensor of a right call, but for what is said. address: from its place on."""
    shape, steps = shape or SHAPES[name], [1]
    for size in reversed(shape[1:]):
        steps.insert(0, steps[0] * size)
    dtype = dtype or ("fp32" if name == "lse" else "fp16")
    place = PLACES[name] + address
    return launch.tensor_at(dtype, place, shape, strides or steps, **options)


def longer(shape, mode, by=1):
    return tuple(size + by * (number == mode) for number, size in enumerate(shape))


def bad_tensors():
    """What is wrong -> the tensors that are, and whom the message blames."""
    for name, shape in SHAPES.items():
        last = len(shape) - 1  # how many heads Q has follows from K
        yield f"{name} dtype", {name: at(name, dtype="bf16")}, name
        yield f"{name} rank", {name: at(name, shape[1:])}, name
        yield f"{name} last", {name: at(name, (*shape[:-1], 64))}, name
        yield f"{name} heads", {name: at(name, longer(shape, last - 1))}, (
            "q" if name in "qk" else name
        )
        yield f"{name} on the CPU", {name: at(name, device=(1, 0))}, name
        yield f"{name} on another GPU", {name: at(name, device=(2, 7))}, name
        yield f"{name} misaligned", {name: at(name, address=2)}, name
        yield f"{name} offset misaligned", {name: at(name, byte_offset=2)}, name
        yield f"{name} null", {name: at(name, address=-PLACES[name])}, name
        yield f"{name} empty", {name: at(name, (0, *shape[1:]))}, name
        if name != "lse":
            rows = (12 if shape is Q else 3) * 128
            yield f"{name} padded", {
                name: at(name, None, (1 << 20, rows, 132, 1))
            }, name
            for step in (0, -1024, 2**39):
                steps = (1 << 20, step, 128, 1)
                yield f"{name} step {step}", {name: at(name, None, steps)}, name
    for name in ("k", "v", "out", "lse"):
        batch = {name: at(name, longer(SHAPES[name], 0))}
        yield f"{name} batch", batch, name
    for name in ("v", "out"):
        yield f"{name} rows", {name: at(name, longer(SHAPES[name], 1))}, name
    for rows in (2**31, 2**31 + 24, 2**32 + 24):
        many = (1, rows, 3, 128)
        others = {
            name: at(name, (1, *SHAPES[name][1:])) for name in ("q", "out", "lse")
        }
        both = {name: at(name, many, (1 << 20, 8, 8, 1)) for name in ("k", "v")}
        yield f"{rows} rows", others | both, "k"


def overlaps():
    """Outputs that share memory, and what the message says."""
    out_of = {"out": {**at("out"), "address": PLACES["q"]}}
    yield "out is q", out_of, "out: shares memory with q"
    begins = {"out": {**at("out"), "address": PLACES["q"] + 12 * 128 * 2}}
    yield "out begins in q", begins, "out: shares memory with q"
    held = {"v": {**at("v"), "address": PLACES["out"] + 256}}
    yield "out holds v", held, "out: shares memory with v"
    for name in ("out", "k"):
        inside = {"lse": {**at("lse"), "address": PLACES[name] + 512}}
        yield f"lse in {name}", inside, f"lse: shares memory with {name}"
    shared = "has elements that share memory"
    for strides in ((61440, 128, 128, 1), (61440, 1536, 64, 1)):
        yield f"out {strides}", {"out": at("out", None, strides)}, f"out: {shared}"
    for strides in ((0, 40, 1), (480, 0, 1), (480, 40, 0), (480, 1, 1)):
        yield f"lse {strides}", {"lse": at("lse", None, strides)}, f"lse: {shared}"


def apart():
    """Layouts whose memory interleaves without being shared, and steps that are never taken."""
    beside = {"row": (40 * 3072, 3072, 128, 1), "head": (40 * 3072, 3072, 256, 1)}
    for what, steps in beside.items():
        second = at("out", None, steps, address=PLACES["q"] - PLACES["out"])
        second["address"] += 2 * (1536 if what == "row" else 128)
        yield f"out beside q in a {what}", {"q": at("q", None, steps), "out": second}
    between = (2 * 61440, 128, 40 * 128, 1)
    second = {**at("out", None, between), "address": PLACES["q"] + 2 * 61440}
    yield "out beside q in a batch", {"q": at("q", None, between), "out": second}
    for order in itertools.permutations(range(3)):
        strides, step = [0, 0, 0], 1
        for mode in reversed(order):
            strides[mode], step = step, step * (ROWS[mode] + 3)
        yield f"lse in the order {order}", {"lse": at("lse", None, strides)}
    yield "lse backwards", {"lse": at("lse", None, (480, -40, -1), address=4 * 479)}
    once = {name: at(name, (1, *shape[1:])) for name, shape in SHAPES.items()}
    yield "a step of a single batch", once | {
        "q": at("q", (1, *Q[1:]), (3, 1536, 128, 1))
    }


def made_with(changed, torch):
    tensors = {name: at(name) for name in SHAPES} | changed
    return call(tensors, stream=None, torch=TORCH if torch else None)


@pytest.mark.parametrize("torch", [True, False], ids=["torch", "dlpack"])
@pytest.mark.parametrize(
    ("changed", "blamed"), [pytest.param(*x, id=what) for what, *x in bad_tensors()]
)
def test_a_bad_tensor_is_refused_by_its_name(program, changed, blamed, torch):
    called = program.program.call(made_with(changed, torch))
    assert called.refusal.startswith(f"{blamed}: "), called.refusal
    assert called.launches == ()


@pytest.mark.parametrize("torch", [True, False], ids=["torch", "dlpack"])
@pytest.mark.parametrize(
    ("changed", "message"), [pytest.param(*x, id=what) for what, *x in overlaps()]
)
def test_outputs_that_share_memory_are_refused(program, changed, message, torch):
    assert program.program.call(made_with(changed, torch)).refusal == message


@pytest.mark.parametrize("torch", [True, False], ids=["torch", "dlpack"])
@pytest.mark.parametrize("changed", [pytest.param(x, id=what) for what, x in apart()])
def test_outputs_may_lie_between_other_tensors(program, changed, torch):
    assert program.program.call(made_with(changed, torch)).refusal == ""


def test_query_heads_are_so_many_per_head_of_k(program):
    kv = {name: at(name, (2, 24, 4, 128)) for name in ("k", "v")}
    message = "q: k has 4 heads, so q needs 16 (4 per KV head), not 12"
    assert program.program.call(made_with(kv, False)).refusal == message


@pytest.mark.parametrize("torch", [True, False], ids=["torch", "dlpack"])
def test_q_must_be_on_the_current_device(program, torch):
    elsewhere = {name: at(name, device=(2, 7)) for name in SHAPES}
    refusal = program.program.call(made_with(elsewhere, torch)).refusal
    assert refusal == "q: is on device 7, which is not the current one"


@pytest.mark.parametrize(
    "scale", [0.0, -1.0, math.nan, math.inf, 1e-50, 1e-38, 1e38, 1e300]
)
def test_a_scale_is_positive_and_finite_in_fp32(program, scale):
    """The last four are 0 or infinite in fp32, or so is their multiple by log2(e)."""
    refusal = program.program.call(call(softmax_scale=scale)).refusal
    assert refusal.startswith("softmax_scale: must be positive, finite")


@pytest.mark.parametrize("scale", [2.0**-126, 1e-30, 2.0**126])
def test_extreme_scales(program, scale):
    assert program.launch(call(softmax_scale=scale))[1] == set()


def test_a_fixed_length_is_the_only_one(programs):
    for rows in (999, 1001):
        kv = {name: at(name, (2, rows, 12, 128)) for name in ("k", "v")}
        tensors = {"q": at("q"), "out": at("out"), **kv}
        refusal = (
            programs(PLAIN).program.call(call(tensors, PLAIN, stream=None)).refusal
        )
        assert refusal.startswith("k: Mismatched k.shape[1] ")
        assert refusal.endswith("expected to be 1000")

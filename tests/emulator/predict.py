# SPDX-License-Identifier: Apache-2.0
"""What the emulator's data modules say that a micro-kernel answers, with no machine in between."""

from __future__ import annotations

import numpy as np
from fmha_gen.emulator import memory, numerics, tma, wgmma

from tests.hardware.micro import kernels
from tests.hardware.micro.kernels import SAMPLES, THREADS, TILES, Micro

TENSOR_ADDRESS = 0x7F0000100000
LINE = memory.RESERVED  # where dynamic shared memory starts
TYPE_CODES = {"u16": 1}  # of a tensor map


def encode(tensor: kernels.Tensor, address: int) -> bytes:
    """A tensor map as the driver encodes it, in the fields that are known."""
    rank = len(tensor.dimensions)
    swizzle = {0: 0, 32: 1, 64: 2, 128: 3}[tensor.swizzle_bytes]
    flags = 2 | (rank - 1) << 4 | TYPE_CODES[tensor.element_type] << 7 | swizzle << 13
    strides = [stride // 16 for stride in tensor.strides] + [0] * 4
    limits = [dimension - 1 for dimension in tensor.dimensions] + [0] * 5
    edges = [edge - 1 for edge in tensor.box] + [0] * 5
    words = [
        address,
        flags | strides[0] << 32,
        strides[1] | strides[2] << 32,
        strides[3],
        limits[0] | limits[1] << 32,
        limits[2] | limits[3] << 32,
        limits[4] | edges[0] << 56,
        sum(edge << 8 * i for i, edge in enumerate(edges[1:])),
    ]
    return b"".join(word.to_bytes(8, "little") for word in words) + bytes(64)


@np.errstate(all="ignore")
def predict(micro: Micro, raw_map: bytes | None = None) -> dict[str, np.ndarray]:
    """`output` (bytes), or `tensor` where the kernel writes that."""
    if micro.tensor is not None and raw_map is None:
        raw_map = encode(micro.tensor, TENSOR_ADDRESS)
    if "instructions" in micro.settings:
        return {"output": _lanewise(micro)}
    if micro.name == "warps":
        return {"output": kernels.as_bytes(_warps(micro))}
    if micro.name == "stmatrix":
        return {"output": _stmatrix()}
    if micro.name == "mbarrier":
        return {"output": kernels.as_bytes(np.array(MBARRIER_TESTS, np.uint32))}
    if micro.name.startswith("wgmma"):
        return {"output": kernels.as_bytes(np.stack(_wgmma(micro)))}
    assert raw_map is not None
    if micro.name.startswith("tma_store"):
        return {"tensor": _tma_store(micro, raw_map)}
    return {"output": _tma_load(micro, raw_map)}


@np.errstate(all="ignore")
def agree(micro: Micro, got: np.ndarray, want: np.ndarray) -> str:
    """Where two answers differ by more than the instruction leaves open; empty when nowhere."""
    if "instructions" in micro.settings:
        return _agree_lanewise(micro, got, want)
    eight_bits = (
        micro.settings.get("dtype") == "e4m3"
    )  # whose sums the model gives exactly
    if micro.settings.get("repeats", 1) > 1 and not eight_bits:
        return _agree_rounded(micro, got.view(np.float32), want.view(np.float32))
    differs = np.flatnonzero(got != want)
    if not differs.size:
        return ""
    first = int(differs[0])
    return f"{differs.size} bytes, first {first}: {got[first]:#x} for {want[first]:#x}"


# -- lane by lane

_PAIRS = {
    "bf16x2": numerics.bf16x2_rn,
    "f16x2": numerics.f16x2_rn,
    "e4m3x2": numerics.e4m3x2_rn_satfinite,
    "e5m2x2": numerics.e5m2x2_rn_satfinite,
    "max": numerics.max_f32,
    "min": numerics.min_f32,
}
_SINGLE = {
    "rni_s32": lambda a: numerics.f32_to_s32(a, "rni"),
    "rzi_u32": lambda a: numerics.f32_to_u32(a, "rzi"),
    "ex2": numerics.ex2_approx_ftz,
    "lg2": numerics.lg2_approx_ftz,
    "rcp": numerics.rcp_approx_ftz,
}
_INTEGER = {
    "div_s32": numerics.div_s32,
    "rem_s32": numerics.rem_s32,
    "div_u32": numerics.div_u32,
    "rem_u32": numerics.rem_u32,
}
_FLOATS = {"fma", "max", "min"}
_ERRORS = {
    "ex2": numerics.EX2_ERROR,
    "lg2": numerics.LG2_ERROR,
    "rcp": numerics.RCP_ERROR,
}


def lanewise_inputs(micro: Micro) -> np.ndarray:
    return micro.input.view(np.uint32).reshape(3, SAMPLES)


def _lanewise(micro: Micro) -> np.ndarray:
    bits = lanewise_inputs(micro)
    a, b, c = bits.view(np.float32)
    rows = []
    for name in micro.settings["instructions"]:
        if name in _PAIRS:
            row = _PAIRS[name](a, b)
        elif name in _SINGLE:
            row = _SINGLE[name](a)
        elif name in _INTEGER:
            row = _INTEGER[name](bits[0], bits[1])
        else:
            assert name == "fma"
            row = numerics.fma32(a, b, c)
        rows.append(
            row.view(np.uint32) if row.dtype == np.float32 else row.astype(np.uint32)
        )
    return kernels.as_bytes(np.stack(rows))


def _agree_lanewise(micro: Micro, got: np.ndarray, want: np.ndarray) -> str:
    problems = []
    for row, name in enumerate(micro.settings["instructions"]):
        part = slice(4 * SAMPLES * row, 4 * SAMPLES * (row + 1))
        have, need = got[part].view(np.uint32), want[part].view(np.uint32)
        same = have == need
        if name in _FLOATS or name in _ERRORS:
            x, y = have.view(np.float32), need.view(np.float32)
            same |= np.isnan(x) & np.isnan(y)
            if name in _ERRORS:
                same |= _close(name, x.astype(np.float64), y.astype(np.float64))
        if not same.all():
            i = int(np.argmin(same))
            inputs = ", ".join(f"{v:#010x}" for v in lanewise_inputs(micro)[:, i])
            problems.append(
                f"{name}: {(~same).sum()} of {SAMPLES}, first {have[i]:#010x} for "
                f"{need[i]:#010x} of {inputs}"
            )
    return "; ".join(problems)


def _close(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Within the documented error, of which the model's own rounding takes a part of 2^-24."""
    scale = np.abs(y)
    if name == "lg2":
        # Absolute between 0.5 and 2, where the logarithm is within 1 of zero.
        scale = np.maximum(scale, 1)
    return np.abs(x - y) <= (_ERRORS[name] + 2.0**-24) * scale


# -- warps


def _shuffle_source(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The pseudo-code of the manual, for one lane."""
    bval, cval, mask = b & 31, c & 31, c >> 8 & 31
    maximum = lane & mask | cval & ~mask & 31
    minimum = lane & mask
    if mode == "up":
        j, inside = lane - bval, lane - bval >= maximum
    elif mode == "down":
        j, inside = lane + bval, lane + bval <= maximum
    elif mode == "bfly":
        j, inside = lane ^ bval, lane ^ bval <= maximum
    else:
        j = minimum | bval & ~mask & 31
        inside = j <= maximum
    return (j if inside else lane), inside


def _warps(micro: Micro) -> np.ndarray:
    values, lanes = micro.input.view(np.uint32).reshape(2, THREADS)
    rows = []
    for mode, b, c in kernels.SHUFFLES:
        got, inside = np.zeros(THREADS, np.uint32), np.zeros(THREADS, np.uint32)
        for thread in range(THREADS):
            lane = thread % 32
            operand = int(lanes[thread]) if b == "%r11" else int(b)
            source, inside[thread] = _shuffle_source(mode, lane, operand, c)
            got[thread] = values[thread - lane + source]
        rows += [got, inside]
    for mask in kernels.VOTE_MASKS:
        for vote in kernels.VOTES:
            answer = {
                "any": int(mask != 0),
                "all": int(mask == 0xFFFFFFFF),
                "ballot": mask,
            }[vote]
            rows.append(np.full(THREADS, answer, np.uint32))
    rows.append(np.zeros(THREADS, np.uint32))  # the lowest lane is elected
    rows.append((np.arange(THREADS) % 32 == 0).astype(np.uint32))
    return np.stack(rows)


def _stmatrix() -> np.ndarray:
    registers, offsets = kernels.stmatrix_inputs()
    size = kernels.STMATRIX_BYTES * len(kernels.STMATRIX)
    shared = memory.SharedMemory(LINE + size)
    shared.bytes[:] = 0xA5
    for i, (count, transposed) in enumerate(kernels.STMATRIX):
        addresses = LINE + kernels.STMATRIX_BYTES * i + offsets[i].astype(np.int64)
        memory.store_matrices(
            shared, addresses, registers[:count], transpose=transposed
        )
    return shared.bytes[LINE:]


# The tests with parity 0 and 1 after each of kernels.MBARRIER_STEPS; before the first phase is
# complete the one "before" it, of the other parity, is. Polled steps: never complete, and a 2.
MBARRIER_TESTS = [
    (0, 1),
    (0, 1),
    (1, 0),
    (0, 1),
    (0, 2),
    (1, 0),
    (0, 2),
    (0, 2),
    (1, 0),
]


# -- TMA


def _memory(
    micro: Micro, raw_map: bytes
) -> tuple[tma.TensorMap, memory.GlobalMemory, np.ndarray]:
    assert micro.tensor is not None
    tensor_map = tma.TensorMap.decode(raw_map)
    content = micro.tensor.content.copy()
    space = memory.GlobalMemory()
    space.add("tensor", tensor_map.address, content)
    return tensor_map, space, content


def _shared(micro: Micro) -> memory.SharedMemory:
    """Filled from the input."""
    size = micro.settings["size"]
    shared = memory.SharedMemory(LINE + TILES + size)
    shared.bytes[LINE + TILES :] = micro.input[:size]
    return shared


def _tma_load(micro: Micro, raw_map: bytes) -> np.ndarray:
    tensor_map, space, _ = _memory(micro, raw_map)
    targets = [_shared(micro) for _ in range(micro.cluster)]
    place = LINE + TILES + micro.settings["place"]
    tma.load(tensor_map, micro.settings["coordinates"], space, targets, place)
    return np.concatenate([target.bytes[LINE + TILES :] for target in targets])


def _tma_store(micro: Micro, raw_map: bytes) -> np.ndarray:
    tensor_map, space, content = _memory(micro, raw_map)
    place = LINE + TILES + micro.settings["place"]
    tma.store(tensor_map, micro.settings["coordinates"], space, _shared(micro), place)
    return content


# -- wgmma


def _wgmma(micro: Micro) -> list[np.ndarray]:
    s = micro.settings
    n, k, dtype = s["n"], s["k"], s["dtype"]
    shared = memory.SharedMemory(LINE + TILES + kernels.WGMMA_SMEM)
    shared.bytes[LINE + TILES :] = micro.input[: kernels.WGMMA_SMEM]
    base = (LINE + TILES) >> 4
    if s["a"] is None:
        held = micro.input[kernels.WGMMA_SMEM :][: 16 * THREADS].view(np.uint32)
        a = wgmma.fragment_a(list(held.reshape(4, THREADS)), dtype)
    else:
        a = wgmma.gather(shared, s["a"].encode() + base, 64, k, dtype, s["a"].mn_major)
    b = wgmma.gather(shared, s["b"].encode() + base, n, k, dtype, s["b"].mn_major)
    registers = [np.arange(THREADS).astype(np.float32).view(np.uint32)] * (n // 2)
    scale_a, scale_b = s["negates"]
    for repeat in range(s["repeats"]):
        registers = wgmma.multiply(
            (64, n, k),
            a,
            b,
            registers,
            dtypes=(dtype, dtype),
            scale_d=s["adds"] or repeat > 0,
            scale_a=scale_a,
            scale_b=scale_b,
        )
    return registers


ROUNDING = 2.0**-21  # of the sum of the magnitudes, for a few products that add up


def _agree_rounded(micro: Micro, got: np.ndarray, want: np.ndarray) -> str:
    """Sums of rounded floats, in another order: compared with the size of what was added."""
    magnitude = micro.settings["repeats"] * micro.settings["k"] * 4.0
    error = float(np.abs(got - want).max()) / magnitude
    return "" if error <= ROUNDING else f"differs by {error:.2e} of the magnitude"

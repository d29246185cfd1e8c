# SPDX-License-Identifier: Apache-2.0
"""`fmha_fwd` of Q, K and V in e4m3, with V^T in the order of the tensor cores, and its helper.

A thread has the columns 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16 of S, where t is its place in a
quad, and in four bytes of P those of four keys in a row. So of each 16 keys V^T has those of thread
0 first, then those of thread 1: no value of P moves to another thread.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, Final

from . import forward
from .compare import Verdict
from .forward import (
    BATCH,
    FORWARD,
    HEAD_DIM_V,
    HEADS,
    HEADS_KV,
    LSE,
    OUT,
    SEQLEN_KV,
    SEQLEN_Q,
    K,
    Q,
    V,
)
from .operation import OF_OUTPUT, Array, Axis, Given, Sizes, Spec, Tensor
from .paged import paging
from .reference import Truth, truth
from .scores import float64
from .varlen import packing

E4M3: Final = "e4m3"
LARGEST: Final = 448.0
KEY_GROUP: Final = 16
DESCALE_ROWS: Final = 128  # of Q, K or V that share a factor by blocks
OWN_FIELDS: Final = ("out_dtype", "v_layout", "descale", "exp")


def is_e4m3(spec: Spec) -> bool:
    """Whether Q, K and V of a SPEC have 8 bits."""
    return bool(spec["dtype"] == E4M3)


def has_block_factors(spec: Spec) -> bool:
    """Whether each block of rows of Q, K and V has a factor of its own."""
    return spec.get("descale") == "block"


def is_permuted(spec: Spec) -> bool:
    """Whether V is V^T, as `permute_v` makes it."""
    return spec.get("v_layout") == "permuted"


def permute_v(v: Array) -> Array:
    """Return V^T as kernels with `v_layout: permuted` take it: [batch, heads, head_dim, keys].

    v: [batch, seqlen, heads, head_dim], of any type of NumPy or PyTorch. keys is seqlen up to a
    multiple of 16: place 4t + 2g + e of each 16 has key 8g + 2t + e, for t below 4, g and e below
    2, and 0 behind the last one. What is returned is contiguous, on the same device.
    """
    if _is_float8(v):
        return permute_v(_bytes_of(v)).view(v.dtype)
    xp = _namespace(v)
    batch, seqlen, heads, head_dim = v.shape
    groups = -(-seqlen // KEY_GROUP)
    shape = (batch, heads, head_dim, groups * KEY_GROUP)
    where = {"device": v.device} if xp.__name__ == "torch" else {}
    made = xp.zeros(shape, dtype=v.dtype, **where)
    made[..., :seqlen] = _transposed(v, (0, 2, 3, 1))
    halves = made.reshape(batch, heads, head_dim, groups, 2, 4, 2)
    return _transposed(halves, (0, 1, 2, 3, 5, 4, 6)).reshape(shape)


def natural_v(permuted: Array, seqlen: int) -> Array:
    """Return [batch, seqlen, heads, head_dim] of what `permute_v` made of it."""
    if _is_float8(permuted):
        return natural_v(_bytes_of(permuted), seqlen).view(permuted.dtype)
    batch, heads, head_dim, keys = permuted.shape
    quads = permuted.reshape(batch, heads, head_dim, keys // KEY_GROUP, 4, 2, 2)
    in_order = _transposed(quads, (0, 1, 2, 3, 5, 4, 6)).reshape(permuted.shape)
    return _transposed(in_order[..., :seqlen], (0, 3, 1, 2))


def _is_float8(x: Array) -> bool:
    """Whether it is one of PyTorch's, of which few functions take 8-bit floats."""
    return "torch.float8" in str(x.dtype)


def _bytes_of(x: Array) -> Array:
    return x.view(_namespace(x).uint8)


def _transposed(x: Array, axes: tuple[int, ...]) -> Array:
    return x.permute(axes) if _namespace(x).__name__ == "torch" else x.transpose(axes)


def _namespace(x: Array) -> ModuleType:
    return importlib.import_module(type(x).__module__.partition(".")[0])


def _padded(spec: Spec, sizes: Sizes) -> int:
    return -(-sizes.kv // KEY_GROUP) * KEY_GROUP


def _fixed(spec: Spec) -> int | None:
    kv = SEQLEN_KV.fixed(spec)
    return None if kv is None else -(-kv // KEY_GROUP) * KEY_GROUP


# Its rows are those of V^T, and its columns keys.
ROWS_OF_V: Final = replace(HEAD_DIM_V, kind="s")
SEQLEN_V: Final = Axis(
    *("seqlen_v", "u", "d", _padded),
    fixed=_fixed,
    follows="seqlen_kv",
    told=lambda spec: (
        "" if _fixed(spec) else f"seqlen_kv up to a multiple of {KEY_GROUP}"
    ),
)
V_PERMUTED: Final = Tensor(
    "v", (BATCH, HEADS_KV, ROWS_OF_V, SEQLEN_V), words="V^T, permuted"
)


def _blocks(side: str, of_rows: Axis) -> Axis:
    """The blocks of rows of Q, or of K and V, that have a factor each."""

    def fixed(spec: Spec) -> int | None:
        rows = of_rows.fixed(spec)
        return None if rows is None else -(-rows // DESCALE_ROWS)

    return Axis(
        *(f"blocks_{side}", "n", "n"),
        size=lambda spec, sizes: -(-of_rows.size(spec, sizes) // DESCALE_ROWS),
        fixed=fixed,
        follows=of_rows.name,
        told=lambda spec: (
            "" if fixed(spec) else f"ceil({of_rows.name} / {DESCALE_ROWS})"
        ),
    )


def _descale(name: str, *axes: Axis) -> Tensor:
    of_what = f"{DESCALE_ROWS} rows of {name}" if len(axes) > 2 else name
    return Tensor(
        *(f"{name}_descale", axes, "fp32"),
        tma=False,
        words="positive",
        when="descale",
        about=lambda spec: f"is a factor of {of_what}; its strides may be 0",
    )


DESCALES: Final = tuple(_descale(name, BATCH, HEADS_KV) for name in "qkv")
BLOCKS_Q: Final = _blocks("q", SEQLEN_Q)
BLOCKS_KV: Final = _blocks("kv", SEQLEN_KV)
DESCALES_OF_BLOCKS: Final = (
    _descale("q", BATCH, HEADS, BLOCKS_Q),
    *(_descale(name, BATCH, HEADS_KV, BLOCKS_KV) for name in "kv"),
)


def in_16_bits(spec: Spec) -> dict[str, Any]:
    """The SPEC of the same computation on Q, K and V of O's type, V as rows."""
    left = {name: x for name, x in spec.items() if name not in OWN_FIELDS}
    return {**left, "dtype": spec["out_dtype"]}


def _dequantised(given: Given) -> Given:
    """The same call with Q, K and V in float64: factors multiplied, V as rows."""
    found = dict(given.inputs)
    for name in "qkv":
        found[name] = float64(found[name])
        if name == "v" and is_permuted(given.spec):
            found[name] = natural_v(found[name], found["k"].shape[1])
        if given.spec.get("descale"):
            factors = float64(found.pop(f"{name}_descale"))
            batch, seqlen, _, head_dim = found[name].shape
            groups = (batch, seqlen, factors.shape[1], -1, head_dim)
            of_rows = factors[:, None]
            if has_block_factors(given.spec):
                blocks = [row // DESCALE_ROWS for row in range(seqlen)]
                of_rows = factors[:, :, blocks].swapaxes(1, 2)
            scaled = found[name].reshape(groups) * of_rows[..., None, None]
            found[name] = scaled.reshape(found[name].shape)
    return replace(given, spec=in_16_bits(given.spec), inputs=found)


def _exact(given: Given, wanted: Array | None = None) -> dict[str, Array]:
    return dict(FORWARD.exact(_dequantised(given), wanted))


def _truth(given: Given, wanted: Array | None = None) -> Truth:
    return truth(
        **forward.defined_by(_dequantised(given)),
        dtype=given.spec["out_dtype"],
        dtype_of_p=E4M3,
        exp=given.spec.get("exp", "exact"),
        wanted=wanted,
    )


def _judge(
    given: Given,
    outputs: Mapping[str, Array],
    right: Truth,
    tile: int,
    wanted: Array | None = None,
) -> dict[str, Verdict]:
    call = _dequantised(given)
    return dict(FORWARD.judge(call, outputs, right, tile, wanted))


E4M3_FORWARD: Final = replace(
    FORWARD,
    reads=(Q, K, V, *DESCALES),
    writes=(replace(OUT, dtype=OF_OUTPUT), LSE),
    exact=_exact,
    truth=_truth,
    judge=_judge,
)
OF_PERMUTED: Final = replace(E4M3_FORWARD, reads=(Q, K, V_PERMUTED, *DESCALES))
OF_BLOCKS: Final = replace(E4M3_FORWARD, reads=(Q, K, V, *DESCALES_OF_BLOCKS))
OF_PERMUTED_BLOCKS: Final = replace(
    E4M3_FORWARD, reads=(Q, K, V_PERMUTED, *DESCALES_OF_BLOCKS)
)
PACKED_E4M3: Final = packing(E4M3_FORWARD, *DESCALES)
PAGED_E4M3: Final = paging(PACKED_E4M3)

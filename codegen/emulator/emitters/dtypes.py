# SPDX-License-Identifier: Apache-2.0
"""The dtypes of lanes, and the PTX types that stand for them."""

from __future__ import annotations

from typing import Any

import numpy as np

DTYPES: dict[str, Any] = {
    "bool": np.bool_,
    "u8": np.uint8,
    "i8": np.int8,
    "u16": np.uint16,
    "i16": np.int16,
    "u32": np.uint32,
    "i32": np.int32,
    "f32": np.float32,
    "u64": np.uint64,
    "i64": np.int64,
}
BITS = {name: np.dtype(dtype).itemsize * 8 for name, dtype in DTYPES.items()} | {
    "bool": 1
}
ONES = {name: (1 << bits) - 1 for name, bits in BITS.items()}

PTX_TYPES = {
    "pred": "bool",
    **{f"{letter}{bits}": f"u{bits}" for letter in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    "f32": "f32",
}
"""PTX type to the dtype of its lanes."""

INTEGERS = "s16 u16 s32 u32 s64 u64"
UNTYPED = "b16 b32 b64"
"""Modifiers of instructions that work on any of these, for the table."""


def unsigned(dtype: str) -> str:
    """The unsigned dtype of the same width."""
    return "u8" if dtype == "bool" else f"u{BITS[dtype]}"


def numpy_name(dtype: str) -> str:
    """The numpy name of a dtype."""
    return np.dtype(DTYPES[dtype]).name if dtype != "bool" else "bool_"


def view(have: str, want: str) -> str:
    """What makes of an expression of one dtype one of another: the same bits."""
    return "" if have == want else f".view(np.{numpy_name(want)})"

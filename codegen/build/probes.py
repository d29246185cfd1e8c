# SPDX-License-Identifier: Apache-2.0
"""The calls of `fmha` by which a kernel's host launch is known: what they launch is its digest.

They are few enough for every compile, and unlike one another in all that host code computes with:
lengths beside and on the tiles, counts, strides, offsets, scales and SMs. Nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, get_args

from ..emulator.launch import Call
from ..evidence.tensors import arguments
from ..ops.cases import DYNAMIC, Case, Layout, Tiles, launches_for, tiles_of
from .kernel_text import read_constants

COUNT: Final = 48
LAYOUTS: Final[tuple[Layout, ...]] = get_args(Layout)
SCALES: Final = (1.0, 1.3, 2.0**-10, 30.0, 1e4)  # times 1 / sqrt(head_dim)


def calls(text: str) -> list[Call]:
    """The calls for a generated kernel's text, the same ones for every text of a spec and tiles."""
    constants = read_constants(text)
    spec, tiles = constants["SPEC"], tiles_of(constants)
    return [arguments(spec, case) for case in _cases(spec, tiles)]


def _cases(spec: Mapping[str, Any], tiles: Tiles) -> Iterator[Case]:
    fixed = spec["seqlen"]
    for number in range(COUNT):
        # Whole tiles in every third, and no two alike: the factors are primes.
        q = 1 + number**2 * 37 % 1499 if number % 3 else tiles.q * (1 + number % 7)
        kv = 1 + number**2 * 53 % 2999 if number % 4 else tiles.kv * (1 + number % 5)
        yield Case(
            f"probe_{number}",
            batch=1 + number % 5,
            kv_heads=1 + number * 3 % 7,
            q=q if fixed["q"] == DYNAMIC else int(fixed["q"]),
            kv=kv if fixed["kv"] == DYNAMIC else int(fixed["kv"]),
            sm_count=tiles.ctas * (1 + number * 13 % 71) + number % tiles.ctas,
            layout=LAYOUTS[number % len(LAYOUTS)],
            scale_factor=SCALES[number % len(SCALES)],
        )
    for case in launches_for(spec, tiles):
        yield replace(case, sm_count=case.sm_count or 7 * tiles.ctas)

# SPDX-License-Identifier: Apache-2.0
"""Tiles, pipeline depths and the schedule: the plan chooses what a spec leaves out."""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Final, Literal

from pydantic import Field

from ..ops.forward import FORWARD
from .e4m3 import E4M3
from .feature import Accepts, Block, Feature, Model, Relation


class TileRows(Model):
    """Rows of one work tile; the plan chooses what is left out."""

    q: Annotated[
        Literal[64, 128, 192, 256] | None,
        Accepts("query rows per CTA", "64, 128, 192 or 256", (int, NoneType)),
    ] = None
    kv: Annotated[
        Annotated[int, Field(ge=16, le=256, multiple_of=16)] | None,
        Accepts(
            "KV rows per pipeline stage",
            "a multiple of 16 from 16 to 256",
            (int, NoneType),
        ),
    ] = None


Tile = Annotated[TileRows, Block("rows of one work tile", "a mapping with q and kv")]
TILE: Final = Feature(
    "tile",
    tokens={
        r"t\d+x\d+": lambda spec: (
            [f"t{spec.tile.q}x{spec.tile.kv}"] if spec.tile.q and spec.tile.kv else [""]
        )
    },
    keys={
        r"(block|tile)(_size)?_?(m|n|q|k|kv)|block(_size)?": "write tile: {q: N, kv: N}"
    },
)
TILE_Q: Final = Feature(
    "tile.q",
    relations=[
        # A warpgroup's 64 rows, at most three times; two halves of 128 rows.
        Relation([None, 64, 128, 192], {"arch": ["sm90"]}),
        Relation([None, 256], {"arch": ["sm100"], "op": [FORWARD.name]}),
        # The barrier of its turn tells a warpgroup that the O of the tile before has left.
        Relation([None, 128, 192], {"arch": ["sm90"], "dtype": [E4M3]}),
    ],
)
# 32 keys are a step of an MMA.
TILE_KV: Final = Feature(
    "tile.kv", relations=[Relation([None, *range(32, 257, 32)], {"dtype": [E4M3]})]
)

_Depth = Annotated[int, Field(ge=2, le=8)] | None
_DEPTH: Final = "a whole number from 2 to 8"
_SHARED: Final = "K tiles, and as many V tiles, in flight; sm100: tiles of K or V"
_OF_V: Final = "V tiles in flight, where not as many as K's"


class Depths(Model):
    """Depth of the pipelines through shared memory; the plan chooses what is left out."""

    q: Annotated[
        Literal[1, 2] | None, Accepts("Q tiles in flight", "1 or 2", (int, NoneType))
    ] = None
    kv: Annotated[_Depth, Accepts(_SHARED, _DEPTH, (int, NoneType))] = None
    do: Annotated[
        Annotated[int, Field(ge=1, le=4)] | None,
        Accepts("dO tiles in flight", "a whole number from 1 to 4", (int, NoneType)),
    ] = None
    v: Annotated[_Depth, Accepts(_OF_V, _DEPTH, (int, NoneType))] = None


Stages = Annotated[Depths, Block("pipeline depths", "a mapping with q and kv")]
STAGES: Final = Feature(
    "stages",
    keys={
        r"(num_)?stages?(_q|_kv?)?|pipeline(_stages)?": "write stages: {q: N, kv: N}"
    },
)
# A half of the query tile each.
STAGES_Q: Final = Feature(
    "stages.q",
    relations=[Relation([None, 2], {"arch": ["sm100"], "op": [FORWARD.name]})],
)
# K and V share the stages of one ring.
STAGES_V: Final = Feature("stages.v", relations=[Relation([None], {"arch": ["sm100"]})])
# Of the backward pass, which alone reads dO.
STAGES_DO: Final = Feature(
    "stages.do", relations=[Relation([None], {"op": [FORWARD.name]})]
)

Schedule = Annotated[
    Literal["persistent", "single"],
    Accepts(
        "a CTA takes one work tile after the other, or a single one",
        words={
            r"dynamic|clc|stream_?k|split_?k": (
                "CTAs take tiles in a fixed order: persistent or single"
            ),
            r"static|non_?persistent": "write single, a tile per CTA, or persistent",
        },
    ),
]
SCHEDULE: Final = Feature(
    "schedule",
    tokens={r"single|persistent": lambda spec: [spec.schedule]},
    keys={r"persistent": "write schedule: persistent, or single"},
    relations=[
        Relation(["persistent"], {"arch": ["sm90"]}),
        # ptxas spills in the correction of a single tile.
        Relation(["persistent"], {"cta_group": [2]}),
    ],
    flags=lambda spec: {"persistent": spec.schedule == "persistent"},
)

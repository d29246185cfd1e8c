# SPDX-License-Identifier: Apache-2.0
"""K and V in the pages of a cache, of which a table says whose they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field

from .feature import Accepts, Block, Feature, Model, Relation

if TYPE_CHECKING:
    from ..spec.model import Spec

_MOST: Final = 2**16  # [rows]
_STEP: Final = 16  # [rows]
_WRITE: Final = "write batch: varlen and kv: {paged: {page: 16}}"

_Rows = Annotated[int, Field(ge=_STEP, le=_MOST, multiple_of=_STEP)]


class Pages(Model):
    """Of one size."""

    page: Annotated[
        _Rows | Literal["none"],
        Accepts(
            "keys of a page; none: K and V have no pages",
            f"a multiple of {_STEP} from {_STEP} to {_MOST}, or none",
            (int, str),
        ),
    ] = "none"


class Cache(Model):
    """Where K and V are."""

    paged: Annotated[
        Pages,
        Block(
            "in pages, which block_table of a call deals out to sequences",
            "a mapping with page",
            hint=_WRITE,
        ),
    ] = Pages()


Kv = Annotated[
    Cache,
    Block(
        "where K and V are: as Q, or in the pages of a cache",
        "a mapping with paged",
        hint=_WRITE,
    ),
]


def page_of(spec: Spec) -> int | None:
    """Return the keys of a page; None where K and V have no pages."""
    page = spec.kv.paged.page
    return None if page == "none" else page


PAGED: Final = Feature(
    "kv.paged.page",
    tokens={
        r"page\d+": lambda spec: (
            [f"page{page_of(spec)}"] if page_of(spec) is not None else [""]
        )
    },
    keys={
        r"page(d|s|_size)?|paged_kv|kv_cache|(block|page)_tables?|block_size|seqused(_k)?": (
            _WRITE
        )
    },
    relations=[
        Relation(
            ["none"],
            {"batch": ["dense"]},
            "FG203",
            "needs packed queries",
            "set batch: varlen",
        ),
    ],
    flags=lambda spec: {"paged": page_of(spec) is not None},
    title=lambda spec: f"pages of {page_of(spec)} keys" if page_of(spec) else "",
    contract=lambda spec: (
        "Sequence i has the rows from cu_seqlens_q[i] on, before cu_seqlens_q[i + 1], and\n"
        "seqused_k[i] keys, of which key j is in row j % page of page block_table[i, j // page].\n"
        "It has no more keys than its row of the table, of which a page outside the pool is the\n"
        "first or the last; positions count from its first key. Rows of no sequence are neither\n"
        "read nor written."
        if page_of(spec)
        else ""
    ),
)

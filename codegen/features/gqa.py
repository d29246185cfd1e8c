# SPDX-License-Identifier: Apache-2.0
"""Query heads that share a KV head, and query tiles with the rows of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field

from ..errors import SpecError
from .feature import Accepts, Block, Feature, Model, Relation

if TYPE_CHECKING:
    from ..spec.model import Spec, SpecFile

_MAX_Q_PER_KV: Final = 128
_WRITE: Final = "write heads: {q_per_kv: N}"


class Group(Model):
    """How query heads share KV heads. How many there are is a run-time argument."""

    q_per_kv: Annotated[
        int,
        Field(ge=1, le=_MAX_Q_PER_KV),
        Accepts(
            "query heads per KV head: 1 is MHA, more is GQA",
            f"a whole number from 1 to {_MAX_Q_PER_KV}",
            (int,),
        ),
    ] = 1


Heads = Annotated[
    Group,
    Block(
        "how query heads share KV heads",
        "a mapping with q_per_kv",
        hint=f"{_WRITE}, the query heads per KV head; how many heads there are is known at"
        " run time",
    ),
]


def _title(spec: Spec) -> str:
    if spec.heads.q_per_kv == 1:
        return ""
    return f"GQA {spec.heads.q_per_kv}{' packed' if spec.pack_gqa else ''}"


HEADS: Final = Feature(
    "heads.q_per_kv",
    tokens={
        r"mha|mqa|gqa\d*": lambda spec: (
            [f"gqa{spec.heads.q_per_kv}", "gqa", "mqa"]
            if spec.heads.q_per_kv > 1
            else ["mha", "gqa1"]
        )
    },
    keys={
        r"(num_|n)?(q_|kv_|query_)?heads?(_q|_kv?)?|gqa|q_per_kv|group(_size)?": (
            f"{_WRITE}; how many heads there are is known at run time"
        )
    },
    flags=lambda spec: {"grouped": spec.heads.q_per_kv > 1},
    title=_title,
)

PackGqa = Annotated[
    bool, Accepts("a tile has the rows of all query heads of a KV head")
]
PACK_GQA: Final = Feature(
    "pack_gqa",
    tokens={r"pack": lambda spec: ["pack" if spec.pack_gqa else ""]},
    relations=[
        Relation([False], {"arch": ["sm100"]}),
        Relation(
            [False],
            {"heads.q_per_kv": [1]},
            "FG203",
            "needs several query heads per KV head",
            "set heads: {q_per_kv: N}, or leave pack_gqa out",
        ),
    ],
    flags=lambda spec: {"pack_gqa": spec.pack_gqa},
    contract=lambda spec: (
        "Rows of a query tile are (position, head of the group), heads fastest."
        if spec.pack_gqa
        else ""
    ),
)


def heads_of_tile(spec: Spec) -> int:
    """Return the number of query heads whose rows a query tile has."""
    return spec.heads.q_per_kv if spec.pack_gqa else 1


def cut_group(spec: Spec, rows: int) -> str:
    """Return why so many rows do not hold whole groups of heads; "" if they do."""
    heads = heads_of_tile(spec)
    if rows % heads == 0:
        return ""
    return (
        f"pack_gqa: true needs whole groups of {heads} heads (heads.q_per_kv):"
        f" {rows} % {heads} = {rows % heads}"
    )


def tile_that_cuts_groups(
    spec_file: SpecFile, rows: int, others: Sequence[int]
) -> SpecError:
    """FG403: a query tile of so many rows; `others` are the numbers of rows that it could have."""
    heads = heads_of_tile(spec_file.spec)
    message = (
        f"pack_gqa: true fills a query tile with whole groups of {heads} heads"
        f" (heads.q_per_kv), but its rows (tile.q) are {rows}: {rows} % {heads} ="
        f" {rows % heads}"
    )
    holding = [f"tile: {{q: {n}}}" for n in others if n % heads == 0]
    hint = f"set {' or '.join([*holding, 'pack_gqa: false'])}"
    field = ("tile", "q") if spec_file.spec.tile.q else ("pack_gqa",)
    return spec_file.refusal("FG403", field, message, hint)

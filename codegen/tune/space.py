# SPDX-License-Identifier: Apache-2.0
"""What is searched: the fields of a spec that the plan chooses when they are left out.

A cluster and multicast are not among them: they are what a kernel is, its name says them, and who
wants to compare them writes a second spec. A point gives every tunable field a value, by the
field's dotted name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from ..errors import CheckFailed
from ..planning.kernel_plan import KernelPlan

Point = Mapping[str, int]


class Tunable(NamedTuple):
    """A field, the plan's constant that it sets, and the values to try."""

    field: str
    constant: str
    values: tuple[int, ...]


TUNABLE: Final = (
    Tunable("tile.q", "TILE_Q", (64, 128, 192)),
    # Fewer rows mean more barriers to a product; --fix tile.kv=16,32 tries them all the same.
    Tunable("tile.kv", "TILE_KV", tuple(range(48, 257, 16))),
    Tunable("stages.q", "Q_STAGES", (1, 2)),
    # More fit only beside small tiles; --fix stages.kv=5,6 tries them.
    Tunable("stages.kv", "K_STAGES", (2, 3, 4)),
    Tunable("stages.v", "V_STAGES", (2, 3, 4)),
)
"""In the order of a spec. A new planned field is a new line here."""

_NUMBER: Final = re.compile(r"[1-9][0-9]{0,8}")  # as a spec writes it

FIELDS: Final = tuple(tunable.field for tunable in TUNABLE)


def chosen(plan: KernelPlan) -> Point:
    """The point that a plan is at; raises CheckFailed for a plan of other numbers than these."""
    values = {number.name: int(number.value) for number in plan.chosen}
    if any(tunable.constant not in values for tunable in TUNABLE):
        raise CheckFailed(
            f"{plan.stem}: tune knows the numbers of Hopper's forward plans only, not these"
        )
    return {tunable.field: values[tunable.constant] for tunable in TUNABLE}


def fixed_values(options: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """What `--fix` says: ``tile.q`` keeps the incumbent's value, ``tile.kv=96,112`` tries those.

    By field; no values mean the incumbent's. Raises ValueError for anything else.
    """
    fixed: dict[str, tuple[int, ...]] = {}
    for option in options:
        field, equals, text = option.partition("=")
        if field not in FIELDS:
            raise ValueError(f"{option}: the fields are {', '.join(FIELDS)}")
        values = text.split(",") if equals else []
        if not all(_NUMBER.fullmatch(value) for value in values):
            raise ValueError(f"{option}: not values such as {field}=64,128")
        fixed[field] = tuple(dict.fromkeys(map(int, values)))
    return fixed


def points(incumbent: Point, fixed: Mapping[str, Sequence[int]]) -> Iterator[Point]:
    """Every point, the incumbent first, whatever is fixed; fields vary from the last one on."""
    yield incumbent
    axes = [
        (fixed[field] or (incumbent[field],)) if field in fixed else values
        for field, _, values in TUNABLE
    ]
    for values in itertools.product(*axes):
        point = dict(zip(FIELDS, values, strict=True))
        if point != incumbent:
            yield point

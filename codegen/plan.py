# SPDX-License-Identifier: Apache-2.0
"""From a spec to every number and choice of its kernel, each with where it came from.

Pure: the same spec gives the same plan. Templates place what is decided in `planning`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from .errors import Diagnostic, SpecError
from .planning import sm90, sm100
from .planning.kernel_plan import KernelPlan
from .spec import SpecFile

PLANNERS: Final[Mapping[str, Callable[[SpecFile], KernelPlan]]] = {
    "sm90": sm90.resolve,
    "sm100": sm100.resolve,
}


def resolve(spec_file: SpecFile) -> KernelPlan:
    """Plan a kernel, or raise SpecError (FG401 and on) with the numbers that do not fit."""
    made = PLANNERS[spec_file.spec.arch](spec_file)
    _require_two_query_tiles(made)
    return made


def _require_two_query_tiles(made: KernelPlan) -> None:
    """Of a cluster along them, where the length is fixed: or raise SpecError (FG408).

    A second tile would have no row, ever; and the DSL gives a mode of one tile no stride, so that
    its CTA would load the first one's rows again.
    """
    spec = made.spec_file.spec
    sizes = {number.name: number.value for number in (*made.chosen, *made.derived)}
    rows = sizes["TILE_Q"] // (spec.heads.q_per_kv if spec.pack_gqa else 1)
    q = spec.seqlen.q
    if spec.cluster[0] == 1 or not isinstance(q, int) or q > rows:
        return
    what = "positions" if spec.pack_gqa else "rows"
    message = (
        f"cluster: {list(spec.cluster)} has two query tiles of a head, but seqlen.q: {q}"
        f" fills one, of {rows} {what}"
    )
    hint = "leave seqlen.q dynamic, or set cluster: [1, 1]"
    place = made.spec_file.locate("cluster")
    raise SpecError([Diagnostic(place, "FG408", message, hint)])

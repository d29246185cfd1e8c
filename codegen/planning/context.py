# SPDX-License-Identifier: Apache-2.0
"""What the templates under common/ read, for whichever architecture.

Templates do no arithmetic and take no decision: each is taken here once, under a name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from .. import features
from ..arch import ARCHITECTURES
from ..features.backward import is_backward
from ..features.params import as_said
from ..features.varlen import is_packed
from ..ops import operation_of
from ..ops.operation import BYTES
from ..spec.model import SpecFile
from .kernel_plan import Number
from .traits import Traits

_PLANNED: Final = {"cta_group", "schedule", "tile", "stages"}
_LATER: Final = {"window", "softcap", "sink", "score", "alibi", "blocks", "params"} | {
    *("chunk", "documents", "prefix", "bias", "batch", "kv"),
    *("out_dtype", "v_layout", "descale", "exp", "deterministic", "dq_sums"),
}
# That it does not take: a pass of its own has no LSE to write, and so on.
_NOT_OF_BACKWARD: Final = {"lse", "pack_gqa", "cluster", "multicast"}


def common_context(
    spec_file: SpecFile,
    traits: Traits,
    chosen: Sequence[Number],
    derived: Sequence[Number],
    *,
    roles: Sequence[str],
    spec_items: Sequence[tuple[str, object]],
) -> dict[str, Any]:
    """Return every name that the templates under common/ read, but what `render` adds.

    roles: the lines of the header that say who does what, and what it takes.
    """
    spec = spec_file.spec
    own_items = _spec_items(spec_file, traits)
    return {
        **features.flags(spec),
        "title": features.title(spec),
        "contract": features.contract(spec),
        "spec_name": f"{spec_file.stem}.yaml",
        "operation": operation_of(dict(own_items)),
        "spec": dict(own_items),
        "roles": roles,
        "gpu_family": ARCHITECTURES[spec.arch].gpu_family,
        "gpu_arch": ARCHITECTURES[spec.arch].compile_arch,
        "spec_items": [*own_items, *spec_items],
        "chosen": chosen,
        "derived": derived,
        "fixed_q": traits.seqlen_q is not None,
        "fixed_kv": traits.seqlen_kv is not None,
        "q_tail": traits.q_tail,
        "kv_tail": traits.kv_tail,
        "dynamic_blocks": traits.dynamic_blocks,
        "left_edges": traits.mask.left_edges,
        "right_edges": traits.mask.right_edges,
        "gap_first_edges": traits.mask.gap_edges[0],
        "gap_end_edges": traits.mask.gap_edges[1],
        "tests": traits.mask.tests,
        **_units(traits),
    }


def bias_swizzle(traits: Traits) -> int:
    """Bytes that a swizzle of a stage of the bias goes over: 128, unless its rows are no multiple.

    Any number where there is no bias.
    """
    row = traits.sizes.tile_kv * BYTES.get(traits.spec.bias.dtype, 1)
    return math.gcd(128, row)


def _units(traits: Traits) -> dict[str, str]:
    """What is counted, where a cluster or the rows of a tile change it."""
    along_q, along_heads = (count > 1 for count in traits.spec.cluster)
    heads = "pairs of query heads" if along_heads else "query heads"
    return {
        "q_tiles_unit": f"{'clusters along a' if along_q else 'per'} {traits.tiled_head}",
        "heads_unit": "KV heads" if traits.packed else heads,
        "sections_unit": (
            "of a sequence" if is_packed(traits.spec) else "of all batches"
        ),
        "tiles_unit": f"of all {'clusters' if traits.cluster_size > 1 else 'CTAs'}",
    }


def _spec_items(spec_file: SpecFile, traits: Traits) -> list[tuple[str, object]]:
    """The SPEC dict of the generated file, in its order.

    A field that came later is in it where it is not at its default: texts without it stay.
    """
    spec = spec_file.spec
    given = spec.model_dump(include=_LATER, exclude_defaults=True)
    left_out = _PLANNED | (_LATER - given.keys())
    if is_backward(spec):
        left_out = left_out - {"deterministic"} | _NOT_OF_BACKWARD
    values = spec.model_dump(mode="json", exclude=left_out)
    if spec.params:
        values["params"] = as_said(spec.params)
    values = {"name": spec_file.stem, **values}
    if traits.lists:  # of blocks that large: a caller has to know
        values["tile"] = {"q": traits.sizes.tile_q, "kv": traits.sizes.tile_kv}
    group = ("q_per_kv", spec.heads.q_per_kv)
    return [group if item[0] == "heads" else item for item in values.items()]

# SPDX-License-Identifier: Apache-2.0
"""What the templates under common/ read, for whichever architecture.

Templates do no arithmetic and take no decision: each is taken here once, under a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import toolchain
from ..arch import ARCHITECTURES
from ..spec import Spec, SpecFile
from .kernel_plan import Number
from .traits import Traits


def common_context(
    spec_file: SpecFile,
    traits: Traits,
    chosen: Sequence[Number],
    derived: Sequence[Number],
    *,
    roles: Sequence[str],
    spec_items: Sequence[tuple[str, object]],
) -> dict[str, Any]:
    """Return every name that the templates under common/ read, but the digests.

    roles: the lines of the header that say who does what, and what it takes.
    """
    spec = spec_file.spec
    return {
        "title": _title(spec),
        "spec_name": f"{spec_file.stem}.yaml",
        "dtype": spec.dtype,
        "bf16": spec.dtype == "bf16",
        "head_dim_qk": spec.head_dim.qk,
        "head_dim_v": spec.head_dim.v,
        "heads_kv_text": _heads_kv(spec),
        "roles": roles,
        "gpu_family": ARCHITECTURES[spec.arch].gpu_family,
        "gpu_arch": ARCHITECTURES[spec.arch].compile_arch,
        "cta_group_size": spec.cta_group,
        "dsl_wanted": f"{toolchain.DSL}{toolchain.DSL_RANGE}",
        "ffi_wanted": f"{toolchain.FFI}{toolchain.FFI_RANGE}",
        "spec_items": [*_spec_items(spec_file), *spec_items],
        "chosen": chosen,
        "derived": derived,
        "lse": spec.lse,
        "cluster_size": traits.cluster_size,
        "cluster_q": spec.cluster[0],
        "cluster_heads": spec.cluster[1],
        "keys_seen": str(traits.mask),
        "edges": traits.edges,
        "right_edge": traits.right_edge,
        "left_edge": traits.left_edge,
        "right_offset": traits.mask.right not in (None, 0),
        "lpt_order": traits.lpt_order,
        "persistent": traits.persistent,
        "grouped": spec.heads.q_per_kv > 1,
        "pack_gqa": traits.pack_gqa,
        "fixed_q": traits.seqlen_q is not None,
        "fixed_kv": traits.seqlen_kv is not None,
        "q_tail": traits.q_tail,
        "kv_tail": traits.kv_tail,
        "dynamic_blocks": traits.dynamic_blocks,
        **_lengths(traits),
        **_units(traits),
    }


def _lengths(traits: Traits) -> dict[str, str]:
    """How the header spells sequence lengths."""
    q, kv = traits.seqlen_q, traits.seqlen_kv
    return {
        "seqlen_q_text": "seqlen_q" if q is None else str(q),
        "seqlen_kv_text": "seqlen_kv" if kv is None else str(kv),
    }


def _units(traits: Traits) -> dict[str, str]:
    """What is counted, where a cluster changes it."""
    clusters = traits.cluster_size > 1
    return {
        "q_tiles_unit": (
            f"clusters along a {traits.tiled_head}"
            if traits.spec.cluster[0] > 1
            else f"per {traits.tiled_head}"
        ),
        "heads_unit": _heads_unit(traits),
        "tiles_unit": "of all clusters" if clusters else "of all CTAs",
    }


def _heads_kv(spec: Spec) -> str:
    per_kv = spec.heads.q_per_kv
    return f"heads / {per_kv}" if per_kv > 1 else "heads"


def _heads_unit(traits: Traits) -> str:
    if traits.pack_gqa:
        return "KV heads"
    return "pairs of query heads" if traits.spec.cluster[1] > 1 else "query heads"


def _title(spec: Spec) -> str:
    qk, v = spec.head_dim.qk, spec.head_dim.v
    head_dim = str(qk) if qk == v else f"{qk} and {v}"
    parts = [
        f"head_dim {head_dim}",
        spec.dtype,
        "causal" if spec.mask == "causal" else "full mask",
    ]
    if spec.heads.q_per_kv > 1:
        packed = " packed" if spec.pack_gqa else ""
        parts.append(f"GQA {spec.heads.q_per_kv}{packed}")
    if spec.cluster != (1, 1):
        parts.append(f"cluster {spec.cluster[0]}x{spec.cluster[1]}")
    if spec.cta_group > 1:
        parts.append("a pair of CTAs per MMA")
    elif spec.cluster != (1, 1):
        shared = {"none": "no", "k": "K", "v": "V", "kv": "K and V"}[spec.multicast]
        parts.append(f"{shared} multicast")
    return f"FMHA forward for {spec.arch}: {', '.join(parts)}"


def _spec_items(spec_file: SpecFile) -> list[tuple[str, object]]:
    """The SPEC dict of the generated file, in its order."""
    spec = spec_file.spec
    values: dict[str, object] = {
        "name": spec_file.stem,
        "arch": spec.arch,
        "op": spec.op,
        "dtype": spec.dtype,
        "head_dim": {"qk": spec.head_dim.qk, "v": spec.head_dim.v},
        "seqlen": {"q": spec.seqlen.q, "kv": spec.seqlen.kv},
        "q_per_kv": spec.heads.q_per_kv,
        "pack_gqa": spec.pack_gqa,
        "mask": spec.mask,
        "lse": spec.lse,
        "cluster": list(spec.cluster),
        "multicast": spec.multicast,
    }
    return [*values.items()]

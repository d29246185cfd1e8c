# SPDX-License-Identifier: Apache-2.0
"""Clusters of two CTAs: what they share of the loads, and of the MMAs."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from .e4m3 import E4M3
from .feature import Accepts, Feature, Relation, either, in_yaml

_CLUSTERS: Final = ([1, 1], [2, 1], [1, 2])


def _from_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _known(value: tuple[int, int]) -> tuple[int, int]:
    if [*value] not in _CLUSTERS:
        raise ValueError
    return value


Cluster = Annotated[
    tuple[int, int],
    AfterValidator(_known),
    BeforeValidator(_from_list),
    Accepts(
        "CTAs along [query tiles of a head, query heads of a KV head]",
        either(map(in_yaml, _CLUSTERS)),
        (list, tuple),
    ),
    Field(json_schema_extra={"enum": [*_CLUSTERS]}),
]
_ALONG_Q: Final = ([1, 1], [2, 1])

CLUSTER: Final = Feature(
    "cluster",
    tokens={
        r"c\d+x\d+": lambda spec: (
            ["", "c1x1"]
            if spec.cluster == (1, 1)
            else [f"c{spec.cluster[0]}x{spec.cluster[1]}"]
        )
    },
    keys={r"cluster_(size|shape|dims?)": "write cluster: [2, 1]"},
    relations=[
        Relation(_ALONG_Q, {"arch": ["sm100"]}),
        Relation([[1, 1]], {"dtype": [E4M3]}),
        Relation(
            _ALONG_Q,
            {"heads.q_per_kv": range(1, 129, 2)},
            "FG202",
            "needs an even number of query heads per KV head",
            "set cluster: [2, 1] or [1, 1], or an even heads.q_per_kv",
        ),
        Relation(
            _ALONG_Q,
            {"pack_gqa": [True]},
            "FG204",
            "gives each CTA one query head, not all that share a KV head",
            "set cluster: [2, 1] or [1, 1], or leave pack_gqa out",
        ),
    ],
    flags=lambda spec: {
        "cluster_size": spec.cluster[0] * spec.cluster[1],
        "cluster_q": spec.cluster[0],
        "cluster_heads": spec.cluster[1],
    },
    title=lambda spec: (
        "" if spec.cluster == (1, 1) else f"cluster {spec.cluster[0]}x{spec.cluster[1]}"
    ),
)

Multicast = Annotated[
    Literal["none", "k", "v", "kv"], Accepts("which TMA loads the cluster shares")
]
_SHARED: Final = {"none": "no", "k": "K", "v": "V", "kv": "K and V"}

MULTICAST: Final = Feature(
    "multicast",
    tokens={
        r"mc(k|v|kv)|(k|v|kv)mc": lambda spec: (
            [f"{spec.multicast}mc", f"mc{spec.multicast}"]
            if spec.multicast != "none"
            else [""]
        )
    },
    relations=[
        Relation(
            ["none"],
            {"cluster": [[1, 1]]},
            "FG201",
            "needs a cluster of two CTAs",
            "set cluster: [2, 1] or [1, 2], or multicast: none",
        ),
        # K and V share the stages that a cluster frees.
        Relation(["none", "kv"], {"arch": ["sm100"]}),
        # Each CTA has half of K and V, which an MMA reads in both.
        Relation(["none"], {"cta_group": [2]}),
    ],
    title=lambda spec: (
        f"{_SHARED[spec.multicast]} multicast"
        if spec.cluster != (1, 1) and spec.cta_group == 1
        else ""
    ),
)

CtaGroup = Annotated[Literal[1, 2], Accepts("CTAs that share one MMA")]
CTA_GROUP: Final = Feature(
    "cta_group",
    tokens={r"cta\d": lambda spec: [f"cta{spec.cta_group}"]},
    keys={r"2cta|two_cta|cta_pair": "write cta_group: 2"},
    relations=[
        Relation([1], {"arch": ["sm90"]}),
        Relation([1], {"dtype": [E4M3]}),
        Relation(
            [1],
            {"cluster": [[1, 1], [1, 2]]},
            reason="needs two query tiles of a head in a cluster",
            hint="set cluster: [2, 1], or leave cta_group out",
        ),
    ],
    flags=lambda spec: {"cta_group_size": spec.cta_group},
    title=lambda spec: "a pair of CTAs per MMA" if spec.cta_group > 1 else "",
)

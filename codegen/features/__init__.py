# SPDX-License-Identifier: Apache-2.0
"""One file per feature, or for a few that are about the same thing.

It has the type of the spec's field, with what it accepts and means, and a `Feature`: the words of
a name that speak about it, what other tools call it, its relations to other fields, the flags that
templates test, and its words in a file's header, which have the order of `_FILES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ..ops import OPERATIONS
from . import (
    backward,
    bias,
    blocks,
    chunk,
    cluster,
    documents,
    e4m3,
    gqa,
    lse,
    mask,
    paged,
    params,
    prefix,
    problem,
    score,
    sink,
    softcap,
    tiling,
    varlen,
    window,
)
from .feature import Feature

if TYPE_CHECKING:
    from ..spec.model import Spec

_FILES: Final = (
    *(problem, e4m3, lse, softcap, bias, score, params, mask, chunk, window, documents),
    *(prefix, varlen, paged),
    blocks,
    *(sink, gqa, cluster, tiling, backward),
)

FEATURES: Final = (
    *(x for file in _FILES for x in vars(file).values() if isinstance(x, Feature)),
    *backward.TAKEN,
)


def flags(spec: Spec) -> Mapping[str, Any]:
    """Return what templates test or place of a spec alone, all features together."""
    return {name: v for each in FEATURES for name, v in each.flags(spec).items()}


def title(spec: Spec) -> str:
    """Return the kernel in a line."""
    parts = [part for each in FEATURES if (part := each.title(spec))]
    return f"{OPERATIONS[spec.op].title} for {spec.arch}: {', '.join(parts)}"


def contract(spec: Spec) -> list[str]:
    """Return the lines of a file's docstring that say what a call computes."""
    return [line for each in FEATURES if (line := each.contract(spec))]

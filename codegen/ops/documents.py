# SPDX-License-Identifier: Apache-2.0
"""The inputs of kernels whose spec says `documents: true`, of what frameworks have.

Arrays are NumPy's or PyTorch's, and so is what is returned, on the same device.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from .operation import Array


def document_ids(cu_seqlens: Array) -> Array:
    """Return the number of each token's document, [1, tokens].

    cu_seqlens: where documents begin, and the end of the last one: [documents + 1], from 0 on.
    """
    xp = _namespace(cu_seqlens)
    tokens = xp.arange(int(cu_seqlens[-1]), **_like(cu_seqlens))
    return xp.searchsorted(cu_seqlens[1:], tokens, side="right")[None]


def document_starts(ids: Array) -> Array:
    """Return `document_start`, int32 [batch, tokens]: the first token of each token's document.

    ids: [batch, tokens], any integers; neighbours with the same one are of one document.
    """
    xp = _namespace(ids)
    places = xp.arange(ids.shape[1], dtype=xp.int32, **_like(ids))
    starts = xp.zeros_like(ids, dtype=xp.int32)
    starts[:, 1:] = places[1:] * (ids[:, 1:] != ids[:, :-1])
    if xp.__name__ == "numpy":
        return xp.maximum.accumulate(starts, axis=1)
    return xp.cummax(starts, 1).values.to(xp.int32)


def document_ends(ids: Array) -> Array:
    """Return `document_end`, int32 [batch, tokens]: the token behind each token's document.

    ids: as of `document_starts`.
    """
    xp = _namespace(ids)
    return ids.shape[1] - xp.flip(document_starts(xp.flip(ids, (1,))), (1,))


def _namespace(x: Array) -> ModuleType:
    return importlib.import_module(type(x).__module__.partition(".")[0])


def _like(x: Array) -> dict[str, object]:
    """Where an array is, as PyTorch wants to be told."""
    return {} if _namespace(x).__name__ == "numpy" else {"device": x.device}

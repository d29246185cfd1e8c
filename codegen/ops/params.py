# SPDX-License-Identifier: Apache-2.0
"""What expressions read at run time: what `params` of a spec declares, and what its words do.

A scalar is a number of the public function, a tensor one of its inputs; both come by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..expressions.language import MAX_SEQLEN, Name, Param, Range, parse
from ..expressions.solve import Form, solve

ARGUMENT: Final = "argument"  # in place of a number of the spec: known in a call
CAUSAL: Final = "kv <= q"
_AFTER_QUERY: Final = Form.of({Name("q"): 1}, 1)


@dataclass(frozen=True)
class Declared:
    """axes: of `language.AXES`; none of a scalar. monotone: rises along row. field: of the spec, by
    which it is there. about: what it says, for the function's docstring.
    """

    name: str
    field: str = "params"
    dtype: str = "int32"
    axes: tuple[str, ...] = ()
    monotone: bool = False
    range: Range = (-MAX_SEQLEN, MAX_SEQLEN)
    about: str = ""

    @property
    def param(self) -> Param:
        """As expressions know it."""
        if self.dtype == "fp32":
            return Param(self.axes, type="real")
        return Param(self.axes, self.range, self.monotone)


_ROWS: Final[Mapping[str, Any]] = {"axes": ("b", "row"), "monotone": True}
_START: Final = Declared(
    *("document_start", "documents"),
    about="is the first key of each query's document",
    **_ROWS,
)
_END: Final = Declared(
    *("document_end", "documents"),
    about="is the key behind the last of each query's document",
    **_ROWS,
)
_PREFIX: Final = Declared(
    *("prefix", "prefix"),
    axes=("b",),
    about="is how many of the first keys all queries of a batch see",
)
_WINDOW: Final = {
    side: Declared(
        *(f"window_{side}", "window"),
        range=(0, MAX_SEQLEN),
        about=f"the keys {place} its own that a query sees",
    )
    for side, place in (("left", "before"), ("right", "behind"))
}
OF_WORDS: Final = (_PREFIX, _START, _END, *_WINDOW.values())


def declared(spec: Mapping[str, Any]) -> Iterator[Declared]:
    """Yield what expressions of a SPEC may read: of `params`, then of words."""
    for name, said in (spec.get("params") or {}).items():
        data = {"dtype": said} if isinstance(said, str) else said
        monotone = data.get("monotone", "none") == "row"
        yield Declared(
            name, dtype=data["dtype"], axes=(*data.get("shape", ()),), monotone=monotone
        )
    if spec.get("prefix"):
        yield _PREFIX
    if spec.get("documents"):
        yield _START
        if not _ends_at_query(spec):
            yield _END
    for side, keys in (spec.get("window") or {}).items():
        if keys == ARGUMENT:
            yield _WINDOW[side]


def of_spec(spec: Mapping[str, Any]) -> dict[str, Param]:
    """The integers among them, which masks may read, by name."""
    return {x.name: x.param for x in declared(spec) if x.dtype == "int32"}


def of_scores(spec: Mapping[str, Any]) -> dict[str, Param]:
    """What `params` declares, which scores may read, by name."""
    return {x.name: x.param for x in declared(spec) if x.field == "params"}


def has_tensors(spec: Mapping[str, Any]) -> bool:
    """Whether which keys a row sees depends on tensors."""
    return any(x.axes for x in declared(spec))


def _ends_at_query(spec: Mapping[str, Any]) -> bool:
    """Whether no query sees a key behind its own place, or of a later document."""
    if (spec.get("window") or {}).get("right") == 0 or spec["mask"] == "causal":
        return True
    if spec["mask"] == "none":
        return False
    known = of_spec({**spec, "documents": False})
    return all(
        _AFTER_QUERY in x.upper for x in solve(parse(spec["mask"], known), known).pieces
    )

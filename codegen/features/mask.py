# SPDX-License-Identifier: Apache-2.0
"""The scores that count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from ..errors import Violation
from ..expressions.language import ExpressionError, Param, names_in, parse, text_of
from ..expressions.solve import Form, falling_comparison
from ..ops import masks, scores
from ..ops.backward import BACKWARD_OP
from . import vocabulary
from .e4m3 import E4M3
from .feature import Accepts, Feature, Relation, did_you_mean, refusal
from .params import as_said, known_to
from .vocabulary import NOT_YET

if TYPE_CHECKING:
    from ..spec.model import Spec

_LINE: Final = 106  # [characters] of a generated file's docstring
_COMPARES: Final = re.compile("[<>=]")


class _Expression(Accepts):
    """A word of `masks.MASKS`, or an expression; one that means the same as a word becomes it."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        forms = [
            {"enum": [*masks.MASKS]},
            {"type": "string", "pattern": _COMPARES.pattern},
        ]
        return {"anyOf": forms, "description": self.meaning}

    def check(self, value: Any, info: core_schema.ValidationInfo) -> str:
        """Return what a SPEC says."""
        if type(value) is not str:
            raise refusal("FG103", self.text, value, "")
        if value in masks.MASKS:
            return value
        if not _COMPARES.search(value):
            words = [*masks.MASKS]
            hint = vocabulary.answer(self.words, value) or did_you_mean(value, words)
            raise refusal("FG104", self.text, value, hint)
        try:
            return _canonical(value, known_to(info.data.get("params", {})))
        except ExpressionError as error:
            details = {
                "message": error.message,
                "hint": error.hint,
                "column": error.column,
            }
            raise PydanticCustomError(
                cast(Any, error.code), "{message}", details
            ) from None


def _canonical(text: str, params: Mapping[str, Param]) -> str:
    """Return an expression as it reads, or the word for it; raises ExpressionError."""
    mask, tree = masks.of_text(text, params), parse(text, params)
    if mask.empty:
        raise ExpressionError("FG217", 0, "no query sees any key, whatever the lengths")
    if mask == masks.ALL_KEYS:
        hint = "write none"
        raise ExpressionError(
            "FG214", 0, "hides no key: every query sees all of them", hint
        )
    if mask.falls:
        comparison, bound = falling_comparison(tree, params)
        message = (
            "a bound of kv that falls from query to query is not generated:"
            f" {text_of(bound.node())}"
        )
        raise ExpressionError("FG219", comparison.column, message)
    return next(
        (word for word, each in masks.MASKS.items() if each == mask), text_of(tree)
    )


Mask = Annotated[
    str,
    _Expression(
        "causal: query i sees key j when j <= i + seqlen_kv - seqlen_q",
        "none, causal or an expression",
        (str,),
        words={
            r".*(window|swa|local|band).*": "write window: {left: N, right: N} beside the mask",
            r".*alibi.*": "write alibi: true beside the mask",
            r".*chunk.*": "write chunk: N beside mask: causal",
            r".*prefix.*": "write prefix: true beside mask: causal",
            r".*(document|packed).*": "write documents: true beside the mask",
            r".*(block|sparse).*": "write blocks: lists beside the mask of partial blocks",
            r".*(custom|bias|tree).*": f"such a mask is {NOT_YET}",
            r"full|false|no|off|dense|noncausal|bidirectional": "write none",
            r"(causal_)?(bottom_?right|lower_?right)|true|tril": (
                "write causal, which is aligned at the bottom right"
            ),
            r"(causal_)?(top_?left|upper_?left)": (
                "causal is aligned at the bottom right, and no mask at the top left"
            ),
        },
    ),
]


def keys_of(spec: Spec) -> masks.Mask:
    """Return which keys a query sees, by all fields that have a say in it."""
    said = spec.model_dump(mode="json")
    return masks.of_spec({**said, "params": as_said(spec.params)})


def _flags(spec: Spec) -> dict[str, bool]:
    mask = keys_of(spec)
    read = [name for name, x in mask.params.items() if x.axes]
    of_rows = [name for name in read if "row" in mask.params[name].axes]
    left, right = masks.Mask(mask.lower, frozenset()), masks.Mask(
        frozenset(), mask.upper
    )
    return {
        "edges": mask.edges,
        "loads_edges": mask.reads(*read),
        "left_loaded": left.reads(*read),
        "right_loaded": right.reads(*read),
        "left_place": left.reads("q"),
        "right_place": right.reads("q"),
        "left_row": left.reads(*of_rows),
        "right_row": right.reads(*of_rows),
        "lengths_known": not of_rows,
        "left_edge": bool(mask.left_edges),
        "right_edge": bool(mask.right_edges),
        "gap": not mask.gap.empty,
        "gap_first_moves": _moves(mask.gap.first),
        "gap_end_moves": _moves(mask.gap.end),
        "tests_keys": mask.tests is not None,
        "left_window": mask.left is not None,
        "right_window": mask.right is not None,
        "right_offset": bool(mask.right),
        "diagonal": mask.right == 0,
        "lpt_order": mask.uneven and spec.blocks == "derived",
    }


def _moves(bounds: Iterable[Form]) -> bool:
    """Whether some bound depends on the query."""
    return any({"q", "row"} & names_in(bound.node()) for bound in bounds)


def _refusals(spec: Spec) -> Iterator[Violation]:
    """A gap, or tests of each key, beside what they do not go with."""
    mask = keys_of(spec)
    if not mask.apart:
        return
    what = "mask: two ranges of keys, or a test of each, are not generated"
    if spec.blocks == "lists":
        message = f"{what} for blocks: lists"
        yield Violation("FG205", ("mask",), message, "set blocks: derived")
    if mask.params:
        message = f"{what} beside {', '.join(mask.params)}"
        yield Violation("FG219", ("mask",), message, "")
    score = scores.of_spec(spec.model_dump(mode="json"))
    if score.parts.how != "scaled" and score.cap is None:
        message = f"{what} beside scores that depend on the key's number"
        yield Violation("FG219", ("mask",), message, "")


def _notes(spec: Spec) -> Iterator[Violation]:
    """A mask of which no block is seen whole."""
    if (tests := keys_of(spec).tests) is not None:
        message = f"mask: no KV block is ever whole: {text_of(tests)} is tested for each score"
        yield Violation("FG219", ("mask",), message, "")


def _contract(spec: Spec) -> str:
    if not (keys := str(keys_of(spec))):
        return ""
    for name, said in (
        ("row", "i"),
        ("b", "batch"),
        ("h", "head"),
        ("h_kv", "kv_head"),
    ):
        keys = re.sub(rf"\b{name}\b", said, keys)
    place, ending = "q = i + seqlen_kv - seqlen_q", "A row that sees no key is 0."
    if spec.op == BACKWARD_OP:
        ending = "Of a row that sees no key dQ is 0."
    line = f"Query i, at {place}, sees {keys}. {ending}"
    return (
        line
        if len(line) <= _LINE
        else f"Query i is at {place}, and sees\n  {keys}. {ending}"
    )


_TOKENS: Final = {"none": "full", "causal": "causal"}


def _title(spec: Spec) -> str:
    if spec.mask == "none":
        return "" if keys_of(spec).edges else "full mask"
    return "causal" if spec.mask == "causal" else f"mask {spec.mask}"


MASK: Final = Feature(
    "mask",
    tokens={r"causal|full": lambda spec: [_TOKENS.get(spec.mask, "")]},
    keys={
        r"(is_)?causal": "write mask: causal",
    },
    relations=[Relation(["none", "causal"], {"dtype": [E4M3]})],
    refusals=_refusals,
    notes=_notes,
    flags=_flags,
    title=_title,
    contract=_contract,
)

# SPDX-License-Identifier: Apache-2.0
"""Scores that are more than the scaled product of Q and K: an expression, or ALiBi."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from ..errors import Violation
from ..expressions.language import (
    SCORE,
    ExpressionError,
    Name,
    Param,
    parse,
    text_of,
    walk,
)
from ..expressions.scores import parts_of
from ..expressions.values import check_range
from ..ops import scores
from .bias import BIAS_DTYPES, has_bias
from .blocks import has_lists
from .e4m3 import E4M3, has_block_factors
from .feature import Accepts, Feature, Relation, refusal
from .params import as_said, known_to_scores

if TYPE_CHECKING:
    from ..spec.model import Spec

_NONE: Final = "none"


class _Expression(Accepts):
    """An expression over s, as it reads; one that is s itself becomes none."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "string", "description": self.meaning}

    def check(self, value: Any, info: core_schema.ValidationInfo) -> str:
        """Return what a SPEC says."""
        if type(value) is not str:
            raise refusal("FG103", self.text, value, "put the expression in quotes")
        try:
            known = known_to_scores(info.data.get("params", {}))
            return value if value == _NONE else _canonical(value, known)
        except ExpressionError as error:
            details = {
                "message": error.message,
                "hint": error.hint,
                "column": error.column,
            }
            raise PydanticCustomError(
                cast(Any, error.code), "{message}", details
            ) from None


def _canonical(text: str, known: Mapping[str, Param]) -> str:
    tree = parse(text, known, type="real")
    check_range(tree, known)
    parts = parts_of(tree)
    is_s = (parts.how, parts.factor, parts.row) == ("scaled", 1.0, None)
    return _NONE if is_s else text_of(tree)


def in_words(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a spec's fields with `softcap` in place of a score that is the same."""
    text = data.get("score")
    if not isinstance(text, str) or "softcap" in data:
        return data
    try:
        cap = scores.of_text(text).cap
    except ExpressionError:
        return data
    if cap is None:
        return data
    others = {name: value for name, value in data.items() if name != "score"}
    return {**others, "softcap": int(cap) if cap == int(cap) else cap}


Score = Annotated[
    str,
    _Expression(
        f"the score of a query and a key, in natural logarithms, where {SCORE} is softmax_scale *"
        " QK^T; before the mask",
        f"none, or an expression over {SCORE}",
        (str,),
    ),
]
Alibi = Annotated[
    bool,
    Accepts("ALiBi: scores are s + slope * (kv - q), with a slope for each query head"),
]


def score_of(spec: Spec) -> scores.Score:
    """Return the score, by whichever field says it."""
    said = spec.model_dump(mode="json")
    return scores.of_spec({**said, "params": as_said(spec.params)})


def tests_exponents(spec: Spec) -> bool:
    """Return whether rows are rescaled where exponents are too large, not scores.

    Scores that do not order like QK^T leave no other way, unless they are there before the test:
    those with a bias are. Hopper compares bits, for which a limit must not be negative. Where
    blocks have factors of their own, each would need a limit of its own.
    """
    if has_block_factors(spec):
        return True
    score = score_of(spec)
    if has_bias(spec):
        return spec.arch == "sm90"
    return score.parts.how != "scaled" and score.cap is None


def _refusals(spec: Spec) -> Iterator[Violation]:
    """More than one field that says what the score is, and a row's constant beside a sink."""
    given = {"softcap": spec.softcap, "score": spec.score}
    said = [name for name, value in given.items() if value != _NONE]
    said += ["alibi"] * spec.alibi
    if len(said) > 1:
        hint = (
            "write one score that has all, such as softcap(s, 30) - 0.5 * abs(q - kv)"
        )
        message = f"{said[-1]}: the score is also said by {' and '.join(said[:-1])}"
        yield Violation("FG214", (said[-1],), message, hint)
    elif spec.sink and (row := score_of(spec).parts.row) is not None:
        message = (
            f"score: {text_of(row)}, which is the same for all keys of a row, is not generated"
            " beside a sink"
        )
        yield Violation("FG219", ("score",), message, "leave sink out, or the term")
    elif has_lists(spec) and spec.score != _NONE and tests_exponents(spec):
        message = f"score: {spec.score}, which is more than a factor of s and a constant of a row,"
        message += " is not generated for blocks: lists"
        yield Violation("FG205", ("score",), message, "set blocks: derived")


def _flags(spec: Spec) -> dict[str, Any]:
    score = score_of(spec)
    parts = score.parts
    by_element = parts.how == "by_element" and score.cap is None
    read = (
        []
        if has_bias(spec)
        else [x.axes for x in walk(score.tree) if isinstance(x, Name)]
    )
    return {
        "sloped": parts.how == "sloped",
        "by_element": by_element and not has_bias(spec),
        "tests_exponents": tests_exponents(spec),
        "scaled": parts.factor != 1.0,
        "row_term": parts.row is not None,
        "score_reads_rows": any("row" in axes for axes in read),
        "score_reads_batches": any("b" in axes for axes in read),
        "score": score.tree,
        "score_slope": parts.slope,
        "score_row": parts.row,
    }


def _contract(spec: Spec) -> str:
    if spec.alibi:
        said = "s + slopes[h] * (kv - q)"
    elif spec.score == _NONE:
        return ""
    else:
        said = spec.score
    return f"Scores are {said}, where s is softmax_scale * QK^T, before the mask."


SCORES: Final = Feature(
    "score",
    keys={r"score_(mod|fn|function)": "write score: an expression over s, in quotes"},
    relations=[
        Relation([_NONE], {"bias.dtype": BIAS_DTYPES}),
        Relation([_NONE], {"dtype": [E4M3]}),
    ],
    refusals=_refusals,
    flags=_flags,
    title=lambda spec: f"score {spec.score}" if spec.score != _NONE else "",
    contract=_contract,
)
ALIBI: Final = Feature(
    "alibi",
    tokens={r"alibi": lambda spec: ["alibi" if spec.alibi else ""]},
    keys={
        r"(use_|with_|attn_)?alibi(_slopes)?": (
            "write alibi: true; the slopes are an argument of fmha() at run time"
        )
    },
    # What is computed with a key's number counts blocks down, from the last one.
    relations=[
        Relation([False], {"blocks": ["lists"]}),
        Relation([False], {"bias.dtype": BIAS_DTYPES}),
        Relation([False], {"dtype": [E4M3]}),
    ],
    title=lambda spec: "ALiBi" if spec.alibi else "",
)

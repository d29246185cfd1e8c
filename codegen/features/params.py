# SPDX-License-Identifier: Apache-2.0
"""Inputs that expressions read: numbers, and tensors along some axes of a score."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BeforeValidator, GetCoreSchemaHandler
from pydantic_core import core_schema

from ..errors import Violation, quoted
from ..expressions.language import NAMES, Name, Param, parse, walk
from ..ops import OPERATIONS, masks, params
from .feature import Accepts, Block, Feature, Model, either, refusal

if TYPE_CHECKING:
    from ..spec.model import Spec

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TYPES: Final = "int32 or fp32"
_AXES: Final = ("b", "h", "h_kv", "row")

# Names that the host section of a kernel has for other things (tests/unit/test_params_field.py).
_OF_HOST: Final = """
    all arguments batch bias_tma check check_tensors cluster cluster_layout clusters compile cpasync
    cuda current cute cutlass device divisor error fits float fmha_kernel g getattr given
    grads half half_layout handle heads high in_fp32 int is_current is_torch isinstance
    k_layout last_heads last_section list load low math name num_tiles number o_layout
    of_torch out_layout pv_mma q_layout q_tiles qk_mma re reorder run s scale section_heads
    section_tiles share sm100 sm_count store str sys tcgen05 tensors tma tma_a tma_b torch
    tuple tvm_ffi v_layout view_of x zip
"""
_RESERVED: Final = frozenset(_OF_HOST.split())

_Shape = Annotated[
    tuple[Literal["b", "h", "h_kv", "row"], ...],
    BeforeValidator(lambda said: tuple(said) if isinstance(said, list) else said),
    Accepts("its axes, each once", f"a list of {either(_AXES)}", (list, tuple)),
]


class Declaration(Model):
    """A number of a call, or with a shape a tensor."""

    dtype: Annotated[Literal["int32", "fp32"], Accepts("of its elements")]
    shape: _Shape = ()
    monotone: Annotated[
        Literal["none", "row"], Accepts("row: its values rise along that axis")
    ] = "none"


_Declaration = Annotated[
    Declaration,
    Block(
        "a number of a call, or a tensor",
        f"{_TYPES}, or a mapping with shape, dtype and perhaps monotone",
        (str,),
        expand=lambda dtype: {"dtype": dtype},
        short=Literal["int32", "fp32"],
    ),
]


class _Declarations(Accepts):
    """Of a mapping whose values report for themselves."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        def check(value: Any) -> Any:
            if type(value) is not dict:
                raise refusal("FG103", self.text, value, "")
            return value

        return core_schema.no_info_before_validator_function(check, handler(source))


Params = Annotated[
    dict[str, _Declaration],
    _Declarations(
        "what expressions read beside axes and lengths, by name: keyword arguments of a call",
        "a mapping of names to declarations",
        (dict,),
    ),
]


def as_said(declared: Mapping[str, Declaration]) -> dict[str, Any]:
    """Return declarations as a SPEC says them."""
    return {
        name: x.model_dump(mode="json", exclude_defaults=True) if x.shape else x.dtype
        for name, x in declared.items()
    }


def known_to(declared: Mapping[str, Declaration]) -> dict[str, Param]:
    """Return the integers among them, as expressions of masks know them."""
    return params.of_spec({"mask": "none", "params": as_said(declared)})


def known_to_scores(declared: Mapping[str, Declaration]) -> dict[str, Param]:
    """Return all of them, as expressions of scores know them."""
    return params.of_scores({"params": as_said(declared)})


def _refusals(spec: Spec) -> Iterator[Violation]:
    operation = OPERATIONS[spec.op]
    taken = {x.name for x in (*operation.reads, *operation.writes)}
    taken |= {x.name for x in params.OF_WORDS}
    taken |= {
        "stream",
        *_RESERVED,
        *NAMES,
        *(x.name for x in operation.scalars),
        "min",
        "max",
        "abs",
    }
    trees = [parse(masks.text_of_word(spec.mask), known_to(spec.params))]
    of_mask = {x.name for x in walk(trees[0]) if isinstance(x, Name)}
    if spec.score != "none":
        known = known_to_scores(spec.params)
        trees.append(parse(spec.score, known, type="real"))
    read = {x.name for tree in trees for x in walk(tree) if isinstance(x, Name)}
    for name, said in spec.params.items():
        place, shape = ("params", name), said.shape
        if not _NAME.fullmatch(name) or keyword.iskeyword(name):
            message = f"params: {quoted(name)} is no name: [a-z][a-z0-9_]*, at most 32 characters"
            yield Violation("FG212", place, message, "choose another name")
        elif name in taken:
            message = f"params: {name} is the name of something else"
            yield Violation("FG212", place, message, "choose another name")
        elif len({*shape}) < len(shape) or {"h", "h_kv"} <= {*shape}:
            message = f"params.{name}: an axis is there twice"
            yield Violation(
                "FG218", place, message, "name each axis once, and h or h_kv"
            )
        elif said.monotone == "row" and "row" not in shape:
            message = f"params.{name}: monotone: row needs that axis in its shape"
            yield Violation("FG218", place, message, "leave monotone out")
        elif name not in read:
            message = f"params.{name}: no expression reads it"
            yield Violation("FG214", place, message, "leave it out")
        elif shape and spec.blocks == "lists":
            message = f"params.{name}: a tensor is not generated beside blocks: lists"
            yield Violation("FG205", place, message, "leave one of them out")
        elif (
            name in of_mask and "h" in shape and (spec.pack_gqa or spec.cluster[1] > 1)
        ):
            field = "pack_gqa: true" if spec.pack_gqa else f"cluster: {[*spec.cluster]}"
            message = (
                f"params.{name}: a mask of its own for each query head is not generated for"
                f" {field}, whose heads take the same KV blocks"
            )
            yield Violation("FG205", place, message, "index it by h_kv")


PARAMS: Final = Feature(
    "params",
    keys={
        r"(run_?time_)?(arguments?|args|inputs|aux(_tensors)?|buffers)": "write params"
    },
    refusals=_refusals,
)

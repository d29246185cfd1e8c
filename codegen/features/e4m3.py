# SPDX-License-Identifier: Apache-2.0
"""Q, K and V in e4m3: the type of O, where V's keys lie, and the factors of a quantiser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from .feature import Accepts, Feature, Relation
from .vocabulary import NOT_YET

if TYPE_CHECKING:
    from ..spec.model import Spec

E4M3: Final = "e4m3"
SIXTEEN_BITS: Final = ("bf16", "fp16")

OutDtype = Annotated[
    Literal["none", "bf16", "fp16"],
    Accepts(
        "of O beside dtype: e4m3, where none is bf16; none: dtype is also that of O"
    ),
]
VLayout = Annotated[
    Literal["rows", "permuted"],
    Accepts(
        "rows: V as K; permuted: V^T with keys in the order of the MMA, as"
        " fmha_gen.permute_v(v) makes it",
        words={
            r"(natural|bshd|default)": "write rows",
            r"(columns?|transposed|vt|bhds)": f"natural V^T is {NOT_YET}: write permuted",
        },
    ),
]
Descale = Annotated[
    Literal["none", "head", "block"],
    Accepts(
        "factors of Q, K and V, fp32 arguments of fmha(); head: [batch, heads_kv] each; block: one"
        " for 128 rows of a head",
        words={
            r"tensor|(per_?)?head": "write head; one number for all is a tensor with strides of 0",
            r"(per_?)?block|block_?(wise|scaled?)": "write block",
            r"(per_?)?(token|row|channel)": f"write block: others are {NOT_YET}",
        },
    ),
]
Exp = Annotated[
    Literal["exact", "linear", "linear16"],
    Accepts(
        "exponentials of dtype: e4m3; linear: P's code is a straight line between powers of two,"
        " without the MUFU; linear16: P as fp16 is, which keeps small P",
        words={
            r"(log_?linear|schraudolph|fast|approx\w*)": "write linear or linear16",
            r"linear_?(half|fp16|f16|small)": "write linear16",
            r"(mufu|ex2|exp2|hardware|true|default)": "write exact",
        },
    ),
]


def is_e4m3(spec: Spec) -> bool:
    """Return whether Q, K and V have 8 bits."""
    return spec.dtype == E4M3


def has_block_factors(spec: Spec) -> bool:
    """Return whether each block of rows of Q, K and V has a factor of its own."""
    return spec.descale == "block"


def output_type(spec: Spec) -> str:
    """Return the element type of O."""
    return spec.out_dtype if is_e4m3(spec) else spec.dtype


def with_output(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with the type of O said where e4m3 leaves it to the default."""
    left_out = data.get("out_dtype", "none") == "none"
    if data.get("dtype") == E4M3 and left_out:
        return {**data, "out_dtype": "bf16"}
    return data


_BUT_BLOCKS: Final = ("none", "head")  # of `descale`
_OF_WHAT: Final = {
    "head": "batch and KV head",
    "block": "batch, head and block of 128 rows",
}


def _contract(spec: Spec) -> str:
    if spec.descale == "none":
        return ""
    return (
        "Q, K and V are what q, k and v hold times q_descale, k_descale and v_descale of"
        f" their\n{_OF_WHAT[spec.descale]}, positive numbers."
    )


OUT_DTYPE: Final = Feature(
    "out_dtype",
    keys={r"(o|out|output)_?(type|dtype|precision)": "write out_dtype: bf16 or fp16"},
    relations=[Relation(["none"], {"dtype": SIXTEEN_BITS})],
    flags=lambda spec: {"out_bf16": output_type(spec) == "bf16"},
)
V_LAYOUT: Final = Feature(
    "v_layout",
    tokens={
        r"permuted": lambda spec: ["permuted" if spec.v_layout == "permuted" else ""]
    },
    keys={r"v_?(colmajor|col_major|transposed?|t)": "write v_layout: permuted"},
    relations=[
        Relation(["rows"], {"dtype": SIXTEEN_BITS}),
        # Its 8-bit MMAs take V as it is.
        Relation(["rows"], {"arch": ["sm100"]}),
        Relation(["rows"], {"batch": ["varlen"]}),
    ],
    flags=lambda spec: {"v_permuted": spec.v_layout == "permuted"},
    contract=lambda spec: (
        "v is V^T: of each 16 keys the order is 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, and\n"
        "zeros stand for those behind the last key; fmha_gen.permute_v(v) makes it of V."
        if spec.v_layout == "permuted"
        else ""
    ),
)
DESCALE: Final = Feature(
    "descale",
    tokens={
        r"descales?": lambda spec: ["" if spec.descale == "none" else "descale"],
        r"blockwise": lambda spec: ["blockwise" if has_block_factors(spec) else ""],
    },
    keys={
        r"([qkv]_)?(de|dequant_?)?scales?": (
            "write descale: head, or block; q_descale, k_descale and v_descale are arguments of"
            " fmha()"
        )
    },
    relations=[
        Relation(["none"], {"dtype": SIXTEEN_BITS}),
        Relation(_BUT_BLOCKS, {"arch": ["sm100"]}),
        Relation(_BUT_BLOCKS, {"batch": ["varlen"]}),
        Relation(_BUT_BLOCKS, {"pack_gqa": [True]}),
        Relation(_BUT_BLOCKS, {"head_dim": [256]}),
        Relation(_BUT_BLOCKS, {"exp": ["linear", "linear16"]}),
        Relation(_BUT_BLOCKS, {"tile.kv": [160, 96]}),
    ],
    flags=lambda spec: {
        "descale": spec.descale != "none",
        "block_descale": has_block_factors(spec),
    },
    title=lambda spec: {"none": "", "head": "descales"}.get(
        spec.descale, "descales by block"
    ),
    contract=_contract,
)
EXP: Final = Feature(
    "exp",
    tokens={r"linear(16)?": lambda spec: ["" if spec.exp == "exact" else spec.exp]},
    keys={
        r"exp2?(_?(mode|impl|method))?|exponentials?|softmax_exp": (
            "write exp: linear, linear16 or exact, of dtype: e4m3"
        )
    },
    relations=[
        Relation(["exact"], {"dtype": SIXTEEN_BITS}),
        Relation(["exact"], {"arch": ["sm100"]}),
        Relation(
            ["exact"],
            {"lse": [True]},
            reason="has no sum of P before its rounding",
            hint="leave out exp, or lse",
        ),
    ],
    title=lambda spec: "" if spec.exp == "exact" else f"{spec.exp} exp",
)

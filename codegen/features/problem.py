# SPDX-License-Identifier: Apache-2.0
"""What is computed and for which GPU: architecture, operation, element type, sizes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field

from ..ops.backward import BACKWARD_OP
from .feature import Accepts, Block, Feature, Model, Relation
from .vocabulary import NOT_YET

if TYPE_CHECKING:
    from ..spec.model import Spec

DYNAMIC: Final = "dynamic"

_HEAD_DIM_WORDS: Final = "a multiple of 16 from 32 to 256"
_MAX_SEQLEN: Final = 2**24  # [rows]

Arch = Annotated[
    Literal["sm90", "sm100"],
    Accepts(
        "GPU architecture",
        words={
            r"sm_?90a?|hopper|h100|h200|gh200": "write sm90",
            r"sm_?100a?|blackwell|g?b200": "write sm100",
            r"sm_?103a?|g?b300": "write sm100: its kernels let an sm_103 through, unproven",
            r"sm_?\d+[af]?|ampere|ada|turing|volta|a100|l40s?|rtx.*|mi\d+.*|gfx.*": (
                "kernels are for Hopper (sm90) and Blackwell (sm100) only"
            ),
        },
    ),
]
ARCH: Final = Feature(
    "arch",
    tokens={r"sm\d+[a-z]?": lambda spec: [spec.arch]},
    keys={r"sm|gpu|target|device|compute_capability": "write arch: sm90 or sm100"},
)

Op = Annotated[
    Literal["fmha_fwd", "fmha_bwd"],
    Accepts(
        "what is computed",
        words={
            r".*(bwd|backward|grad).*": "write fmha_bwd",
            r".*(decode|decoding|paged|splitkv|split_kv).*": f"a kernel for decoding is {NOT_YET}",
            r".*varlen.*": "write fmha_fwd, and batch: varlen",
            r"fwd|forward|attention|attn|sdpa|mha|fmha|flash_?(attn|attention)(_fwd)?": (
                "write fmha_fwd"
            ),
        },
    ),
]
OP: Final = Feature(
    "op",
    tokens={
        r"bwd|fwd": lambda spec: ["bwd"] if spec.op == BACKWARD_OP else ["", "fwd"]
    },
    keys={r"backward|bwd|grad": "write op: fmha_bwd"},
    flags=lambda spec: {"backward": spec.op == BACKWARD_OP},
)

# A step of an MMA along the head is 16 elements.
_Elements = Annotated[int, Field(ge=32, le=256, multiple_of=16)]


class HeadDims(Model):
    """Elements of one head: `qk` of a row of Q and of K, `v` of a row of V and of O."""

    qk: Annotated[_Elements, Accepts("of Q and K", _HEAD_DIM_WORDS, (int,))]
    v: Annotated[_Elements, Accepts("of V and O", _HEAD_DIM_WORDS, (int,))]

    def said(self) -> Any:
        """Return one number where both are the same."""
        return self.qk if self.qk == self.v else super().said()


HeadDim = Annotated[
    HeadDims,
    Block(
        "elements of a head; a number is that of Q, K, V and O",
        f"{_HEAD_DIM_WORDS}, or a mapping with qk and v",
        (int,),
        expand=lambda n: {"qk": n, "v": n},
        short=_Elements,
    ),
]
HEAD_DIM: Final = Feature(
    "head_dim",
    tokens={
        r"d\d+(x\d+)?": lambda spec: (
            [f"d{spec.head_dim.v}", f"d{spec.head_dim.v}x{spec.head_dim.v}"]
            if spec.head_dim.qk == spec.head_dim.v
            else [f"d{spec.head_dim.qk}x{spec.head_dim.v}"]
        )
    },
    keys={r"head_?size|headdim|hdim|d(_?head)?|head_dim_(qk?|v)": "write head_dim"},
    relations=[
        Relation(
            [64, 96, 128, {"qk": 192, "v": 128}],
            {"arch": ["sm100"], "cta_group": [1]},
            hint="set head_dim: 64, 96, 128 or {qk: 192, v: 128}; 256 is generated for"
            " cta_group: 2 with cluster: [2, 1]",
        ),
        # Half of V is a swizzled row at least.
        Relation([128, {"qk": 192, "v": 128}, 256], {"cta_group": [2]}),
        # Others have no kernel that was compiled and emulated.
        Relation([64, 96, 128, {"qk": 192, "v": 128}, 256], {"dtype": ["e4m3"]}),
    ],
    flags=lambda spec: {
        "head_dim_qk": spec.head_dim.qk,
        "head_dim_v": spec.head_dim.v,
    },
    title=lambda spec: (
        f"head_dim {spec.head_dim.qk}"
        if spec.head_dim.qk == spec.head_dim.v
        else f"head_dim {spec.head_dim.qk} and {spec.head_dim.v}"
    ),
)

Dtype = Annotated[
    Literal["bf16", "fp16", "e4m3"],
    Accepts(
        "of Q, K, V and O; of e4m3 O has 16 bits. Softmax and sums are fp32",
        words={
            r"(torch\.)?(float16|half)|f16": "write fp16",
            r"(torch\.)?bfloat16|bfloat": "write bf16",
            r"(torch\.)?(fp8|float8)(_?e4m3(fn)?)?|e4m3fn": "write e4m3",
            r".*(fp8|float8|e4m3|e5m2).*": f"of FP8 there is e4m3: others are {NOT_YET}",
            r".*(fp4|mxfp|nvfp|int8|int4).*": f"of 8 bits there is e4m3: others are {NOT_YET}",
            r"(torch\.)?(fp32|float32|float|tf32|fp64|float64|double)|f32": (
                "Q, K and V have 16 bits or 8, O has 16; softmax and sums are fp32 in any case"
            ),
        },
    ),
]
DTYPE: Final = Feature(
    "dtype",
    tokens={
        r"(bf|fp)\d+|e\dm\d": lambda spec: (
            [spec.dtype, spec.out_dtype] if spec.dtype == "e4m3" else [spec.dtype]
        )
    },
    keys={r"type|element|precision": "write dtype"},
    flags=lambda spec: {
        "dtype": spec.dtype,
        "bf16": spec.dtype == "bf16",
        "e4m3": spec.dtype == "e4m3",
    },
    title=lambda spec: spec.dtype,
)

_Rows = Annotated[int, Field(ge=1, le=_MAX_SEQLEN)] | Literal["dynamic"]
_LENGTH: Final = f"a whole number from 1 to {_MAX_SEQLEN}, or dynamic"


class Lengths(Model):
    """Rows of a sequence: fixed when the kernel is generated, or any number at run time."""

    q: Annotated[_Rows, Accepts("rows of Q", _LENGTH, (int, str))] = "dynamic"
    kv: Annotated[_Rows, Accepts("rows of K and V", _LENGTH, (int, str))] = "dynamic"


Seqlen = Annotated[
    Lengths,
    Block(
        "fixed when generated, or any length at run time",
        "a whole number, dynamic, or a mapping with q and kv",
        (int, str),
        expand=lambda n: {"q": n, "kv": n},
        short=_Rows,
    ),
]


def _lengths(spec: Spec) -> list[str]:
    q, kv = (each[0] for each in (_length("q", spec), _length("kv", spec)))
    if spec.seqlen.q == spec.seqlen.kv:
        return [q.replace("q", "s") or "dyn"]
    return ["_".join(filter(None, [q, kv]))]


def _length(axis: str, spec: Spec) -> list[str]:
    length = getattr(spec.seqlen, axis)
    return ["" if length == DYNAMIC else f"{axis}{length}"]


SEQLEN: Final = Feature(
    "seqlen",
    tokens={r"s\d+|dyn": _lengths},
    keys={
        r"(max_)?seq_?len(gth)?s?(_q|_kv?)?|s(_q|_kv?)|context(_len)?": (
            "write seqlen: {q: N, kv: N}, each a number or dynamic"
        )
    },
)
SEQLEN_Q: Final = Feature("seqlen.q", tokens={r"q\d+": partial(_length, "q")})
SEQLEN_KV: Final = Feature("seqlen.kv", tokens={r"kv\d+": partial(_length, "kv")})

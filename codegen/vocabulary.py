# SPDX-License-Identifier: Apache-2.0
"""Words of the trade that a spec does not know, and what to say to who writes them.

He means what he writes: a hint at a word that is spelt alike would mislead. What a spec calls
otherwise is named; of what is not generated it is said so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_Answers = Mapping[re.Pattern[str], str]

_NOT_YET: Final = "not generated; the README's Limits list what is not"


def _answers(*pairs: tuple[str, str]) -> _Answers:
    return {re.compile(words, re.IGNORECASE): answer for words, answer in pairs}


_VALUES: Final[Mapping[str, _Answers]] = {
    "arch": _answers(
        (r"sm_?90a?|hopper|h100|h200|gh200", "write sm90"),
        (r"sm_?100a?|blackwell|g?b200", "write sm100"),
        (
            r"sm_?103a?|g?b300",
            "write sm100: its kernels let an sm_103 through, unproven",
        ),
        (
            r"sm_?\d+[af]?|ampere|ada|turing|volta|a100|l40s?|rtx.*|mi\d+.*|gfx.*",
            "kernels are for Hopper (sm90) and Blackwell (sm100) only",
        ),
    ),
    "op": _answers(
        (r".*(bwd|backward|grad).*", "there is no backward pass: forward only"),
        (
            r".*(decode|decoding|paged|splitkv|split_kv).*",
            f"a kernel for decoding is {_NOT_YET}",
        ),
        (r".*varlen.*", f"packed variable lengths are {_NOT_YET}"),
        (
            r"fwd|forward|attention|attn|sdpa|mha|fmha|flash_?(attn|attention)(_fwd)?",
            "write fmha_fwd",
        ),
    ),
    "dtype": _answers(
        (r"(torch\.)?(float16|half)|f16", "write fp16"),
        (r"(torch\.)?bfloat16|bfloat", "write bf16"),
        (r".*(fp8|float8|e4m3|e5m2).*", f"FP8 is {_NOT_YET}"),
        (
            r".*(fp4|mxfp|nvfp|int8|int4).*",
            f"Q, K and V of 4 or 8 bits are {_NOT_YET}",
        ),
        (
            r"(torch\.)?(fp32|float32|float|tf32|fp64|float64|double)|f32",
            "Q, K, V and O have 16 bits; softmax and sums are fp32 in any case",
        ),
    ),
    "mask": _answers(
        (r".*(window|swa|local|band).*", f"a sliding window is {_NOT_YET}"),
        (r".*alibi.*", f"ALiBi is {_NOT_YET}"),
        (
            r".*(prefix|document|block|chunk|sparse|custom|bias|tree).*",
            f"such a mask is {_NOT_YET}",
        ),
        (r"full|false|no|off|dense|noncausal|bidirectional", "write none"),
        (
            r"(causal_)?(bottom_?right|lower_?right)|true|tril",
            "write causal, which is aligned at the bottom right",
        ),
        (
            r"(causal_)?(top_?left|upper_?left)",
            "causal is aligned at the bottom right, and no mask at the top left",
        ),
    ),
    "schedule": _answers(
        (
            r"dynamic|clc|stream_?k|split_?k",
            "CTAs take tiles in a fixed order: persistent or single",
        ),
        (r"static|non_?persistent", "write single, a tile per CTA, or persistent"),
    ),
}

_KEYS: Final = _answers(
    (
        r"(sliding_?)?window(_size|_left|_right)?|local(_size)?",
        f"a sliding window is {_NOT_YET}",
    ),
    (
        r"(attn_|logits?_)?soft_?cap(ping)?|logits?_cap",
        f"a soft cap of the scores is {_NOT_YET}",
    ),
    (r"(attention_|attn_|learnable_)?sinks?|s_aux", f"attention sinks are {_NOT_YET}"),
    (
        r"page(d|s|_size)?|paged_kv|kv_cache|block_tables?|page_tables?",
        f"a paged KV cache is {_NOT_YET}",
    ),
    (
        r"var_?len|cu_seqlens(_q|_kv?)?|ragged|packed|thd",
        f"packed variable lengths are {_NOT_YET}",
    ),
    (r"alibi(_slopes)?|(attn_)?bias|score(_mod)?", f"a bias or ALiBi is {_NOT_YET}"),
    (r"dropout(_p)?", f"dropout is {_NOT_YET}"),
    (r"block_sparse|block_mask|mask_mod", f"masks but causal are {_NOT_YET}"),
    (r"(q_|k_|v_)?descale|fp8|kv_dtype", f"FP8 is {_NOT_YET}"),
    (r"(num_|kv_)?splits?(_k|_kv)?", f"KV split among CTAs is {_NOT_YET}"),
    (r"backward|bwd|grad", "there is no backward pass: forward only"),
    (r"deterministic", "leave it out: the same inputs give the same bits"),
    (r"(is_)?causal", "write mask: causal"),
    (
        r"(softmax_|sm_)?scale",
        "leave it out: softmax_scale is an argument of fmha() at run time",
    ),
    (
        r"batch(_size)?|b",
        "leave it out: the batch size is that of the tensors at run time",
    ),
    (
        r"(num_|n)?(q_|kv_|query_)?heads?(_q|_kv?)?|gqa|q_per_kv|group(_size)?",
        "write heads: {q_per_kv: N}; how many heads there are is known at run time",
    ),
    (r"head_?size|headdim|hdim|d(_?head)?|head_dim_(qk?|v)", "write head_dim"),
    (
        r"(max_)?seq_?len(gth)?s?(_q|_kv?)?|s(_q|_kv?)|context(_len)?",
        "write seqlen: {q: N, kv: N}, each a number or dynamic",
    ),
    (r"(return_|with_)?(softmax_)?lse|logsumexp", "write lse: true"),
    (
        r"(block|tile)(_size)?_?(m|n|q|k|kv)|block(_size)?",
        "write tile: {q: N, kv: N}",
    ),
    (r"(num_)?stages?(_q|_kv?)?|pipeline(_stages)?", "write stages: {q: N, kv: N}"),
    (r"(num_)?warps?|num_threads|registers", "leave it out: the plan chooses it"),
    (r"name", "leave it out: the file's name is the kernel's"),
    (r"persistent", "write schedule: persistent, or single"),
    (r"cluster_(size|shape|dims?)", "write cluster: [2, 1]"),
    (r"2cta|two_cta|cta_pair", "write cta_group: 2"),
    (r"sm|gpu|target|device|compute_capability", "write arch: sm90 or sm100"),
    (r"type|element|precision", "write dtype"),
)


def of_value(field: str, value: object) -> str:
    """What to say of a value that a field refuses; empty when it is no word of the trade."""
    return _of(_VALUES.get(field, {}), value)


def of_key(key: str) -> str:
    """What to say of a key that no spec has; empty when it is no word of the trade."""
    return _of(_KEYS, key)


def foreign_letter(text: str) -> str:
    """Names the first letter that only looks like one of the alphabet; empty when there is none."""
    for place, letter in enumerate(text, start=1):
        if not letter.isascii():
            return f"character {place} is U+{ord(letter):04X}, which is not ASCII"
    return ""


def _of(answers: _Answers, word: object) -> str:
    if not isinstance(word, str):
        return ""
    return next((a for words, a in answers.items() if words.fullmatch(word)), "")

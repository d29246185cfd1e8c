# SPDX-License-Identifier: Apache-2.0
"""Words of the field that a spec does not know, and the answer to each.

A feature has the words for its own field; here are those that belong to no field. Such a word is
meant as it is written, so a hint at one that is spelt alike would mislead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

Words = Mapping[str, str]
"""Answers by regular expression; upper and lower case are one."""

NOT_YET: Final = "not generated; the README's Limits list what is not"

KEYS: Final[Words] = {
    r"(attn_)?bias": f"a bias is {NOT_YET}",
    r"dropout(_p)?": f"dropout is {NOT_YET}",
    r"(is_|use_)?fp8": "write dtype: e4m3",
    r"kv_(cache_)?dtype": f"K and V of another type than Q are {NOT_YET}",
    r"(num_|kv_)?splits?(_k|_kv)?": f"KV split among CTAs is {NOT_YET}",
    r"(softmax_|sm_)?scale": "leave it out: softmax_scale is an argument of fmha() at run time",
    r"batch_size|b": "leave it out: the batch size is that of the tensors at run time",
    r"(num_)?warps?|num_threads|registers": "leave it out: the plan chooses it",
    r"name": "leave it out: the file's name is the kernel's",
}


def answer(words: Words, word: object) -> str:
    """Return the answer to a word; empty when it is not among them."""
    if not isinstance(word, str):
        return ""
    return next(
        (said for each, said in words.items() if re.fullmatch(each, word, re.I)), ""
    )


def foreign_letter(text: str) -> str:
    """Names the first letter that only looks like one of the alphabet; empty when there is none."""
    for place, letter in enumerate(text, start=1):
        if not letter.isascii():
            return f"character {place} is U+{ord(letter):04X}, which is not ASCII"
    return ""

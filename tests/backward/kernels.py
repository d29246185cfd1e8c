# SPDX-License-Identifier: Apache-2.0
"""Texts of backward kernels, as a build makes them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from fmha_gen.build import render
from fmha_gen.planning import plan

from tests import support

SMALL = "head_dim: 64\ndtype: bf16\ntile: {q: 64}\n"
STEM = "sm90_d64_bf16_bwd"


@functools.cache
def text_of(fields: str = SMALL, stem: str = STEM) -> str:
    """A kernel's whole text, for the architecture that its name begins with."""
    arch = stem.partition("_")[0]
    spec = support.load_text(f"arch: {arch}\nop: fmha_bwd\n{fields}", stem)
    return render.render_kernel(plan.resolve(spec))


def written(folder: Path, text: str, stem: str = STEM) -> Path:
    """A kernel's file of this text."""
    path = folder / f"{stem}.py"
    path.write_text(text, encoding="utf-8")
    return path


def damaged(text: str, changes: Mapping[str, str]) -> str:
    """The text with others in the places of some, each of which it has once."""
    for right, wrong in changes.items():
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    return text

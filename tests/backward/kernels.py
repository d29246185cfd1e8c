# SPDX-License-Identifier: Apache-2.0
"""Texts of backward kernels: what the templates make, with the device code of `device.py`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from fmha_gen.build import render, specialise
from fmha_gen.planning import plan

from tests import support

DEVICE = Path(__file__).with_name("device.py")
SMALL = "head_dim: 64\ndtype: bf16\ntile: {q: 64}\n"
STEM = "sm90_d64_bf16_bwd"


@functools.cache
def text_of(fields: str = SMALL, stem: str = STEM) -> str:
    """A kernel's whole text, as a build finishes it."""
    spec = support.load_text(f"arch: sm90\nop: fmha_bwd\n{fields}", stem)
    kernel = plan.resolve(spec)
    values = {**kernel.context, **render.OF_EVERY_KERNEL}
    text = render.render_template(render.kernel_template(kernel), values)
    flags, numbers = render.decided(kernel.context)
    group = str(spec.spec.heads.q_per_kv)
    device = DEVICE.read_text("utf-8").partition('"""\n')[2]
    device = device.replace("Q_PER_KV", group) if group == "1" else device
    flags = {**flags, "CAUSAL": spec.spec.mask == "causal"}
    source = specialise.specialise(f"{text}\n\n{device}", flags, numbers)
    return render.finish(render.format_source(source), spec.digest)


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

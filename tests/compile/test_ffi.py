# SPDX-License-Identifier: Apache-2.0
"""TVM-FFI refuses what a kernel's Python checks leave to it, and `fmha` says of which tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import GENERATED

KERNEL = GENERATED / "sm90_d128_fp16_causal_lse_gqa4.py"
CALLS = Path(__file__).parent / "ffi_calls.py"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What each call raised, by what is wrong with it."""
    done = subprocess.run(
        [sys.executable, str(CALLS), str(KERNEL)],
        env=os.environ | {"CUTE_DSL_ARCH": "sm_90a", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_right_call_gets_as_far_as_the_driver(report: dict[str, Any]) -> None:
    for what in ("nothing", "nothing: offset"):
        right = report[what]
        assert right["plain"], what
        for kind, text in (right["ffi"], right["fmha"]):
            assert kind == "RuntimeError", what
            assert "cuda" in text.lower(), what


def test_every_bad_call_is_refused_by_the_compiled_code(report: dict[str, Any]) -> None:
    bad = {what: x for what, x in report.items() if not what.startswith("nothing")}
    assert len(bad) == 5 * 9 + 4
    for what, found in bad.items():
        # Python looks at Q's device and the heads of Q and K, and leaves the rest to TVM-FFI.
        by_python = ("q: rank", "k: rank", "q: CPU")
        assert found["plain"] == (what not in by_python), what
        assert found["ffi"] is not None, what
        kind, text = found["ffi"]
        assert kind in ("TypeError", "ValueError"), what
        assert "on argument #" in text, what


def test_fmha_names_the_tensor_that_tvm_ffi_counts(report: dict[str, Any]) -> None:
    names = ("q", "k", "v", "out", "lse")
    for what, found in report.items():
        if (
            what == "q: GPU"
        ):  # TVM-FFI would blame the others, `fmha` compares with the current one
            assert found["fmha"][1].startswith("q: is on device 1, which is not")
        elif not what.startswith("nothing"):
            _, text = found["ffi"]
            counted = int(text.partition("on argument #")[2].split()[0])
            kind, told = found["fmha"]
            assert kind == "ValueError", what
            assert told.startswith(f"{names[counted]}: "), what

# SPDX-License-Identifier: Apache-2.0
import pytest
from fmha_gen.build import lint, render

GOOD = f'''# SPDX-License-Identifier: Apache-2.0
"""A kernel.

{render.DIGEST_PLACEHOLDER}
"""

import enum
import math

import cutlass.cute as cute

# --- constants: given by the spec ---
HEAD_DIM = 128  # [elements]
TILE_KV = 64  # [rows]
SCALE = 1.4426950408889634  # = math.log2(math.e)
# --- constants: derived ---
KV_BYTES = 16384  # [bytes per stage] = TILE_KV * HEAD_DIM * 2  (bf16)
EVEN = True  # = TILE_KV % 2 == 0

SPEC = {{"name": "k", "tile": 64}}


class Barrier(enum.IntEnum):
    ORDER = 1


def load(tile):
    """Loads 77 things."""
    size = KV_BYTES if EVEN else 0

    def inner(step):
        return step * size

    return inner(tile) + math.floor(SCALE) + Barrier.ORDER


def fmha(q, *_ignored):
    import torch

    return cute.size(q) + load(2) + torch.numel(q)
'''


def findings(text: str) -> list[str]:
    return [f.message for f in lint.lint(render.finish(text, "a" * 64))]


def test_a_good_file_has_no_findings():
    assert findings(GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("import enum\n", "import enum\nimport numpy\n", "imports numpy"),
        ("import enum\n", "import enum\nimport torch\n", "imports torch"),
        ("import enum\n", "import enum\nimport json\n", "import json is not used"),
        ("import enum\n", "import enum\nfrom . import x\n", "imports ."),
        ("cute.size(q)", "cute._mlir.size(q)", "_mlir is private to the DSL"),
        ("cute.size(q)", "cute.const_expr(q)", "const_expr decides at trace time"),
        ("load(2)", "load(5)", "number 5 outside the constants block"),
        ("load(2)", "load(2.5)", "number 2.5 outside the constants block"),
        ("load(2)", "load(-7)", "number 7 outside the constants block"),
        ("(bf16)", "(bf16", "KV_BYTES: formula"),
        ("= 16384", "= 16385", "KV_BYTES is 16385, its formula gives 16384"),
        ("= 16384", "= 16384.0", "KV_BYTES is 16384.0, its formula gives 16384"),
        (
            "TILE_KV * HEAD",
            "LATER * HEAD",
            "KV_BYTES: formula 'LATER * HEAD_DIM * 2': name",
        ),
        ("math.log2(math.e)", "().__class__", "attributes of math only"),
        ("# [elements]", "# elements", "HEAD_DIM: comment is not '# [unit] = formula'"),
        ("TILE_KV = 64 ", "TILE_KV = 8 * 8 ", "TILE_KV is not a literal"),
        ("ORDER = 1\n", "ORDER = 1\n    OTHER = 2\n", "name OTHER is not used"),
        ("def load(tile)", "def load(tile, more=1)", "argument more is not used"),
        ("    size = KV", "    spare = 1\n    size = KV", "name spare is not used"),
        (
            "def fmha",
            "def helper():\n    pass\n\n\ndef fmha",
            "function helper is not used",
        ),
        (
            "def inner(step)",
            "def inner_cutlass(step)",
            "must not hold the word cutlass",
        ),
        ("    return inner", "\treturn inner", "tab"),
        ("import enum\n", "import enum \n", "space at the end of the line"),
        ("# SPDX", "# spdx", "first line is not"),
        ("import math\n", "import math math\n", "does not parse"),
    ],
)
def test_each_rule_is_seen_to_fail(old, new, message):
    assert old in GOOD
    assert any(message in found for found in findings(GOOD.replace(old, new)))


def test_a_use_in_another_function_does_not_count():
    text = GOOD.replace("    size = KV", "    torch = 1\n    size = KV")
    assert "name torch is not used" in findings(text)


def test_digest_and_ends():
    stamped = render.finish(GOOD, "a" * 64)
    edited = [f.message for f in lint.lint(stamped.replace("128  # [el", "64  # [el"))]
    assert "body digest in the header is not the body's" in edited
    assert any("no digest line" in f.message for f in lint.lint(GOOD))
    assert any("no newline at the end" in f for f in findings(GOOD.rstrip("\n")))


def test_findings_are_sorted_and_placed():
    text = render.finish(GOOD.replace("load(2)", "load(5) + 6"), "a" * 64)
    line = (
        text.split("\n").index("    return cute.size(q) + load(5) + 6 + torch.numel(q)")
        + 1
    )
    assert [(f.line, f.message[:8]) for f in lint.lint(text)] == [
        (line, "number 5"),
        (line, "number 6"),
    ]

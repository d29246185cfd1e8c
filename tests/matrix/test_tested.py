# SPDX-License-Identifier: Apache-2.0
"""What decision 0021 shows of other versions of the DSL is what is known."""

from __future__ import annotations

import json

import support

DATA = support.ROOT / "codegen" / "decisions" / "0021-dsl-matrix.json"

FINE = ("same", "changed")
KNOWN = {("sm100_d192x128_fp16_full_c2x1_kvmc", "4.7.1")}  # spills 16 bytes


def test_the_matrix_shows_what_is_known() -> None:
    data = json.loads(DATA.read_text("utf-8"))
    cells = {(cell["kernel"], cell["dsl"]): cell for cell in data["cells"]}
    kernels = {kernel for kernel, _ in cells}
    assert kernels and kernels <= set(support.SHIPPED)
    assert cells.keys() == {
        (stem, version) for stem in kernels for version in data["environments"]
    }
    failed = {key for key, cell in cells.items() if cell["verdict"] not in FINE}
    assert failed == KNOWN

# SPDX-License-Identifier: Apache-2.0
"""What the digest of a launch tells apart: compiles a shipped kernel and damaged copies of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import support
from fmha_gen.build import captures, records

STEM = "sm90_d64_fp16_causal_gqa8"
TEXT = (support.GENERATED / f"{STEM}.py").read_text("utf-8")

# Names, comments and formatting, on the host and in device code.
RENAMED = (
    ("q_tiles", "query_tiles"),
    ("def make_states(", "# Of a role.\ndef make_states("),
    ("def check(holds, ", "def check(\n    holds,\n    "),
)
# By what the host does, no other kernel: all of it has the PTX of the shipped one.
OTHER_LAUNCHES = (
    ("1.0 / math.sqrt(HEAD_DIM_QK)", "1.0 / math.sqrt(HEAD_DIM_QK + 1)"),
    ("query(key.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)[1]", "132"),
    ("sm_count // SMS_PER_HEAD", "sm_count // (SMS_PER_HEAD + 1)"),
)


def changed(*pairs: tuple[str, str]) -> str:
    text = TEXT
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def test_the_launch_is_told_apart_from_its_words() -> None:
    other_launches = support.rotated(OTHER_LAUNCHES, 2)
    texts = [changed(*RENAMED), *map(changed, other_launches)]
    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(lambda text: captures.compile_kernel(text, STEM, "sm_90a"), texts)
        )
    record = records.load(support.GENERATED / records.path_of(STEM))
    assert record is not None
    known = record["compiled"]
    assert {report.ptx_sha256 for report in found} == {known["ptx_sha256"]}
    renamed, *others = [report.launch_sha256 for report in found]
    assert renamed == known["launch_sha256"]
    assert known["launch_sha256"] not in others
    assert len({*others}) == len(other_launches)


def test_a_text_that_cannot_be_called_has_no_launch() -> None:
    text = changed(
        (
            "    torch: Any = sys.modules.get",
            "    raise RuntimeError\n    torch: Any = sys.modules.get",
        )
    )
    report = captures.compile_kernel(text, STEM, "sm_90a")
    assert report.launch_sha256 == ""
    text = changed(("TILE_KV = 128", "TILE_KV = int('128')"))
    assert captures.compile_kernel(text, STEM, "sm_90a").launch_sha256 == ""

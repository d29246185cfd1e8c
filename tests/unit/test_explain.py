# SPDX-License-Identifier: Apache-2.0
"""What `fmha-gen explain` says: one whole text as a golden file, and what holds for every plan.

`FMHA_GEN_ACCEPT=1` writes a new golden text, and prints what changed.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

import pytest
from fmha_gen.arch import sm90
from fmha_gen.build import records
from fmha_gen.build.render import body_digest, render_kernel
from fmha_gen.planning.kernel_plan import KernelPlan
from fmha_gen.planning.plan import resolve
from fmha_gen.show import explain
from fmha_gen.spec.model import load_specs

DATA = Path(__file__).parent / "data"
GOLDENS = {"fixed": DATA / "explain_small.txt", "sm100": DATA / "explain_sm100.txt"}
REQUIRED = "op: fmha_fwd\ndtype: bf16\n"
SPECS = {
    "plain": "head_dim: 64\n",
    "fixed": "head_dim: 128\nseqlen: 4096\nmask: causal\n",
    "no_mask": "head_dim: 128\nseqlen: {kv: 4096}\n",
    "ragged": "head_dim: 96\nseqlen: {q: 1000, kv: 1000}\nlse: true\n",
    "one_q_stage": "head_dim: {qk: 192, v: 128}\nmask: causal\nlse: true\n",
    "cluster": "head_dim: 128\ncluster: [2, 1]\nmulticast: kv\nmask: causal\n",
    "heads": "head_dim: 128\nheads: {q_per_kv: 4}\ncluster: [1, 2]\nmulticast: k\n",
    "pairs": "head_dim: 128\nheads: {q_per_kv: 4}\ncluster: [1, 2]\nmask: causal\n",
    "packed": "head_dim: 128\nheads: {q_per_kv: 8}\npack_gqa: true\nmask: causal\n",
    "packed_pair": "head_dim: 96\nheads: {q_per_kv: 2}\npack_gqa: true\ncluster: [2, 1]\n",
    "packed_thirds": "head_dim: 64\nheads: {q_per_kv: 12}\npack_gqa: true\nmask: causal\n",
    "alone": "head_dim: 256\ncluster: [2, 1]\n",
    "skips": "head_dim: 64\nmask: causal\n",
    "one_warpgroup": "head_dim: 128\ntile: {q: 64}\n",
    "given": "head_dim: 64\ntile: {q: 128, kv: 96}\nstages: {q: 1, kv: 4}\n",
}
SM100 = {
    "sm100": "head_dim: {qk: 192, v: 128}\nmask: causal\nlse: true\n",
    "sm100_pair": "head_dim: 64\ncluster: [2, 1]\nmulticast: kv\nstages: {kv: 4}\n",
    "sm100_single": "head_dim: 96\nmask: causal\nseqlen: 4096\nschedule: single\n",
    "sm100_short": "head_dim: 128\nseqlen: {q: 100, kv: 100}\n",
}


def planned(folder: Path, name: str, text: str = "") -> KernelPlan:
    path = folder / f"{name}.yaml"
    arch = "sm100" if name in SM100 else "sm90"
    fields = text or (SPECS | SM100)[name]
    path.write_text(f"arch: {arch}\n{REQUIRED}{fields}")
    (spec_file,) = load_specs([path])
    return resolve(spec_file)


@pytest.fixture(params=SPECS | SM100)
def plan(request: pytest.FixtureRequest, tmp_path: Path) -> KernelPlan:
    return planned(tmp_path, request.param)


def section(text: str, title: str) -> str:
    (found,) = (part for part in text.split("\n\n") if part.startswith(f"{title}\n"))
    return found


def one_line(text: str) -> str:
    """Undo the wrapping."""
    return " ".join(text.split())


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(tmp_path: Path, name: str) -> None:
    golden = GOLDENS[name]
    text = explain.render(planned(tmp_path, name), None) + "\n"
    expected = golden.read_text() if golden.exists() else ""
    if text != expected and os.environ.get("FMHA_GEN_ACCEPT") == "1":
        lines = expected.splitlines(), text.splitlines()
        print("\n".join(difflib.unified_diff(*lines, "old", "new", lineterm="")))
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
        return
    assert text == expected


def test_plain_text_of_bounded_width(plan: KernelPlan) -> None:
    text = explain.render(plan, None)
    assert text.isascii()
    assert all(line == line.rstrip() for line in text.split("\n"))
    assert max(map(len, text.split("\n"))) <= explain.WIDTH
    assert text == explain.render(plan, None)


def test_every_number_with_its_origin(plan: KernelPlan) -> None:
    numbers = one_line(section(explain.render(plan, None), "Numbers"))
    for number in (*plan.chosen, *plan.derived):
        unit = f"[{number.unit}] " if number.unit else ""
        start = f"{number.name} {number.value} {unit}"
        if number.origin in ("given", "default"):
            assert re.search(
                re.escape(start) + r"(given|default) \([a-z_.]+\)", numbers
            )
        else:
            why = number.formula if number.origin == "derived" else number.reason
            assert why
            assert f"{start}{number.origin} ({why})" in numbers


def test_shared_memory_adds_up(plan: KernelPlan) -> None:
    shown = section(explain.render(plan, None), "Shared memory of a CTA")
    rows = re.findall(r"^ +(\d+) +(\d+)  (\w+) +\|([#.]+)\|", shown, re.MULTILINE)
    (kernel,) = plan.kernels
    assert [name for *_, name, _ in rows] == [region.name for region in kernel.smem]
    end = 0
    for offset, nbytes, _, bar in rows:
        assert int(offset) == end
        end += int(nbytes)
        assert len(bar) == explain.BAR
        exact = int(nbytes) * explain.BAR / sm90.SMEM_BYTES
        assert max(0, exact - 1) < bar.count("#") < exact + 1
    assert end == plan.smem_bytes
    left = sm90.SMEM_BYTES - end
    assert f"= {end} of {sm90.SMEM_BYTES}, {left} left" in shown


def test_tensor_memory_is_drawn(tmp_path: Path) -> None:
    plan = planned(tmp_path, "sm100")
    shown = section(explain.render(plan, None), "Tensor memory of an SM")
    rows = re.findall(
        r"^ +(\d+) +(\d+)  (\w of half \d) +\|([#.]+)\|", shown, re.MULTILINE
    )
    assert [
        (int(first), int(count), name, bar.index("#"), bar.count("#"))
        for first, count, name, bar in rows
    ] == [
        (0, 128, "S of half 0", 0, 8),
        (0, 64, "P of half 0", 0, 4),
        (128, 128, "S of half 1", 8, 8),
        (128, 64, "P of half 1", 8, 4),
        (256, 128, "O of half 0", 16, 8),
        (384, 128, "O of half 1", 24, 8),
    ]
    assert "512 of 512 columns of 32 bits, 0 left" in shown
    assert "Tensor memory" not in explain.render(planned(tmp_path, "plain"), None)


def test_registers_add_up(plan: KernelPlan) -> None:
    (kernel,) = plan.kernels
    assert sum(kernel.register_parts.values()) == kernel.registers_needed
    shown = section(explain.render(plan, None), "Registers")
    assert f"= {kernel.registers_needed} of {kernel.hungriest.per_thread}, " in shown
    product, total = re.search(r"CTA: (.*) = (\d+) of 65536$", shown).groups()
    assert eval(product) == int(total) <= explain.SM_REGISTERS
    assert all(str(role.per_thread) in product for role in kernel.registers)


def test_every_barrier(plan: KernelPlan) -> None:
    shown = one_line(section(explain.render(plan, None), "Pipelines and barriers"))
    for barrier in plan.kernels[0].barriers:
        row = f"{barrier.name} {barrier.stages} {barrier.arrivals} {barrier.waiter}"
        assert row in shown


def test_every_field_given_or_default(tmp_path: Path) -> None:
    text = explain.render(planned(tmp_path, "heads"), None)
    rows = [line.split() for line in section(text, "Spec").split("\n")[1:]]
    said = {name: words for name, *words in rows}
    assert said["head_dim.qk"] == ["128", "given"]
    assert said["heads.q_per_kv"] == ["4", "given"]
    assert said["cluster"] == ["[1,", "2]", "given"]
    assert said["lse"] == ["false", "default"]
    assert said["seqlen.q"] == ["dynamic", "default"]
    assert said["tile.kv"][:3] == ["-", "default:", "planned,"]
    # Half of a mapping can be given.
    rows_of_kv = section(
        explain.render(planned(tmp_path, "no_mask"), None), "Spec"
    ).split("\n")
    assert "  seqlen.q        dynamic     default" in rows_of_kv
    assert "  seqlen.kv       4096        given" in rows_of_kv


@pytest.mark.parametrize(
    ("name", "said", "unsaid"),
    [
        (
            "plain",
            ["masked for the end of K; one loop", "Warpgroups take turns"],
            ["diagonal", "LSE", "Loop 1", "section", "skips", "of the group"],
        ),
        (
            "skips",
            [
                "A section of SM count // SMS_PER_HEAD heads",
                "A warpgroup skips the blocks that only rows of later warpgroups see.",
                "counted at run time, per warpgroup",
                "not every row of the warpgroup sees whole",
                "O goes through the stage that its Q had; TMA drops",
            ],
            ["from registers"],
        ),
        ("one_warpgroup", ["Two Q stages"], ["take turns", "from registers"]),
        ("given", ["O is stored from registers"], ["TMA drops", "Two Q stages"]),
        ("fixed", ["masked for the diagonal; one loop"], ["end of K;", "Loop 1"]),
        ("no_mask", ["No mask at all"], ["is masked", "diagonal"]),
        ("ragged", ["LSE is stored", "KV_BLOCKS of them"], ["diagonal", "at run time"]),
        (
            "one_q_stage",
            [
                "One Q stage: the next tile's Q is loaded once this tile's last QK is done.",
                *("Loop 1", "Loop 2", "O is 0 and its LSE -inf"),
                "O is stored from registers, 16 bytes a thread, rows before the end only.",
            ],
            ["No mask", "Two Q stages", "A warpgroup skips", "O goes through"],
        ),
        ("cluster", ["2 query tiles of one head; each loads its slice of K and V"], []),
        ("heads", ["2 query heads of one KV head; each loads its slice of K for"], []),
        ("pairs", ["A section of SM count // SMS_PER_HEAD pairs of heads"], []),
        (
            "packed",
            [
                "SMS_PER_HEAD KV heads is done",
                "Rows of a query tile are (position, head of the group), heads fastest.",
                "Query position i, at q = i + seqlen_kv - seqlen_q, sees kv <= q.",
            ],
            ["skips"],
        ),
        ("packed_pair", ["one KV head side by side", "2 query tiles of one KV"], []),
        ("packed_thirds", ["O is stored from registers"], ["skips", "TMA drops"]),
        ("alone", ["each loads for itself"], ["slice"]),
        (
            "sm100",
            ["Persistent: each CTA", "Loop 1, masked for the diagonal", "its LSE -inf"],
            ["A CTA for each", "No mask", "cluster"],
        ),
        (
            "sm100_pair",
            ["each cluster takes", "each loads its slice of K and V for both"],
            ["diagonal", "LSE"],
        ),
        (
            "sm100_single",
            ["A CTA for each tile, those", "or whose scores are all -inf"],
            ["Persistent"],
        ),
        ("sm100_short", ["Loop 1, masked for the end of K"], ["Loop 2", "No mask"]),
    ],
)
def test_masks_and_loops(
    tmp_path: Path, name: str, said: list[str], unsaid: list[str]
) -> None:
    statements = "\n".join(planned(tmp_path, name).statements)
    assert [text for text in said if text not in statements] == []
    assert [text for text in unsaid if text in statements] == []


def test_evidence(tmp_path: Path) -> None:
    plan = planned(tmp_path, "plain")
    body = body_digest(render_kernel(plan))

    def shown(record: records.Record | None) -> str:
        return one_line(section(explain.render(plan, record), "Evidence"))

    assert shown(None) == "Evidence rung rendered (no record)"
    record = records.merge_rung(
        None, kernel="plain", body_sha256=body, rung="compiled", result=COMPILED
    )
    assert "rung compiled compiled for sm_90a by CuTe DSL 4.8.1;" in shown(record)
    record = records.merge_rung(
        record, kernel="plain", body_sha256=body, rung="validated", result=VALIDATED
    )
    text = shown(record)
    assert "rung validated compiled for sm_90a" in text
    assert "validated 25 cases on NVIDIA H200; " in text
    assert "worst error 0.00312, 0.52 of its bound, in steep" in text
    assert "memcheck not run; 57 misuses refused" in text
    record["validated"] = [{**VALIDATED, "body_sha256": "0" * 64}]
    assert shown(record).startswith("Evidence rung compiled (stale: its record holds")
    other = {
        "kernel": "plain",
        "body_sha256": "0" * 64,
        "rung": "compiled",
        "compiled": {**COMPILED, "body_sha256": "0" * 64},
    }
    assert shown(other) == (
        "Evidence rung rendered (stale: its record is for another body)"
    )


COMPILED = {
    "arch": "sm_90a",
    "dsl": "4.8.1",
    "registers": 128,
    "setmaxnreg": [32, 160],
    "stack_bytes": 0,
    "local_bytes": 0,
    "instructions": {"LDL": 0, "STL": 0, "HGMMA": 28, "total": 2376},
    "wgmma": {"serialised": 0},
}
VALIDATED = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "dsl": "4.8.1",
    "cases": 25,
    "worst": {
        "case": "steep",
        "absolute": 3.12e-3,
        "of_bound": 0.52,
    },
    "lse_worst": None,
    "repeats": 20,
    "misuses": 57,
    "sanitizer": None,
}

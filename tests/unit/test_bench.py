# SPDX-License-Identifier: Apache-2.0
"""Shapes, FLOPs, turns and what is shown; the timing itself needs a GPU."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fmha_gen import bench
from fmha_gen.bench import Cell, Shape, Timing, shape_for
from fmha_gen.errors import CheckFailed
from rich.console import Console


def spec(
    qk: int = 128,
    v: int | None = None,
    q: Any = "dynamic",
    kv: Any = "dynamic",
    **more: Any,
) -> dict[str, Any]:
    return {
        "name": "x",
        "head_dim": {"qk": qk, "v": v or qk},
        "seqlen": {"q": q, "kv": kv},
        "q_per_kv": 1,
        "mask": "none",
        **more,
    }


@pytest.mark.parametrize(
    ("given", "sizes", "expected"),
    [
        (spec(64), {}, Shape(4, 32, 32, 4096, 4096, 64, 64, False)),
        (spec(256, mask="causal"), {}, Shape(4, 8, 8, 4096, 4096, 256, 256, True)),
        (spec(192, 128, q_per_kv=8), {}, Shape(4, 16, 2, 4096, 4096, 192, 128, False)),
        (spec(256, q_per_kv=16), {}, Shape(4, 16, 1, 4096, 4096, 256, 256, False)),
        (spec(q=1024, kv=2048), {}, Shape(16, 16, 16, 1024, 2048, 128, 128, False)),
        (spec(q=1), {"batch": 7}, Shape(7, 16, 16, 1, 4096, 128, 128, False)),
        (
            spec(),
            {"seqlen": 512, "heads": 3},
            Shape(32, 3, 3, 512, 512, 128, 128, False),
        ),
        (spec(q=100_000), {}, Shape(1, 16, 16, 100_000, 4096, 128, 128, False)),
    ],
)
def test_the_default_shape(
    given: dict[str, Any], sizes: dict[str, int], expected: Shape
) -> None:
    assert shape_for(given, **sizes) == expected


def test_a_shape_that_the_kernel_does_not_take_is_refused() -> None:
    with pytest.raises(CheckFailed, match="--heads 6 is no multiple of q_per_kv = 4"):
        shape_for(spec(q_per_kv=4), heads=6)
    with pytest.raises(
        CheckFailed, match="both lengths are fixed, --seqlen 512 is neither"
    ):
        shape_for(spec(q=4096, kv=4096), seqlen=512)


@pytest.mark.parametrize(
    ("q", "kv", "causal", "pairs"),
    [
        (10, 20, False, 200),
        (20, 20, True, 200),
        (10, 20, True, 150),
        (20, 10, True, 50),
    ],
)
def test_flops(q: int, kv: int, causal: bool, pairs: int) -> None:
    assert Shape(2, 6, 3, q, kv, 192, 128, causal).flops == 2 * 2 * 6 * pairs * (
        192 + 128
    )


@pytest.mark.parametrize(("q", "kv"), [(700, 700), (300, 700), (700, 300)])
def test_causal_flops_count_the_visible_pairs(q: int, kv: int) -> None:
    visible = sum(max(0, min(kv, row + kv - q + 1)) for row in range(q))
    counted = Shape(1, 1, 1, q, kv, 1, 1, True).flops / 4
    assert counted == pytest.approx(visible, rel=5e-3)  # the diagonal counts half


def test_everyone_has_a_turn_in_every_round_and_the_order_changes() -> None:
    orders = list(bench.turns(["a", "b", "c"], 20))
    assert len(orders) == 20
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(map(tuple, orders))) > 3
    assert orders == list(bench.turns(["a", "b", "c"], 20))


def cell() -> Cell:
    shape = Shape(1, 1, 1, 1000, 1000, 125, 125, False)  # 0.5 GFLOP
    ours = Timing(3, 1e-3, [1e-6, 2e-6, 9e-6], [1700, None, 1710], [650.0, None, 660.0])
    return Cell(
        "x",
        shape,
        {"ours": ours, "fa4": Timing(3, 1e-3, [1e-6])},
        {"cudnn": "RuntimeError: no"},
    )


def test_speed_is_that_of_the_median_round() -> None:
    assert cell().tflops("ours") == pytest.approx(250)
    assert cell().ratio("fa4") == pytest.approx(0.5)
    assert cell().tflops("cudnn") is cell().ratio("cudnn") is None


def test_the_table_has_a_column_for_each_peer_even_if_missing() -> None:
    stream = io.StringIO()
    view = bench.table([cell()], ["fa4", "cudnn"], plain=True)
    Console(file=stream, width=120).print(view)
    head, row = stream.getvalue().splitlines()
    assert head.split() == [
        "kernel",
        "shape",
        "ours",
        "TFLOPS",
        "fa4",
        "cudnn",
        "/",
        "fa4",
        "/",
        "cudnn",
    ]
    assert row.split() == [
        "x",
        "b1",
        "h1",
        "q1000",
        "kv1000",
        "none",
        "250",
        "500",
        "-",
        "0.50",
        "-",
    ]


def test_the_missing_are_named_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench.print_table([cell()], ["fa4", "cudnn"])
    assert capsys.readouterr().out.splitlines()[-1] == "x: no cudnn: RuntimeError: no"


def test_json_keeps_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_versions", lambda: {"torch": "2.11"})
    gpu: Any = SimpleNamespace(name="NVIDIA H200", driver="580.1")
    found = json.loads(bench.as_json_text([cell()], gpu))
    assert found["gpu"] == "NVIDIA H200"
    contenders = found["cells"][0]["contenders"]
    assert contenders["ours"]["seconds"] == [1e-6, 2e-6, 9e-6]
    assert contenders["ours"]["sm_clock_mhz"] == [1700, None, 1710]
    assert contenders["fa4"]["tflops"] == pytest.approx(500)
    assert found["cells"][0]["missing"] == {"cudnn": "RuntimeError: no"}


def test_unknown_peers_and_no_rounds_are_refused() -> None:
    with pytest.raises(CheckFailed, match="--against fa9: the peers are fa4, cudnn"):
        bench.run([Path("x.py")], against=["fa9"])
    with pytest.raises(CheckFailed, match="--rounds 0: at least 1"):
        bench.run([Path("x.py")], rounds=0)

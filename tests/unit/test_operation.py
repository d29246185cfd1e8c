# SPDX-License-Identifier: Apache-2.0
"""What is derived from an operation, seen of one that has none of the names of `fmha_fwd`."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest
from fmha_gen.build import captures, render
from fmha_gen.build.calls import LAYOUTS, STREAM, arguments
from fmha_gen.emulator.launch import Called, Launch
from fmha_gen.evidence import coverage, tensors
from fmha_gen.ops import OPERATIONS, operation_of
from fmha_gen.ops.cases import Case, Tiles
from fmha_gen.ops.forward import FORWARD
from fmha_gen.ops.inputs import place_tensors
from fmha_gen.ops.operation import Given
from made_up import MADE_UP, spec

CASE = Case("x", batch=2, kv_heads=3, q=48, kv=40)
TILES = Tiles(64, 64, (1, 1))


@pytest.fixture(autouse=True)
def _there_is_such_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATIONS, MADE_UP.name, MADE_UP)


def entry(**changes: Any) -> str:
    """The entry as the template gives it."""
    values = {"gpu_family": "Hopper", "gpu_arch": "sm_90a", "operation": MADE_UP}
    return render.render_template(
        "common/entry.py.j2", {**values, "spec": spec(**changes)}
    )


def function(text: str, name: str) -> ast.FunctionDef:
    (found,) = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    return found


def test_the_header_has_a_line_for_each_tensor() -> None:
    assert MADE_UP.header(spec()) == [
        "x:     [batch, 48, heads, 64] fp16",
        "y:     [batch, seqlen_kv, heads / 2, 32] fp16",
        "table: [batch, pages] int32",
        "dy:    [batch, seqlen_kv, heads / 2, 32] fp16, of y",
        "sums:  [heads] fp32",
    ]
    mha = MADE_UP.header(spec(paged=False, q_per_kv=1))
    assert mha[1:3] == [
        "y:    [batch, seqlen_kv, heads, 32] fp16",
        "dy:   [batch, seqlen_kv, heads, 32] fp16, of y",
    ]


def test_the_signature_has_inputs_scalars_and_outputs() -> None:
    found = function(entry(), "turn")
    assert [each.arg for each in found.args.args] == ["x", "y"]
    options = [each.arg for each in found.args.kwonlyargs]
    assert options == ["table", "factor", "dy", "sums", "stream"]
    assert found.args.kw_defaults[0] is None, "it must be given"
    assert found.returns and ast.unparse(found.returns) == "tuple[Tensor, Tensor]"
    assert "sums, fp32 [heads], receives the sums." in (ast.get_docstring(found) or "")
    last = found.body[-1]
    assert ast.unparse(last) == "return (dy, sums)"
    without = function(entry(paged=False), "turn")
    assert "table" not in [each.arg for each in without.args.kwonlyargs]


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_launch_takes_the_tensors_in_the_same_order(arch: str) -> None:
    values = {"operation": MADE_UP, "spec": spec()}
    text = render.render_template(f"{arch}/forward/host.py.j2", values)
    found = [each.arg for each in function(text, "launch").args.args]
    assert found[:5] == ["x", "y", "table", "dy", "sums"]
    assert found[5:] == ["factor", "sm_count", "stream"]


def test_outputs_are_allocated_by_the_shapes_of_the_inputs() -> None:
    text = ast.unparse(function(entry(), "turn"))
    assert "if is_torch and x.ndim == 4 and (y.ndim == 4):" in text
    assert "b, _, h, _ = x.shape" in text
    assert "_, t, g, _ = y.shape" in text
    assert "dy = x.new_empty(b, t, g, HEAD_DIM_V) if dy is None else dy" in text
    assert (
        "sums = x.new_empty(h, dtype=torch.float32) if sums is None else sums" in text
    )


def test_arguments_say_which_sizes_are_equal() -> None:
    text = ast.unparse(function(entry(), "arguments"))
    for line in (
        "batch, heads, pages = (size(), size(), size())",
        "heads_kv = size()",
        "seqlen_q = SEQLEN_Q",
        "seqlen_kv = size()",
        "'x': bshd(batch, seqlen_q, heads, HEAD_DIM_QK)",
        "'table': fake(Int32, (batch, pages), (step(), step()))",
        "'dy': bshd(batch, seqlen_kv, heads_kv, HEAD_DIM_V)",
        "'sums': fake(Float32, (heads,), (step(),))",
    ):
        assert line in text, line
    mha = ast.unparse(function(entry(q_per_kv=1, paged=False), "arguments"))
    assert "batch, heads = (size(), size())" in mha
    assert "heads_kv = heads" in mha


def test_checks_find_heads_and_outputs_where_they_are() -> None:
    text = entry()
    assert "places[0][2][2], places[1][2][2]" in text
    assert '"y has {} heads, so x needs {} ({} per KV head), not {}"' in text
    assert "enumerate(spans[3:], 3)" in text
    assert "enumerate(spans[2:], 2)" in entry(paged=False)


# --- the emulator ------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_all_tensors_apart(layout: Any) -> None:
    case = Case("x", batch=2, kv_heads=3, q=48, kv=40, layout=layout)
    found = place_tensors(spec(), case)
    shapes = {name: placed.shape for name, placed in found.tensors.items()}
    assert shapes == {
        "x": (2, 48, 6, 64),
        "y": (2, 40, 3, 32),
        "table": (2, 3),
        "dy": (2, 40, 3, 32),
        "sums": (6,),
    }
    assert found.tensors["table"].dtype == "int32"
    if layout in ("far", "farther"):
        return
    used = {name: np.zeros(size, int) for name, size in found.storages.items()}
    for placed in found.tensors.values():
        view = tensors.view_of(used[placed.storage], placed)
        view += 1
    assert all(count.max() == 1 for count in used.values())


def test_a_problem_has_values_in_the_inputs_alone() -> None:
    made = tensors.make_problem(spec(), TILES, CASE)
    assert [x.name for x in made.inputs] == ["x", "y", "table"]
    assert [x.name for x in made.outputs] == ["dy", "sums"]
    assert np.isfinite(made["x"].numbers()).all()
    assert (made["table"].numbers() == 0).all()
    assert np.isnan(made["sums"].numbers()).all()
    tiles = coverage.tiles_of_tensors(
        TILES, spec(), {name: x.address for name, x in made.tensors.items()}
    )
    assert tiles == {
        made["x"].address: (1, 64),
        **{made[name].address: (1, TILES.kv) for name in ("y", "dy")},
    }


def test_a_call_says_what_is_taken_and_returned() -> None:
    case = Case(*("x", 2, 3, 48, 40), scale_factor=3.0, layout="plain")
    call = arguments(spec(), case)
    assert (call["function"], call["scalars"]) == ("turn", {"factor": 3.0})
    assert list(call["tensors"]) == ["x", "y", "table"]
    assert call["outputs"] == {"dy": 4, "sums": 1}
    assert call["torch"].keys() == {"stream", "dy", "sums"}


def test_outputs_that_are_missing_or_swapped_are_findings() -> None:
    call = arguments(spec(), CASE)
    launched = Launch("k", (1, 1, 1), (1, 1, 1), (1, 1, 1), 0, b"", STREAM)
    places = [call["tensors"][name]["address"] for name in ("dy", "sums")]
    right = Called((launched,), "", tuple(places), {})
    assert list(captures.wrong_host(call, right)) == []
    swapped = Called((launched,), "", tuple(places[::-1]), {})
    (finding,) = captures.wrong_host(call, swapped)
    assert finding.startswith("turn returned") and "not dy and sums at" in finding
    given = {name: x for name, x in call["tensors"].items() if name != "sums"}
    (finding,) = captures.wrong_host({**call, "tensors": given}, right)
    assert finding == "sums was neither given nor allocated"


# --- the forward operation -----------------------------------------------------------------


def test_bytes_are_those_of_the_tensors() -> None:
    forward = spec(op="fmha_fwd", lse=True)
    made = tensors.make_problem({**forward, "mask": "none"}, TILES, CASE)
    found = operation_of(forward).nbytes(forward, CASE)
    assert found == {name: x.view.nbytes for name, x in made.tensors.items()}


def test_the_reference_has_the_shapes_of_the_outputs() -> None:
    forward = spec(op="fmha_fwd", lse=True, mask="causal")
    made = tensors.make_problem(forward, TILES, CASE)
    inputs = {x.name: x.numbers() for x in made.inputs}
    given = Given(forward, inputs, scale=0.125)
    truth = FORWARD.truth(given)
    for output in made.outputs:
        assert getattr(truth, output.name).shape == output.view.shape
    outputs = {x.name: getattr(truth, x.name) for x in made.outputs}
    verdicts = FORWARD.judge(given, outputs, truth, TILES.kv)
    assert [*verdicts] == ["out", "lse"]
    assert all(each.of_bound == 0 and not each.finding for each in verdicts.values())

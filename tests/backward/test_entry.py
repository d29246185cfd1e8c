# SPDX-License-Identifier: Apache-2.0
"""The public function of a backward file: its words, what it allocates, launches and refuses."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fmha_gen.build import captures
from fmha_gen.build.calls import arguments
from fmha_gen.build.kernel_text import host_digest, read_constants
from fmha_gen.emulator.launch import Called, open_host_program
from fmha_gen.ops.backward import BACKWARD
from fmha_gen.ops.cases import Case, tiles_of

from . import kernels

FIELDS = kernels.SMALL + "mask: causal\nheads: {q_per_kv: 2}\n"
STEM = "sm90_d64_bf16_causal_gqa2_bwd"
TEXT = kernels.text_of(FIELDS, STEM)
CONSTANTS = read_constants(TEXT)
SPEC, TILES = CONSTANTS["SPEC"], tiles_of(CONSTANTS)
CASE = Case("x", batch=2, kv_heads=2, q=70, kv=40, sm_count=5)
PLAIN = Case("plain", batch=2, kv_heads=2, q=70, kv=40, sm_count=5, layout="plain")
# Batches, heads, rows in blocks of 64, sums and statistics; a ticket; counters of KV heads.
ELEMENTS = 2 * 4 * 128 * 66 + 1 + 2 * 2


def function(name: str) -> ast.FunctionDef:
    (found,) = [
        node
        for node in ast.parse(TEXT).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    return found


# --- words ----------------------------------------------------------------------------------


def test_the_header_has_every_tensor_the_workspace_and_the_kernels() -> None:
    said = (ast.get_docstring(ast.parse(TEXT)) or "").splitlines()
    assert said[0] == "FMHA backward for sm90: head_dim 64, bf16, causal, GQA 2."
    for line in (
        "dout:      [batch, seqlen_q, heads, 64] bf16",
        "k:         [batch, seqlen_kv, heads / 2, 64] bf16",
        "lse:       [batch, heads, seqlen_q] fp32, natural log",
        "dv:        [batch, seqlen_kv, heads / 2, 64] bf16",
        "workspace: [workspace_size(batch, seqlen_q, heads)] fp32",
        "  _stats   -LSE * log2(e) and -D of each row, and zeros where dQ of the first heads is"
        " summed",
        "  _finish  dQ of its sums",
    ):
        assert line in said, line
    assert any(line.endswith("Of a row that sees no key dQ is 0.") for line in said)


def test_the_signature() -> None:
    found = function("fmha_bwd")
    assert [x.arg for x in found.args.args] == ["dout", "q", "k", "v", "out", "lse"]
    options = [each.arg for each in found.args.kwonlyargs]
    assert options == ["softmax_scale", "dq", "dk", "dv", "workspace", "stream"]
    assert ast.unparse(found.body[-1]) == "return (dq, dk, dv)"
    assert '__all__ = ["SPEC", "compile", "fmha_bwd", "workspace_size"]' in TEXT
    assert max(map(len, TEXT.partition("\n_stats")[0].splitlines()[:20])) <= 106
    words = ast.get_docstring(found) or ""
    assert "outputs and workspace may be left out with torch" in words
    assert "workspace, fp32 [workspace_size(batch, seqlen_q, heads)] or more" in words


def test_gradients_are_asked_of_nobody_and_no_expanded_tensor_is_copied() -> None:
    """Tensors that an autograd function saved require gradients: they are detached."""
    assert 'x.detach() if getattr(x, "requires_grad", False) else x' in TEXT
    assert "there is no backward pass" not in TEXT
    assert "pass dout.contiguous()" in TEXT


@pytest.mark.parametrize(
    "fields",
    [
        *(FIELDS, "head_dim: 128\ndtype: fp16\n", kernels.SMALL),
        "head_dim: 256\ndtype: bf16\ndeterministic: true\n",
    ],
)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 64, 3), (3, 65, 2), (1, 1000, 16)])
def test_the_file_and_the_operation_have_one_size_of_workspaces(
    fields: str, sizes: tuple[int, int, int]
) -> None:
    text = kernels.text_of(fields, "sm90_bwd")
    known = read_constants(text)
    (node,) = [
        each
        for each in ast.parse(text).body
        if isinstance(each, ast.FunctionDef) and each.name == "workspace_size"
    ]
    scope: dict[str, Any] = dict(known)
    exec(compile(ast.Module([node], []), "text", "exec"), scope)
    batch, rows, heads = sizes
    group = known["SPEC"]["q_per_kv"]
    case = Case("x", batch, heads, rows, 7)
    (workspace,) = BACKWARD.workspaces
    wanted = workspace.elements(known["SPEC"], tiles_of(known), case)
    assert scope["workspace_size"](batch, rows, heads * group) == wanted
    blocks = batch * heads * group * -(-rows // known["TILE_Q"])
    of_block = known["TILE_Q"] * (known["HEAD_DIM_QK"] + 2)
    of_block += 2 if known["SPEC"]["deterministic"] else 0
    counters = batch * heads if "mCleared" in text else 0
    assert wanted == blocks * of_block + 1 + counters


def test_the_size_of_workspaces_is_of_the_host_section() -> None:
    changed = kernels.damaged(TEXT, {"(HEAD_DIM_QK + STATISTICS)": "(HEAD_DIM_QK + 1)"})
    assert host_digest(changed) != host_digest(TEXT)


# --- calls ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def call(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[Any], Called]]:
    """Makes a call of the kernel, which compiles once."""
    path = kernels.written(tmp_path_factory.mktemp("kernel"), TEXT, STEM)
    with open_host_program(path) as program:
        yield program.call


def spoiled(name: str, case: Case = CASE, **changes: Any) -> Any:
    """A right call with one tensor described differently; None: without it."""
    made = copy.deepcopy(dict(arguments(SPEC, case, TILES)))
    made["tensors"][name] = {**made["tensors"][name], **changes}
    return made


def test_three_launches_in_their_order(call: Callable[[Any], Called]) -> None:
    made = arguments(SPEC, CASE, TILES)
    assert [*made["tensors"]] == [
        *("dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv", "workspace"),
    ]
    assert made["scratch"] == {"workspace": ELEMENTS}
    found = call(made)
    assert list(captures.wrong_host(made, found)) == []
    names = [launch.kernel for launch in found.launched]
    assert names == [f"{STEM}{x}_{n}" for n, x in enumerate(("_stats", "", "_finish"))]
    grids = [launch.grid for launch in found.launched]
    assert grids == [(16, 1, 1), (4, 1, 1), (16, 1, 1)]


def test_torch_allocates_the_outputs_and_a_workspace(
    call: Callable[[Any], Called],
) -> None:
    made = arguments(SPEC, PLAIN, TILES)
    assert [*made["tensors"]] == ["dout", "q", "k", "v", "out", "lse"]
    found = call(made)
    assert list(captures.wrong_host(made, found)) == []
    shapes = {name: x["shape"] for name, x in found.allocated.items()}
    assert shapes == {
        **{"dq": [2, 70, 4, 64], "dk": [2, 40, 2, 64], "dv": [2, 40, 2, 64]},
        "workspace": [ELEMENTS],
    }
    assert found.allocated["workspace"]["dtype"] == "fp32"


def test_a_larger_workspace_is_taken(call: Callable[[Any], Called]) -> None:
    assert call(spoiled("workspace", shape=[ELEMENTS + 3])).launches


ADDRESS = arguments(SPEC, CASE, TILES)["tensors"]["workspace"]["address"]
REFUSED: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "too small": (
        *("workspace", {"shape": [ELEMENTS - 1]}),
        f"workspace: needs {ELEMENTS} elements, not {ELEMENTS - 1}",
    ),
    "16 bits": ("workspace", {"dtype": "bf16"}, "workspace: "),
    "two dimensions": (
        *("workspace", {"shape": [ELEMENTS, 1], "strides": [1, 1]}),
        "workspace: needs 1 dimensions",
    ),
    "steps over elements": ("workspace", {"strides": [2]}, "workspace: "),
    "misaligned": ("workspace", {"address": ADDRESS + 4}, "workspace: "),
    "on the CPU": ("workspace", {"device": [1, 0]}, "workspace: "),
    "where dq is": (
        "dq",
        {"address": ADDRESS},
        "workspace: shares memory with dq",
    ),
    "where q is": ("q", {"address": ADDRESS}, "workspace: shares memory with q"),
    "an expanded dout": (
        *("dout", {"strides": [0, 0, 0, 0]}),
        "dout: is expanded, with strides (0, 0, 0, 0): pass dout.contiguous()",
    ),
    "one dout for all heads": (
        *("dout", {"strides": [5 * 4 * 64 * 70, 64, 0, 1]}),
        "dout: is expanded",
    ),
    "an expanded q": (
        *("q", {"strides": [64 * 70, 64, 0, 1]}),
        "q: has strides that TMA cannot take",
    ),
    "dout of more batches": ("dout", {"shape": [3, 70, 4, 64]}, "q: "),
    "q of more rows": ("q", {"shape": [2, 71, 4, 64]}, "q: "),
    "lse of another type": ("lse", {"dtype": "bf16"}, "lse: "),
    "out of other rows": ("out", {"shape": [2, 69, 4, 64]}, "out: "),
    "dk as if of all heads": ("dk", {"shape": [2, 40, 4, 64]}, "dk: "),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_tensor_is_refused_by_name(
    what: str, call: Callable[[Any], Called]
) -> None:
    name, changes, message = REFUSED[what]
    found = call(spoiled(name, **changes))
    assert not found.launches
    assert found.refusal.startswith(message), found.refusal


def test_who_is_no_torch_brings_a_workspace(call: Callable[[Any], Called]) -> None:
    made = copy.deepcopy(dict(arguments(SPEC, CASE, TILES)))
    del made["tensors"]["workspace"]
    found = call(made)
    assert not found.launches and found.refusal.startswith("workspace: ")


# --- what a host does wrong ------------------------------------------------------------------

FEWER = {
    "dout.new_empty(workspace_size(b, s, h)": "dout.new_empty(workspace_size(b, s, g)"
}
UNCHECKED = {"elements >= needs": "elements > 0"}


def test_a_workspace_of_another_size_is_a_finding(tmp_path: Path) -> None:
    text = kernels.damaged(TEXT, FEWER | UNCHECKED)
    path = kernels.written(tmp_path, text, STEM)
    made = arguments(SPEC, PLAIN, TILES)
    with open_host_program(path) as program:
        found = program.call(made)
    (finding,) = captures.wrong_host(made, found)
    assert finding == (
        f"workspace was allocated with shape [{ELEMENTS // 2 + 1}], not [{ELEMENTS}]"
    )


def test_a_workspace_that_is_neither_given_nor_allocated_is_a_finding() -> None:
    made = copy.deepcopy(dict(arguments(SPEC, CASE, TILES)))
    places = [made["tensors"][name]["address"] for name in ("dq", "dk", "dv")]
    del made["tensors"]["workspace"]
    launch = captures.Launch(
        "k", (1, 1, 1), (1, 1, 1), (1, 1, 1), 0, b"", made["stream"]
    )
    called = Called((launch,), "", tuple(places), {})
    (finding,) = captures.wrong_host(made, called)
    assert finding == "workspace was neither given nor allocated"

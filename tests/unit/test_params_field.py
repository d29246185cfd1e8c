# SPDX-License-Identifier: Apache-2.0
"""Inputs that a mask reads: names, their words, what counts as work, and helpers that make them."""

from __future__ import annotations

import ast
import dataclasses

import fmha_gen
import numpy as np
import pytest
import support
from fmha_gen.build import kernel_text
from fmha_gen.errors import SpecError
from fmha_gen.expressions.language import NAMES
from fmha_gen.features import params as feature
from fmha_gen.ops import masks, params
from fmha_gen.ops.cases import Case, Tiles
from fmha_gen.ops.forward import FORWARD
from fmha_gen.ops.inputs import numbers_of
from fmha_gen.ops.inputs import params as values_of
from fmha_gen.ops.masks import Lengths

HEAD = "arch: sm90\nop: fmha_fwd\ndtype: bf16\nhead_dim: 64\n"
CAUSAL = {
    "op": "fmha_fwd",
    "dtype": "bf16",
    "mask": "causal",
    "seqlen": {"q": "dynamic", "kv": "dynamic"},
    "q_per_kv": 2,
    "head_dim": {"qk": 64, "v": 64},
}


def test_words_of_the_host_section_are_no_names() -> None:
    """Or an input would be overwritten before it is passed on."""
    operation = {x.name for x in (*FORWARD.reads, *FORWARD.writes, *FORWARD.scalars)}
    known = {*feature._RESERVED, *operation, *NAMES, "stream"}
    known |= {x.name for x in params.OF_WORDS}
    for stem in support.shipped(FORWARD):  # no other operation has params
        text = (support.GENERATED / f"{stem}.py").read_text("utf-8")
        spec = kernel_text.read_constants(text)["SPEC"]
        if spec.get("batch") == "varlen" or spec["dtype"] == "e4m3":
            continue  # no params are generated beside
        for node in ast.parse(text).body:
            if getattr(node, "name", "") not in ("fmha", "launch", "run", "Problem"):
                continue
            inside = [*ast.walk(node)]
            found = {x.id for x in inside if isinstance(x, ast.Name)}
            found |= {x.arg for x in inside if isinstance(x, ast.arg)}
            found -= {*spec.get("params", {})}
            assert {x for x in found if feature._NAME.fullmatch(x)} <= known, stem


@pytest.mark.parametrize(
    "beside", ["batch: varlen", "dtype: e4m3\nv_layout: permuted", "op: fmha_bwd"]
)
def test_beside_what_no_input_is_generated(beside: str) -> None:
    """Names of their host sections are free: nothing reads an input there."""
    given = beside.partition(":")[0]
    head = "".join(x for x in HEAD.splitlines(True) if not x.startswith(given))
    for reads in ("mask: kv < as_bytes", "score: s + as_bytes"):
        dtype = "int32" if "mask" in reads else "fp32"
        with pytest.raises(SpecError) as raised:
            support.load_text(
                f"{head}{beside}\n{reads}\nparams: {{as_bytes: {dtype}}}\n"
            )
        message, refused = str(raised.value), beside.partition("\n")[0]
        assert f"is not generated for {refused}" in message


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ({"documents": True}, ["document_start"]),
        ({"documents": True, "mask": "none"}, ["document_start", "document_end"]),
        (
            {"documents": True, "mask": "none", "window": {"left": "none", "right": 0}},
            ["document_start"],
        ),
        (
            {"documents": True, "mask": "kv <= q and kv // 8 == q // 8"},
            ["document_start"],
        ),
        (
            {"documents": True, "mask": "kv // 8 == q // 8"},
            ["document_start", "document_end"],
        ),
        ({"window": {"left": "argument", "right": "none"}}, ["window_left"]),
        (
            {"params": {"w": "int32", "x": {"dtype": "int32", "shape": ["b"]}}},
            ["w", "x"],
        ),
    ],
)
def test_what_words_bring_along(said: dict[str, object], names: list[str]) -> None:
    assert [x.name for x in params.declared({**CAUSAL, **said})] == names


def test_a_mask_of_a_call() -> None:
    """Each batch has documents of its own; a prefix is seen by all queries."""
    starts = np.array([[0, 0, 2, 2], [0, 1, 1, 3]])
    mask = masks.of_spec({**CAUSAL, "documents": True}).given(
        {"document_start": starts}
    )
    seen = [mask.at(b, 0, 0).visible(np.arange(4), Lengths(4, 4)) for b in range(2)]
    rows, keys = np.arange(4)[:, None], np.arange(4)
    for b in range(2):
        expected = (keys <= rows) & (keys >= starts[b][:, None])
        assert np.array_equal(seen[b], expected)
    mask = masks.of_spec({**CAUSAL, "prefix": True}).given({"prefix": np.array([3])})
    seen_keys = mask.at(0, 0, 0).visible(np.arange(4), Lengths(4, 4))
    assert np.array_equal(seen_keys, (keys <= rows) | (keys < 3))


def test_work_is_counted_from_values() -> None:
    """Documents of 2 and 6 tokens; half of the diagonal counts, as without documents."""
    case = Case("counted", 2, 3, 8, 8)
    spec = {**CAUSAL, "documents": True}
    ids = np.array([[0, 0, 1, 1, 1, 1, 1, 1], [5] * 8])
    given = {"document_start": fmha_gen.document_starts(ids)}
    pairs = (2 + 18) + 32  # n * n / 2 of each document
    heads, dims = 6, 128
    assert FORWARD.flops(spec, case, given) == 2 * heads * pairs * dims
    whole = dataclasses.replace(case, batch=1)
    one = {"document_start": np.zeros((1, 8), np.int32)}
    assert FORWARD.flops(spec, whole, one) == FORWARD.flops(CAUSAL, whole)


def test_values_of_cases_hide_as_much_as_their_kind_says() -> None:
    tiles = Tiles(128, 64, (1, 1))
    spec = {
        **CAUSAL,
        "documents": True,
        "window": {"left": "argument", "right": "none"},
    }
    seen = {}
    for kind in ("least", "some", "on_tiles", "most"):
        case = Case("kinds", 2, 1, 200, 260, params=kind)  # type: ignore[arg-type]
        mask = masks.of_spec(spec).given(values_of(spec, tiles, case)).at(1, 0, 0)
        seen[kind] = mask.visible(np.arange(200), Lengths(200, 260)).sum()
        assert numbers_of(spec, case) == {
            "window_left": int(mask.values["window_left"])
        }
    assert seen["least"] == 200
    causal = masks.of_spec(CAUSAL).visible(np.arange(200), Lengths(200, 260)).sum()
    assert seen["least"] < seen["some"] < seen["most"] == causal
    start = values_of(spec, tiles, Case("kinds", 2, 1, 200, 260, params="on_tiles"))
    assert (start["document_start"] % 64 == 0).all()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_documents_of_ids_and_of_lengths(library: str) -> None:
    xp = np if library == "numpy" else pytest.importorskip("torch")
    ids = xp.asarray([[3, 3, 1, 1, 1, 7], [0, 0, 0, 0, 0, 0]])
    starts, ends = fmha_gen.document_starts(ids), fmha_gen.document_ends(ids)
    assert starts.tolist() == [[0, 0, 2, 2, 2, 5], [0] * 6]
    assert ends.tolist() == [[2, 2, 5, 5, 5, 6], [6] * 6]
    assert starts.dtype == ends.dtype == xp.int32
    of_lengths = fmha_gen.document_ids(xp.asarray([0, 2, 2, 5]))
    assert fmha_gen.document_starts(of_lengths).tolist() == [[0, 0, 2, 2, 2]]


def test_an_input_has_its_place_in_the_signature() -> None:
    """After the other tensors, and by name alone; a number after the scale."""
    text = support.kernel_text(
        f"{HEAD}mask: causal\ndocuments: true\nwindow: {{left: argument}}\nsink: true\n"
    )
    functions = {
        node.name: node.args
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }
    entry, host = functions["fmha"], functions["launch"]
    by_name = [x.arg for x in entry.kwonlyargs]
    assert by_name[:3] == ["sink", "document_start", "window_left"]
    assert entry.kw_defaults[:3] == [None] * 3
    assert [x.arg for x in host.args][3:8] == [
        *("sink", "document_start", "out", "softmax_scale", "window_left")
    ]

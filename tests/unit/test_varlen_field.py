# SPDX-License-Identifier: Apache-2.0
"""`batch: varlen`: what it does not go with, and what is right for packed sequences."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import support
from fmha_gen.errors import SpecError
from fmha_gen.ops import operation_of
from fmha_gen.ops.cases import Case
from fmha_gen.ops.forward import FORWARD
from fmha_gen.ops.operation import Given
from fmha_gen.ops.varlen import PACKED_FORWARD, each_of, rows_of

HEAD = "op: fmha_fwd\ndtype: bf16\nhead_dim: 64\nbatch: varlen\n"
SPEC: dict[str, Any] = {
    **{"op": "fmha_fwd", "arch": "sm90", "dtype": "bf16", "mask": "causal"},
    **{"head_dim": {"qk": 16, "v": 16}, "q_per_kv": 2, "lse": True, "sink": True},
    **{"seqlen": {"q": "dynamic", "kv": "dynamic"}, "batch": "varlen"},
}
LENGTHS = ((3, 5), (0, 4), (4, 0), (6, 2))
ROWS, KEYS, HEADS = 16, 13, 4


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ("arch: sm100\nschedule: single\n", "schedule is single"),
        ("arch: sm100\ncluster: [2, 1]\nmulticast: kv\n", "cluster is [2, 1]"),
        ("arch: sm100\ncluster: [2, 1]\ncta_group: 2\n", "cluster is [2, 1]"),
        ("arch: sm90\nmask: causal\ndocuments: true\n", "documents is true"),
        ("arch: sm90\nmask: causal\nprefix: true\n", "prefix is true"),
        ("arch: sm90\nbias: bf16\n", "bias.dtype is bf16"),
        ("arch: sm90\nblocks: lists\n", "blocks is lists"),
        ("arch: sm90\ncluster: [2, 1]\nmulticast: kv\n", "cluster is [2, 1]"),
        ("arch: sm90\nseqlen: {kv: 512}\n", "seqlen.kv: 512"),
        ("arch: sm90\nwindow: {left: argument}\n", "window: an argument"),
        ("arch: sm90\nscore: s - b / 9\n", "it reads b"),
        ("arch: sm90\nmask: kv >= n\nparams: {n: int32}\n", "params: n"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_both_names(
    said: str, names: str
) -> None:
    with pytest.raises(SpecError) as caught:
        support.load_text(HEAD + said)
    text = str(caught.value)
    assert "FG205" in text and "batch: varlen" in text.replace('"', "")
    assert names in text or names.replace(" is ", ": ") in text


def drawn(library: str) -> dict[str, Any]:
    """Inputs of a call; NaN in rows of no sequence."""
    random = np.random.default_rng(0)
    shapes = {"q": (ROWS, HEADS, 16), "k": (KEYS, 2, 16), "v": (KEYS, 2, 16)}
    made: dict[str, Any] = {x: random.normal(size=n) for x, n in shapes.items()}
    rows = rows_of(case())
    for name, of in (("q", "q"), ("k", "kv"), ("v", "kv")):
        outside = np.ones(len(made[name]), np.bool_)
        for each in rows:
            outside[getattr(each, of)] = False
        made[name][outside] = np.nan
    made["sink"] = random.normal(size=HEADS)
    made |= PACKED_FORWARD.indices(SPEC, case())
    if library == "torch":
        torch = importlib.import_module("torch")
        return {name: torch.from_numpy(x) for name, x in made.items()}
    return made


def case() -> Case:
    return Case("some", len(LENGTHS), 2, ROWS, KEYS, lengths=LENGTHS)


@pytest.fixture(params=["numpy", "torch"])
def given(request: pytest.FixtureRequest) -> Given:
    pytest.importorskip(request.param)
    return Given(SPEC, drawn(request.param), 0.25)


def test_offsets_of_a_case() -> None:
    found = PACKED_FORWARD.indices(SPEC, case())
    assert found["cu_seqlens_q"].tolist() == [1, 4, 4, 8, 14]
    assert found["cu_seqlens_k"].tolist() == [0, 5, 9, 9, 11]
    assert found["cu_seqlens_q"].dtype == np.int32
    cut = Case("cut", 2, 1, 5, 5, lengths=((4, 4), (7, 4)))
    assert PACKED_FORWARD.indices(SPEC, cut)["cu_seqlens_q"].tolist() == [-2, 2, 9]
    q, kv = zip(*((each.q, each.kv) for each in rows_of(cut)), strict=True)
    assert q == (slice(0, 2), slice(2, 5)) and kv == (slice(0, 3), slice(3, 5))


def test_each_sequence_is_the_dense_problem_of_its_rows(given: Given) -> None:
    assert operation_of(SPEC) is PACKED_FORWARD
    found = {name: np.asarray(x) for name, x in PACKED_FORWARD.exact(given).items()}
    plain = {name: x for name, x in SPEC.items() if name != "batch"}
    seen = np.zeros(ROWS, np.bool_)
    for each in rows_of(case()):
        seen[each.q] = True
        if not each.q.stop - each.q.start or not each.kv.stop - each.kv.start:
            continue
        own = {"q": each.q, "k": each.kv, "v": each.kv}
        parts = {name: given.inputs[name][at][None] for name, at in own.items()}
        dense = FORWARD.exact(Given(plain, {**given.inputs, **parts}, given.scale))
        assert (found["out"][each.q] == np.asarray(dense["out"][0])).all()
        assert (found["lse"][:, each.q] == np.asarray(dense["lse"][0])).all()
    assert (
        np.isnan(found["out"][~seen]).all() and np.isnan(found["lse"][:, ~seen]).all()
    )
    # The third sequence has queries and no keys.
    no_keys = slice(4, 8)
    assert (found["out"][no_keys] == 0).all()
    sink = np.asarray(given.inputs["sink"])[:, None]
    assert (found["lse"][:, no_keys] == sink).all()


def judged(given: Given, spoil: Any) -> dict[str, str]:
    """Findings about right results that `spoil` has changed."""
    outputs = PACKED_FORWARD.exact(given)
    spoil(outputs)
    truth = PACKED_FORWARD.truth(given)
    verdicts = PACKED_FORWARD.judge(given, outputs, truth, 128)
    return {name: x.finding for name, x in verdicts.items() if x.finding}


def test_a_verdict_names_the_sequence(given: Given) -> None:
    assert not judged(given, lambda outputs: None)

    def wrong(outputs: dict[str, Any]) -> None:
        outputs["out"][10, 3] += 1.0
        outputs["lse"][1, 5] = 7.0

    found = judged(given, wrong)
    assert "row 2 of head 3" in found["out"] and "sequence 2 of 3" in found["out"]
    assert "row 1 of head 1" in found["lse"] and "sequence 1 of 3" in found["lse"]


def test_a_row_of_no_sequence_that_is_written_is_found(given: Given) -> None:
    def beyond(outputs: dict[str, Any]) -> None:
        outputs["out"][ROWS - 1, 0] = 0.0

    assert judged(given, beyond) == {
        "out": "1 rows of out: of no sequence, and written"
    }


def test_flops_are_those_of_all_sequences() -> None:
    plain = {name: x for name, x in SPEC.items() if name != "batch"}
    alone = [FORWARD.flops(plain, one) for one in each_of(case())]
    assert PACKED_FORWARD.flops(SPEC, case()) == sum(alone) > 0

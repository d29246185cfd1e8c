# SPDX-License-Identifier: Apache-2.0
"""Each check of a trial, seen to pass on a right kernel and to fail on one with one fault.

The kernels are PyTorch on the CPU: the checks are what is tested here, not a GPU.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest

torch = pytest.importorskip(
    "torch", reason="needs PyTorch (CPU): pip install 'fmha-gen[torch]'"
)

from fake_kernel import CpuDevice, FakeKernel, spec  # noqa: E402
from fmha_gen.evidence import trial  # noqa: E402
from fmha_gen.ops import lists  # noqa: E402
from fmha_gen.ops.cases import Case, Data, Params  # noqa: E402
from fmha_gen.ops.lists import Drawn  # noqa: E402

CASE = Case("small", batch=2, kv_heads=2, q=33, kv=65)
DENSE = Case("dense", batch=2, kv_heads=2, q=33, kv=65, layout="plain")
NOT_NORMAL = {"first_at_minus_inf", "all_at_minus_inf", "saturated", "sinks", "biases"}
DATA = sorted(set(get_args(Data)) - NOT_NORMAL)
MANY = Case("many", batch=1, kv_heads=1, q=9, kv=17, repeats=20)


def findings(
    fault: str = "",
    case: Case = CASE,
    device: CpuDevice | None = None,
    **changes: Any,
) -> list[str]:
    kernel = FakeKernel(spec(**changes), fault)
    return trial.check_case(kernel, case, device or CpuDevice()).findings


# --- a right kernel holds on every kind of case --------------------------------------


@pytest.mark.parametrize("layout", ["own", "bhsd", "mixed", "fused", "cache", "plain"])
@pytest.mark.parametrize("kv", [33, 40])
def test_right_kernel_holds_in_every_layout(layout: Any, kv: int) -> None:
    case = Case("layout", batch=2, kv_heads=2, q=33, kv=kv, layout=layout)
    assert findings(case=case, q_per_kv=4) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("q", "kv"), [(40, 40), (17, 65), (65, 17), (1, 33), (33, 1)])
def test_right_kernel_holds_on_every_kind_of_data(
    dtype: str, mask: str, data: Any, q: int, kv: int
) -> None:
    case = Case("data", batch=1, kv_heads=2, q=q, kv=kv, data=data)
    assert findings(case=case, dtype=dtype, mask=mask, q_per_kv=2) == []


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("data", [*DATA, "sinks"])
@pytest.mark.parametrize(("q", "kv"), [(17, 65), (65, 17)])
def test_right_kernel_holds_with_sinks(mask: str, data: Any, q: int, kv: int) -> None:
    case = Case("data", batch=2, kv_heads=4, q=q, kv=kv, data=data)
    assert findings(case=case, mask=mask, q_per_kv=2, sink=True) == []


LISTED = {"blocks": "lists", "tile": {"q": 64, "kv": 64}}


@pytest.mark.parametrize("number", range(len(lists.PATTERNS)))
def test_right_kernel_holds_with_lists(number: int) -> None:
    drawn = Drawn([*lists.PATTERNS][number], lists.AXES[number % 4])
    layout: Any = ("own", "plain", "mixed")[number % 3]
    counts = {"batch": 2, "kv_heads": 2, "q": 97, "kv": 200}
    case = Case("lists", **counts, lists=drawn, layout=layout)
    assert findings(case=case, mask="causal", q_per_kv=2, **LISTED) == []


@pytest.mark.parametrize("fault", ["swaps the lists", "loses a block"])
def test_fault_of_lists_is_found(fault: str) -> None:
    case = Case("lists", 1, 1, 97, 200, lists=Drawn("some", "bh"))
    found = findings(fault, case, mask="causal", **LISTED)
    assert any("of out: wrong" in text for text in found), found


def test_every_misuse_of_lists_is_refused() -> None:
    found = misuse_findings(q_per_kv=2, **LISTED)
    for name in lists.NAMES:
        assert f"{name}: int64" in found and f"{name}: one more of query_tiles" in found
    assert {name: text for name, text in found.items() if text} == {}


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("data", [*DATA, "biases"])
@pytest.mark.parametrize("shape", [["b", "h", "q", "kv"], [1, 1, 1, "kv"]])
@pytest.mark.parametrize(("q", "kv"), [(17, 65), (65, 17)])
def test_right_kernel_holds_with_a_bias(
    mask: str, data: Any, shape: list[Any], q: int, kv: int
) -> None:
    case = Case("data", batch=2, kv_heads=3, q=q, kv=kv, data=data, layout="mixed")
    bias = {"shape": shape, "dtype": "fp32"}
    assert findings(case=case, mask=mask, q_per_kv=2, bias=bias) == []


@pytest.mark.parametrize(
    "fault",
    [
        "ignores the bias",
        "scales the bias",
        "takes the next row's bias",
        "takes the next head's bias",
        "takes the bias for 0 or -inf",
    ],
)
def test_a_wrong_bias_is_found(fault: str) -> None:
    bias = {"shape": ["b", "h", "q", "kv"], "dtype": "bf16"}
    found = findings(fault, bias=bias)
    assert any("of out: wrong" in finding for finding in found)
    assert fault != "ignores the bias" or "as without its bias" in found[0]


@pytest.mark.parametrize("lse", [True, False])
def test_right_kernel_holds_with_two_head_dims_and_steep_scores(lse: bool) -> None:
    case = Case("steep", batch=1, kv_heads=2, q=33, kv=65, scale_factor=30.0)
    assert findings(case=case, head_dim={"qk": 192, "v": 128}, lse=lse) == []


def test_a_result_has_the_numbers() -> None:
    result = trial.check_case(FakeKernel(spec()), MANY, CpuDevice())
    assert result.findings == []
    assert result.repeats == 20
    assert 0 < result.shown.of_bound < 1 and 0 < result.shown.absolute < 0.1
    lse = result.shown.others["lse"]
    assert lse is not None and lse.of_bound < 1 and lse.absolute < 1e-4


# --- each fault is found -------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("skips the last key", " is as with "),
        ("weights in 4 bits", "of out: wrong"),
        ("last row unwritten", "row 32 of head 0, batch 0 and 3 more"),
        ("writes a row too many", "elements outside out were written"),
        ("writes before head_dim", "elements outside out were written"),
        ("writes lse past its row", "elements outside lse were written"),
        ("writes an input", "elements of an input differ after the launches"),
        ("one bit differs now and then", "elements of out differ in launch 2"),
        ("lse differs now and then", "elements of lse differ in launch 2"),
        ("lse in base 2", "of lse: wrong"),
    ],
)
def test_fault_is_found(fault: str, expected: str) -> None:
    assert any(expected in finding for finding in findings(fault))


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("lse 0 where no key", "of lse: not -inf exactly where a row sees no key"),
        ("out 1 where no key", "row 0 of head 0, batch 0 and"),
        ("top-left mask", "of out: wrong"),
    ],
)
def test_fault_of_causal_rows_without_keys_is_found(fault: str, expected: str) -> None:
    case = Case("no_keys", batch=1, kv_heads=1, q=65, kv=17)
    assert any(expected in finding for finding in findings(fault, case, mask="causal"))


@pytest.mark.parametrize("data", ["normal", "sinks"])
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("ignores the sink", "of out: wrong"),
        ("scales the sink", "of out: wrong"),
        ("sink in base 2", "of out: wrong"),
        ("takes the next head's sink", "of out: wrong"),
        ("lse without the sink", "of lse: wrong"),
    ],
)
def test_fault_of_a_sink_is_found(data: Any, fault: str, expected: str) -> None:
    case = Case("sinks", batch=1, kv_heads=4, q=33, kv=65, data=data)
    found = findings(fault, case, q_per_kv=2, sink=True)
    assert any(expected in finding for finding in found)


EDGES = {"mask": "causal", "documents": True, "window": {"left": "argument"}}


@pytest.mark.parametrize("kind", get_args(Params))
@pytest.mark.parametrize("data", ["normal", "edges", "peaks"])
def test_right_kernel_holds_where_its_mask_reads_inputs(data: Any, kind: Any) -> None:
    case = Case("edges", batch=2, kv_heads=2, q=70, kv=90, data=data, params=kind)
    assert findings(case=case, q_per_kv=2, **EDGES) == []


def test_documents_of_another_batch_are_found() -> None:
    case = Case("edges", batch=2, kv_heads=2, q=70, kv=90)
    assert findings("takes the next batch's documents", case, **EDGES)


def test_misuses_of_what_a_mask_reads_are_refused() -> None:
    found = misuse_findings(**EDGES)
    assert {name: text for name, text in found.items() if text} == {}
    assert {f"window_left: {x}" for x in (-1, 2**24 + 1, 1.5, None)} <= found.keys()
    assert {
        "document_start: int64",
        "document_start: one more of seqlen_q",
    } <= found.keys()


def test_a_row_without_its_sink_is_called_so() -> None:
    (found,) = findings("ignores the sink", CASE, sink=True, lse=False)
    assert found.endswith(" is as without its sink")


def test_ignored_scale_is_found() -> None:
    case = Case("steep", batch=1, kv_heads=1, q=33, kv=65, scale_factor=30.0)
    assert any(
        "of out: wrong" in text for text in findings("ignores softmax_scale", case)
    )


def test_weights_that_overflow_fp16_are_found() -> None:
    # Scores of 1e10: the rounded scaled maximum is off by hundreds, and exp2(17) is no fp16.
    options: dict[str, Any] = {"data": "uniform_1e4", "scale_factor": 30.0}
    case = Case("large", batch=1, kv_heads=2, q=65, kv=127, **options)
    assert findings("rounds the scaled maximum", case, dtype="fp16")
    ordinary = Case("normal", batch=1, kv_heads=2, q=65, kv=127)
    assert findings("rounds the scaled maximum", ordinary, dtype="fp16") == []


def test_graph_that_captured_nothing_is_found() -> None:
    found = findings(device=CpuDevice(graph_works=False))
    assert "8448 of 8448 elements of out differ under graph replay" in found


def test_launch_that_ignores_the_current_stream_is_found() -> None:
    found = findings(case=MANY, device=CpuDevice(streams_work=False))
    assert any("differ on another stream" in finding for finding in found)


def test_what_the_kernel_allocates_is_judged() -> None:
    class Wrong(FakeKernel):
        def fmha(
            self, q: Any, k: Any, v: Any, *, out: Any = None, **options: Any
        ) -> Any:
            o, lse = super().fmha(q, k, v, out=out, **options)
            return (o, lse) if out is not None else (o.float(), lse)

    class Other(FakeKernel):
        def fmha(
            self, q: Any, k: Any, v: Any, *, out: Any = None, **options: Any
        ) -> Any:
            o, lse = super().fmha(q, k, v, out=out, **options)
            return (o, lse) if out is not None else (o + 1, lse)

    class Alone(FakeKernel):
        def fmha(self, *inputs: Any, **options: Any) -> Any:
            return super().fmha(*inputs, **options)[0]

    for kernel, text in (
        (Wrong, "fmha returned out as torch.float32"),
        (Other, "of out differ when the kernel allocates it"),
        (Alone, "fmha returned 1 tensors, not 2"),
    ):
        (finding,) = trial.check_case(kernel(spec()), DENSE, CpuDevice()).findings
        assert text in finding


# --- misuse --------------------------------------------------------------------------


def misuse_findings(fault: str = "", **changes: Any) -> dict[str, str]:
    kernel = FakeKernel(spec(**changes), fault)
    found = trial.events(kernel, CpuDevice(), only=[trial.MISUSE])
    return {
        event["name"]: event["finding"] for event in found if event["event"] == "misuse"
    }


@pytest.mark.parametrize("seqlen", ["dynamic", 1, 48])
@pytest.mark.parametrize("lse", [True, False])
@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("q_per_kv", [1, 4])
def test_right_kernel_refuses_every_misuse(
    seqlen: Any, lse: bool, sink: bool, q_per_kv: int
) -> None:
    lengths = {"q": seqlen, "kv": seqlen}
    found = misuse_findings(seqlen=lengths, lse=lse, sink=sink, q_per_kv=q_per_kv)
    assert len(found) >= 70
    of_sink = {name for name in found if name.startswith("sink: ")}
    if not sink:
        assert of_sink == {"sink: not a parameter of this kernel"}
    else:
        spoiled = {"bf16", "fp16", "fp64", "0 dimensions", "another device"}
        assert of_sink == {f"sink: {x}" for x in (*spoiled, "one more of heads")}
    assert {name: text for name, text in found.items() if text} == {}


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("names no argument", "the message names none of"),
        ("raises TypeError", "raised TypeError instead of ValueError"),
        ("checks after the launch", "elements of out differ after a refused call"),
    ],
)
def test_bad_refusal_is_found(fault: str, expected: str) -> None:
    assert any(expected in text for text in misuse_findings(fault).values())


def test_kernel_that_checks_nothing_is_found() -> None:
    found = misuse_findings("checks nothing")
    assert found["q: misaligned by one element"] == "accepted"
    assert found["k: stride of seqlen_kv 8 bytes more"] == "accepted"
    assert found["v: fp32"] == "accepted"
    assert found["out, q: where q is"] == "accepted"
    assert found["softmax_scale: 1e-50"] == "accepted"


def test_lse_may_be_a_parameter_that_does_not_exist() -> None:
    class Without(FakeKernel):
        def fmha(
            self, q: Any, k: Any, v: Any, *, out: Any = None, softmax_scale: Any = None
        ) -> Any:
            return super().fmha(q, k, v, out=out, softmax_scale=softmax_scale)

    kernel = Without(spec(lse=False))
    found = [
        e
        for e in trial.events(kernel, CpuDevice(), only=["misuse"])
        if e["event"] == "misuse"
    ]
    assert [event["finding"] for event in found if event["finding"]] == []
    assert any(event["name"].startswith("lse: not a parameter") for event in found)


def test_the_spoiled_calls_are_what_they_say() -> None:
    x = torch.arange(2 * 3 * 2 * 8, dtype=torch.bfloat16).view(2, 3, 2, 8)
    rows, heads = trial._padded(x, axis=1), trial._padded(x, axis=2)
    assert torch.equal(rows, x) and rows.stride() == (60, 20, 8, 1)
    assert torch.equal(heads, x) and heads.stride() == (72, 24, 12, 1)
    assert (
        torch.equal(trial._misaligned(x), x)
        and trial._misaligned(x).data_ptr() % 16 == 2
    )


# --- the whole kernel ----------------------------------------------------------------


def small_cases(_spec: Any, _tiles: Any) -> tuple[Case, ...]:
    return (CASE, DENSE, MANY)


def test_events_of_a_right_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "cases_for", small_cases)
    found = list(trial.events(FakeKernel(spec()), CpuDevice()))
    assert [event["case"] for event in found if event["event"] == "case"] == [
        "small",
        "dense",
        "many",
    ]
    assert found[-1] == {"event": "end"}
    assert not any(event.get("findings") or event.get("finding") for event in found)


def test_one_case_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "cases_for", small_cases)
    found = list(trial.events(FakeKernel(spec()), CpuDevice(), only=["dense"]))
    assert [event["case"] for event in found if event["event"] == "case"] == ["dense"]
    assert not any(event["event"] == "misuse" for event in found)
    (unknown,) = trial.events(FakeKernel(spec()), CpuDevice(), only=["nonsense"])
    assert unknown == {
        "event": "unknown_case",
        "names": ["small", "dense", "many", "misuse"],
    }


def test_a_good_call_that_is_refused_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Picky(FakeKernel):
        def fmha(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
            if q.shape[0] == 2:
                raise ValueError("q: batch must be 1")
            return super().fmha(q, k, v, **options)

    monkeypatch.setattr(trial, "cases_for", small_cases)
    found = list(trial.events(Picky(spec()), CpuDevice(), only=["small"]))
    (case,) = [event for event in found if event["event"] == "case"]
    assert case["findings"] == ["refused: q: batch must be 1"]


def test_memcheck_runs_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "cases_for", small_cases)
    kernel = FakeKernel(spec())
    found = list(trial.memcheck_events(kernel, CpuDevice()))
    assert [event["event"] for event in found] == ["start", "case"]
    assert found[-1]["case"] == "many"  # the cheapest
    assert kernel.launches == 1

# SPDX-License-Identifier: Apache-2.0
"""The package with packed sequences, paged K and V, windows and soft caps."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .standins import expected, imported, packed, source_of, tensors

torch = pytest.importorskip("torch", reason="the package's operators need PyTorch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

GQA2: dict[str, Any] = {"q_per_kv": 2, "mask": "causal"}
PAGED: dict[str, Any] = GQA2 | {"kv": {"paged": {"page": 16}}}
ANY = {"left": "argument", "right": "argument"}
SPECS: dict[str, dict[str, Any]] = {
    "dense_cap30": {"batch": "dense", "softcap": 30.0},
    "dense_w31x8": {"batch": "dense", "window": {"left": 31, "right": 8}},
    "dense_w_any": {"batch": "dense", "window": ANY, "lse": True},
    "paged16": PAGED,
    "paged16_lse": PAGED | {"lse": True},
    "paged16_pack": PAGED | {"pack_gqa": True},
    "paged16_w7_sink_lse": PAGED
    | {"window": {"left": 7, "right": "none"}, "sink": True, "lse": True},
    "paged32_lse": PAGED | {"kv": {"paged": {"page": 32}}, "lse": True},
    "varlen_cap30_lse": GQA2 | {"softcap": 30.0, "lse": True},
    "varlen_lse": GQA2 | {"lse": True},
    "varlen_none": {"q_per_kv": 2},
    "varlen_w7": GQA2 | {"mask": "none", "window": {"left": 7, "right": 0}},
}
CAUSAL: dict[str, Any] = {"causal": True}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleType, list[str]]:
    folder = tmp_path_factory.mktemp("layouts")
    source = source_of(folder / "generated", SPECS)
    return imported(folder, tuple(SPECS), source=source)


@pytest.fixture
def package(loaded: tuple[ModuleType, list[str]]) -> ModuleType:
    return loaded[0]


@pytest.fixture
def calls(loaded: tuple[ModuleType, list[str]]) -> list[str]:
    loaded[1].clear()
    return loaded[1]


def dense(**shape: Any) -> tuple[Any, Any, Any]:
    return tensors(qk=64, v=64, **shape)


@pytest.mark.parametrize(
    ("name", "page", "asked"),
    [
        ("varlen_lse", None, CAUSAL),
        ("varlen_lse", None, {"window": (-1, 0)}),  # the same thing
        ("varlen_none", None, {}),
        ("varlen_none", None, {"window": (-1, None), "softcap": 0.0}),
        ("varlen_w7", None, CAUSAL | {"window": (7, -1)}),
        (
            "varlen_w7",
            None,
            CAUSAL | {"window": (7, 7)},
        ),  # no key behind is seen anyway
        ("varlen_cap30_lse", None, CAUSAL | {"softcap": 30}),
        ("paged16", 16, CAUSAL),
        ("paged16", 16, CAUSAL | {"max_seqlen_q": 2048}),
        ("paged16_pack", 16, CAUSAL | {"max_seqlen_q": 60}),
        ("paged32_lse", 32, CAUSAL),
    ],
)
def test_each_layout(
    package: ModuleType, calls: list[str], name: str, page: int | None, asked: Any
) -> None:
    given = packed(page=page)
    bound = {key: x for key, x in asked.items() if key != "max_seqlen_q"}
    if "window" in bound:
        bound["window"] = tuple(-1 if n is None else n for n in bound["window"])
    wanted, logs = expected(given, scale=0.2, **bound)
    out = torch.full_like(given["q"], math.nan)
    found = package.fmha(**given, **asked, softmax_scale=0.2, out=out)
    assert found is out and calls == [name]
    torch.testing.assert_close(
        out.double(), wanted, atol=1e-2, rtol=1e-2, equal_nan=True
    )
    if SPECS[name].get("lse"):
        found, lse = package.fmha_lse(**given, **asked, softmax_scale=0.2)
        assert lse.shape == logs.shape and lse.dtype == torch.float32
        rows = int(given["cu_seqlens_q"][-1])
        assert torch.equal(found[:rows], out[:rows])
        torch.testing.assert_close(
            lse.double()[:, :rows], logs[:, :rows], atol=1e-3, rtol=1e-3
        )


def test_a_sink_beside_a_window_and_pages(
    package: ModuleType, calls: list[str]
) -> None:
    given, sink = packed(page=16), torch.linspace(-2.0, 3.0, 4)
    asked: dict[str, Any] = CAUSAL | {"window": (7, 0), "sink": sink}
    wanted, logs = expected(given, **asked)
    out = torch.full_like(given["q"], math.nan)
    _, lse = package.fmha(**given, **asked, out=out, return_lse=True)
    assert calls == ["paged16_w7_sink_lse"]
    torch.testing.assert_close(
        out.double(), wanted, atol=1e-2, rtol=1e-2, equal_nan=True
    )
    rows = int(given["cu_seqlens_q"][-1])
    torch.testing.assert_close(
        lse.double()[:, :rows], logs[:, :rows], atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("dense_cap30", {"softcap": 30.0}),
        ("dense_w31x8", {"window": (31, 8)}),
        ("dense_w_any", {"window": (30, 8)}),
        ("dense_w_any", {"window": (5, -1)}),
        ("dense_w_any", {}),  # 2^24 keys on both sides are all
    ],
)
def test_dense_windows_and_soft_caps(
    package: ModuleType, calls: list[str], name: str, asked: dict[str, Any]
) -> None:
    q, k, v = dense()
    out = package.fmha(q, k, v, **asked)
    assert calls == [name]
    starts = torch.tensor([0, 48, 96], dtype=torch.int32)
    given = {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": v.flatten(0, 1)}
    ends = torch.tensor([0, 80, 160], dtype=torch.int32)
    wanted, _ = expected(
        given | {"cu_seqlens_q": starts, "cu_seqlens_k": ends}, **asked
    )
    torch.testing.assert_close(out.flatten(0, 1).double(), wanted, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("page", "asked", "message"),
    [
        (None, CAUSAL | {"window": (8, 0)}, r"_w7: window_left is 7, not 8"),
        (None, CAUSAL | {"softcap": 50.0}, r"_cap30_lse: softcap is 30.0, not 50.0"),
        (
            None,
            CAUSAL | {"softcap": 30.0, "window": (7, 0)},
            "window_left 7, softcap 30",
        ),
        (None, {"window": (7, 3)}, "window_right 3"),
        (64, CAUSAL, r"batch varlen, page 64, mask causal; nearest"),
        (16, {}, r"paged16: mask is causal, not none"),
        (16, CAUSAL | {"sink": torch.zeros(4)}, r"paged16: sink is False, not True"),
    ],
)
def test_nothing_that_is_asked_is_dropped(
    package: ModuleType, page: int | None, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        package.fmha(**packed(page=page), **asked)


INT32: Any = torch.int32
MALFORMED = [
    ({"cu_seqlens_q": None}, "^cu_seqlens_k: needs cu_seqlens_q beside it"),
    ({"cu_seqlens_k": None}, "^cu_seqlens_q: needs either cu_seqlens_k, or"),
    ({"cu_seqlens_q": torch.zeros(5)}, r"^cu_seqlens_q: needs dtype torch\.int32"),
    ({"cu_seqlens_q": torch.zeros(0, dtype=INT32)}, r"needs shape \(batch \+ 1,\)"),
    (
        {"cu_seqlens_k": torch.zeros(4, dtype=INT32)},
        r"^cu_seqlens_k: .* \(5,\), not \(4,\)",
    ),
    ({"seqused_k": torch.zeros(4, dtype=INT32)}, "^cu_seqlens_q: needs either"),
    ({"out": torch.zeros(9, 4, 64)}, "^out: needs shape"),
    ({"q": torch.zeros(1, 9, 4, 64)}, "^q: needs 3 dimensions, has 4"),
    ({"sink": torch.zeros(2)}, r"^sink: needs shape \(4,\)"),
]
MALFORMED_PAGED = [
    ({"seqused_k": None}, "^cu_seqlens_q: needs either"),
    ({"cu_seqlens_q": None}, "^seqused_k: needs cu_seqlens_q beside it"),
    ({"seqused_k": torch.zeros(3, dtype=INT32)}, r"^seqused_k: .* \(4,\), not \(3,\)"),
    ({"block_table": torch.zeros(4, dtype=INT32)}, "^block_table: needs shape"),
    (
        {"block_table": torch.zeros(4, 2).long()},
        r"^block_table: .*int32, not torch\.int64",
    ),
    ({"v": torch.zeros(2, 16, 2, 64).bfloat16()}, r"^k: needs shape \(2, 16, 2, 64\)"),
    ({"k": torch.zeros(16, 2, 64).bfloat16()}, "^k: needs 4 dimensions, has 3"),
]


@pytest.mark.parametrize(
    ("page", "edit", "message"),
    [(None, *each) for each in MALFORMED] + [(16, *each) for each in MALFORMED_PAGED],
)
def test_what_does_not_belong_together(
    package: ModuleType, page: int | None, edit: dict[str, Any], message: str
) -> None:
    given = packed(page=page) | edit
    with pytest.raises(ValueError, match=message):
        package.fmha(**given, **CAUSAL)


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("empty", ["q", "kv", "batch", "table"])
def test_an_empty_packed_problem(
    package: ModuleType, calls: list[str], page: int | None, empty: str
) -> None:
    queries, keys = ((), ()) if empty == "batch" else ((3, 0, 4), (0, 0, 0))
    given = packed(queries, keys or (9,), page=page)
    if empty == "batch":
        given["cu_seqlens_q"] = torch.zeros(1, dtype=INT32)
        for name in ("cu_seqlens_k", "seqused_k", "block_table"):
            given |= {name: given[name][: page is None]} if name in given else {}
    if empty == "q":
        given["q"] = given["q"][:0]
    if empty == "kv":
        given["k"], given["v"] = given["k"][:0], given["v"][:0]
    if empty == "table" and page:
        given["block_table"] = given["block_table"][:, :0]
    out = torch.full_like(given["q"], 5.0)
    _, lse = package.fmha(**given, **CAUSAL, out=out, return_lse=True)
    rows = 0 if empty in ("q", "batch") else 7
    assert not out[:rows].any() and (out[rows:] == 5.0).all()
    assert (lse[:, :rows] == -math.inf).all() and lse.shape == (4, len(out))
    if empty == "kv" or page:  # else the kernel has that to find on the device
        assert calls == []


@pytest.mark.parametrize("page", [None, 16])
def test_opcheck(package: ModuleType, page: int | None) -> None:
    given = packed(page=page, spare=0)
    lse = torch.zeros(4, len(given["q"]))
    known = package.Tensors(**given, out=torch.zeros_like(given["q"]), lse=lse)
    torch.library.opcheck(package.OPERATOR, (*known, *package.Options(True), None))


@pytest.mark.parametrize("page", [None, 16])
def test_compile_takes_it_whole(package: ModuleType, page: int | None) -> None:
    names = list(packed(page=page))

    def layer(*given: Any) -> Any:
        asked = dict(zip(names, given, strict=True))
        asked["q"] = asked["q"] * 2
        out, lse = package.fmha_lse(**asked, causal=True, max_seqlen_q=70)
        return out + 1, lse * 2

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for queries in ((33, 0, 1, 60), (5, 9, 0, 2)):
        given = packed(queries, page=page, spare=0).values()
        for found, right in zip(compiled(*given), layer(*given), strict=True):
            torch.testing.assert_close(found, right)


@pytest.mark.parametrize("page", [None, 16])
def test_a_trace_refuses_what_no_kernel_takes(
    package: ModuleType, page: int | None
) -> None:
    given = packed(page=page)
    asked: dict[str, Any] = CAUSAL | {"window": (3, 0)}
    with pytest.raises(ValueError) as real:
        package.fmha(**given, **asked)
    with FakeTensorMode() as mode, pytest.raises(ValueError) as fake:
        faked = {name: mode.from_tensor(x) for name, x in given.items()}
        package.fmha(**faked, **asked)
    assert str(fake.value) == str(real.value)


def test_export_of_dynamic_sizes(package: ModuleType) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, starts: Any, ends: Any) -> Any:
            return package.fmha(
                q, k, v, cu_seqlens_q=starts, cu_seqlens_k=ends, causal=True
            )

    rows, keys = torch.export.Dim("rows"), torch.export.Dim("keys")
    sizes = ({0: rows}, {0: keys}, {0: keys}, None, None)
    order = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    first, second = (packed(n, spare=0) for n in ((33, 0, 1, 60), (5, 9, 0, 2)))
    exported = torch.export.export(
        Layer(), tuple(first[name] for name in order), dynamic_shapes=sizes
    )
    found = exported.module()(*(second[name] for name in order))
    assert torch.equal(found, package.fmha(**second, causal=True))


def test_the_nearest_are_told_the_layout(package: ModuleType) -> None:
    with pytest.raises(ValueError) as error:
        package.select(**packed(page=16, heads=6), causal=True)
    assert str(error.value).startswith(
        "no kernel takes arch sm90, dtype bf16, head_dim_qk 64, head_dim_v 64, q_per_kv 3,"
        " batch varlen, page 16, mask causal; nearest:\n  paged16: q_per_kv is 2, not 3\n"
    )
    kernel = package.select(**packed(page=16), causal=True, lse=True)
    assert kernel.SPEC["name"] == "paged16_lse"


SHIPPED = {
    "sm90_d128_bf16_causal_gqa4_varlen": (None, CAUSAL),
    "sm90_d128_bf16_causal_gqa4_page16_varlen_lse": (16, CAUSAL | {"return_lse": True}),
    "sm90_d128_bf16_causal_gqa4_page128_varlen": (128, CAUSAL),
    "sm90_d128_bf16_causal_gqa4_pack_page16_varlen_t64x128": (
        16,
        CAUSAL | {"max_seqlen_q": 60},
    ),
}


def test_shipped_kernels_are_called_by_their_own_names(tmp_path: Path) -> None:
    package, calls = imported(tmp_path, tuple(SHIPPED))
    for name, (page, asked) in SHIPPED.items():
        given = packed(page=page, heads=8, head_dim=128, spare=0)
        found = package.fmha(**given, **asked)
        out = found[0] if "return_lse" in asked else found
        assert calls.pop() == name
        torch.testing.assert_close(
            out.double(), expected(given, causal=True)[0], atol=1e-2, rtol=1e-2
        )

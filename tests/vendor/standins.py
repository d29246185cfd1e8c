# SPDX-License-Identifier: Apache-2.0
"""Vendored packages whose kernels are PyTorch's own operations: what the tests here call.

A kernel's `fmha` is replaced by one that computes what its SPEC says, sequence by sequence, and
asserts to be called as the kernel is; all else is as shipped. Of a backward kernel the compiled
function is replaced, and nothing else.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fmha_gen.build import manifest, render
from fmha_gen.vendoring import command
from support import GENERATED

torch = pytest.importorskip("torch", reason="the package's operators need PyTorch")

SM_COUNT = 132
DESCALES = ("q_descale", "k_descale", "v_descale")
OF_ARGUMENTS = {"bf16": "BFloat16", "fp16": "Float16", "e4m3": "Uint8"}
_names = (f"attention{number}" for number in itertools.count())


def numbers(x: Any, factors: Any = None) -> Any:
    """[rows, heads, head_dim] in float64, uint8 as e4m3, those of a KV head times its factor."""
    x = (x.view(torch.float8_e4m3fn) if x.dtype is torch.uint8 else x).double()
    if factors is None:
        return x
    return x * factors.double().repeat_interleave(x.shape[1] // len(factors))[:, None]


def attention(
    spec: dict[str, Any], q: Any, k: Any, v: Any, scale: float, window: Any, sink: Any
) -> tuple[Any, Any]:
    """One sequence of what a SPEC says: out, [queries, heads, head_dim], and lse, in float32."""
    k, v = (x.repeat_interleave(spec["q_per_kv"], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if "softcap" in spec:
        scores = torch.tanh(scores / spec["softcap"]) * spec["softcap"]
    queries, keys = scores.shape[1:]
    place = torch.arange(queries)[:, None] + keys - queries
    ahead = torch.arange(keys) - place
    seen = (ahead <= 0) | (spec["mask"] != "causal")
    seen = seen & (ahead >= -window[0]) & (ahead <= window[1])
    scores = scores.masked_fill(~seen, -math.inf)
    if sink is not None:
        column = sink[:, None, None].expand(-1, queries, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., :keys]  # a row may see no key
    return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(-1)


def sequences(
    k: Any, v: Any, cu_seqlens_k: Any, seqused_k: Any, block_table: Any
) -> Any:
    """The keys and values of each packed sequence."""
    if block_table is None:
        ends = cu_seqlens_k.tolist()
        return [(k[a:b], v[a:b]) for a, b in itertools.pairwise(ends)]
    found = []
    for used, table in zip(seqused_k.tolist(), block_table, strict=True):
        pages = table[: -(-used // k.shape[1])].long()
        found.append(tuple(x[pages].flatten(0, 1)[:used] for x in (k, v)))
    return found


def reference(spec: dict[str, Any], calls: list[str], shipped: Any = None) -> Any:
    """Attention in PyTorch for what a SPEC says, called as a kernel is; shipped: the kernel's."""
    window = {"left": "none", "right": "none", **spec.get("window", {})}

    def fmha(
        q: Any,
        k: Any,
        v: Any,
        *,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        seqused_k: Any = None,
        block_table: Any = None,
        softmax_scale: Any = None,
        out: Any,
        lse: Any = None,
        sink: Any = None,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
        **sides: Any,
    ) -> Any:
        assert not any(x.requires_grad for x in (q, k, v, out))
        descales = (q_descale, k_descale, v_descale)
        calls.append(spec["name"])
        if shipped is not None:
            names = (
                "cu_seqlens_q",
                "cu_seqlens_k",
                "seqused_k",
                "block_table",
                "lse",
                "sink",
                *DESCALES,
            )
            tensors = (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, lse, sink)
            tensors += descales
            given = {
                name: x for name, x in zip(names, tensors, strict=True) if x is not None
            }
            inspect.signature(shipped).bind(q, k, v, out=out, **given, **sides)
        assert (sink is not None) == spec.get("sink", False)
        assert sink is None or (not sink.requires_grad and sink.dtype == torch.float32)
        for factors in descales:
            assert (factors is not None) == (spec.get("descale") == "head")
            assert factors is None or not factors.requires_grad
        assert out.dtype == getattr(
            torch, OF_ARGUMENTS[spec.get("out_dtype", spec["dtype"])].lower()
        )
        assert (lse is not None) <= spec["lse"]
        assert (cu_seqlens_q is not None) == (spec.get("batch") == "varlen")
        assert (block_table is not None) == ("kv" in spec)
        assert (cu_seqlens_k is None) == (
            cu_seqlens_q is None or block_table is not None
        )
        asked = {f"window_{side}" for side, n in window.items() if n == "argument"}
        assert set(sides) == asked
        keys = [sides.get(f"window_{side}", n) for side, n in window.items()]
        keys = [math.inf if n == "none" else n for n in keys]
        more = (softmax_scale or 1 / math.sqrt(q.shape[-1]), keys, sink)
        if cu_seqlens_q is None:
            places = [(i, q[i], (k[i], v[i])) for i in range(q.shape[0])]
        else:
            begins = cu_seqlens_q.tolist()
            places = [
                (slice(a, b), q[a:b], kv)
                for a, b, kv in zip(
                    begins,
                    begins[1:],
                    sequences(k, v, cu_seqlens_k, seqused_k, block_table),
                    strict=False,
                )
            ]
        for i, (place, rows, kv) in enumerate(places):
            factors = [x if x is None else x[i] for x in descales]
            given = [x.float() for x in map(numbers, (rows, *kv), factors)]
            found, logs = attention(spec, *given, *more)
            out[place] = found.to(out.dtype)
            if lse is not None:
                lse[(slice(None), place) if lse.ndim == 2 else place] = logs
        return out

    return fmha


def arguments_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """As `arguments` of a kernel for what its SPEC says: names are sizes of one symbol."""

    def told(*shape: int | str, dtype: str = "Int32", align: int = 4) -> Any:
        return SimpleNamespace(shape=shape, element_type=dtype, _assumed_align=align)

    qk, v = spec["head_dim"].values()
    packed = spec.get("batch") == "varlen"
    page = spec["kv"]["paged"]["page"] if "kv" in spec else None
    rows, keys = (("rows",), ("keys",)) if packed else (("b", "rows"), ("b", "keys"))
    keys = ("pages", page) if page else keys
    kind = {"dtype": OF_ARGUMENTS[spec["dtype"]]}
    of_out = {"dtype": OF_ARGUMENTS[spec.get("out_dtype", spec["dtype"])]}
    found = {
        "q": told(*rows, "heads", qk, **kind, align=16),
        "k": told(*keys, "kv_heads", qk, **kind, align=16),
        "v": told(*keys, "kv_heads", v, **kind, align=16),
    }
    if packed:
        found["cu_seqlens_q"] = told("starts")
    if page:
        found |= {"seqused_k": told("b"), "block_table": told("b", "blocks")}
    elif packed:
        found["cu_seqlens_k"] = told("starts")
    if spec.get("sink"):
        found["sink"] = told("heads", dtype="Float32")
    if spec.get("descale") == "head":
        found |= {name: told("b", "kv_heads", dtype="Float32") for name in DESCALES}
    found["out"] = told(*rows, "heads", v, **of_out, align=16)
    if spec["lse"]:
        found["lse"] = told(*rows[:-1], "heads", "rows", dtype="Float32")
    return found


def compiled(kernel: ModuleType) -> Any:
    """In the place of a compiled function: compares what that compares, and calls `fmha`."""
    described = kernel.arguments()
    windows = kernel.SPEC.get("window", {})
    sides = [f"window_{side}" for side, n in windows.items() if n == "argument"]

    def function(*given: Any) -> None:
        tensors = dict(zip(described, given, strict=False))
        *numbers, sm_count = given[len(described) :]
        assert sm_count == SM_COUNT and type(numbers[0]) is float
        compare(tensors, described)
        asked = dict(zip(["softmax_scale", *sides], numbers, strict=True))
        kernel.fmha(**{name: x.detach() for name, x in tensors.items()}, **asked)

    return function


def compare(tensors: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    """Raises as TVM-FFI does where a tensor is not as a kernel's `arguments` describe it."""
    sizes: dict[Any, int] = {}

    def same(size: Any, n: int) -> bool:
        """By name, or which symbol of the DSL it is: its symbols are all equal."""
        name = size if isinstance(size, str) else id(size)
        return bool(n == (size if type(size) is int else sizes.setdefault(name, n)))

    for number, (name, x) in enumerate(tensors.items()):
        told = described[name]
        if not (
            x.device == tensors["q"].device
            and x.dtype == getattr(torch, str(told.element_type).lower())
            and x.ndim == len(told.shape)
            and all(map(same, told.shape, x.shape))
            and x.data_ptr() % told._assumed_align == 0
        ):
            raise ValueError(f"Mismatched Tensor on argument #{number}")


def backward(kernel: ModuleType, calls: list[str]) -> Any:
    """In the place of a backward kernel's compiled function: compares what that compares, and
    computes from what the forward pass gave, in float64.
    """
    described = kernel.arguments()

    def function(*given: Any) -> None:
        *tensors, scale, sm_count = given
        assert sm_count == SM_COUNT and type(scale) is float
        by_name = dict(zip(described, tensors, strict=True))
        for number, x in enumerate(tensors):
            if x.ndim == 4 and (
                x.stride(-1) != 1 or any(n % 8 for n in x.stride()[:3])
            ):
                raise ValueError(f"Mismatched strides on argument #{number}")
        compare(by_name, described)
        calls.append(kernel.SPEC["name"])
        dout, q, k, v, out = (x.double().transpose(1, 2) for x in tensors[:5])
        group = kernel.SPEC["q_per_kv"]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
        seen = ahead <= k.shape[2] - q.shape[2]
        scores = q @ k.mT * scale
        if kernel.SPEC["mask"] == "causal":
            scores = scores.masked_fill(~seen, -math.inf)
        weights = (scores - by_name["lse"].double()[..., None]).exp().nan_to_num(0.0)
        of_scores = dout @ v.mT - (dout * out).sum(-1, keepdim=True)
        of_scores = weights * of_scores * scale
        found = {"dq": of_scores @ k, "dk": of_scores.mT @ q, "dv": weights.mT @ dout}
        for name, x in found.items():
            if name != "dq":
                x = x.unflatten(1, (-1, group)).sum(2)
            by_name[name].copy_(x.transpose(1, 2))

    return function


def imported(
    folder: Path,
    stems: tuple[str, ...],
    adapters: tuple[str, ...] = (),
    source: Path = GENERATED,
    stand_in: bool = True,
) -> tuple[ModuleType, list[str]]:
    """Vendor and import a package; the names of the kernels that it then calls.

    stand_in: kernels are PyTorch's own operations.
    """
    name = next(_names)
    command.vendor(command.Options(folder / name, source, stems, True, adapters))
    sys.path.insert(0, str(folder))
    try:
        package = importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
    calls: list[str] = []
    for kernel in map(package.load, package.KERNELS if stand_in else ()):
        shipped = kernel.fmha if source == GENERATED else None
        kernel.fmha = reference(kernel.SPEC, calls, shipped)
        if shipped is None:
            kernel.arguments = functools.partial(arguments_of, kernel.SPEC)
        kernel.compile = functools.partial(compiled, kernel)
        kernel.sm_count = lambda _device: SM_COUNT
    for kernel in map(package.load, package.BACKWARD if stand_in else ()):
        kernel.compile = functools.partial(backward, kernel, calls)
        kernel.sm_count = lambda _device: SM_COUNT
    if stand_in:
        package.current_device = lambda: -1  # of tensors on the CPU
    package.arch_of = lambda device: "sm90"
    return package, calls


def source_of(folder: Path, specs: Mapping[str, Mapping[str, Any]]) -> Path:
    """A folder as a build leaves it, of kernels that say these fields in their SPEC.

    All are texts of one packed kernel otherwise: they are never compiled.
    """
    base = (GENERATED / "sm90_d64_bf16_full_varlen.py").read_text()
    before, rest = base.split("\nSPEC = {", 1)
    after = rest.split("\n}\n", 1)[1]
    common: dict[str, Any] = {}
    exec("SPEC = {" + rest.split("\n}\n", 1)[0] + "}", common)
    texts = {}
    for name, fields in specs.items():
        spec = common["SPEC"] | dict(fields) | {"name": name}
        texts[name] = f"{before}\nSPEC = {spec!r}\n{after}"
    return source_of_texts(folder, texts)


def source_of_texts(folder: Path, texts: Mapping[str, str]) -> Path:
    """A folder as a build leaves it, of kernels with these texts, whose digests are made theirs."""
    folder.mkdir()
    entries = {}
    for name, text in texts.items():
        body, stated = render.body_digest(text), render.stated_digests(text)
        assert stated is not None
        (folder / f"{name}.py").write_text(text.replace(stated.body, body))
        entries[f"{name}.py"] = manifest.Entry("0" * 64, body, "0" * 64)
    tools = manifest.parse((GENERATED / manifest.FILE).read_text()).tools
    (folder / manifest.FILE).write_text(
        manifest.dump(manifest.Manifest(tools, entries))
    )
    return folder


def tensors(
    queries: int = 48,
    keys: int = 80,
    *,
    heads: int = 2,
    kv_heads: int = 2,
    qk: int = 128,
    v: int = 128,
    dtype: Any = torch.bfloat16,
) -> tuple[Any, Any, Any]:
    make = functools.partial(torch.randn, generator=torch.Generator().manual_seed(1))
    shapes = (queries, heads, qk), (keys, kv_heads, qk), (keys, kv_heads, v)
    return tuple(make(2, *shape).to(dtype) for shape in shapes)  # type: ignore[return-value]


def strided(tensor: Any) -> Any:
    """The same tensor, in memory [batch, heads, seqlen, head_dim]."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def packed(
    queries: tuple[int, ...] = (33, 0, 1, 60),
    keys: tuple[int, ...] = (40, 9, 70, 0),
    *,
    page: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    spare: int = 5,
    dtype: Any = torch.bfloat16,
) -> dict[str, Any]:
    """The tensors of a call with packed sequences, or with K and V in pages.

    spare: rows of q behind the last sequence. What no sequence may read is NaN, a page of it among
    the paged; the table's entries behind the last page of a sequence are no pages.
    """
    generator = torch.Generator().manual_seed(1)

    def make(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(dtype)

    def starts(lengths: tuple[int, ...]) -> Any:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)

    q = make(sum(queries) + spare, heads, head_dim)
    q[sum(queries) :] = math.nan
    given = {"q": q, "cu_seqlens_q": starts(queries)}
    shape = kv_heads, head_dim
    if page is None:
        k, v = make(sum(keys), *shape), make(sum(keys), *shape)
        return given | {"k": k, "v": v, "cu_seqlens_k": starts(keys)}
    blocks = max(-(-n // page) for n in keys) + 1
    table = torch.full((len(keys), blocks), -7, dtype=torch.int32)
    pool = 1 + sum(-(-n // page) for n in keys)
    order = torch.randperm(pool, generator=generator).tolist()
    rows = torch.full((2, pool, page, *shape), math.nan, dtype=dtype)
    for i, length in enumerate(keys):
        for block in range(-(-length // page)):
            table[i, block] = number = order.pop()
            filled = min(page, length - block * page)
            rows[:, number, :filled] = make(2, filled, *shape)
    used = torch.tensor(keys, dtype=torch.int32)
    return given | {
        "k": rows[0],
        "v": rows[1],
        "seqused_k": used,
        "block_table": table,
    }


def arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """As `fmha` takes them: factors in one argument."""
    asked = {name: x for name, x in given.items() if name not in DESCALES}
    if asked.keys() != given.keys():
        asked["descales"] = tuple(given.get(name) for name in DESCALES)
    return asked


def expected(
    given: Mapping[str, Any],
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    scale: float | None = None,
    sink: Any = None,
) -> tuple[Any, Any]:
    """out and lse in float64, sequence by sequence from the definition; NaN where nothing is
    written. Factors of e4m3 are among the given.
    """
    q, starts = given["q"], given["cu_seqlens_q"].tolist()
    out = torch.full((*q.shape[:2], given["v"].shape[-1]), math.nan).double()
    lse = torch.full((q.shape[1], q.shape[0]), math.nan).double()
    for i, (begin, end) in enumerate(itertools.pairwise(starts)):
        if "cu_seqlens_k" in given:
            ends = given["cu_seqlens_k"].tolist()
            k, v = (given[name][ends[i] : ends[i + 1]] for name in "kv")
        else:
            page, used = given["k"].shape[1], int(given["seqused_k"][i])
            places = [
                (int(given["block_table"][i, j // page]), j % page) for j in range(used)
            ]
            k, v = (
                (
                    torch.stack([given[name][at] for at in places])
                    if places
                    else given[name][0, :0]
                )
                for name in "kv"
            )
        group = q.shape[1] // k.shape[1]
        factors = [given[name][i] if name in given else None for name in DESCALES]
        rows, k, v = map(numbers, (q[begin:end], k, v), factors)
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", rows, k)
        scores = scores * (scale or q.shape[2] ** -0.5)
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        for row in range(end - begin):
            place = row + k.shape[0] - (end - begin)
            for key in range(k.shape[0]):
                hidden = causal and key > place
                hidden = hidden or 0 <= window[0] < place - key
                if hidden or 0 <= window[1] < key - place:
                    scores[:, row, key] = -math.inf
        total = scores.exp().sum(-1)
        if sink is not None:
            total = total + sink.double().exp()[:, None]
        weights = scores.exp() / total[..., None]
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights.nan_to_num(0.0), v)
        lse[:, begin:end] = total.log()
    return out, lse

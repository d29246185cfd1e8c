# SPDX-License-Identifier: Apache-2.0
"""The files of a vendored folder that are not copies: README, package, licence."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..build import records, render
from ..diff.kernels import KernelState
from ..errors import CheckFailed, EnvironmentProblem
from ..evidence import table
from ..ops import scores
from ..ops.backward import BACKWARD, DQ_SUMS, is_backward, sums_in_fp16
from ..ops.e4m3 import OWN_FIELDS, is_permuted
from ..ops.forward import FORWARD
from ..ops.masks import word_of
from .source import Source

README = "README.md"
LICENSE = "LICENSE"
PACKAGE = "__init__.py"

EDITED = "edited here"  # in place of a rung: the evidence is about another text
TITLES = ("kernel", "made for", "rung", "GPU", "driver", "DSL", "error over its bound")

# By the name of what they are for: files of the package that fit it to somebody's interface.
ADAPTERS = {
    name: f"{name}_adapter.py"
    for name in ("flash_attention", "pytorch", "sglang", "transformers", "vllm")
}
FUNCTIONS = {  # of adapters that stand in for somebody's functions
    "flash_attention": "FlashAttention's functions",
    "vllm": "the functions that vLLM's FlashAttention backend calls",
    "sglang": "the functions that SGLang's FlashAttention backend calls",
}
CODE = frozenset({PACKAGE, *ADAPTERS.values()})  # Python that is no kernel

# What the package's `Problem` says by default: it stands for "nothing of the kind".
_OFF: Mapping[str, str | int | bool] = {
    "q_per_kv": 1,
    "batch": "dense",
    "seqlen_q": "dynamic",
    "seqlen_kv": "dynamic",
    **dict.fromkeys(("page", "mask", "window_left", "window_right", "softcap"), "none"),
    **dict.fromkeys(("sink", "lse", "pack_gqa"), False),
    "out_dtype": "as q",
    "v_layout": "rows",
    "descale": "none",
    "exp": "exact",
    "deterministic": False,
    DQ_SUMS: "fp32",
}
# Of a `Problem`, what a forward kernel and one for its gradients have to agree in.
_OF_PAIRS = (
    *("arch", "dtype", "head_dim_qk", "head_dim_v", "q_per_kv", "batch", "page"),
    *(
        "seqlen_q",
        "seqlen_kv",
        "mask",
        "window_left",
        "window_right",
        "softcap",
        "sink",
    ),
)
_ANY = ("dynamic", "argument")
_EDITED = (CheckFailed, LookupError, TypeError, ValueError)  # by hand, in the SPEC
_DISTRIBUTION = "fmha-gen"
_WORDS = re.compile(r"(\D*)(\d*)")


def readme(
    source: Source,
    commit: str,
    kernels: Sequence[tuple[KernelState, bool]],
    package: str | None,
    adapters: Sequence[str],
) -> str:
    """The folder's README. kernels: each with whether it was edited; package: name to import."""
    rows = [TITLES, *(_row(state, edited) for state, edited in kernels)]
    values = {
        "version": source.version,
        "commit": commit,
        "dsl": source.dsl,
        "table": table.markdown(rows),
        "package": package,
        "example": _example([state for state, _ in kernels]),
        "backward": any(map(_is_backward, (state for state, _ in kernels))),
        "adapters": adapters,
        "functions": FUNCTIONS,
    }
    return render.render_template("vendor/readme.md.j2", values)


def package(kernels: Sequence[KernelState]) -> str:
    """The text of `__init__.py`, which chooses among the kernels."""
    values: dict[str, list[tuple[str, list[str]]]] = {"kernels": [], "backward": []}
    for state in kernels:
        if fields := _problem(state):
            table = "backward" if _is_backward(state) else "kernels"
            values[table].append((state.stem, _arguments(fields)))
    return render.format_source(render.render_template("vendor/init.py.j2", values))


def adapter(name: str, package: str) -> str:
    """The text of one of ADAPTERS for a package of this name."""
    text = render.render_template(f"vendor/{ADAPTERS[name]}.j2", {"package": package})
    return render.format_source(text)


def gives_lse(state: KernelState) -> bool:
    """Whether a kernel, of a text of any kind, gives an LSE."""
    return bool((_problem(state) or {}).get("lse"))


def unpaired(kernels: Sequence[KernelState]) -> list[str]:
    """The backward kernels to which no forward kernel gives an O and an LSE, by stem."""
    forward = [_problem(state) for state in kernels if gives_lse(state)]
    known = [(state.stem, _problem(state)) for state in kernels if _is_backward(state)]
    return [
        stem
        for stem, made in known
        if made and not any(_are_a_pair(made, other) for other in forward if other)
    ]


def licence() -> str:
    """The text of our licence, from the installed package or the checkout."""
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    found = [Path(str(file.locate())) for file in files if file.name == LICENSE]
    for path in (*found, Path(__file__).resolve().parents[2] / LICENSE):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise EnvironmentProblem("the licence of fmha-gen is not installed with it")


def naturally(stem: str) -> list[tuple[str, int]]:
    """Sorts d64 before d128, as formatters of imports do."""
    return [(text, int(digits or 0)) for text, digits in _WORDS.findall(stem)]


def made_for(spec: Mapping[str, Any]) -> str:
    """A kernel's SPEC in words."""
    qk, v = spec["head_dim"]["qk"], spec["head_dim"]["v"]
    lengths = {side: spec["seqlen"][side] for side in ("q", "kv")}
    fixed = [f"{side} {n}" for side, n in lengths.items() if n != "dynamic"]
    words = [
        f"{spec['arch']} {spec['dtype']}",
        f"head_dim {qk}" if qk == v else f"head_dim {qk} with {v}",
        "no mask" if (mask := word_of(spec)) == "none" else mask,
        f"seqlen {', '.join(fixed)}" if fixed else "any seqlen",
    ]
    words += ["block lists"] * bool(spec.get("blocks"))
    words += ["packed sequences"] * bool(spec.get("batch"))
    if paged := spec.get("kv", {}).get("paged"):
        words.append(f"K and V in pages of {paged['page']} keys")
    words += filter(None, [scores.word_of(spec)])
    if spec["q_per_kv"] > 1:
        words.append(f"{spec['q_per_kv']} query heads per KV head")
    words += ["V permuted"] * is_permuted(spec)
    words += {"head": ["descales"], "block": ["descales by block"]}.get(
        str(spec.get("descale")), []
    )
    words += [f"{spec.get('exp')} exp"] * (spec.get("exp", "exact") != "exact")
    words += ["sinks"] * bool(spec.get("sink")) + ["lse"] * bool(spec.get("lse"))
    words += ["backward"] * is_backward(spec)
    words += ["deterministic"] * bool(spec.get("deterministic"))
    words += ["dQ summed in fp16"] * sums_in_fp16(spec)
    return ", ".join(words)


def _problem(state: KernelState) -> dict[str, str | int | float | bool] | None:
    """The fields of the package's `Problem` for a kernel that say something; None when its SPEC
    cannot be read.
    """
    try:
        return _made(state.spec)
    except _EDITED:
        return None


def _is_backward(state: KernelState) -> bool:
    """Whether a kernel, of a text of any kind, is of the backward pass."""
    try:
        return is_backward(state.spec)
    except _EDITED:
        return False


def _are_a_pair(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether some problem fits two kernels, by the fields of their `Problem`s."""
    pairs = [[made.get(x, _OFF.get(x)) for made in (one, other)] for x in _OF_PAIRS]
    return all(a == b or a in _ANY or b in _ANY for a, b in pairs)


def _example(kernels: Sequence[KernelState]) -> tuple[str, str, str]:
    """Of a folder without a package: a kernel, its function, and a line that calls it."""
    state = next((x for x in kernels if not _is_backward(x)), kernels[0])
    if _is_backward(state):
        call = "dq, dk, dv = fmha_bwd(dout, q, k, v, out, lse)"
        return state.stem, BACKWARD.function, call
    return state.stem, FORWARD.function, "out = fmha(q, k, v)"


def _arguments(fields: Mapping[str, Any]) -> list[str]:
    """As Python writes them in a call of `Problem`: by name where they may be left out."""
    return [f"{name}={x!r}" if name in _OFF else repr(x) for name, x in fields.items()]


def _made(spec: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    window = spec.get("window", {})
    right = window.get("right", "none")
    mask = word_of({name: spec[name] for name in spec if name != "window"})
    if mask == "none" and right == 0:
        mask = "causal"
    if mask == "causal":
        right = "none"
    elif mask != "none":
        mask = word_of(spec)
    cap = scores.of_spec(spec).cap
    more = [scores.word_of(spec) if cap is None else ""]
    more += ["block lists"] * bool(spec.get("blocks"))
    made = {
        "arch": spec["arch"],
        "dtype": spec["dtype"],
        "head_dim_qk": spec["head_dim"]["qk"],
        "head_dim_v": spec["head_dim"]["v"],
        "q_per_kv": spec["q_per_kv"],
        "batch": spec.get("batch", "dense"),
        "page": spec.get("kv", {}).get("paged", {}).get("page", "none"),
        "seqlen_q": spec["seqlen"]["q"],
        "seqlen_kv": spec["seqlen"]["kv"],
        # A score or lists, which the package's functions do not take, are no mask that they name.
        "mask": ", ".join(filter(None, [mask, *more])),
        "window_left": window.get("left", "none"),
        "window_right": right,
        "softcap": "none" if cap is None else cap,
        "sink": bool(spec.get("sink")),
        "lse": not is_backward(spec) and spec["lse"],
        "pack_gqa": bool(spec.get("pack_gqa")),
        **{name: spec[name] for name in OWN_FIELDS if name in spec},  # of e4m3
        "deterministic": bool(spec.get("deterministic")),
        DQ_SUMS: spec.get(DQ_SUMS, "fp32"),
    }
    return {name: value for name, value in made.items() if value != _OFF.get(name)}


def _words(state: KernelState) -> str:
    """What a kernel, of a text of any kind, is made for."""
    try:
        return made_for(state.spec)
    except _EDITED:
        return table.NOTHING


def _row(state: KernelState, edited: bool) -> tuple[str, ...]:
    name, words = f"[{state.stem}]({state.stem}.py)", _words(state)
    if edited:
        return name, words, EDITED, *[table.NOTHING] * 4
    record = state.record
    ran, proof = records.entry_of(record, "validated"), table.proof_of(record)
    known = proof or record.get("compiled", {})
    return (
        name,
        words,
        record["rung"],
        ", ".join(records.gpus(record, "validated"))
        or (table.NOT_RUN if proof else table.NOTHING),
        ran.get("driver", table.NOTHING),
        known.get("dsl", table.NOTHING),
        table.over_bound(proof.get("worst")),
    )

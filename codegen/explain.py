# SPDX-License-Identifier: Apache-2.0
"""A plan for people: where every number comes from, what it costs, and how far it is proven.

Pure: the same plan and record give the same text, of plain ASCII and at most `WIDTH` columns.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel

from . import records
from .arch import sm90
from .plan import KernelPlan, Number
from .render import body_digest, render_kernel
from .spec import Spec

WIDTH: Final = 100  # [columns]
BAR: Final = 32  # [columns] that stand for all shared memory a CTA can have
SM_REGISTERS: Final = 65536

_INDENT: Final = "  "
_GAP: Final = "  "

# The field of the spec behind each constant that can be given.
_FIELDS: Final[Mapping[str, str]] = {
    "HEAD_DIM_QK": "head_dim.qk",
    "HEAD_DIM_V": "head_dim.v",
    "SEQLEN_Q": "seqlen.q",
    "SEQLEN_KV": "seqlen.kv",
    "Q_PER_KV": "heads.q_per_kv",
    "CLUSTER_SIZE": "cluster",
    "TILE_Q": "tile.q",
    "TILE_KV": "tile.kv",
    "Q_STAGES": "stages.q",
    "K_STAGES": "stages.kv",
    "V_STAGES": "stages.v",
}


def render(plan: KernelPlan, record: records.Record | None) -> str:
    """Explain one kernel; `record` is what its records file says, None when there is none."""
    sections = (
        _section(plan.stem, _wrapped(f"{plan.context['title']}.")),
        _section("Spec", _table(_spec_rows(plan))),
        _section("Numbers", _table(_number_rows(plan))),
        _section("Shared memory of a CTA", _shared_memory(plan)),
        _section("Registers", _registers(plan)),
        _section("Pipelines and barriers", _table(_barrier_rows(plan))),
        _section("Masks and loops", _bullets(masks_and_loops(plan))),
        _section("Evidence", _table(_evidence_rows(plan, record))),
    )
    return "\n\n".join(sections)


def fields(spec: BaseModel) -> Iterator[tuple[str, Any, bool]]:
    """Yield every field of a spec: its dotted name, its value, and whether the file gives it."""
    for name in type(spec).model_fields:
        value, given = getattr(spec, name), name in spec.model_fields_set
        if isinstance(value, BaseModel):
            for inner, inner_value, inner_given in fields(value):
                yield f"{name}.{inner}", inner_value, given and inner_given
        else:
            yield name, value, given


def masks_and_loops(plan: KernelPlan) -> Iterator[str]:
    """Yield what the kernel does for its shapes, a statement each; what it leaves out is named."""
    has = plan.context
    spec = plan.spec_file.spec
    yield from _tile_statements(plan)
    if has["causal"]:
        query = "position" if has["pack_gqa"] else "row"
        yield f"Query {query} i sees key j when j <= i + seqlen_kv - seqlen_q."
    yield from _block_statements(has)
    if has["hidden_rows"]:
        yield "A row may have seen no key so far: a maximum of -inf is replaced before it is used."
    if has["empty_rows"]:
        lse = " and its LSE -inf" if spec.lse else ""
        yield f"A row may see no key at all: its O is 0{lse}."
    elif has["causal"]:
        yield "Every row sees a key, because seqlen_kv >= seqlen_q: no code for empty rows."
    yield _output_statement(has)
    if spec.lse:
        tail = (
            "for rows before the end only" if has["lse_predicate"] else "unpredicated"
        )
        yield f"LSE is stored by one thread in four, {tail}."


def _output_statement(has: Mapping[str, Any]) -> str:
    if has["cross_tile"]:
        return "O goes through the stage that its Q had; TMA drops rows past the end."
    tail = "rows before the end only" if has["lse_predicate"] else "unpredicated"
    return f"O is stored from registers, 16 bytes a thread, {tail}."


def _tile_statements(plan: KernelPlan) -> Iterator[str]:
    has = plan.context
    owner = "cluster" if has["cluster_size"] > 1 else "CTA"
    head = "KV head" if has["pack_gqa"] else "head"
    order = (
        "those with most keys first, odd waves backwards"
        if has["causal"]
        else f"query tiles of one {head} side by side"
    )
    yield f"Persistent: each {owner} takes a tile per wave, {order}."
    if has["causal"]:
        of = "pairs of heads" if has["cluster_heads"] > 1 else f"{head}s"
        yield f"A section of SM count // SMS_PER_HEAD {of} is done before the next one starts."
    if has["pack_gqa"]:
        yield "Rows of a query tile are (position, head of the group), heads fastest."
    if has["cluster_size"] > 1:
        along = (
            f"{has['cluster_q']} query tiles of one {head}"
            if has["cluster_q"] > 1
            else f"{has['cluster_heads']} query heads of one KV head"
        )
        shared = [name for name in "KV" if has[f"multicast_{name.lower()}"]]
        loads = (
            f"each loads its slice of {' and '.join(shared)} for all"
            if shared
            else "each loads for itself"
        )
        yield f"A cluster has {along}; {loads}."
    if has["cross_tile"]:
        yield "Two Q stages: QK of the next tile's first block overlaps PV of this tile's last."
    else:
        yield "One Q stage: the next tile's Q is loaded once this tile's last QK is done."
    if has["order_barrier"]:
        yield "Warpgroups take turns at the tensor cores: the others' softmax runs meanwhile."


def _block_statements(has: Mapping[str, Any]) -> Iterator[str]:
    if has["dynamic_blocks"]:
        per = "query tile" if has["causal"] else "launch"
        per = "warpgroup" if has["strips"] else per
        yield f"KV blocks, last first; how many is counted at run time, per {per}."
        if has["strips"]:
            yield "A warpgroup skips the blocks that only rows of later warpgroups see."
    else:
        yield "KV blocks, last first; KV_BLOCKS of them for every query tile."
    crossings = [
        *(["the diagonal"] if has["causal"] else []),
        *(["the end of K"] if has["kv_tail"] else []),
    ]
    if not crossings:
        yield "No mask at all: seqlen_kv is a multiple of TILE_KV. One loop over the blocks."
        return
    if not has["kv_tail"]:
        yield "No mask for the end of K: seqlen_kv is a multiple of TILE_KV."
    what = " and ".join(crossings)
    if has["masked_loop"]:
        yield f"The first block is masked for {what}."
        rows = "row of the warpgroup" if has["strips"] else "row"
        yield f"Loop 1, masked the same way: further blocks that not every {rows} sees whole."
        yield f"Loop 2, without masks: blocks that every {rows} sees whole."
    else:
        yield f"The first block is masked for {what}; one loop without masks takes the others."


def _spec_rows(plan: KernelPlan) -> Iterator[tuple[str, ...]]:
    for name, value, given in fields(plan.spec_file.spec):
        if value is None:
            yield name, "-", "default: planned, see the numbers"
        else:
            yield name, _plain(value), "given" if given else "default"


def _number_rows(plan: KernelPlan) -> Iterator[tuple[str, ...]]:
    numbers = (*plan.chosen, *plan.derived)
    width = max(len(str(number.value)) for number in numbers)
    for number in numbers:
        yield (
            number.name,
            f"{number.value:>{width}}",
            f"[{number.unit}]",
            _origin(number, plan.spec_file.spec),
        )


def _origin(number: Number, spec: Spec) -> str:
    if number.origin == "derived":
        return f"derived ({number.formula})"
    if number.origin == "planned":
        return f"planned ({number.reason})"
    field = _FIELDS[number.name]
    if field == "stages.v" and spec.stages.v is None:
        field = "stages.kv"  # it sets both
    return f"{number.origin} ({field})"


def _shared_memory(plan: KernelPlan) -> list[str]:
    rows = [("offset", "bytes", "region", "", "")]
    offset = 0
    for region in plan.smem:
        rows.append(
            (
                f"{offset:>6}",
                f"{region.nbytes:>6}",
                region.name,
                _bar(offset, region.nbytes),
                region.formula,
            )
        )
        offset += region.nbytes
    parts = " + ".join(str(region.nbytes) for region in plan.smem)
    left = sm90.SMEM_BYTES - plan.smem_bytes
    total = f"{parts} = {plan.smem_bytes} of {sm90.SMEM_BYTES}, {left} left"
    return [*_table(rows), *_wrapped(total)]


def _bar(offset: int, nbytes: int) -> str:
    """Where a region lies in all that a CTA can have; a region of any size shows."""
    start = offset * BAR // sm90.SMEM_BYTES
    end = (offset + nbytes) * BAR // sm90.SMEM_BYTES
    marks = "#" * (max(end, start + 1) - start if nbytes else 0)
    return f"|{'.' * start}{marks}".ljust(BAR + 1, ".") + "|"


def _registers(plan: KernelPlan) -> list[str]:
    parts = " + ".join(f"{name} {n}" for name, n in plan.register_parts.items())
    producer, consumer = plan.registers
    warpgroups = _by_name(plan)["WARPGROUPS"]
    all_of_them = sm90.WARPGROUP_ROWS * 2 * (producer + warpgroups * consumer)
    return [
        *_wrapped(
            f"consumer thread: {parts} = {plan.registers_needed} of {consumer}, an estimate"
        ),
        *_wrapped(
            f"CTA: 128 * ({producer} + {warpgroups} * {consumer}) = {all_of_them} of {SM_REGISTERS}"
        ),
    ]


def _barrier_rows(plan: KernelPlan) -> Iterator[tuple[str, ...]]:
    yield "barrier", "stages", "arrivals", "who waits"
    for barrier in plan.barriers:
        yield barrier.name, f"{barrier.stages:>6}", barrier.arrivals, barrier.waiter


def _evidence_rows(
    plan: KernelPlan, record: records.Record | None
) -> Iterator[tuple[str, ...]]:
    if record is None:
        yield "rung", "rendered (no record)"
        return
    body = body_digest(render_kernel(plan))
    stale = records.staleness(record, kernel=plan.stem, body_sha256=body)
    current = records.current(record, kernel=plan.stem, body_sha256=body)
    yield "rung", f"{current['rung']} (stale: {stale})" if stale else current["rung"]
    for rung in records.RUNGS:
        if rung in current:
            said = _SAYS.get(rung)
            what = said(current[rung]) if said else f"see {records.path_of(plan.stem)}"
            yield rung, what


def _compiled(evidence: Mapping[str, Any]) -> str:
    counts = evidence["instructions"]
    limits = " and ".join(map(str, evidence["setmaxnreg"]))
    parts = [
        f"for {evidence['arch']} by CuTe DSL {evidence['dsl']}",
        f"{evidence['registers']} registers at launch, setmaxnreg {limits}",
        f"stack {evidence['stack_bytes']} B, local {evidence['local_bytes']} B",
        f"LDL {counts['LDL']}, STL {counts['STL']}",
        f"HGMMA {counts['HGMMA']}, serialised {evidence['wgmma']['serialised']}",
        f"{counts['total']} instructions",
    ]
    return "; ".join(parts)


def _validated(evidence: Mapping[str, Any]) -> str:
    worst, lse = evidence["worst"], evidence["lse_worst"]
    parts = [
        f"{evidence['cases']} cases on {evidence['gpu']}",
        f"driver {evidence['driver']}, CuTe DSL {evidence['dsl']}",
    ]
    if worst:
        parts.append(
            f"worst error {worst['error']:.3g}, {worst['ratio']:.2f} times the 16-bit"
            f" reference's, in {worst['case']}"
        )
    if lse:
        parts.append(f"LSE off by at most {lse['absolute']:.2g}, in {lse['case']}")
    parts.append(f"up to {evidence['repeats']} launches alike bit for bit")
    parts.append("memcheck clean" if evidence["sanitizer"] else "memcheck not run")
    return "; ".join(parts)


_SAYS: Final[Mapping[str, Callable[[Mapping[str, Any]], str]]] = {
    "compiled": _compiled,
    "validated": _validated,
}


def _by_name(plan: KernelPlan) -> dict[str, int]:
    return {number.name: number.value for number in (*plan.chosen, *plan.derived)}


def _plain(value: object) -> str:
    """A value of a spec, as its file would have it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value)


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([title, *lines])


def _wrapped(text: str, first: str = _INDENT, rest: str = _INDENT) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
    )


def _bullets(statements: Iterable[str]) -> list[str]:
    return [
        line
        for statement in statements
        for line in _wrapped(statement, f"{_INDENT}- ", f"{_INDENT}  ")
    ]


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; the last one is wrapped."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    lines = []
    for *cells, last in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        before = _INDENT + "".join(cell + _GAP for cell in padded)
        lines += _wrapped(last, before, " " * len(before)) or [before.rstrip()]
    return lines

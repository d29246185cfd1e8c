# SPDX-License-Identifier: Apache-2.0
"""A plan for people: where every number comes from, what it costs, and how far it is proven.

Pure: the same plan and record give the same text, of plain ASCII and at most `WIDTH` columns.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel

from ..arch import compiled_as
from ..arch.architecture import Architecture
from ..build import records
from ..build.render import body_digest, render_kernel
from ..features.backward import is_backward
from ..features.feature import Model, in_yaml
from ..ops.forward import LSE
from ..ops.operation import Operation
from ..planning.kernel_plan import WARPGROUP_THREADS, DevicePlan, KernelPlan, Number
from ..planning.protocol import Phase
from . import backward

WIDTH: Final = 100  # [columns]
BAR: Final = 32  # [columns] that stand for all shared memory a CTA can have
SM_REGISTERS: Final = 65536

_INDENT: Final = "  "
_GAP: Final = "  "


def render(plan: KernelPlan, record: records.Record | None) -> str:
    """Explain one kernel; `record` is what its records file says, None when there is none."""
    plan = backward.shown(plan)
    sections = [
        _section(plan.stem, _wrapped(f"{plan.context['title']}.")),
        _section("Spec", _table(spec_rows(plan))),
        _section("Numbers", _table(number_rows(plan))),
        *_launched(plan),
        *(
            s
            for kernel in plan.kernels
            for s in _kernel(plan, kernel, plan.architecture)
        ),
        *_products(plan),
        _section("Masks and loops", _bullets(plan.statements)),
        _section("Evidence", _table(evidence_rows(plan, record, _body(plan, record)))),
    ]
    return "\n\n".join(sections)


def _launched(plan: KernelPlan) -> Iterator[str]:
    """The kernels that a call launches, where these are several."""
    if is_backward(plan.spec_file.spec):
        yield _section("Kernels", _table(backward.kernel_rows(plan)))


def _products(plan: KernelPlan) -> Iterator[str]:
    """Those of a backward kernel, and what they cost."""
    if is_backward(plan.spec_file.spec):
        rows = _table(backward.product_rows(plan))
        yield _section("main: Products of a step, in their order", rows)
        yield _section("Costs", _bullets(backward.cost_lines(plan)))


def _kernel(
    plan: KernelPlan, kernel: DevicePlan, architecture: Architecture
) -> Iterator[str]:
    """The sections about one kernel, without those of what it has not."""
    sections = [
        ("Roles", _table(backward.role_rows(plan, kernel))),
        ("Shared memory of a CTA", _shared_memory(kernel, architecture.smem_bytes)),
        ("Tensor memory of an SM", _tensor_memory(kernel, architecture.tmem_columns)),
        ("Registers", register_lines(kernel)),
        ("Pipelines and barriers", _table(barrier_rows(kernel))),
        *((phase.title, _table(step_rows(phase))) for phase in kernel.phases),
        ("Loads", _table(load_rows(kernel))),
    ]
    for title, lines in sections:
        if lines:
            yield _section(f"{kernel.name}: {title}" if kernel.name else title, lines)


def fields(spec: BaseModel) -> Iterator[tuple[str, Any, bool]]:
    """Yield every field of a spec: its dotted name, its value, and whether the file gives it."""
    for name in type(spec).model_fields:
        value, given = getattr(spec, name), name in spec.model_fields_set
        if isinstance(value, Model) and isinstance(word := value.said(), str):
            yield name, word, given
        elif isinstance(value, BaseModel):
            for inner, inner_value, inner_given in fields(value):
                yield f"{name}.{inner}", inner_value, given and inner_given
        else:
            yield name, value, given


def spec_rows(plan: KernelPlan) -> Iterator[tuple[str, ...]]:
    """Yield (field, value, where it comes from)."""
    for name, value, given in fields(plan.spec_file.spec):
        if value is None:
            yield name, "-", "default: planned, see the numbers"
        else:
            yield name, in_yaml(value), "given" if given else "default"


def number_rows(plan: KernelPlan) -> Iterator[tuple[str, ...]]:
    """Yield (constant, value, [unit], where it comes from)."""
    numbers = (*plan.chosen, *plan.derived)
    width = max(len(str(number.value)) for number in numbers)
    for number in numbers:
        yield (
            number.name,
            f"{number.value:>{width}}",
            f"[{number.unit}]" if number.unit else "",
            _origin(number),
        )


def _origin(number: Number) -> str:
    why = {"derived": number.formula, "planned": number.reason}
    return f"{number.origin} ({why.get(number.origin, number.field)})"


def _shared_memory(kernel: DevicePlan, limit: int) -> list[str]:
    """limit: [bytes]"""
    if not kernel.smem:
        return []
    rows = [("offset", "bytes", "region", "", "")]
    offset = 0
    for region in kernel.smem:
        rows.append(
            (
                f"{offset:>6}",
                f"{region.nbytes:>6}",
                region.name,
                _bar(offset, region.nbytes, limit),
                region.formula,
            )
        )
        offset += region.nbytes
    parts = " + ".join(str(region.nbytes) for region in kernel.smem)
    left = limit - kernel.smem_bytes
    total = f"{parts} = {kernel.smem_bytes} of {limit}, {left} left"
    return [*_table(rows), *_wrapped(total)]


def _tensor_memory(kernel: DevicePlan, limit: int) -> list[str]:
    """limit: [columns]"""
    if not kernel.tmem:
        return []
    rows = [("first", "columns", "part", "", "")]
    for part in kernel.tmem:
        rows.append(
            (
                f"{part.first:>5}",
                f"{part.count:>7}",
                part.name,
                _bar(part.first, part.count, limit),
                part.formula,
            )
        )
    end = max(part.first + part.count for part in kernel.tmem)
    used = f"{end} of {limit} columns of 32 bits, {limit - end} left"
    return [*_table(rows), *_wrapped(used)]


def _bar(start: int, size: int, limit: int) -> str:
    """Where a part lies in all that there is; a part of any size shows."""
    first, end = start * BAR // limit, (start + size) * BAR // limit
    marks = "#" * (max(end, first + 1) - first if size else 0)
    return f"|{'.' * first}{marks}".ljust(BAR + 1, ".") + "|"


def register_lines(kernel: DevicePlan) -> list[str]:
    """What a thread needs, and what all of a CTA have; nothing where no role has a limit."""
    if not kernel.registers:
        return []
    parts = " + ".join(f"{name} {n}" for name, n in kernel.register_parts.items())
    role = kernel.hungriest
    terms = " + ".join(
        (
            f"{each.warpgroups} * {each.per_thread}"
            if each.warpgroups > 1
            else str(each.per_thread)
        )
        for each in kernel.registers
    )
    all_of_them = WARPGROUP_THREADS * sum(
        each.warpgroups * each.per_thread for each in kernel.registers
    )
    return [
        *_wrapped(
            f"{role.role} thread: {parts} = {kernel.registers_needed} of {role.per_thread},"
            " an estimate"
        ),
        *_wrapped(
            f"CTA: {WARPGROUP_THREADS} * ({terms}) = {all_of_them} of {SM_REGISTERS}"
        ),
    ]


def barrier_rows(kernel: DevicePlan) -> Iterator[tuple[str, ...]]:
    """Yield the titles, then (barrier, stages, arrivals, who waits); nothing without barriers."""
    if kernel.barriers:
        yield "barrier", "stages", "arrivals", "who waits"
    for barrier in kernel.barriers:
        yield barrier.name, f"{barrier.stages:>6}", barrier.arrivals, barrier.waiter


def step_rows(phase: Phase) -> Iterator[tuple[str, ...]]:
    """Yield (role, step, what it waits for, then what it signals); the role once."""
    for lane in phase.lanes:
        for number, step in enumerate(lane.steps):
            waits = ", ".join(wait.label for wait in step.waits)
            signals = ", ".join(each.label for each in step.signals)
            said = [f"waits {waits}"] if waits else []
            said += [f"signals {signals}"] if signals else []
            role = "" if number else f"{lane.role}, {lane.warps}"
            yield role, step.text, "; ".join(said)


def load_rows(kernel: DevicePlan) -> Iterator[tuple[str, ...]]:
    """Yield (tensor, bytes, who loads what for whom)."""
    for load in kernel.loads:
        yield load.tensor, f"{load.nbytes:>6} B", load.words


def _body(plan: KernelPlan, record: records.Record | None) -> str:
    """The body digest of the plan's kernel, for which nobody asks where there is no record."""
    return body_digest(render_kernel(plan)) if record is not None else ""


def evidence_rows(
    plan: KernelPlan, record: records.Record | None, body: str
) -> Iterator[tuple[str, ...]]:
    """Yield (rung, what was found); `body` is the digest of the text that it must be about."""
    if record is None:
        yield "rung", "rendered (no record)"
        return
    stale = records.staleness(record, kernel=plan.stem, body_sha256=body)
    current = records.current(record, kernel=plan.stem, body_sha256=body)
    yield "rung", f"{current['rung']} (stale: {stale})" if stale else current["rung"]
    for rung in records.RUNGS:
        if rung in current:
            if rung == "compiled":
                yield from _compiled(current[rung], plan.stem)
            elif rung == "validated":
                for entry in current[rung]:
                    yield rung, _validated(entry, plan)
            else:
                yield rung, f"see {records.path_of(plan.stem)}"


def _compiled(evidence: Mapping[str, Any], stem: str) -> Iterator[tuple[str, str]]:
    """Yield (rung, what was found), of several kernels a row for each."""
    compiler = f"for {evidence['arch']} by CuTe DSL {evidence['dsl']}"
    classes = compiled_as(evidence["arch"]).mma_classes
    for name, kernel in records.kernels(evidence, stem).items():
        counts = kernel["instructions"]
        mma = next((name for name in classes if counts.get(name)), classes[0])
        registers = f"{kernel['registers']} registers at launch"
        if kernel["setmaxnreg"]:
            limits = " and ".join(map(str, kernel["setmaxnreg"]))
            registers += f", setmaxnreg {limits}"
        parts = [
            f"{name} {compiler}" if name else compiler,
            registers,
            f"stack {kernel['stack_bytes']} B, local {kernel['local_bytes']} B",
            f"LDL {counts['LDL']}, STL {counts['STL']}",
            f"{mma} {counts[mma]}, serialised wgmma {kernel['wgmma']['serialised']}",
            f"{counts['total']} instructions",
        ]
        yield "compiled", "; ".join(parts)


def _unordered(plan: KernelPlan) -> list[str]:
    """Outputs whose sums come in any order."""
    operation: Operation = plan.context["operation"]
    return sorted(operation.unordered(plan.context["spec"]))


def _validated(evidence: Mapping[str, Any], plan: KernelPlan) -> str:
    worst, unordered = evidence["worst"], _unordered(plan)
    first, *_ = plan.context["operation"].outputs(plan.context["spec"])
    of_first = f" of {first.name}" if is_backward(plan.spec_file.spec) else ""
    parts = [
        f"{evidence['cases']} cases on {evidence['gpu']}",
        f"driver {evidence['driver']}, CuTe DSL {evidence['dsl']}",
    ]
    if worst and "of_bound" in worst:
        parts.append(
            f"worst error{of_first} {worst['absolute']:.3g}, {worst['of_bound']:.2f} of its"
            f" bound, in {worst['case']}"
        )
    for name, other in records.others(evidence).items():
        of_bound = "" if name == LSE.name else f", {other['of_bound']:.2f} of its bound"
        parts.append(
            f"{name} off by at most {other['absolute']:.2g}{of_bound}, in {other['case']}"
        )
    but = f" but for a last place of {' and '.join(unordered)}" if unordered else ""
    parts.append(f"up to {evidence['repeats']} launches alike bit for bit{but}")
    parts.append("memcheck clean" if evidence["sanitizer"] else "memcheck not run")
    parts.append(
        f"{evidence['misuses']} misuses refused"
        if "misuses" in evidence
        else "misuses not run since the host section changed"
    )
    return "; ".join(parts)


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
    if not rows:
        return []
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    lines = []
    for *cells, last in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        before = _INDENT + "".join(cell + _GAP for cell in padded)
        lines += _wrapped(last, before, " " * len(before)) or [before.rstrip()]
    return lines

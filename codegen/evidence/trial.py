# SPDX-License-Identifier: Apache-2.0
"""One kernel on the GPU: every case, every misuse, in a process that may hang or crash.

``python -m fmha_gen.evidence.trial KERNEL.py EVENTS [--case NAME ... | --memcheck]`` appends one
JSON object per line to EVENTS: ``machine``, ``start`` before a case, ``case`` or ``misuse`` after
one, ``end``, ``device_code``; or only ``environment`` when this machine cannot run the kernel,
``unknown_case`` for a wrong NAME.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from ..arch import ARCHITECTURES
from ..build import device_code
from ..ops import operation_of
from ..ops.cases import (
    DYNAMIC,
    REPEATS,
    Case,
    Tiles,
    cases_for,
    relaunched,
    smallest_ragged,
    tiles_of,
)
from ..ops.compare import Shown, Verdict, nearly_same, outside_touched, same_bits
from ..ops.inputs import Placed, numbers_of, place_tensors, values
from ..ops.operation import Axis, Given, Operation, Tensor, Workspace
from ..ops.reference import Bounded
from ..ops.varlen import is_packed

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "fp32": torch.float32,
    "int32": torch.int32,
}

MISUSE = "misuse"  # the name under which they are replayed

GUARD_BYTE = (
    0xA5  # as 16-bit and 32-bit floats: small normal numbers, neither zero nor NaN
)
DELAY_CYCLES = (
    20_000_000  # about 10 ms: long enough for a launch on a wrong stream to overtake
)


class Device(Protocol):
    """What the checks need of a GPU; tests put a CPU in its place."""

    name: str  # of a torch.device

    def synchronize(self) -> None:
        """Wait for everything launched; raise what went wrong in it."""

    def captured(self, launch: Callable[[], object]) -> Callable[[], object]:
        """Capture the launches into a graph and return its replay."""

    def on_late_stream(self, work: Callable[[], object]) -> None:
        """Run on another stream, behind a delay, and wait."""

    def elsewhere(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor on a device that no kernel reaches."""


class CudaDevice:
    """The current CUDA device."""

    name = "cuda"

    def synchronize(self) -> None:
        """See Device."""
        torch.cuda.synchronize()

    def captured(self, launch: Callable[[], object]) -> Callable[[], object]:
        """See Device."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        replay: Callable[[], object] = graph.replay
        return replay

    def on_late_stream(self, work: Callable[[], object]) -> None:
        """See Device."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES)
            work()
        stream.synchronize()

    def elsewhere(self, x: torch.Tensor) -> torch.Tensor:
        """See Device."""
        return x.cpu()


class Guarded:
    """An output inside a larger tensor, of which the rest holds guard bytes where it is watched."""

    def __init__(self, storage: torch.Tensor, placed: Placed, *, watched: bool) -> None:
        """storage: one-dimensional, all of it."""
        self.name, self.dtype = placed.name, placed.dtype
        self.view = _view(storage, placed)
        self._words = bits(storage) if watched else None
        if watched:
            storage.view(torch.uint8).fill_(GUARD_BYTE)
            self._inside = torch.zeros_like(storage, dtype=torch.bool)
            _view(self._inside, placed).fill_(True)

    def poison(self) -> None:
        """Fill with NaN, so that an element nobody writes is seen."""
        self.view.fill_(math.nan)

    def snapshot(self) -> torch.Tensor:
        """The bits that are there now."""
        return bits(self.view).clone()

    def differs(
        self,
        what: str,
        found: torch.Tensor,
        expected: torch.Tensor,
        right: Bounded | None,
    ) -> str:
        """Finding when bits are not those of a launch before; when numbers are not nearly those, of
        sums without an order, whose bounds are given.
        """
        if right is None:
            return same_bits(self.name, what, found, expected)
        one, other = (x.view(self.view.dtype).double() for x in (found, expected))
        return nearly_same(self.name, what, one, other, self.dtype, right)

    def outside(self) -> str:
        """Finding when a guard was written."""
        if self._words is None:
            return ""
        pattern = int.from_bytes(
            bytes([GUARD_BYTE] * self._words.itemsize), "little", signed=True
        )
        return outside_touched(self.name, self._words, self._inside, pattern)


@dataclass(frozen=True)
class Tensors:
    """A case's inputs by name with the memory that they are views of; outputs and workspaces."""

    inputs: Mapping[str, torch.Tensor]
    given: tuple[torch.Tensor, ...]
    outputs: tuple[Guarded, ...]
    scratch: tuple[Guarded, ...] = ()

    @property
    def into(self) -> dict[str, torch.Tensor]:
        """The outputs and workspaces by name."""
        return {x.name: x.view for x in (*self.outputs, *self.scratch)}


@dataclass
class CaseResult:
    """What one case showed; it passed when there are no findings."""

    case: str
    shown: Shown = field(default_factory=Shown)
    repeats: int = 0
    findings: list[str] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        """As plain data."""
        own = {"repeats": self.repeats, "findings": self.findings}
        return {"case": self.case, **self.shown.told(), **own}


@dataclass(frozen=True)
class Misuse:
    """A call that must end in a ValueError whose text has one of the ``blamed`` argument names."""

    name: str
    call: dict[str, Any]
    blamed: tuple[str, ...]
    errors: tuple[type[Exception], ...] = (ValueError,)


def load_kernel(path: Path) -> ModuleType:
    """Import a generated file under its stem."""
    found = importlib.util.spec_from_file_location(path.stem, path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that NaN equals itself and -0 is not 0."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


# --- inputs and outputs --------------------------------------------------------------


def make_tensors(
    spec: Mapping[str, Any], tiles: Tiles, case: Case, device: str
) -> Tensors:
    """All tensors of a case; memory around the inputs is NaN, the outputs hold nothing yet."""
    layout, operation = place_tensors(spec, case, tiles), operation_of(spec)
    storages: dict[str, torch.Tensor] = {}
    for placed in layout.tensors.values():
        if placed.storage not in storages:
            size, dtype = layout.storages[placed.storage], DTYPES[placed.dtype]
            storages[placed.storage] = torch.empty(size, dtype=dtype, device=device)
            if layout.guarded and dtype.is_floating_point:
                storages[placed.storage].fill_(math.nan)
    inputs = {}
    for name, numbers in values(spec, tiles, case).items():
        inputs[name] = _view(
            storages[layout.tensors[name].storage], layout.tensors[name]
        )
        inputs[name].copy_(torch.from_numpy(numbers))
    read = {layout.tensors[name].storage for name in inputs}

    def guarded(some: Sequence[Tensor | Workspace]) -> tuple[Guarded, ...]:
        placed = [layout.tensors[x.name] for x in some]
        return tuple(
            Guarded(storages[x.storage], x, watched=layout.guarded) for x in placed
        )

    return Tensors(
        inputs,
        # What lies beside inputs that are far apart is not looked at: it is gigabytes.
        given=tuple(
            (storages[name] for name in sorted(read))
            if layout.guarded
            else inputs.values()
        ),
        outputs=guarded(operation.outputs(spec)),
        scratch=guarded(operation.workspaces),
    )


def _view(storage: torch.Tensor, placed: Placed) -> torch.Tensor:
    return storage.as_strided(placed.shape, placed.strides, placed.offset)


@contextlib.contextmanager
def told(kernel: Any, sm_count: int | None) -> Iterator[None]:
    """Within it a kernel believes that the GPU has that many SMs; None: as many as it has."""
    before = kernel.sm_count
    if sm_count is not None:
        kernel.sm_count = lambda _device: sm_count
    try:
        yield
    finally:
        kernel.sm_count = before


# --- one case ------------------------------------------------------------------------


def check_case(
    kernel: Any, case: Case, device: Device, *, first_launch_only: bool = False
) -> CaseResult:
    """Run a case and everything that must hold for it. Raises what the kernel raises."""
    with told(kernel, case.sm_count):
        return _check_case(kernel, case, device, first_launch_only)


def _check_case(
    kernel: Any, case: Case, device: Device, first_launch_only: bool
) -> CaseResult:
    spec = kernel.SPEC
    result = result_of(spec, case)
    tiles = tiles_of(vars_of(kernel))
    tensors = make_tensors(spec, tiles, case, device.name)
    given = [bits(x).clone() for x in tensors.given]
    outputs, operation = tensors.outputs, operation_of(spec)
    leading, *others = (tensors.inputs[x.name] for x in operation.reads if not x.when)
    function = getattr(kernel, operation.function)
    scales = {x.name: x.value(spec) * case.scale_factor for x in operation.scalars}
    options: dict[str, Any] = {} if case.scale_factor == 1 else {**scales}
    numbers = numbers_of(spec, case)
    options |= {
        x.name: tensors.inputs[x.name] for x in operation.inputs(spec) if x.when
    } | numbers

    def launch(source: torch.Tensor = leading) -> object:
        return function(source, *others, **options, **tensors.into)

    def poison() -> None:
        for written in (*outputs, *tensors.scratch):
            written.poison()

    def compare(what: str) -> bool:
        """Whether the outputs still hold the first launch's bits; if not, says so."""
        device.synchronize()
        found = [
            output.differs(what, output.snapshot(), expected, rights.get(output.name))
            for output, expected in zip(outputs, first, strict=True)
        ]
        result.findings += filter(None, found)
        return not any(found)

    def judged() -> tuple[Mapping[str, Verdict], Any]:
        call = Given(spec, {**tensors.inputs, **numbers}, *scales.values())
        written = {x.name: x.view.double() for x in outputs}
        truth = operation.truth(call)
        return operation.judge(call, written, truth, tiles.kv), truth

    poison()
    launch()
    device.synchronize()
    first = [output.snapshot() for output in outputs]
    verdicts, truth = judged()
    rights = {name: getattr(truth, name) for name in operation.unordered(spec)}
    result.shown.note(verdicts)
    result.findings += filter(None, (each.finding for each in verdicts.values()))

    result.repeats = 1
    if first_launch_only:
        return result
    while result.repeats < case.repeats:
        poison()
        launch()
        result.repeats += 1
        if not compare(f"in launch {result.repeats}"):
            break

    poison()
    replay = device.captured(launch)
    poison()
    replay()
    compare("under graph replay")

    if case.repeats == REPEATS:
        late = torch.full_like(leading, math.nan)
        poison()
        device.on_late_stream(lambda: launch(late.copy_(leading)))
        name = next(iter(tensors.inputs))
        compare(f"on another stream, whose earlier work writes {name}")
    if case.layout == "plain":
        returned = function(leading, *others, **options)
        device.synchronize()
        result.findings += _judge_returned(spec, returned, outputs, first, rights)

    watched = (*outputs, *tensors.scratch)
    result.findings += filter(None, (written.outside() for written in watched))
    for x, before in zip(tensors.given, given, strict=True):
        result.findings += filter(
            None, [same_bits("an input", "after the launches", bits(x), before)]
        )
    if case.lengths and case.repeats == REPEATS:
        for name, found in values(spec, tiles, relaunched(case)).items():
            tensors.inputs[name].copy_(torch.from_numpy(found))
        poison()
        replay()
        device.synchronize()
        result.findings += [
            f"under graph replay with other lengths: {each.finding}"
            for each in judged()[0].values()
            if each.finding
        ]
    return result


def result_of(spec: Mapping[str, Any], case: Case) -> CaseResult:
    """What a case showed before anything ran: of all outputs that the operation can have."""
    _, *others = operation_of(spec).writes
    return CaseResult(case.name, Shown(others=dict.fromkeys(x.name for x in others)))


def vars_of(kernel: Any) -> Mapping[str, Any]:
    """The constants of a kernel's module."""
    return {name: getattr(kernel, name) for name in dir(kernel) if name.isupper()}


def _judge_returned(
    spec: Mapping[str, Any],
    returned: Any,
    outputs: Sequence[Guarded],
    expected: Sequence[torch.Tensor],
    rights: Mapping[str, Bounded],
) -> Iterator[str]:
    """What a kernel returns when it allocates: its outputs, a tuple where there are several."""
    operation = operation_of(spec)
    found = returned if isinstance(returned, tuple) else (returned,)
    name = operation.function
    if len(found) != len(outputs):
        yield f"{name} returned {len(found)} tensors, not {len(outputs)}"
        return
    for x, output, wanted in zip(found, outputs, expected, strict=True):
        if x.shape != output.view.shape or x.dtype != output.view.dtype:
            yield (
                f"{name} returned {output.name} as {x.dtype} {list(x.shape)} "
                f"instead of {output.view.dtype} {list(output.view.shape)}"
            )
        else:
            what = "when the kernel allocates it"
            differs = output.differs(what, bits(x), wanted, rights.get(output.name))
            yield from filter(None, [differs])


# --- misuse --------------------------------------------------------------------------


def misuse_case(spec: Mapping[str, Any]) -> Case:
    """A small good call, with several batches and heads, for the misuses to spoil."""
    q, kv = (
        fallback if spec["seqlen"][side] == DYNAMIC else int(spec["seqlen"][side])
        for side, fallback in (("q", 96), ("kv", 160))
    )
    lengths = ((q // 2, kv // 2),) * 2 if is_packed(spec) else ()
    return Case(
        MISUSE, batch=2, kv_heads=2, q=q, kv=kv, layout="plain", lengths=lengths
    )


def misuses(
    operation: Operation,
    spec: Mapping[str, Any],
    good: Mapping[str, torch.Tensor],
    device: Device,
) -> Iterator[Misuse]:
    """Every way to call a kernel wrongly, each with an argument of a good call spoiled."""

    def spoil(what: str, *blamed: str, **wrong: Any) -> Misuse:
        name = f"{', '.join(wrong)}: {what}"
        return Misuse(name, {**good, **wrong}, blamed or tuple(wrong))

    tensors = operation.tensors(spec)
    for tensor in tensors:
        name, x = tensor.name, good[tensor.name]
        for what, wrong in _spoiled(tensor, x, device):
            yield spoil(what, **{name: wrong})
        for number, axis in enumerate(tensor.axes):
            others = [each.name for each in tensors if _has(each, axis)]
            if axis.fixed(spec) is None and others == [name]:
                continue  # its size is any
            first = next(each.name for each in tensors if axis in each.axes)
            blamed = others if first == name else [name]
            what = f"one more of {axis.name}"
            yield spoil(what, *blamed, **{name: _longer(x, number)})
    for axis in dict.fromkeys(axis for tensor in tensors for axis in tensor.axes):
        sharing = {x.name: x.axes.index(axis) for x in tensors if axis in x.axes}
        if axis.constant:
            continue
        if axis.fixed(spec) is not None:
            longer = {name: _longer(good[name], at) for name, at in sharing.items()}
            yield spoil(f"more than the fixed {axis.name}", **longer)
        else:
            none = {name: good[name].narrow(at, 0, 0) for name, at in sharing.items()}
            yield spoil(f"no {axis.name}", **none)
    for number, output in enumerate(tensors):
        if output in operation.inputs(spec):
            continue
        name, x = output.name, good[output.name]
        for other in tensors[:number]:
            there, x_there = _sharing(good[other.name], x)
            what = f"where {other.name} is"
            yield spoil(what, **{name: x_there, other.name: there})
        for at, axis in enumerate(output.axes):
            if x.shape[at] > 1:  # else it is a tensor like any other
                same = x.narrow(at, 0, 1).expand_as(x)
                yield spoil(f"one {axis.name} for all", **{name: same})
        outer = min(x.ndim - 2, 1)
        if min(x.shape[outer : outer + 2]) > 1:
            steps = [*x.stride()]
            steps[outer] = steps[outer + 1]
            overlapping = x.as_strided(x.shape, steps)
            what = f"{output.axes[outer].name} that overlap"
            yield spoil(what, **{name: overlapping})
    for each_of_own in operation.workspaces:
        name, x = each_of_own.name, good[each_of_own.name]
        for what, wrong in _spoiled_workspace(x, device):
            yield spoil(what, **{name: wrong})
        for other in tensors:
            there, x_there = _sharing(good[other.name], x)
            yield spoil(f"where {other.name} is", **{name: x_there, other.name: there})
    for tensor in tensors:
        if tensor.expands:
            of_one = good[tensor.name][:1, :1, :1, :1].expand_as(good[tensor.name])
            yield spoil("expanded", **{tensor.name: of_one})
    for scalar in operation.scalars:
        for value in (0.0, -1.0, math.nan, math.inf, 1e-50, 1e300):
            yield spoil(str(value), **{scalar.name: value})
    for each in operation.numbers(spec):
        beyond: tuple[float, ...] = (each.least - 1, each.most + 1, 1.5)
        if each.dtype == "fp32":
            beyond = (math.nan, math.inf, 1e300)
        for wrong_one in (*beyond, None):
            yield spoil(str(wrong_one), **{each.name: wrong_one})
    for tensor in {*operation.reads, *operation.writes} - {*tensors}:
        shape = tensor.shape(spec, misuse_case(spec))
        unwanted = torch.empty(
            shape, dtype=DTYPES[tensor.type(spec)], device=device.name
        )
        # A kernel without it may lack the parameter, and then Python itself refuses it.
        yield replace(
            spoil("not a parameter of this kernel", **{tensor.name: unwanted}),
            errors=(ValueError, TypeError),
        )


def _spoiled(
    tensor: Tensor, x: torch.Tensor, device: Device
) -> Iterator[tuple[str, torch.Tensor]]:
    """What is wrong with a tensor alone, and the tensor with it."""
    types = {**DTYPES, "fp64": torch.float64, "int64": torch.int64}
    wide = ("int64",) if tensor.dtype == "int32" else ()
    for name in ("bf16", "fp16", "fp32", "fp64", *wide):
        if types[name] != x.dtype:
            yield name, x.to(types[name])
    if x.dtype == torch.int32:
        yield "int64", x.long()
    yield f"{x.ndim - 1} dimensions", x[0]
    yield "another device", device.elsewhere(x)
    *others, last = tensor.axes
    if not tensor.tma:
        if x.ndim > 1 and x.shape[-1] != x.shape[-2]:
            names = (*others[:-1], last, others[-1])
            words = ", ".join(axis.name for axis in names)
            yield f"[{words}]", x.mT.contiguous()
        return
    yield f"half the {last.name}", x[..., : x.shape[-1] // 2].contiguous()
    if x.shape[-2] > 1:
        yield f"{last.name} not contiguous", x.mT.contiguous().mT
    yield "misaligned by one element", _misaligned(x)
    for number, axis in enumerate(others[1:], 1):
        # The stride of a single row says nothing.
        if x.shape[number] > 1:
            what = f"stride of {axis.name} 8 bytes more"
            yield what, _padded(x, axis=number)


def _spoiled_workspace(
    x: torch.Tensor, device: Device
) -> Iterator[tuple[str, torch.Tensor]]:
    """What is wrong with a workspace, and the workspace with it."""
    yield "one element less", x[:-1]
    yield "bf16", x.bfloat16()
    yield "fp64", x.double()
    yield "2 dimensions", x[None]
    yield "another device", device.elsewhere(x)
    yield "misaligned by one element", _misaligned(x)
    yield "every second element", torch.stack((x, x), -1).flatten()[::2]


def _has(tensor: Tensor, axis: Axis) -> bool:
    """Whether a size of the tensor follows from that of the axis."""
    related = {axis.name, axis.part_of} - {""}
    return any(related & {each.name, each.part_of} for each in tensor.axes)


def check_misuse(
    operation: Operation, kernel: Any, misuse: Misuse, device: Device
) -> str:
    """Finding unless the call is refused as it must be, and writes nothing."""
    names = [x.name for x in operation.writes] + [x.name for x in operation.workspaces]
    written = {
        name: (x, bits(x).clone())
        for name in names
        if (x := misuse.call.get(name)) is not None
        and x.device.type == device.name
        and x.element_size() <= 4
    }
    try:
        getattr(kernel, operation.function)(**misuse.call)
    except misuse.errors as error:
        if not _names(str(error), misuse.blamed):
            return f"the message names none of {', '.join(misuse.blamed)}: {error}"
    except Exception as error:
        return f"raised {type(error).__name__} instead of ValueError: {error}"
    else:
        return "accepted"
    device.synchronize()
    for name, (x, before) in written.items():
        if finding := same_bits(name, "after a refused call", bits(x), before):
            return finding
    return ""


def _names(message: str, arguments: Sequence[str]) -> bool:
    return any(re.search(rf"\b{name}\b", message) for name in arguments)


def _longer(x: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.cat([x, x.narrow(axis, 0, 1)], dim=axis)


def _sharing(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same values, but where the tensors overlap, which begin at one address."""
    sizes = [x.numel() * x.element_size() for x in tensors]
    memory = torch.zeros(max(sizes), dtype=torch.uint8, device=tensors[0].device)
    return [
        memory[:size].view(x.dtype).view(x.shape).copy_(x)
        for size, x in zip(sizes, tensors, strict=True)
    ]


def _misaligned(x: torch.Tensor) -> torch.Tensor:
    flat = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    return flat[1:].view(x.shape).copy_(x)


def _padded(x: torch.Tensor, *, axis: int) -> torch.Tensor:
    """The same values with 8 more bytes per step along an axis."""
    more = 8 // x.element_size()
    size = [*x.shape[: axis + 1], math.prod(x.shape[axis + 1 :]) + more]
    storage = torch.zeros(size, dtype=x.dtype, device=x.device)
    return storage[..., :-more].unflatten(-1, x.shape[axis + 1 :]).copy_(x)


# --- the whole kernel ----------------------------------------------------------------


def events(
    kernel: Any, device: Device, *, only: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """All checks of a kernel, as they happen; ``only``: these cases, `MISUSE` one of them."""
    spec = kernel.SPEC
    tiles = tiles_of(vars_of(kernel))
    cases = cases_for(spec, tiles)
    names = [*(case.name for case in cases), MISUSE]
    if set(only) - set(names):
        yield {"event": "unknown_case", "names": names}
        return
    yield {"event": "start", "case": "compile"}
    kernel.compile()
    for case in cases:
        if not only or case.name in only:
            yield {"event": "start", "case": case.name}
            try:
                result = check_case(kernel, case, device)
            except ValueError as error:  # the next case may still run
                result = result_of(spec, case)
                result.findings.append(f"refused: {error}")
            except torch.OutOfMemoryError as error:
                message = f"{case.name} needs more memory than is free: {error}"
                yield {"event": "environment", "message": message}
                return
            yield {"event": "case", **result.told()}
            torch.cuda.empty_cache()  # for those that are validated beside this one
    if not only or MISUSE in only:
        yield {"event": "start", "case": MISUSE}
        tensors = make_tensors(spec, tiles, misuse_case(spec), device.name)
        operation = operation_of(spec)
        good = {**tensors.inputs, **tensors.into, **numbers_of(spec, misuse_case(spec))}
        getattr(kernel, operation.function)(**good)
        device.synchronize()
        for misuse in misuses(operation, spec, good, device):
            finding = check_misuse(operation, kernel, misuse, device)
            yield {"event": "misuse", "name": misuse.name, "finding": finding}
    yield {"event": "end"}


def memcheck_events(kernel: Any, device: Device) -> Iterator[dict[str, Any]]:
    """One launch of one small case, for a tool that watches the process."""
    case = smallest_ragged(cases_for(kernel.SPEC, tiles_of(vars_of(kernel))))
    yield {"event": "start", "case": case.name}
    kernel.compile()
    result = check_case(kernel, case, device, first_launch_only=True)
    yield {"event": "case", **result.told()}


def environment_problem(arch: str) -> str:
    """Why this process cannot run kernels of an arch, or nothing."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability != ARCHITECTURES[arch].compute_capability:
        major, minor = capability
        return f"{torch.cuda.get_device_name()} is sm{major}{minor}, the kernel needs {arch}"
    return ""


def write_events(path: Path, found: Iterator[dict[str, Any]]) -> None:
    """One line each, written through at once: a crash must not take the last one along."""
    with path.open("a", encoding="utf-8") as file:
        for event in found:
            file.write(json.dumps(event) + "\n")
            file.flush()


def run_on_gpu(
    path: Path, *, only: Sequence[str], memcheck: bool
) -> Iterator[dict[str, Any]]:
    """All events of a kernel file on the current GPU; this process has not imported the DSL yet."""
    with tempfile.TemporaryDirectory(prefix="fmha-gen-") as folder:
        device_code.keep(Path(folder))
        yield from _run_on_gpu(path, only=only, memcheck=memcheck)
        if code := device_code.kept(Path(folder)):
            yield {"event": "device_code", "found": code}


def _run_on_gpu(
    path: Path, *, only: Sequence[str], memcheck: bool
) -> Iterator[dict[str, Any]]:
    try:
        import cutlass

        kernel = load_kernel(path)
    except ImportError as error:
        yield {"event": "environment", "message": f"cannot import {path.name}: {error}"}
        return
    if problem := environment_problem(kernel.SPEC["arch"]):
        yield {"event": "environment", "message": problem}
        return
    gpu = torch.cuda.get_device_name()
    yield {"event": "machine", "gpu": gpu, "dsl": cutlass.__version__}
    if memcheck:
        yield from memcheck_events(kernel, CudaDevice())
    else:
        yield from events(kernel, CudaDevice(), only=only)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="fmha_gen.evidence.trial")
    parser.add_argument("kernel", type=Path)
    parser.add_argument("events", type=Path)
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--memcheck", action="store_true")
    given = parser.parse_args(argv)
    found = run_on_gpu(given.kernel, only=given.case, memcheck=given.memcheck)
    write_events(given.events, found)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What a KV block costs our sm100 kernels and FlashAttention-4's, counted in their machine code.

    python -m tests.emulator.sm100.static_cost SITE [KERNEL.py ...]

SITE is a folder with the wheels of flash-attn-4 and quack-kernels unpacked. For each kernel, by
default the one of decision 0019, FlashAttention-4's is compiled for the same spec. A loop's
numbers are those of one iteration that waits for nothing (`sass.iteration`); where a number of
ours is the larger one, a star says so. Softmax: a row of 128 columns. The others: both halves.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmha_gen.build import captures, kernel_text, sass, toolchain
from fmha_gen.emulator import launch
from fmha_gen.ops.cases import DYNAMIC

from . import harness

SHIPPED = Path(__file__).resolve().parents[3] / "generated"
OURS = SHIPPED / "sm100_d128_bf16_causal_gqa4_lse.py"
PEER = harness.HERE / "peer_fa4.py"
# How a row is named -> what its opcodes start with; the first that fits counts.
CLASSES: Mapping[str, tuple[str, ...]] = {
    "exp2 (MUFU.EX2)": ("MUFU.EX2",),
    "packed fp32 (FFMA2, FADD2, FMUL2)": ("FFMA2", "FADD2", "FMUL2"),
    "F2FP": ("F2FP",),
    "FMNMX, FMNMX3": ("FMNMX",),
    "mask (FSEL, SEL, ISETP, R2P)": ("FSEL", "SEL", "ISETP", "R2P"),
    "LDTM": ("LDTM",),
    "STTM": ("STTM",),
    "MMAs (UTCHMMA)": ("UTCHMMA",),
    "TMA loads": ("UTMALDG",),
    "mbarrier waits": ("SYNCS.PHASECHK",),
    "mbarrier arrives": ("SYNCS.ARRIVE",),
    "commits": ("UTCBAR",),
    "named barriers": ("BAR.",),
    "uniform": ("U", "R2UR", "S2UR", "LDCU"),
}
MASKED_AT_LEAST = 64  # selections
SOFTMAX_AT_LEAST = 64  # exponentials
_REGISTER = re.compile(r"\bR(\d+)\b")


@dataclass(frozen=True)
class Cost:
    """What is compared: numbers by (loop, row), in the order in which they are printed."""

    rows: Mapping[tuple[str, str], int]


def measure(path: Path, spec: Mapping[str, Any]) -> Cost:
    """Compile a module and count; raises as `toolchain.listing` and `captures.capture` do."""
    found = toolchain.listing(path.read_text(encoding="utf-8"), path.stem, "sm_100a")
    kernel = sass.parse(found.disassembly)
    rows = {("kernel", name): value for name, value in resources(found, path, spec)}
    for name, instructions in loops(kernel):
        rows |= {(name, row): number for row, number in counts(instructions)}
    return Cost(rows)


def resources(
    found: toolchain.Listing, path: Path, spec: Mapping[str, Any]
) -> Iterable[tuple[str, int]]:
    """Of the whole kernel."""
    numbers = re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", found.ptx)
    roles = sorted({int(number) for number in numbers}, reverse=True)
    names = ("softmax", "correction", "other roles")
    yield from zip((f"registers, {name}" for name in names), roles, strict=True)
    (stack,) = re.findall(r"STACK:(\d+)", found.usage)
    yield "stack [bytes]", int(stack)
    yield "shared memory [bytes]", shared_bytes(path, spec)
    yield "mbarriers", found.ptx.count("mbarrier.init.")


def shared_bytes(path: Path, spec: Mapping[str, Any]) -> int:
    """Dynamic shared memory of a launch, of whatever size."""
    heads = spec["q_per_kv"]
    length = {
        side: 256 if fixed == DYNAMIC else int(fixed)
        for side, fixed in spec["seqlen"].items()
    }
    shapes = {
        "q": (1, length["q"], heads, spec["head_dim"]["qk"]),
        "k": (1, length["kv"], 1, spec["head_dim"]["qk"]),
        "v": (1, length["kv"], 1, spec["head_dim"]["v"]),
        "out": (1, length["q"], heads, spec["head_dim"]["v"]),
    }
    if spec["lse"]:
        shapes["lse"] = (1, heads, length["q"])
    dtypes = dict.fromkeys(shapes, spec["dtype"]) | {"lse": "fp32"}
    steps = {
        name: [math.prod(shape[mode + 1 :]) for mode in range(len(shape))]
        for name, shape in shapes.items()
    }
    if path.stem != PEER.stem:
        tensors = {
            name: launch.tensor_at(dtypes[name], place << 40, shape, steps[name])
            for place, (name, shape) in enumerate(shapes.items(), start=1)
        }
        outputs = {name: len(shapes[name]) for name in ("out", "lse") if name in shapes}
        call = launch.call(tensors, function="fmha", outputs=outputs, sm_count=148)
        _, (called,) = captures.capture(path, [call], arch="sm100")
        return called.launched[0].smem_bytes
    arguments = {
        name: launch.tensor(1 << 40, shape[:3], steps[name][:3])
        for name, shape in shapes.items()
    }
    arguments |= {"softmax_scale": launch.float32(1.0), "stream": launch.stream()}
    _, ((found,),) = captures.capture_launches(path, [arguments], arch="sm100")
    return found.smem_bytes


def loops(kernel: sass.Kernel) -> Iterable[tuple[str, list[sass.Instruction]]]:
    """An iteration of each role's innermost loop over KV blocks."""
    exp2, store = "MUFU.EX2", "STTM"
    for loop in innermost(kernel, exp2, SOFTMAX_AT_LEAST):
        found = sass.iteration(kernel, loop, exp2)
        masks = (
            sum(i.opcode.startswith(("FSEL", "SEL")) for i in found) >= MASKED_AT_LEAST
        )
        yield f"softmax, {'masked' if masks else 'unmasked'}", found
    for loop in innermost(kernel, store, 1):
        body = sass.body(kernel, loop)
        if not any(i.opcode.startswith(exp2) for i in body):
            yield "correction, no rescale", sass.iteration(kernel, loop)
            yield "correction, rescale", sass.iteration(kernel, loop, store)
    for name, opcode in (("mma", "UTCHMMA"), ("load", "UTMALDG")):
        for loop in innermost(kernel, opcode, 1):
            yield name, sass.iteration(kernel, loop, opcode)


def innermost(kernel: sass.Kernel, opcode: str, at_least: int) -> list[sass.Loop]:
    """Loops that hold so many of an opcode and no other loop that does."""
    holding = [
        loop
        for loop in sass.loops(kernel)
        if sum(i.opcode.startswith(opcode) for i in sass.body(kernel, loop)) >= at_least
    ]
    return [
        loop
        for loop in holding
        if not any(set(other.blocks) < set(loop.blocks) for other in holding)
    ]


def counts(instructions: Sequence[sass.Instruction]) -> Iterable[tuple[str, int]]:
    """All, those until a part and all of P are handed over, by class, and registers."""
    names = [class_of(instruction) for instruction in instructions]
    found = Counter(names)
    yield "instructions", len(instructions)
    if found["exp2 (MUFU.EX2)"]:
        stored = names.index("STTM")
        places = [at for at, name in enumerate(names, 1) if name == "mbarrier arrives"]
        arrives = [at for at in places if at > stored]
        yield "  until a part of P is released", arrives[0]
        yield "  until all of P is released", arrives[-1]
    yield from ((name, found[name]) for name in (*CLASSES, "other"))
    named = (int(n) for i in instructions for n in _REGISTER.findall(i.operands))
    yield "registers named", 1 + max(named, default=-1)


def class_of(instruction: sass.Instruction) -> str:
    """Its name in CLASSES."""
    fits = (n for n, starts in CLASSES.items() if instruction.opcode.startswith(starts))
    return next(fits, "other")


def write_peer(site: str, spec: Mapping[str, Any], folder: Path) -> Path:
    """FlashAttention-4's module for this spec."""
    wanted = {**spec, "cta_group": spec.get("cta_group", 1)}
    constants = {"SITE": repr(str(Path(site).resolve())), "SPEC": repr(wanted)}
    return harness.variant(PEER.stem, folder, constants)


def table(ours: Cost, peer: Cost) -> str:
    """The columns side by side; rows that are 0 on both sides are left out."""
    lines, last = [], ""
    for key in dict.fromkeys((*peer.rows, *ours.rows)):
        numbers = [cost.rows.get(key) for cost in (peer, ours)]
        if not any(numbers):
            continue
        name, row = key
        if name != last:
            lines.append(f"{name:<36}{'FA4':>8}{'ours':>8}")
            last = name
        shown = "".join(f"{'-' if n is None else n:>8}" for n in numbers)
        worse = None not in numbers and numbers[1] > numbers[0]
        lines.append(f"  {row:<34}{shown}{' *' if worse else ''}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Print a table per kernel."""
    site, *kernels = arguments
    for path in map(Path, kernels or [str(OURS)]):
        constants = kernel_text.read_constants(path.read_text(encoding="utf-8"))
        spec = constants["SPEC"]
        with tempfile.TemporaryDirectory() as folder:
            peer = measure(write_peer(site, spec, Path(folder)), spec)
        print(f"{path.stem}\n{table(measure(path, spec), peer)}\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

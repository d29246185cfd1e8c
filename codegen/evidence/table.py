# SPDX-License-Identifier: Apache-2.0
"""What the records of a generated folder prove, as the table that `generated/README.md` shows.

A record counts only for the kernel's text as it lies there, and for what that compiles to; what is
about other code proves nothing and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..build import records, shipped
from ..build.render import body_digest, stated_digests
from ..ops.forward import LSE

TITLES = ("kernel", "rung", "GPU", "worst error over its bound", "registers")
NOTHING = "-"  # where no evidence is
NOT_RUN = "emulated, not run"  # its error is the emulator's


def load(generated: Path) -> list[records.Record]:
    """Return the record of each kernel in a folder, by name, with only what holds for its text."""
    found = []
    for kernel in sorted(generated.glob("*.py")):
        text = kernel.read_text(encoding="utf-8")
        if stated_digests(text) is None:
            continue
        record = records.load(generated / records.path_of(kernel.stem))
        body = body_digest(text)
        found.append(records.current(record, kernel=kernel.stem, body_sha256=body))
    return found


def shipped_kernels() -> list[dict[str, Any]]:
    """Each packaged kernel with its files, and its record as far as it holds for the text."""
    return [
        {
            "kernel": record["kernel"],
            "rung": record["rung"],
            "file": str(shipped.generated() / f"{record['kernel']}.py"),
            "spec": str(shipped.specs() / f"{record['kernel']}.yaml"),
            "record": record,
        }
        for record in load(shipped.generated())
    ]


def table(evidence: Iterable[records.Record]) -> str:
    """Return a Markdown table, a line per kernel, with aligned columns."""
    return markdown([TITLES, *(row(record) for record in evidence)])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells, the first of them titles, as a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *body = (_line(cells, widths) for cells in rows)
    rule = _line(["-" * width for width in widths], widths)
    return "\n".join([head, rule, *body]) + "\n"


def row(record: records.Record) -> tuple[str, ...]:
    """Return the cells of a kernel's line, as TITLES name them."""
    compiled: dict[str, Any] = record.get("compiled", {})
    proof = proof_of(record)
    emulated = NOT_RUN if "emulated" in record else NOTHING
    return (
        f"`{record['kernel']}`",
        record["rung"],
        ", ".join(records.gpus(record, "validated")) or emulated,
        over_bound(_worst(proof)),
        registers(compiled),
    )


def registers(compiled: Mapping[str, Any]) -> str:
    """Registers per thread of each role, kernel by kernel; NOTHING where no compile says."""
    kernels = compiled.get("kernels", [compiled])
    each = (one.get("setmaxnreg") or [one.get("registers", NOTHING)] for one in kernels)
    return ", ".join(" / ".join(map(str, roles)) for roles in each)


def proof_of(record: records.Record) -> Mapping[str, Any]:
    """What ran: on the GPU with the largest error, else in the emulator, else nothing."""
    ran = records.entry_of(record, "validated")
    return ran or records.entry_of(record, "emulated")


def _worst(proof: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The largest error over what it may be, of all outputs but LSE, which is none of 16 bits."""
    further = records.others(proof)
    found = [proof.get("worst"), *(x for n, x in further.items() if n != LSE.name)]
    known = [each for each in found if each and each.get("of_bound") is not None]
    return max(known, key=lambda each: float(each["of_bound"]), default=None)


def over_bound(worst: Mapping[str, Any] | None) -> str:
    """A worst error over what it may be, at most 1; NOTHING where a record does not say."""
    found = (worst or {}).get("of_bound")
    return NOTHING if found is None else f"{found:.2f}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"

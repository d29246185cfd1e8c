# SPDX-License-Identifier: Apache-2.0
"""The evidence of one kernel: `records/<stem>.json`, by rung; on GPUs an entry per GPU model.

`compiled` is about a text, and says what that text compiles to: the digests of its device code
(the PTX), of what `fmha` launches it with (`launch`) when certain `calls` are made, and of its host
section (`host`). Of several kernels it has a list, `kernels`; the fields of one stand beside the
others. What ran, in the emulator or on a GPU, is about the device code and the launch; the device
code is what was compiled where it ran (decision 0063), and a benchmark's that of the validation on
its GPU. An entry names the text that ran, and holds for that text and for every other with the same
two digests: a better name or comment costs nothing, a changed instruction everything. What an entry
says of the host section alone, refusals and host times, holds while that digest is the same, too
(decision 0030).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckFailed

Record = dict[str, Any]

_NUMBER = re.compile(r"_\d+$")

FOLDER = "records"  # in the generated folder

# From the lowest rung to the highest; each with the rungs it means nothing without.
RUNGS: Mapping[str, tuple[str, ...]] = {
    "rendered": (),
    "compiled": (),
    "emulated": ("compiled",),
    "validated": ("compiled",),
    "benchmarked": ("compiled", "validated"),
}

ABOVE_BUILD = ("emulated", "validated", "benchmarked")  # what no build can obtain again
ON_GPUS = ("validated", "benchmarked")  # with a list of entries, by `gpu`

DEVICE = ("ptx_sha256", "launch_sha256")  # what ran is about
HOST = "host_sha256"
# Of the host section alone: of an entry, and of each of the `cells` of a benchmark.
OF_HOST = ("misuses",)
OF_HOST_IN_CELLS = ("eager_tflops", "host_us")


def path_of(stem: str) -> str:
    """Where the record of a kernel is, relative to the generated folder."""
    return f"{FOLDER}/{stem}.json"


def load(path: Path) -> Record | None:
    """Read a record; None when there is none. Raises CheckFailed when it is not a record."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return parse(data, str(path))


def parse(text: str | bytes, name: str) -> Record:
    """Read a record's text; `name` is for the message of the CheckFailed it may raise."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckFailed(
            f"{name}: not a record ({error}); delete it and build again"
        ) from error
    if not isinstance(record, dict) or not all(
        isinstance(record.get(key), str) for key in ("kernel", "body_sha256", "rung")
    ):
        raise CheckFailed(f"{name}: not a record; delete it and build again")
    for rung in ON_GPUS:  # once of one GPU only, with no list
        if isinstance(record.get(rung), dict):
            record[rung] = [record[rung]]
    return record


def dump(record: Mapping[str, Any]) -> str:
    """The text of a record: sorted keys, two spaces, a newline at the end."""
    return json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def current(
    record: Mapping[str, Any] | None, *, kernel: str, body_sha256: str
) -> Record:
    """The record with only the evidence that holds for this text."""
    rungs: Record = {}
    compiled = _object(record, "compiled")
    if compiled.get("body_sha256") == body_sha256:
        rungs["compiled"] = compiled
    for rung in ABOVE_BUILD:
        found = [
            _for_text(entry, rungs.get("compiled", {}), body_sha256)
            for entry in _entries(record, rung)
            if _holds(entry, rungs.get("compiled", {}), body_sha256)
        ]
        if found:
            rungs[rung] = found if rung in ON_GPUS else found[0]
    return {
        "kernel": kernel,
        "body_sha256": body_sha256,
        "rung": _highest(rungs),
        **rungs,
    }


def evidence(record: Mapping[str, Any]) -> Record:
    """What a record has for the text that it names; its `rung` is what that amounts to."""
    return current(
        record,
        kernel=record.get("kernel", ""),
        body_sha256=record.get("body_sha256", ""),
    )


def entry_of(record: Mapping[str, Any], rung: str) -> Mapping[str, Any]:
    """The entry of a rung that stands for it: of several GPUs that with the largest error.

    Empty where there is none.
    """

    def error(entry: Mapping[str, Any]) -> float:
        return float((entry.get("worst") or {}).get("of_bound") or 0.0)

    return max(_entries(record, rung), key=error, default={})


MAIN = "main"  # of several kernels the one that has the file's name alone


def kernels(compiled: Mapping[str, Any], stem: str) -> dict[str, Mapping[str, Any]]:
    """What a compile says of each kernel, by its name without that of the file.

    One kernel has no name but the file's: the name is empty. Beside others it is the main one.
    """
    if "kernels" not in compiled:
        return {"": compiled}
    entries = [str(each["entry"]) for each in compiled["kernels"]]
    # The DSL numbers symbols by their order, which says nothing unless two are called alike.
    names = [
        _NUMBER.sub("", each).removeprefix(stem).lstrip("_") or MAIN for each in entries
    ]
    told = names if len(set(names)) == len(names) else entries
    return dict(zip(told, compiled["kernels"], strict=True))


def others(entry: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What an entry says of the worst case of outputs but the first, by their names."""
    ending = "_worst"
    return {
        name.removesuffix(ending): worst
        for name, worst in entry.items()
        if name.endswith(ending) and worst is not None
    }


def gpus(record: Mapping[str, Any], rung: str) -> tuple[str, ...]:
    """The GPU models that a rung was reached on, by name."""
    return tuple(entry["gpu"] for entry in _entries(record, rung))


def merge_rung(
    record: Mapping[str, Any] | None,
    *,
    kernel: str,
    body_sha256: str,
    rung: str,
    result: Mapping[str, Any],
) -> Record:
    """Add or replace what a rung shows of a text, on one GPU where it takes one.

    A compile keeps what ran of another text where device code and launch are the same. What does
    not hold for this text is dropped.
    """
    if rung not in RUNGS or rung == "rendered":
        raise ValueError(f"no such rung: {rung}")
    if rung == "compiled":
        return _compiled_again(record, kernel, {**result, "body_sha256": body_sha256})
    kept = current(record, kernel=kernel, body_sha256=body_sha256)
    if rung == "benchmarked":
        result = {**_validated_code(kept, result), **result}
    entry = _about(result, kept.get("compiled", {}), body_sha256)
    if rung in ON_GPUS:
        others = [e for e in _entries(kept, rung) if e["gpu"] != entry["gpu"]]
        kept[rung] = sorted([*others, entry], key=lambda each: str(each["gpu"]))
    else:
        kept[rung] = entry
    kept["rung"] = _highest(kept)
    return kept


def _compiled_again(
    record: Mapping[str, Any] | None, kernel: str, compiled: Mapping[str, Any]
) -> Record:
    """The record after a compile, with the entries that hold for its text."""
    body = compiled["body_sha256"]
    known = evidence(record) if record is not None else {}
    before = known.get("compiled", {})
    is_same_text = before.get("body_sha256") == body
    made: Record = {"compiled": dict(compiled)}

    def today(entry: Record) -> Record:
        """An entry that names today's digests of the text that it held for."""
        if entry.get("body_sha256") == body:
            return _about(entry, compiled, body)
        if is_same_text and entry["ptx_sha256"] == compiled.get("ptx_sha256"):
            return {**entry, "launch_sha256": compiled.get("launch_sha256")}
        return entry

    for rung in ABOVE_BUILD:
        entries = [today(entry) for entry in _entries(known, rung)]
        if entries:
            made[rung] = entries if rung in ON_GPUS else entries[0]
    return current(made, kernel=kernel, body_sha256=body)


def _validated_code(
    record: Mapping[str, Any], result: Mapping[str, Any]
) -> dict[str, str]:
    """What the validation on the GPU of a benchmark found to be the device code there."""
    entries = _entries(record, "validated")
    same_gpu = [entry for entry in entries if entry["gpu"] == result["gpu"]]
    names = ("ptx_sha256", "ptx_version")
    return {name: each[name] for each in same_gpu for name in names if name in each}


def _about(
    result: Mapping[str, Any], compiled: Mapping[str, Any], body_sha256: str
) -> Record:
    """An entry for what ran a text: where its device code is the compile's, all digests of it."""
    entry = {**result, "body_sha256": body_sha256}
    dsl = result.get("dsl") or result.get("versions", {}).get("dsl")
    code = entry.get("ptx_sha256")
    if dsl == compiled.get("dsl") and code and code == compiled.get("ptx_sha256"):
        known = {name: compiled.get(name) for name in (*DEVICE, HOST)}
        entry |= {name: digest for name, digest in known.items() if digest}
    return entry


def _holds(
    entry: Mapping[str, Any], compiled: Mapping[str, Any], body_sha256: str
) -> bool:
    """Whether an entry is about a text, or about the device code and the launch that it has."""
    return entry.get("body_sha256") == body_sha256 or all(
        entry.get(name) and entry.get(name) == compiled.get(name) for name in DEVICE
    )


def _for_text(
    entry: Mapping[str, Any], compiled: Mapping[str, Any], body_sha256: str
) -> Record:
    """An entry without what it says of another host section than that of the text."""
    is_text = entry.get("body_sha256") == body_sha256
    if is_text or entry.get(HOST) == compiled.get(HOST):
        return dict(entry)
    found = {name: value for name, value in entry.items() if name not in OF_HOST}
    if isinstance(cells := found.get("cells"), list):
        found["cells"] = [
            {name: cell[name] for name in cell if name not in OF_HOST_IN_CELLS}
            for cell in cells
            if isinstance(cell, dict)
        ]
    return found


def _object(record: Mapping[str, Any] | None, name: str) -> Record:
    """An object of a record; empty when it has none of that name."""
    found = record.get(name) if record is not None else None
    return found if isinstance(found, dict) else {}


def _entries(record: Mapping[str, Any] | None, rung: str) -> list[Record]:
    """What a record has of a rung above `compiled`, as a list; what is no entry is none."""
    found = record.get(rung) if record is not None else None
    if rung not in ON_GPUS:
        return [found] if isinstance(found, dict) else []
    entries = found if isinstance(found, list) else []
    return [e for e in entries if isinstance(e, dict) and isinstance(e.get("gpu"), str)]


def staleness(
    record: Mapping[str, Any] | None, *, kernel: str, body_sha256: str
) -> str | None:
    """Why a record does not speak for this body, or None when it does."""
    if record is None:
        return "has no record"
    if record["kernel"] != kernel:
        return f"its record is about {record['kernel']}"
    if record["body_sha256"] != body_sha256:
        return "its record is for another body"
    if record != current(record, kernel=kernel, body_sha256=body_sha256):
        return "its record holds evidence for another body or claims a rung it has not reached"
    return None


def _highest(rungs: Mapping[str, Any]) -> str:
    """The highest rung that stands on those it needs, on the same GPU where both take one."""
    reached = ["rendered"]
    for rung, needed in RUNGS.items():
        if rung in rungs and all(lower in rungs for lower in needed):
            on_same = (set(gpus(rungs, low)) for low in needed if low in ON_GPUS)
            if all(names & set(gpus(rungs, rung)) for names in on_same):
                reached.append(rung)
    return reached[-1]

# SPDX-License-Identifier: Apache-2.0
"""The evidence of one kernel: `records/<stem>.json`, one object per rung it has reached.

Each rung's object repeats the body digest it was obtained with; evidence for another body is
stale and is dropped when the record is next written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import CheckFailed

Record = dict[str, Any]

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
    return record


def dump(record: Mapping[str, Any]) -> str:
    """The text of a record: sorted keys, two spaces, a newline at the end."""
    return json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def current(
    record: Mapping[str, Any] | None, *, kernel: str, body_sha256: str
) -> Record:
    """The record with only the evidence that was obtained with this body."""
    rungs = {
        rung: record[rung]
        for rung in RUNGS
        if record is not None
        and isinstance(record.get(rung), dict)
        and record[rung].get("body_sha256") == body_sha256
    }
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


def merge_rung(
    record: Mapping[str, Any] | None,
    *,
    kernel: str,
    body_sha256: str,
    rung: str,
    result: Mapping[str, Any],
) -> Record:
    """Add or replace one rung's object, and drop evidence for any other body."""
    if rung not in RUNGS or rung == "rendered":
        raise ValueError(f"no such rung: {rung}")
    kept = current(record, kernel=kernel, body_sha256=body_sha256)
    kept[rung] = {**result, "body_sha256": body_sha256}
    kept["rung"] = _highest(kept)
    return kept


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
    reached = ["rendered"]
    for rung, needed in RUNGS.items():
        if rung in rungs and all(lower in rungs for lower in needed):
            reached.append(rung)
    return reached[-1]

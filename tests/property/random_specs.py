# SPDX-License-Identifier: Apache-2.0
"""Legal specs that nobody chose, built and emulated: a right kernel must not be refused.

``PYTHONPATH=tests python -m tests.property.random_specs LOG [--arch ARCH] [--count N] [--seed N]``
appends one JSON object per spec to LOG and prints a line for it. A spec whose kernel the compile's
gate refuses, for its registers say, is replaced by the next one.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import support
import yaml
from fmha_gen.build import engine
from fmha_gen.errors import FmhaGenError
from fmha_gen.evidence import emulate
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from . import test_plan, test_plan_sm100

DRAWN = 20  # specs for each that is asked for: many are alike, refused or too long
TIMEOUT = 3000.0  # [s] for a kernel
LENGTHS = st.sampled_from(["dynamic", "dynamic", 1, 64, 77, 300, 384, 1000])


def of_length(fields: dict[str, Any], q: Any, kv: Any) -> dict[str, Any]:
    """With lengths that the emulator runs whole."""
    return fields | {"seqlen": {"q": q, "kv": kv}}


VALID = {
    "sm90": st.builds(of_length, test_plan.valid, LENGTHS, LENGTHS),
    "sm100": st.builds(of_length, test_plan_sm100.valid, LENGTHS, LENGTHS),
}


def drawn(arch: str, count: int, seed: int) -> list[str]:
    """Texts of valid specs; the same for the same seed."""
    found: dict[str, None] = {}

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(VALID[arch])
    def collect(fields: dict[str, Any]) -> None:
        text = yaml.safe_dump(fields, sort_keys=False)
        try:
            support.load_text(text)
        except FmhaGenError:
            return
        found[text] = None

    collect()
    texts = list(found)  # the simplest come first
    random.Random(seed).shuffle(texts)
    return texts


def judged(arch: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of the log."""
    held = 0
    for number, text in enumerate(drawn(arch, count * DRAWN, seed)):
        if held == count:
            return
        begin = time.perf_counter()
        row = {"arch": arch, "seed": seed, "number": number, "spec": text}
        with tempfile.TemporaryDirectory(prefix="fmha-gen-random-") as name:
            folder = Path(name)
            spec = folder / "specs" / f"{arch}_random.yaml"
            spec.parent.mkdir()
            spec.write_text(text, encoding="utf-8")
            out = folder / "generated"
            try:
                built = engine.build([spec.parent], out)
            except FmhaGenError as error:
                yield row | {"verdict": "refused", "why": str(error)}
                continue
            if not built.ok:
                yield row | {"verdict": "refused", "why": str(built)[:2000]}
                continue
            (outcome,) = emulate.emulate([out / f"{spec.stem}.py"], timeout=TIMEOUT)
            found = outcome.worst.first, outcome.worst.others.get("lse")
            worst, lse = (each and each["of_bound"] for each in found)
            row |= {"of_bound": worst, "lse_of_bound": lse, "cases": outcome.cases}
            row["findings"] = [vars(finding) for finding in outcome.findings]
            row["verdict"] = "FAILED" if outcome.findings else "held"
        row["seconds"] = round(time.perf_counter() - begin, 1)
        held += 1
        yield row


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.property.random_specs")
    parser.add_argument("log", type=Path)
    parser.add_argument("--arch", choices=VALID, default="sm90")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with options.log.open("a", encoding="utf-8") as file:
        for row in judged(options.arch, options.count, options.seed):
            file.write(json.dumps(row) + "\n")
            file.flush()
            told = " ".join(row["spec"].split())
            print(row["verdict"], row.get("of_bound", ""), told, flush=True)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Counts what the emulator notices of kernels that were damaged on purpose.

``python -m tests.mutation.campaign LOG [--kernel NAME] [--kind ptx|source] [--every N]
[--first N]`` runs the mutants and appends one JSON object for each to LOG; those that LOG holds are
not run again. Several processes share a campaign by the same `--every`, other `--first` and logs.
"""

from __future__ import annotations

import argparse
import functools
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fmha_gen.build import kernel_text
from fmha_gen.emulator import lower
from fmha_gen.emulator.launch import CaptureError, Launch
from fmha_gen.emulator.scheduler import Completion, Order, Schedule
from fmha_gen.errors import EnvironmentProblem
from fmha_gen.evidence import rehearsal
from fmha_gen.evidence.tensors import Problem, make_problem
from fmha_gen.ops.backward import is_backward
from fmha_gen.ops.cases import Case, cases_for
from fmha_gen.ops.reference import Truth

from tests.backward.kernels import text_of, written
from tests.emulator.rehearsals import captured
from tests.support import STRUCTURES

from . import ptx_mutants, source_mutants
from .ptx_mutants import Mutant

GENERATED = Path(__file__).resolve().parents[2] / "generated"
OF_8_BITS = (
    "sm90_d128_e4m3_linear_causal",  # V as rows: two warps transpose it
    "sm90_d256_e4m3_permuted_linear_full",  # V^T as it comes, O in slices
    # Warps that load pages of V and transpose them, work tiles from a ring.
    "sm90_d128_e4m3_causal_gqa4_page16_varlen_lse",
)
# Of kernels that are not shipped: what their specs say. dQ by halves of its columns and by halves
# of its rows; added behind dS's fence and, where P stays in fp32, in front of dP. One stage of dO
# is free as soon as it is given back: with as many as Q has, dO waits for Q of its block first.
BACKWARD = {
    "sm90_d64_bf16_causal_gqa2_bwd": (
        "head_dim: 64\ndtype: bf16\ntile: {q: 64}\nmask: causal\nheads: {q_per_kv: 2}\n"
    ),
    "sm90_d64_bf16_bwd": "head_dim: 64\ndtype: bf16\n",
    "sm90_d64_fp16_causal_bwd": (
        "head_dim: 64\ndtype: fp16\nmask: causal\nstages: {q: 2, do: 1}\n"
    ),
}
KERNELS = (*STRUCTURES, *OF_8_BITS, *BACKWARD)
# Of the cases of `emulate`, those that show most first. The first one has 3 KV blocks, more work
# tiles per CTA than Q stages, and a key so large that the softmax's reference moves; the next two
# are the smallest with 3 KV blocks and 2 work tiles per CTA; then more tiles of one block than Q
# stages; then a CTA with an odd number of tiles; two query tiles of one head where a group of heads
# is enough for the others; a block before the last that some rows see in part, others whole; last,
# so many blocks that a miscounted barrier drifts into another phase.
CASES = ("strided", "exact", "ragged", "short_kv", "waves", "fused", "half", "long_kv")
# Where a kernel has them: two query tiles of a head, however large they are, with a causal mask or
# without one; tiles where warpgroups have no row and no masked block.
CASES_OF_SOME = ("sections", "two_tiles", "few_rows")
# Of packed sequences: lengths unlike one another, among them 0; several heads' tiles for a CTA;
# pages in any order; many blocks; CTAs without a tile.
CASES_OF_PACKED = ("mixed", "tiles", "pages", "long_kv", "idle")
# Of the backward pass: more tiles than CTAs, of several heads; more blocks of rows than stages, of
# which the first see no key; tiles with a tail one after the other; batches and heads of one
# section; several tiles of several blocks; a tail whose P would be infinite.
CASES_OF_BACKWARD = ("waves", "few_keys", "long_kv", "tiles", "ragged", "low")
SCHEDULES = (
    *(
        Schedule(0, Order.ROUND_ROBIN, how)
        for how in (
            Completion.EAGER,
            Completion.LATE,
            Completion.LOADS_EARLY_MMAS_LATE,
        )
    ),
    *(Schedule(seed, Order.RANDOM_WARPS, Completion.RANDOM) for seed in (1, 2)),
    *(Schedule(seed, Order.STARVATION, Completion.EAGER) for seed in (0, 1)),
    Schedule(2, Order.STARVATION, Completion.LATE),
)
LONGEST = 4  # times the steps of the kernel as it is, then it does not end


Launches = tuple[Launch, ...]  # of a call


@functools.cache
def path_of(stem: str) -> Path:
    """A kernel's file; of one that is not shipped in a folder that ends with the process."""
    if stem not in BACKWARD:
        return GENERATED / f"{stem}.py"
    return written(Path(_folder().name), text_of(BACKWARD[stem], stem), stem)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fmha-gen-")


NOT_A_KERNEL = "does not compile"
SAME = "the same PTX"


class Noticed(Exception):
    """The first thing that shows that a kernel is wrong."""


class Subject:
    """A kernel with what its mutants are held against."""

    def __init__(self, stem: str, only: str | None = None) -> None:
        """Captures the launches of its cases, or of `only` one."""
        self.path = path_of(stem)
        self.source = self.path.read_text(encoding="utf-8")
        constants = kernel_text.read_constants(self.source)
        self.spec = constants["SPEC"]
        self.tiles = rehearsal.tiles_of(constants)
        every = [x for x in cases_for(self.spec, self.tiles) if x.emulated]
        packed = self.spec.get("batch") == "varlen"
        of_all = CASES_OF_PACKED if packed else CASES
        if is_backward(self.spec):
            of_all = CASES_OF_BACKWARD
        tags = of_all if only is None else (only,)
        self.cases: list[Case] = [
            next(case for case in every if case.name.startswith(f"{tag}_"))
            for tag in tags
        ]
        if only is None:
            self.cases += [
                case for case in every if case.name.rpartition("_b")[0] in CASES_OF_SOME
            ]
        self.problems: list[Problem] = [
            make_problem(self.spec, self.tiles, case) for case in self.cases
        ]
        self.text, self.launches = self._capture(self.path)
        self.programs = lower.lower_kernels(self.text)
        self._grids = _grids(self.launches)
        self._whole: dict[int, tuple[dict[bytes, Truth], int]] = {}

    def whole(self, number: int) -> tuple[dict[bytes, Truth], int]:
        """A case's truths, and the steps that the kernel as it is takes."""
        if number in self._whole:
            return self._whole[number]
        subject = rehearsal.Rehearsal(
            self.spec,
            self.tiles,
            self.programs,
            self.cases[number],
            self.problems[number],
            self.launches[number],
        )
        ran = subject.run(SCHEDULES[-1])
        if ran.findings:
            raise AssertionError(f"{self.path.stem} undamaged: {ran.findings[0]}")
        self._whole[number] = subject.truths, ran.steps
        return self._whole[number]

    def _capture(self, path: Path) -> tuple[str, list[Launches]]:
        text, called = captured(path, self.cases)
        return text, [each.launched for each in called]

    def mutants(self, kind: str) -> Iterator[Mutant]:
        """All mutants of one kind."""
        if kind == "ptx":
            return ptx_mutants.mutants(self.text)
        return source_mutants.mutants(self.source)

    def notice(self, kind: str, mutant: Mutant) -> str | None:
        """What shows that a mutant is wrong; None when nothing does. Raises CaptureError."""
        text, launches = mutant.text, self.launches
        if kind == "source":
            with tempfile.TemporaryDirectory(prefix="fmha-gen-") as folder:
                path = Path(folder) / self.path.name
                path.write_text(mutant.text, encoding="utf-8")
                text, launches = self._capture(path)
        # Not the parameters: what descriptors hold beside their fields differs between captures.
        same_grids = _grids(launches) == self._grids
        if kind == "source" and text == self.text and same_grids:
            return SAME
        try:
            self._run(lower.lower_kernels(text), launches)
        except Noticed as noticed:
            return str(noticed)
        return None

    def _run(
        self, programs: Mapping[str, lower.Program], launches: Sequence[Launches]
    ) -> None:
        for number, (case, problem, launched) in enumerate(
            zip(self.cases, self.problems, launches, strict=True)
        ):
            truths, steps = self.whole(number)

            def tell(event: str, data: Mapping[str, Any], case: Case = case) -> None:
                if event == "run" and data["findings"]:
                    first = data["findings"][0].split("\n")[0]
                    raise Noticed(f"{case.name} {data['schedule']}: {first}")

            known = rehearsal.Rehearsal(
                *(self.spec, self.tiles, programs, case, problem, launched),
                max_steps=LONGEST * steps,
                truths=truths,
            )
            plans = [(schedule, False) for schedule in SCHEDULES]
            rehearsal.rehearse(known, plans, tell)


def _grids(launches: Iterable[Launches]) -> list[list[tuple[int, ...]]]:
    return [[launch.grid for launch in each] for each in launches]


class Judged(Protocol):
    """A kernel of a campaign."""

    def mutants(self, kind: str) -> Iterator[Mutant]:
        """All mutants of one kind."""

    def notice(self, kind: str, mutant: Mutant) -> str | None:
        """What shows that a mutant is wrong; None when nothing does. Raises CaptureError."""


def run(
    subject_of: Callable[[str], Judged],
    log: Path,
    kernels: Sequence[str],
    kinds: Sequence[str],
    every: int,
    first: int,
) -> None:
    """Every n-th mutant from the first on, unless the log holds it."""
    done = {(row["kernel"], row["kind"], row["name"]) for row in read(log)}
    with log.open("a", encoding="utf-8") as file:
        for stem in kernels:
            subject = subject_of(stem)
            for kind in kinds:
                for mutant in list(subject.mutants(kind))[first::every]:
                    if (stem, kind, mutant.name) in done:
                        continue
                    begin = time.perf_counter()
                    try:
                        noticed = subject.notice(kind, mutant)
                    except (
                        EnvironmentProblem
                    ) as error:  # with the same log it runs again
                        print(f"{stem}: {mutant.name}: {error}", file=sys.stderr)
                        continue
                    except CaptureError as error:
                        last = str(error).strip().split("\n")[-1]
                        noticed = f"{NOT_A_KERNEL}: {last}"
                    except Exception as error:
                        noticed = f"the emulator failed: {error!r}"
                    row = {
                        "kernel": stem,
                        "kind": kind,
                        "name": mutant.name,
                        "line": mutant.line,
                        "before": mutant.before,
                        "noticed": noticed,
                        "seconds": round(time.perf_counter() - begin, 2),
                    }
                    file.write(json.dumps(row) + "\n")
                    file.flush()


def read(log: Path) -> list[dict[str, Any]]:
    """What a log holds."""
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_text("utf-8").splitlines()]


def command(
    prog: str,
    subject_of: Callable[[str], Judged],
    all_kernels: Sequence[str],
    all_kinds: Sequence[str],
) -> None:
    """The command line of a campaign over some kernels and kinds of damage."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}")
    parser.add_argument("log", type=Path)
    parser.add_argument("--kernel", choices=all_kernels, action="append")
    parser.add_argument("--kind", choices=all_kinds, action="append")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    # Whoever is asked to end takes the processes that it started along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    kernels, kinds = options.kernel or all_kernels, options.kind or all_kinds
    run(subject_of, options.log, kernels, kinds, options.every, options.first)


if __name__ == "__main__":
    command("tests.mutation.campaign", Subject, KERNELS, ("ptx", "source"))

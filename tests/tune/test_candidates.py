# SPDX-License-Identifier: Apache-2.0
"""Candidates of real specs: what the formulas refuse, what the build refuses, and who is left."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import support
from engine import fake
from fmha_gen.arch import sm90
from fmha_gen.build import engine as build
from fmha_gen.errors import CheckFailed, SpecError
from fmha_gen.host.executor import Local
from fmha_gen.planning import plan
from fmha_gen.spec.model import SpecFile, load_specs, loads
from fmha_gen.tune import candidates, space
from fmha_gen.tune.candidates import Candidate, built, planned

HEAD = "arch: sm90\nop: fmha_fwd\ndtype: bf16\nhead_dim: 128\n"


def shipped(stem: str) -> SpecFile:
    (spec_file,) = load_specs([support.SPECS / f"{stem}.yaml"])
    return spec_file


@pytest.mark.parametrize("stem", ["sm90_d64_bf16_full", "sm90_d256_bf16_causal_lse"])
def test_the_plan_prunes_by_its_formulas(stem: str) -> None:
    found = planned(shipped(stem), {})
    assert len(found) == len(list(space.points(found[0].point, {})))
    kept = [one for one in found if one.plan is not None]
    assert 4 < len(kept) < len(found)
    for one in kept:
        assert one.plan is not None and one.rejection is None
        assert space.chosen(one.plan) == one.point
        assert one.plan.smem_bytes <= sm90.SMEM_BYTES
        split = sm90.REGISTERS[one.point["tile.q"] // sm90.WARPGROUP_ROWS]
        assert one.plan.kernels[0].registers_needed <= split.consumer
    refused = [one.rejection for one in found if one.plan is None]
    assert {one.code for one in refused if one} == {"FG401", "FG402"}
    for why in refused:
        assert why is not None and why.by == "plan"
        assert "sQ " in why.why if why.code == "FG401" else "S " in why.why


def test_a_candidates_text_is_the_spec_that_gives_its_kernel() -> None:
    spec_file = shipped("sm90_d128_bf16_full")
    fixed = space.fixed_values(
        ["tile.q", "tile.kv=64", "stages.q=1", "stages.kv=4", "stages.v=5"]
    )
    incumbent, one = planned(spec_file, fixed)
    assert incumbent.text == spec_file.text
    assert one.text == spec_file.text + (
        "tile:\n  q: 128\n  kv: 64\nstages:\n  q: 1\n  kv: 4\n  v: 5\n"
    )


def test_a_spec_that_does_not_fit_is_the_users_to_mend() -> None:
    spec_file = support.load_text(HEAD + "stages: {kv: 8}\n")
    with pytest.raises(SpecError, match="FG401"):
        planned(spec_file, {})


def test_a_name_that_says_the_tile_keeps_it() -> None:
    spec_file = support.load_text(HEAD + "tile: {q: 128, kv: 64}\n", "k_t128x64")
    found = planned(spec_file, space.fixed_values(["tile.kv=64,80", "stages.q"]))
    by_kv = {(one.point["tile.q"], one.point["tile.kv"]): one for one in found[1:]}
    assert str(by_kv[128, 64].rejection or "fits").split()[0] in ("fits", "FG401")
    for point in ((128, 80), (192, 64)):
        rejection = by_kv[point].rejection
        assert rejection and (rejection.by, rejection.code) == ("spec", "FG305")


def test_a_fixed_value_that_no_spec_takes_is_rejected_as_such() -> None:
    found = planned(
        shipped("sm90_d128_bf16_full"), space.fixed_values(["tile.kv=17", "tile.q"])
    )
    assert {one.rejection.code for one in found[1:] if one.rejection} == {"FG104"}
    assert all(one.rejection for one in found[1:])


def test_all_numbers_written_out_give_the_same_kernel() -> None:
    """So that the incumbent and its point are one contender."""
    spec_file = shipped("sm90_d64_bf16_full")
    point = space.chosen(plan.resolve(spec_file))
    text = candidates.write(spec_file.text, point)
    assert text != spec_file.text
    path = support.SPECS / f"{spec_file.stem}.yaml"
    (with_all,), _ = build.make(
        [plan.resolve(loads(path, text))], build.default_engine(), compile=False
    )
    shipped_text = (support.GENERATED / f"{spec_file.stem}.py").read_text()
    assert with_all.entry.body == build.render.body_digest(shipped_text)


def test_the_gate_stops_what_the_formulas_let_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Really compiled: 190 registers where 160 are, as a formula without others lets through."""
    monkeypatch.setattr(sm90, "REGISTERS_BESIDE_TILES", {1: 0, 2: 0})
    spec_file = support.load_text(HEAD + "tile: {q: 128, kv: 64}\n")
    sizes = ["tile.q=192", "tile.kv=64,128"]
    fixed = [*sizes, "stages.q=1", "stages.kv=2", "stages.v=2"]
    found = built(
        planned(spec_file, space.fixed_values(fixed)), executor=Local(2), progress=None
    )
    assert [one.rejection and one.rejection.by for one in found] == [
        None,
        None,
        "build",
    ]
    _, good, bad = found
    assert good.kernel is not None and good.kernel.report is not None
    assert bad.rejection is not None and "local" in bad.rejection.why
    assert len({one.body for one in found}) == 3


engines = itertools.count()


def engine(*reports: object) -> build.Engine:
    """The real parts but the compiler, which says in turn what is given."""
    turn, key = iter(reports), f"model {next(engines)}"

    def compile_kernel(text: str, stem: str, arch: str) -> object:
        found = next(turn)
        if isinstance(found, CheckFailed):
            raise found
        return found

    return replace(
        build.default_engine(),
        compile_kernel=compile_kernel,
        toolchain_key=lambda: key,
    )


def two(fields: str = "tile: {q: 128, kv: 64}\n") -> list[Candidate]:
    fixed = ["tile.q", "tile.kv=80", "stages.q=1", "stages.kv=2", "stages.v=2"]
    return planned(support.load_text(HEAD + fields), space.fixed_values(fixed))


def test_failures_of_the_compiler_are_reasons() -> None:
    good, bad = fake.report(), CheckFailed("candidate: does not compile\n  why")
    found = built(two(), executor=Local(1), progress=None, engine=engine(good, bad))
    assert str(found[1].rejection) == "does not compile\n  why"
    spilling = fake.report(stack_bytes=8)
    found = built(
        two(), executor=Local(1), progress=None, engine=engine(good, spilling)
    )
    assert "8 B of stack" in str(found[1].rejection)


def test_an_incumbent_that_does_not_build_ends_it() -> None:
    spilling = fake.report(stack_bytes=8)
    parts = engine(spilling, fake.report())
    with pytest.raises(CheckFailed, match="as it is does not pass the build: uses 8 B"):
        built(two(), executor=Local(1), progress=None, engine=parts)


def test_the_same_kernel_twice_is_tried_once() -> None:
    first, second = two()
    twins = [first, second, replace(second, point={**second.point, "tile.kv": 96})]
    parts = engine(*[fake.report()] * 3)
    found = built(twins, executor=Local(1), progress=None, engine=parts)
    assert [one.rejection is None for one in found] == [True, True, False]
    assert "the same kernel as tile.q 128 tile.kv 80" in str(found[2].rejection)

# SPDX-License-Identifier: Apache-2.0
"""The gate: a sample of the damaged kernels is noticed, and who may survive is known."""

from __future__ import annotations

import pytest
import support
from fmha_gen.build import captures

from . import ptx_mutants, source_mutants
from .campaign import BACKWARD, KERNELS, Subject, path_of
from .ptx_mutants import Mutant
from .survivors import ACCEPTED, reason

CAMPAIGNED = [stem for stem in KERNELS if stem not in BACKWARD]


@pytest.mark.parametrize("stem", support.rotated(CAMPAIGNED, 4))
def test_damage_is_noticed(stem):
    """One mutant; decision 0009 has all of them."""
    subject = Subject(stem)
    able = {
        f"{kind} {mutant.name}": (kind, mutant)
        for kind in ("ptx", "source")
        for mutant in subject.mutants(kind)
        if not reason(stem, kind, mutant.name)
    }
    (name,) = support.picked(able, 1)
    assert subject.notice(*able[name]) is not None, name


GROUPS, FULL, ONE_OF_DO = BACKWARD
SHIPPED_100 = "sm100_d64_bf16_causal_bwd"
# Of backward kernels, of which few mutants ran (decision 0009): one for each kind of damage.
OF_BACKWARD = {
    'cute.arch.fence_proxy("async.shared", space="cta"): dropped': GROUPS,
    "ds_stage = dq_state.index: the other stage of dS": GROUPS,
    "warpgroup.wait_group(2): one group more stays in flight": GROUPS,
    "warpgroup.wait_group(0): gives Q back before dK and S are done": GROUPS,
    "warpgroup.wait_group(0): gives dO back before dV and dQ are done": ONE_OF_DO,
    "beyond = key + ROW_STEP * r >= problem.seqlen_kv: keys beyond the end are seen": FULL,
    "if first + thread < dout.shape[1]:: rows beyond the end have an LSE": FULL,
    "mStatS[thread, place] = cutlass.select_(has_keys, -of_row * LOG2_E, of_row):"
    " rows without keys count": GROUPS,
    "cute.arch.griddepcontrol_wait(): dropped": GROUPS,
    "cute.arch.griddepcontrol_wait() #2: dropped": GROUPS,
    "mTicket[0] = 0: tickets are not set back": GROUPS,
    "clear_ds(rings): dropped": GROUPS,
    "atom#1: one more": GROUPS,
    "red.#2: removed": GROUPS,
    "cp.async.bulk.shared#1: 16 bytes fewer": GROUPS,
    "tcgen05.wait::st#1: removed": SHIPPED_100,
    "tcgen05.wait::st#2: removed": SHIPPED_100,
    "pipes.s.producer_acquire(p_state): dropped": SHIPPED_100,
    "pipes.dp.producer_acquire(ds_state): dropped": SHIPPED_100,
    "pipes.do.consumer_release(do_state): dropped": SHIPPED_100,
    "cute.autovec_copy(zeros, gSums[None, i * threads + thread]):"
    " sums are not cleared": SHIPPED_100,
    "STATS_TX_BYTES = 1024  # [bytes per stage] = 2 * STAT_BYTES: half the bytes": SHIPPED_100,
}


@pytest.mark.parametrize("stem", sorted(set(OF_BACKWARD.values())))
def test_damage_of_a_backward_kernel_has_one_place(stem):
    subject = Subject(stem, "waves")
    names = [x.name for kind in ("ptx", "source") for x in subject.mutants(kind)]
    damages = [name for name, of in OF_BACKWARD.items() if of == stem]
    assert [names.count(name) for name in damages] == [1] * len(damages)


@pytest.mark.parametrize("number", range(2))
def test_damage_of_a_backward_kernel_is_noticed(number):
    name = support.picked(OF_BACKWARD, 2)[number]
    # Keys beyond the end have K and V of zeros: they show where their P overflows.
    cases = {"keys beyond": "low", "without keys": "few_keys"}
    only = next((case for what, case in cases.items() if what in name), "waves")
    subject = Subject(OF_BACKWARD[name], only)
    (kind, mutant), *others = (
        (kind, mutant)
        for kind in ("ptx", "source")
        for mutant in subject.mutants(kind)
        if mutant.name == name
    )
    assert not others and subject.notice(kind, mutant) is not None, name


STORE = "ready = STORE_BARRIER + mma.warpgroup_idx: a store barrier for all"
TAKEN = "pipes.stats.producer_acquire(stats_state): dropped"


@pytest.mark.parametrize(
    ("stem", "kind", "name", "case", "finding"),
    [
        # Only from the ninth work tile of a CTA on.
        (KERNELS[2], "ptx", "mbarrier.init#2: count - 1", "short_kv", ""),
        # Only when a warp stays behind where the other warpgroup overtakes it.
        (KERNELS[1], "source", STORE, None, "race"),
        # Only when the correction group stays behind for two tiles of one block.
        (KERNELS[8], "source", TAKEN, "short_kv", "deadlock"),
    ],
)
def test_what_few_runs_can_show_is_noticed(stem, kind, name, case, finding):
    subject = Subject(stem, case)
    (mutant,) = (m for m in subject.mutants(kind) if m.name == name)
    noticed = subject.notice(kind, mutant)
    assert noticed is not None and finding in noticed


def test_a_wrong_slice_is_noticed_as_such_and_not_only_by_its_result():
    """TMA fills a box of which nothing is in the tensor with zeros, and says nothing."""
    subject = Subject("sm90_d128_bf16_full_c2x1_kvmc")
    swapped = [m for m in subject.mutants("ptx") if m.name.endswith("swapped")]
    assert len(swapped) >= 8
    for mutant in (swapped[0], swapped[-1]):  # a load of K, a store of the output
        noticed = subject.notice("ptx", mutant)
        assert noticed is not None and "out-of-bounds" in noticed
        assert "is wholly outside the tensor: dimension 0 has 128" in noticed


def test_a_kernel_that_is_not_damaged_is_clean():
    subject = Subject("sm90_d256_bf16_full", "short_kv")
    whole = Mutant("nothing", line=0, before="", text=subject.text)
    assert subject.notice("ptx", whole) is None


def test_every_accepted_survivor_is_a_mutant_of_its_kernels():
    names = []
    for stem in KERNELS:
        path = path_of(stem)
        text, _ = captures.capture(path, [], arch=stem.partition("_")[0])
        found = ptx_mutants.mutants(text)
        names += [(stem, "ptx", mutant.name) for mutant in found]
        found = source_mutants.mutants(path.read_text(encoding="utf-8"))
        names += [(stem, "source", mutant.name) for mutant in found]
    for accepted in ACCEPTED:
        assert any(accepted.covers(*name) for name in names), accepted

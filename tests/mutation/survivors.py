# SPDX-License-Identifier: Apache-2.0
"""Mutants that nothing shows to be wrong, and why: they are not, or a check or schedule lacks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Accepted:
    """Survivors of some kernels. kernels, name: patterns of the whole name."""

    kernels: str
    kind: Literal["ptx", "source", "function"]
    name: str
    verdict: Literal["equivalent", "not checked", "missed"]
    reason: str

    def covers(self, kernel: str, kind: str, name: str) -> bool:
        """Whether this is one of them."""
        return (
            kind == self.kind
            and re.fullmatch(self.kernels, kernel) is not None
            and re.fullmatch(self.name, name) is not None
        )


PAIRS = "sm90_d128_bf16_full_c2x1_kvmc"
CAUSAL = "sm90_d128_bf16_causal_lse"
WIDE = "sm90_d256_bf16_full"
GROUPS = "sm90_d128_bf16_causal_gqa8_c1x2_kvmc"
SINGLE = "sm100_d128_bf16_causal_gqa4_lse"
BOTH = "sm100_d128_bf16_causal_gqa4_c2x1_cta2_lse"
SHARED = "sm100_d128_bf16_causal_gqa4_c2x1_kvmc_lse"
UNEVEN = "sm100_d192x128_bf16_causal_lse"
BLOCKS = "sm100_d256_bf16_causal_gqa4_c2x1_cta2_lse"
BACKWARD = r"sm90_d64_(bf16|fp16)(_causal)?(_gqa2)?_bwd"
TWO_OF_DO = r"sm90_d64_bf16(_causal_gqa2)?_bwd"
CAUSAL_BACKWARD = r"sm90_d64_(bf16|fp16)_causal(_gqa2)?_bwd"

_TAIL = """The producer stays until the last V stage is free. Each warp frees that one last
of all stages, so waiting for the others says nothing more."""
_FENCE = """The fence is PV's. QK was issued just before with a fence of its own, and
nothing touches P or O in between."""
_ONCE = """The fence of QK in the loop over masked blocks. With tiles of 128 rows and 128
keys it runs at most once per tile: S was last touched before other fences. PV's
fence covers P and O."""
_COMMIT = """QK of the next tile then joins the group of PV, and the only wait that follows
is for both."""
_NUMBER = """All who meet at this barrier meet at another one that nobody uses: a number is a
name."""
_WAITED = """The reference of a thread's second row moves. PV was waited for before the first
row's exponentials, because head_dim 256 waits early."""
_LOADED = """Another tcgen05.wait::ld stands between these loads of O and the release of the
columns. What is loaded is used by instructions that the registers order (decision 0010)."""
_LAST = """The load warp stays until the last V stage is free. The commit that frees it is the MMA
warp's last of q and kv, and commits complete in order."""
_IN_ORDER = """Both stages of Q are freed by commits one after the other, with no MMA between."""
_RESCALED = """s is empty only after the correction group's arrival for the tile's first block,
which follows its reads of O of the tile before. The wait is there so that the pipeline is right
by itself."""
_PERMIT = (
    """It matters to other CTAs of the SM, and shared memory leaves room for none."""
)
_LEADER = """The leader is CTA 0."""
_BEYOND = """S of such a row is that of zeros, and P is 1: but dO beyond the end arrives as zeros
and D there is 0, so that it adds 0 to dV and dK, and its dQ is not stored."""
_MASKED = """The mask sets each score of a row without keys to -inf after it started at the
statistic, whatever that is. Where the statistic is added last, it is noticed."""
_NO_ROW = """Without a mask every row sees a key."""
_AFTER_Q = """The producer loads Q of a block before its dO, and Q's stage, of as many as dO has, is
given back at the end of the step. With one stage of dO it is noticed."""
_TAIL_OF_CAUSAL = (
    """No row sees a key beyond the end but rows beyond the end, which start at -inf."""
)
_UNUSED = """It says that the rest of P was taken. Nobody waits for it: the QK that overwrites P
follows, and s says when."""
ACCEPTED = (
    Accepted(
        f"{SINGLE}|{BOTH}|{SHARED}|{UNEVEN}|{BLOCKS}",
        "source",
        r"pipes\.q\.producer_tail\(q_state\): dropped",
        "equivalent",
        " ".join(_LAST.split()),
    ),
    Accepted(
        f"{SINGLE}|{BOTH}|{SHARED}|{UNEVEN}",
        "source",
        r"pipes\.o\.producer_acquire\(o_free\): dropped|o_free\.advance\(\): dropped",
        "equivalent",
        " ".join(_RESCALED.split()),
    ),
    Accepted(
        f"{SINGLE}|{BOTH}|{SHARED}|{UNEVEN}|{BLOCKS}",
        "source",
        r"cute\.arch\.relinquish_tmem_alloc_permit\(.*\): dropped",
        "equivalent",
        " ".join(_PERMIT.split()),
    ),
    *(
        Accepted(kernels, "source", name, "equivalent", " ".join(text.split()))
        for kernels, name, text in (
            (BACKWARD, r"of_row = -Float32\.inf: rows beyond the end count", _BEYOND),
            (
                r"sm90_d64_fp16_causal_bwd",
                r"mStatS\[thread, place\] = .*: rows without keys count",
                _MASKED,
            ),
            (
                r"sm90_d64_bf16_bwd",
                r"mStatS\[thread, place\] = .*: rows without keys count",
                _NO_ROW,
            ),
            (TWO_OF_DO, r".*: gives dO back before dV and dQ are done", _AFTER_Q),
            (CAUSAL_BACKWARD, r".*: keys beyond the end are seen", _TAIL_OF_CAUSAL),
        )
    ),
    Accepted(
        f"{PAIRS}|{GROUPS}",
        "source",
        r"rings\.k\.producer_tail\(k_state\): dropped",
        "equivalent",
        " ".join(_TAIL.split()),
    ),
    *(
        Accepted(kernel, "ptx", name, "equivalent", " ".join(text.split()))
        for kernel, name, text in (
            (SINGLE, r"tcgen05\.wait::ld#1[123]: removed", _LOADED),
            (SINGLE, r"mbarrier\.try_wait#13: succeeds at once", _IN_ORDER),
            (SINGLE, r"mbarrier\.try_wait#1[6789]: succeeds at once", _LAST),
            (SINGLE, r"mbarrier\.try_wait#2[45]: succeeds at once", _RESCALED),
            (SINGLE, r"mbarrier\.init#1[78]: (count \+ 1|removed)", _UNUSED),
            (SINGLE, r"tcgen05\.relinquish_alloc_permit#1: removed", _PERMIT),
            (SINGLE, r"bar\.sync#[15]: another barrier", _NUMBER),
            (BOTH, r"tcgen05\.wait::ld#1[123]: removed", _LOADED),
            (BOTH, r"mbarrier\.try_wait#13: succeeds at once", _IN_ORDER),
            (BOTH, r"mbarrier\.try_wait#(1[6789]|2[012]): succeeds at once", _LAST),
            (BOTH, r"mbarrier\.try_wait#2[78]: succeeds at once", _RESCALED),
            (BOTH, r"mbarrier\.init#2[34]: (count \+ 1|removed)", _UNUSED),
            (BOTH, r"tcgen05\.relinquish_alloc_permit#1: removed", _PERMIT),
            (BOTH, r"mapa#[1-5]: always CTA 0", _LEADER),
            (SHARED, r"tcgen05\.wait::ld#1[123]: removed", _LOADED),
            (SHARED, r"mbarrier\.try_wait#13: succeeds at once", _IN_ORDER),
            (SHARED, r"mbarrier\.try_wait#1[6789]: succeeds at once", _LAST),
            (SHARED, r"mbarrier\.try_wait#2[45]: succeeds at once", _RESCALED),
            (SHARED, r"mbarrier\.init#1[78]: (count \+ 1|removed)", _UNUSED),
            (SHARED, r"tcgen05\.relinquish_alloc_permit#1: removed", _PERMIT),
            (SHARED, r"bar\.sync#4: another barrier", _NUMBER),
            (UNEVEN, r"tcgen05\.wait::ld#1[123]: removed", _LOADED),
            (UNEVEN, r"mbarrier\.try_wait#13: succeeds at once", _IN_ORDER),
            (UNEVEN, r"mbarrier\.try_wait#1[678]: succeeds at once", _LAST),
            (UNEVEN, r"mbarrier\.try_wait#2[34]: succeeds at once", _RESCALED),
            (UNEVEN, r"mbarrier\.init#1[56]: (count \+ 1|removed)", _UNUSED),
            (UNEVEN, r"tcgen05\.relinquish_alloc_permit#1: removed", _PERMIT),
            (UNEVEN, r"bar\.sync#[15]: another barrier", _NUMBER),
            (BLOCKS, r"tcgen05\.wait::ld#1[1-7]: removed", _LOADED),
            (BLOCKS, r"mbarrier\.try_wait#1[567]: succeeds at once", _LAST),
            (BLOCKS, r"mbarrier\.init#1[56]: (count \+ 1|removed)", _UNUSED),
            (BLOCKS, r"tcgen05\.relinquish_alloc_permit#1: removed", _PERMIT),
            (BLOCKS, r"mapa#[1-5]: always CTA 0", _LEADER),
            (PAIRS, r"mbarrier\.try_wait#[4567]: succeeds at once", _TAIL),
            (PAIRS, r"wgmma\.fence#[35]: removed", _FENCE),
            (PAIRS, r"wgmma\.commit_group#4: removed", _COMMIT),
            (PAIRS, r"bar\.sync#3: another barrier", _NUMBER),
            (CAUSAL, r"wgmma\.fence#2: removed", _ONCE),
            (CAUSAL, r"wgmma\.fence#[357]: removed", _FENCE),
            (CAUSAL, r"wgmma\.commit_group#6: removed", _COMMIT),
            (CAUSAL, r"bar\.sync#[15]: another barrier", _NUMBER),
            (GROUPS, r"mbarrier\.try_wait#[4567]: succeeds at once", _TAIL),
            (GROUPS, r"wgmma\.fence#2: removed", _ONCE),
            (GROUPS, r"wgmma\.fence#[357]: removed", _FENCE),
            (GROUPS, r"wgmma\.commit_group#6: removed", _COMMIT),
            (GROUPS, r"bar\.sync#4: another barrier", _NUMBER),
            (
                WIDE,
                r"wgmma\.wait_group#5: (removed|one group more stays in flight)",
                _WAITED,
            ),
            (WIDE, r"wgmma\.fence#3: removed", _FENCE),
            (WIDE, r"bar\.sync#[15]: another barrier", _NUMBER),
        )
    ),
)


def reason(kernel: str, kind: str, name: str) -> Accepted | None:
    """Why a mutant may survive; None when it must be noticed."""
    return next((a for a in ACCEPTED if a.covers(kernel, kind, name)), None)

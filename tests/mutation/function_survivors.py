# SPDX-License-Identifier: Apache-2.0
"""Damages to the function that nothing shows because the function is the same, and why it is.

Each was judged by reading the kernel. What is wrong and not noticed has no place here.
"""

from __future__ import annotations

from .survivors import Accepted

ALL = ".*"
CAUSAL = ".*_causal_.*"
FULL = ".*_full_.*"
BF16 = ".*_bf16_.*"
TALL = "sm90_d128_bf16_causal_(lse|gqa8_c1x2_kvmc)"

_ORDER = """Every role of every CTA deals out the tiles of a wave in the same other order, and
each tile of the wave is still one CTA's."""
_SECTIONS = """The sections of heads are others, host and device agree on them, and each tile is
in one: what is close in L2 is all that changes."""
_GRID = """A CTA goes by the number of CTAs that there are: fewer take more waves."""
_CLIP = """The last row of queries sees the last key and no row sees one beyond: for rows that
exist the diagonal is the nearer limit."""
_MORE_MASKED = (
    """A block that all rows see whole is masked as well, which changes no score."""
)
_SLACK = """The slack is a choice: P is at most 2^RESCALE_SLACK, which 16 bits and the fp32
sums hold as well for this one."""
_FAR = """Where the reference is far is a choice of accuracy against speed: nearer is the better
path for more rows."""
_AT_LIMIT = """At the limit the old reference is as good as a new one."""
_QUAD = """All threads of a quad have the row's statistics."""
_ROUNDING = """Another legal order of two roundings, of the same size as before."""
_ONE_MASKED = """TILE_KV is TILE_Q at least: of the blocks after the first, the diagonal of a
tile's rows cuts one at most."""
_NEVER_EMPTY = """Without a diagonal the masked block has a key that every row sees: -3e38 is below
any score, and its exponential is 0."""

ACCEPTED = tuple(
    Accepted(kernels, "function", name, "equivalent", " ".join(text.split()))
    for kernels, name, text in (
        (ALL, r"scheduler: .*: (no wave|the third wave) goes backwards.*", _ORDER),
        (
            ALL,
            r"scheduler: .*: sections (wider than all|of one batch's) heads",
            _SECTIONS,
        ),
        (ALL, r"scheduler: .*: at most 131 CTAs, of tiles for 132", _GRID),
        (CAUSAL, r"residues: .*: the clip at the end of K", _CLIP),
        (
            ALL,
            r"residues: .*: mask begins: the diagonal is a key earlier",
            _MORE_MASKED,
        ),
        (ALL, r"magnitudes: .*: a rise of 1\.1 times the slack is none", _SLACK),
        (BF16, r"magnitudes: .*: a rise of (2|8) times the slack is none", _SLACK),
        (ALL, r"magnitudes: .*: (every reference is far|far is 2\^16 nearer)", _FAR),
        (ALL, r"magnitudes: .*: a rise at the limit counts", _AT_LIMIT),
        (ALL, r"lanes: .*: another thread of the quad writes LSE", _QUAD),
        (ALL, r"order: .*: the scale after the reference", _ROUNDING),
        (ALL, r"order: .*: shift and scale, not fused", _ROUNDING),
        (ALL, r"order: .*: P in 16 bits before its sum", _ROUNDING),
        (FULL, r"scale: .*: the mask's value is scaled up", _NEVER_EMPTY),
        (TALL, r"residues: .*: masked: (the last one only|two at most)", _ONE_MASKED),
    )
)


def reason(kernel: str, kind: str, name: str) -> Accepted | None:
    """Why a mutant is no other kernel; None when it must be noticed."""
    return next((a for a in ACCEPTED if a.covers(kernel, kind, name)), None)

# SPDX-License-Identifier: Apache-2.0
"""Any valid spec is planned within the budgets or refused with the sum; what is planned renders.

Rendering takes some 0.3 s, so those tests draw few examples and do not shrink what fails. Every
run draws others, except where Hypothesis sees that it runs in CI.
"""

from __future__ import annotations

import math
import re
from typing import Any

import support
import yaml
from fmha_gen.arch import sm90
from fmha_gen.build import lint, render
from fmha_gen.errors import SpecError
from fmha_gen.planning import plan
from fmha_gen.planning.kernel_plan import KernelPlan
from fmha_gen.spec.model import Spec
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st

many = settings(deadline=None, max_examples=120)
few = settings(
    deadline=None,
    max_examples=10,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    # Of two specs that differ in one field, often one is not legal.
    suppress_health_check=[HealthCheck.filter_too_much],
)

NUMBER = 12  # changed lines, each counted as removed and as added, for another number
FEATURE = 120  # and for another feature
WINDOW = 140  # a loop more, and other blocks; as in golden/test_diffs.py

Fields = dict[str, Any]

# --- valid specs ---------------------------------------------------------------

LENGTHS: list[int | str] = ["dynamic", 1, 64, 128, 300, 384, 1000, 4096]
lengths = st.sampled_from(LENGTHS) | st.integers(1, 2**24)
clusters = st.sampled_from([[1, 1], [2, 1], [1, 2]])
multicasts = st.sampled_from(["none", "k", "v", "kv"])
widths = st.integers(2, 16).map(lambda n: 16 * n)
head_dims = widths | st.fixed_dictionaries({"qk": widths, "v": widths})
q_per_kv = st.sampled_from([1, 2, 4, 5, 6, 8, 128])
blocks = st.sampled_from(["derived", "derived", "lists"])
# On either side of what a constant reference serves.
softcaps = st.sampled_from(["none", "none", 0.5, 10, 30, 50, 68.9, 69, 1000])
of_scores = softcaps.map(lambda cap: {"softcap": cap}) | st.sampled_from(support.SCORES)
tiles = {
    "q": st.sampled_from([64, 128, 192]),
    "kv": st.integers(1, 16).map(lambda n: 16 * n),
}
stages = {"q": st.integers(1, 2), "kv": st.integers(2, 8), "v": st.integers(2, 8)}


SIDES = st.sampled_from(["none", "none", 0, 40, 300]) | st.integers(0, 2**24)
windows = st.fixed_dictionaries({"left": SIDES, "right": SIDES})


def keeps_rules(fields: Fields) -> bool:
    """Whether the fields go together (the rules FG201 to FG214)."""
    alone = fields["cluster"] == [1, 1]
    group, along_heads = fields["heads"]["q_per_kv"], fields["cluster"][1]
    packable = group > 1 and along_heads == 1
    shares_heads = group % along_heads == 0 and (packable or not fields["pack_gqa"])
    shares_loads = not (alone and fields["multicast"] != "none")
    if "bias" in fields and fields["pack_gqa"]:
        return False
    return shares_heads and shares_loads and support.hides_keys(fields)


def spec_fields(
    tile: st.SearchStrategy[Fields], stage: st.SearchStrategy[Fields]
) -> Any:
    """Draw the fields of a valid spec, all but the planned ones written out."""
    fields = st.fixed_dictionaries(
        {
            "arch": st.just("sm90"),
            "op": st.just("fmha_fwd"),
            "dtype": st.sampled_from(["bf16", "fp16"]),
            "head_dim": head_dims,
            "seqlen": st.fixed_dictionaries({"q": lengths, "kv": lengths}),
            "heads": st.fixed_dictionaries({"q_per_kv": q_per_kv}),
            "pack_gqa": st.booleans(),
            "of_scores": of_scores,
            "mask": st.sampled_from(["none", "causal"]),
            "window": st.just(support.NO_WINDOW) | windows,
            "blocks": blocks,
            "lse": st.booleans(),
            "sink": st.booleans(),
            "cluster": clusters,
            "multicast": multicasts,
            "tile": tile,
            "stages": stage,
        }
    )
    in_full = fields.map(support.with_scores).map(support.with_lists_that_fit)
    return in_full.filter(keeps_rules)


def text_of(fields: Fields) -> str:
    return yaml.safe_dump(fields, sort_keys=False)


def planned(fields: Fields) -> KernelPlan | None:
    """Return the plan, or None when the spec asks for more than there is."""
    try:
        return plan.resolve(support.load_text(text_of(fields)))
    except SpecError:
        return None


valid = spec_fields(
    st.fixed_dictionaries({}, optional=tiles),
    st.fixed_dictionaries({}, optional=stages),
)
plannable = valid.filter(planned)
all_given = st.builds(
    lambda fields, head_dim: fields | {"head_dim": head_dim},
    spec_fields(st.fixed_dictionaries(tiles), st.fixed_dictionaries(stages)),
    st.sampled_from([32, 64, 96, 128]),  # where most tiles and depths fit
)
small = spec_fields(
    st.fixed_dictionaries({"q": st.just(128), "kv": st.sampled_from([32, 48, 64])}),
    st.fixed_dictionaries(
        {"q": st.just(1), "kv": st.integers(2, 3), "v": st.integers(2, 3)}
    ),
)

# --- plans ---------------------------------------------------------------------


# 16 rows of KV fit in the registers, but with 48 columns of K only 32 can be swizzled
UNALIGNED = {
    "arch": "sm90",
    "op": "fmha_fwd",
    "dtype": "bf16",
    "head_dim": {"qk": 48, "v": 224},
    "seqlen": {"q": "dynamic", "kv": "dynamic"},
    "heads": {"q_per_kv": 1},
    "pack_gqa": False,
    "mask": "none",
    "window": support.NO_WINDOW,
    "lse": False,
    "blocks": "derived",
    "sink": False,
    "cluster": [1, 1],
    "multicast": "none",
    "tile": {"q": 192},
    "stages": {},
}


@many
@given(valid)
@example(UNALIGNED)
def test_plan_or_report(fields: Fields) -> None:
    spec_file = support.load_text(text_of(fields))
    try:
        kernel = plan.resolve(spec_file)
    except SpecError as error:
        (diagnostic,) = error.diagnostics
        if diagnostic.code == "FG403":
            assert_groups_are_in_pieces(fields, diagnostic.message)
            return
        if diagnostic.code == "FG407":
            widths = {spec_file.spec.head_dim.qk, spec_file.spec.head_dim.v}
            assert any(fields["tile"]["kv"] * n * 2 % 1024 for n in widths)
            return
        if diagnostic.code == "FG404":
            assert_o_cannot_leave(spec_file.spec, diagnostic.message)
            return
        assert_sum_is_written_out(diagnostic.code, diagnostic.message)
        given_sizes = [
            spec_file.locate(block, key)
            for block in ("tile", "stages")
            for key in fields[block]
        ]
        assert diagnostic.location in given_sizes
        return
    assert_within_budgets(kernel)
    assert_numbers_follow(kernel)


def assert_sum_is_written_out(code: str, message: str) -> None:
    """A budget that does not fit: need > limit, and the parts add up to the need."""
    need, limit = map(int, re.findall(r"\d+(?= B| registers|:)", message)[:2])
    parts = message.partition(": ")[2].split(" + ")
    assert sum(int(part.split()[-1]) for part in parts) == need > limit
    limits = {"FG401": {sm90.SMEM_BYTES}, "FG402": {160, 240, 256}}
    assert limit in limits[code]


def assert_groups_are_in_pieces(fields: Fields, message: str) -> None:
    """Rows that are no multiple of the group are divided before the user's eyes."""
    rows, group, left = map(int, re.findall(r"(\d+) % (\d+) = (\d+)", message)[0])
    assert fields["pack_gqa"] and group == fields["heads"]["q_per_kv"]
    assert rows % group == left > 0
    assert rows == fields["tile"].get("q", rows) and rows in (64, 128, 192)


def assert_o_cannot_leave(spec: Spec, message: str) -> None:
    """Each number of Q stages that may be taken is refused by a rule that holds."""
    qk, v, group = spec.head_dim.qk, spec.head_dim.v, spec.heads.q_per_kv
    against = {
        1: v % 32 != 0,
        2: v > qk or (spec.pack_gqa and 64 % group != 0),
    }
    asked = [spec.stages.q] if spec.stages.q else [1, 2]
    assert all(against[stages] for stages in asked)
    assert [f"stages.q: {n} stores O" in message for n in (1, 2)] == [
        n in asked for n in (1, 2)
    ]
    for number, step, left in re.findall(r"(\d+) % (\d+) = (\d+)", message):
        assert int(number) % int(step) == int(left) > 0


def assert_within_budgets(kernel: KernelPlan) -> None:
    (device,) = kernel.kernels
    assert device.smem_bytes == sum(region.nbytes for region in device.smem)
    assert device.smem_bytes <= 232448
    assert device.registers_needed <= device.hungriest.per_thread
    roles = device.registers
    assert 128 * sum(role.warpgroups * role.per_thread for role in roles) <= 65536
    assert all(
        role.per_thread % 8 == 0 and 24 <= role.per_thread <= 256 for role in roles
    )


def assert_numbers_follow(kernel: KernelPlan) -> None:
    """Every formula gives its number from the ones above it; tiles start aligned."""
    known: dict[str, int] = {}
    for number in (*kernel.chosen, *kernel.derived):
        assert number.origin in ("given", "planned", "derived")
        assert bool(number.reason) == (number.origin == "planned")
        assert bool(number.formula) == (number.origin == "derived")
        if number.formula:
            assert (
                eval(number.formula, {"math": math}, sm90.CONSTANTS | known)
                == number.value
            ), number
        assert number.name not in known
        known[number.name] = number.value
    offset = 0
    for region in kernel.kernels[0].smem:
        if region.name.startswith("s"):
            assert offset % 1024 == 0
        if region.name != "padding":
            assert eval(region.formula, {}, known) == region.nbytes, region
        offset += region.nbytes


def numbers_of(kernel: KernelPlan) -> dict[str, int]:
    return {number.name: number.value for number in (*kernel.chosen, *kernel.derived)}


@many
@given(valid)
def test_packed_tiles_are_whole_groups_and_boxes_of_o_too(fields: Fields) -> None:
    kernel = planned(fields)
    assume(kernel is not None)
    assert kernel is not None
    numbers = numbers_of(kernel)
    assert ("TILE_POSITIONS" in numbers) == fields["pack_gqa"]
    if fields["pack_gqa"]:
        group = fields["heads"]["q_per_kv"]
        assert numbers["TILE_POSITIONS"] * group == numbers["TILE_Q"]
        assert numbers["Q_STAGES"] == 1 or 64 % group == 0
        assert not kernel.context["strips"]


@many
@given(all_given)
def test_what_is_given_is_kept(fields: Fields) -> None:
    kernel = planned(fields)
    assume(kernel is not None)
    assert kernel is not None
    numbers = numbers_of(kernel)
    assert numbers["TILE_Q"] == fields["tile"]["q"]
    assert numbers["TILE_KV"] == fields["tile"]["kv"]
    assert numbers["Q_STAGES"] == fields["stages"]["q"]
    assert numbers["K_STAGES"] == fields["stages"]["kv"]
    assert numbers["V_STAGES"] == fields["stages"]["v"]


kv_stages_given = spec_fields(
    st.fixed_dictionaries({"q": st.just(128), "kv": st.sampled_from([16, 32])}),
    st.fixed_dictionaries(
        {"kv": stages["kv"]}, optional={"q": stages["q"], "v": stages["v"]}
    ),
)


@many
@given(kv_stages_given)
def test_kv_stages_are_of_both_unless_v_has_its_own(fields: Fields) -> None:
    asked = fields["stages"]
    kernel = planned(fields)
    assume(kernel is not None)
    assert kernel is not None
    numbers = numbers_of(kernel)
    assert numbers["K_STAGES"] == asked["kv"]
    assert numbers["V_STAGES"] == asked.get("v", asked["kv"])


@many
@given(valid)
def test_what_a_warpgroup_skips_fits_in_the_rings(fields: Fields) -> None:
    """With fewer stages nobody goes on: `Traits.strips` says why.

    An H200 hung so; in the emulator the case `long_kv` does (tests/emulator/test_strips.py).
    """
    kernel = planned(fields)
    assume(kernel is not None)
    assert kernel is not None
    numbers = numbers_of(kernel)
    skipped = -(-(numbers["TILE_Q"] - 64) // numbers["TILE_KV"])
    if kernel.context["strips"]:
        assert skipped < numbers["K_STAGES"] and skipped <= numbers["V_STAGES"]
        assert fields["cluster"] == [1, 1]
        assert kernel.context["right_edge"] and not kernel.context["left_edge"]


# --- texts ---------------------------------------------------------------------


def absent_words(fields: Fields, kernel: KernelPlan) -> dict[str, str]:
    """What the code of a kernel must not speak of: feature that is off -> pattern."""
    numbers = numbers_of(kernel)
    words = {
        "lse": r"\blse\b|LSE|\bLN_2\b",
        "sink": r"(?i)sink",
        "bias": r"bias_|Bias|BIAS",
        "cluster": r"(?i)cluster",
        "multicast": r"(?i)multicast|mcast|\beveryone\b|producer_tail",
        "window": r"WINDOW|mask_left|\bRange\b",
        "causal": r"causal|diagonal|common_keys|end_position",
        "odd waves": r"backwards",
        "lists": r"\bLists\b|[lL]isted|kv_indices|is_listed",
        "seqlen_q at run time": r"problem\.seqlen_q|seqlen_q: Int32|problem\.q_tiles",
        "seqlen_kv at run time": r"problem\.seqlen_kv|seqlen_kv: Int32|seqlen_kv=",
        "overlap across tiles": r"Boundary|\bif more:|StMatrix|STORE_BARRIER",
        "O from registers": r"transpose_quad|store_row|STORE_COLUMNS|\bmO\b",
        "turns of warpgroups": r"turn_of|\bORDER_",
        "skipped blocks": r"skip|warpgroup_row|warpgroup_blocks",
        "sections of heads": r"(?i)section|SMS_PER_HEAD",
        "packed heads": r"POSITIONS|\bgroup=|logical_divide",
        "softcap": r"(?i)softcap|tanh|\bcap_",
        "tests of exponents": r"score_of|(?i:slope)|take_exponents|SLACK_BITS|SCORE_FACTOR",
        "references of rows": r"RESCALE_SLACK|renew_reference|row_max|stats\.(max|reference)",
    }
    present = {
        "lse": fields["lse"],
        "sink": fields["sink"],
        "bias": "bias" in fields,
        "cluster": fields["cluster"] != [1, 1],
        "multicast": fields["multicast"] != "none",
        "causal": kernel.context["edges"],
        "odd waves": kernel.context["lpt_order"] or fields["blocks"] == "lists",
        "lists": fields["blocks"] == "lists",
        "window": fields["window"] != support.NO_WINDOW,
        "seqlen_q at run time": fields["seqlen"]["q"] == "dynamic",
        "seqlen_kv at run time": fields["seqlen"]["kv"] == "dynamic",
        "overlap across tiles": numbers["Q_STAGES"] == 2,
        "O from registers": numbers["Q_STAGES"] == 1,
        "turns of warpgroups": numbers["TILE_Q"] > 64,
        "skipped blocks": kernel.context["strips"],
        "sections of heads": kernel.context["lpt_order"],
        "packed heads": fields["pack_gqa"],
        "softcap": fields.get("softcap", "none") != "none",
        "tests of exponents": {"alibi", "score", "bias"} & fields.keys(),
        "references of rows": not kernel.context["bounded"],
    }
    return {name: pattern for name, pattern in words.items() if not present[name]}


LONGEST = {  # every feature at once: the lint's limit of lines is meant for this one
    "arch": "sm90",
    "op": "fmha_fwd",
    "dtype": "bf16",
    "head_dim": {"qk": 192, "v": 128},
    "seqlen": {"q": "dynamic", "kv": "dynamic"},
    "heads": {"q_per_kv": 2},
    "pack_gqa": False,
    "mask": "causal",
    "window": {"left": 1023, "right": "none"},
    "blocks": "derived",
    "lse": True,
    "sink": True,
    "cluster": [1, 2],
    "multicast": "kv",
    "tile": {},
    "stages": {"q": 2},
}

LONGEST_PACKED = LONGEST | {"pack_gqa": True, "cluster": [2, 1]}
LONGEST_LISTS = LONGEST | {
    "blocks": "lists",
    "cluster": [1, 1],
    "multicast": "none",
}
SLOPED = LONGEST | {  # one slope for all rows, set behind each tile
    "dtype": "fp16",
    "head_dim": {"qk": 64, "v": 224},
    "seqlen": {"q": 596, "kv": 32767},
    "mask": "none",
    "window": {"left": "none", "right": "none"},
    "score": "2 * s + (kv - q) / 64",
    "stages": {},
}
BIASED = LONGEST | {"head_dim": 128, "bias": "bf16", "tile": {"kv": 64}}


@few
@given(plannable)
@example(LONGEST)
@example(LONGEST_PACKED)
@example(LONGEST_LISTS)
@example(SLOPED)
@example(BIASED)
def test_text(fields: Fields) -> None:
    kernel = planned(fields)
    assert kernel is not None
    text = render.render_kernel(kernel)
    assert lint.lint(text) == []
    assert render.render_kernel(kernel) == text
    assert render.format_source(text) == text
    assert "const_expr" not in text
    code = text.partition("\nDTYPE = ")[2]
    assert code
    for feature, pattern in absent_words(fields, kernel).items():
        lines = [line for line in code.splitlines() if re.search(pattern, line)]
        assert not lines, f"{feature} is off: {lines}"


# --- edits of one field --------------------------------------------------------


def changed(before: Fields, after: Fields) -> tuple[list[str], list[str]]:
    """Return the lines that an edit removes and adds."""
    texts = [support.kernel_text(text_of(fields)) for fields in (before, after)]
    return support.changed_lines(support.unified_diff(*texts, "before", "after"))


@few
@given(small, st.data())
def test_another_number_changes_few_lines(fields: Fields, data: st.DataObject) -> None:
    """With all sizes given and run-time lengths no other choice follows from a number.

    But whether warpgroups skip blocks does: tiles of few keys and V's stages decide it. And whether
    the edges of a window are masked apart: so many keys must be between them.
    """
    run_time = {"q": "dynamic", "kv": "dynamic"}
    group = 8 if fields["pack_gqa"] else 6
    fields = fields | {"seqlen": run_time, "heads": {"q_per_kv": group}}
    block, key, values = data.draw(
        st.sampled_from(
            [
                ("stages", "kv", st.sampled_from([2, 3])),
                ("stages", "v", st.sampled_from([2, 3])),
                ("tile", "kv", st.sampled_from([32, 48, 64])),
                ("heads", "q_per_kv", st.sampled_from([2, 4, 8, 128])),
            ]
        )
    )
    edited = fields | {block: fields[block] | {key: data.draw(values)}}
    assume(edited != fields and planned(fields) and planned(edited))
    texts = [support.kernel_text(text_of(one)) for one in (fields, edited)]
    for choice in ("skip_blocks", "mask_left"):
        assume(len({choice in text for text in texts}) == 1)
    removed, added = changed(fields, edited)
    followers = 4 if fields["pack_gqa"] else 0  # positions of a tile and of a cluster
    followers += (
        4 if "bias" in fields else 0
    )  # the bytes of its stage, and their swizzle
    assert len(removed) + len(added) <= NUMBER + followers, (removed, added)


@few
@given(plannable, st.data())
def test_another_feature_changes_a_bounded_part(
    fields: Fields, data: st.DataObject
) -> None:
    field, values = data.draw(
        st.sampled_from(
            [
                ("dtype", st.sampled_from(["bf16", "fp16"])),
                ("mask", st.sampled_from(["none", "causal"])),
                ("window", windows),
                ("lse", st.booleans()),
                ("sink", st.booleans()),
                ("pack_gqa", st.booleans()),
                ("cluster", clusters),
                ("multicast", multicasts),
                ("seqlen", lengths.map(lambda n: fields["seqlen"] | {"q": n})),
                ("seqlen", lengths.map(lambda n: fields["seqlen"] | {"kv": n})),
            ]
        )
    )
    edited = fields | {field: data.draw(values)}
    assume(edited != fields and keeps_rules(edited) and planned(edited))
    # Rows that are not whole groups of packed heads leave in another way: a feature more.
    assume(q_stages(fields) == q_stages(edited))
    # So are references, where P of the one type can do without and that of the other cannot.
    assume(is_bounded(fields) == is_bounded(edited))
    # A window of few keys has tiles of its own.
    assume(tile_kv(fields) == tile_kv(edited))
    removed, added = changed(fields, edited)
    # A loop calls what makes exponents of scores, an argument a line: windows and lengths add one.
    loops, scores = {"window", "seqlen"}, {"alibi", "score", "bias"}
    calls = 48 if field in loops and scores & fields.keys() else 0
    budget = WINDOW if field == "window" else FEATURE
    assert len(removed) + len(added) <= budget + calls, (removed, added)


def q_stages(fields: Fields) -> int:
    kernel = planned(fields)
    assert kernel is not None
    return numbers_of(kernel)["Q_STAGES"]


def tile_kv(fields: Fields) -> int:
    kernel = planned(fields)
    assert kernel is not None
    return numbers_of(kernel)["TILE_KV"]


def is_bounded(fields: Fields) -> bool:
    kernel = planned(fields)
    assert kernel is not None
    return bool(kernel.context["bounded"])


@few
@given(plannable)
def test_lse_off_changes_what_names_outputs(fields: Fields) -> None:
    assume(not is_bounded(fields | {"lse": False}))  # rows have references with an LSE
    removed, added = changed(fields | {"lse": True}, fields | {"lse": False})
    digests, *others = sorted(added, reverse=True)
    assert digests.startswith("spec sha256:")
    others.remove('    "lse": False,')
    # Of many inputs the outputs are counted from the end.
    words = ("out", "Tensor", "len(spans)")
    assert all(any(word in line for word in words) for line in others)
    assert '    "lse": True,' in removed

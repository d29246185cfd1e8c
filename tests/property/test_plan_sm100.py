# SPDX-License-Identifier: Apache-2.0
"""Any valid sm100 spec is planned within the budgets or refused with the sum; plans render.

Rendering takes some 0.3 s, so the test of texts draws few examples and does not shrink.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import support
import yaml
from fmha_gen.arch import sm100
from fmha_gen.build import lint, render
from fmha_gen.errors import SpecError
from fmha_gen.planning import plan
from fmha_gen.planning.kernel_plan import KernelPlan
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st

many = settings(deadline=None, max_examples=120)
few = settings(
    deadline=None,
    max_examples=8,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    # Of two specs that differ in one field, often one is not legal.
    suppress_health_check=[HealthCheck.filter_too_much],
)

Fields = dict[str, Any]

SIDES = st.sampled_from(["none", "none", 0, 100, 700])
windows = st.fixed_dictionaries({"left": SIDES, "right": SIDES})
lengths = st.sampled_from(["dynamic", 1, 77, 128, 300, 1000, 4096])
clusters = st.sampled_from([([1, 1], "none"), ([2, 1], "none"), ([2, 1], "kv")])
head_dims = st.sampled_from([64, 96, 128, {"qk": 192, "v": 128}])
head_dims_of_pairs = st.sampled_from([128, {"qk": 192, "v": 128}, 256])
tiles = st.fixed_dictionaries(
    {}, optional={"q": st.just(256), "kv": st.integers(1, 16).map(lambda n: 16 * n)}
)
stages = st.fixed_dictionaries({}, optional={"q": st.just(2), "kv": st.integers(2, 8)})


def spec_of(cluster: tuple[list[int], str], fields: Fields) -> Fields:
    of_cluster = {"cluster": cluster[0], "multicast": cluster[1]}
    return support.with_lists_that_fit(support.with_scores(fields) | of_cluster)


def pair_of(head_dim: Any, fields: Fields) -> Fields:
    """The same for a pair; a tile of 256 rows is given only where its O fits."""
    tile = {k: n for k, n in fields["tile"].items() if k != "q" or head_dim != 256}
    stages = {k: n for k, n in fields["stages"].items() if k != "q" or head_dim != 256}
    pair = {"cluster": [2, 1], "multicast": "none", "cta_group": 2, "blocks": "derived"}
    rest = {"head_dim": head_dim, "tile": tile, "stages": stages}
    return fields | pair | rest | {"schedule": "persistent"}


CAPS: list[Fields] = [{"softcap": cap} for cap in ("none", "none", 0.5, 30, 1000)]
singles = st.builds(
    spec_of,
    clusters,
    st.fixed_dictionaries(
        {
            "arch": st.just("sm100"),
            "op": st.just("fmha_fwd"),
            "dtype": st.sampled_from(["bf16", "fp16"]),
            "head_dim": head_dims,
            "seqlen": st.fixed_dictionaries({"q": lengths, "kv": lengths}),
            "heads": st.fixed_dictionaries({"q_per_kv": st.sampled_from([1, 4, 128])}),
            "of_scores": st.sampled_from([*CAPS, *support.SCORES]),
            "mask": st.sampled_from(["none", "causal"]),
            "window": st.just(support.NO_WINDOW) | windows,
            "blocks": st.sampled_from(["derived", "derived", "lists"]),
            "lse": st.booleans(),
            "sink": st.booleans(),
            "schedule": st.sampled_from(["persistent", "single"]),
            "tile": tiles,
            "stages": stages,
        }
    ),
).filter(support.hides_keys)
valid = singles | st.builds(pair_of, head_dims_of_pairs, singles)


def planned(fields: Fields) -> KernelPlan:
    return plan.resolve(support.load_text(yaml.safe_dump(fields, sort_keys=False)))


def fits(fields: Fields) -> bool:
    try:
        planned(fields)
    except SpecError:
        return False
    return True


@many
@given(valid)
def test_plan_or_report(fields: Fields) -> None:
    try:
        kernel = planned(fields)
    except SpecError as error:
        (diagnostic,) = error.diagnostics
        assert_sum_is_written_out(diagnostic.code, diagnostic.message)
        return
    assert_within_budgets(kernel)
    assert_numbers_follow(kernel)


def assert_sum_is_written_out(code: str, message: str) -> None:
    if code == "FG406":
        rows, step, left = map(int, re.findall(r"(\d+) % (\d+) = (\d+)", message)[0])
        assert rows % step == left > 0
        return
    limits = {"FG401": {sm100.SMEM_BYTES}, "FG402": {192, 256}, "FG405": {512}}
    need, limit = map(
        int, re.findall(r" (\d+)(?= B| registers| columns|:)", message)[:2]
    )
    products = re.findall(r"\d+(?: \* \d+)*(?= \+|$)", message.partition(": ")[2])
    parts = [math.prod(map(int, product.split(" * "))) for product in products]
    assert sum(parts) == need > limit
    assert limit in limits[code]


def assert_within_budgets(kernel: KernelPlan) -> None:
    (device,) = kernel.kernels
    assert device.smem_bytes <= sm100.SMEM_BYTES
    assert device.registers_needed <= device.hungriest.per_thread
    warpgroups = sum(role.warpgroups for role in device.registers)
    at_launch = sm100.REGISTERS // (128 * warpgroups) // 8 * 8
    dealt_out = sum(role.warpgroups * role.per_thread for role in device.registers)
    assert dealt_out == warpgroups * at_launch
    *_, correction, others = device.registers
    assert max(correction.per_thread, others.per_thread) <= at_launch  # they give back
    assert all(role.per_thread % 8 == 0 for role in device.registers)
    s_and_o = [part for part in device.tmem if not part.name.startswith("P")]
    columns = [
        n for part in s_and_o for n in range(part.first, part.first + part.count)
    ]
    assert len(set(columns)) == len(columns)  # nothing lies on anything else
    assert max(columns) < sm100.TMEM_COLUMNS
    places = {part.name: part for part in device.tmem}
    of = "half" if "S of half 0" in places else "stage"
    for part in range(2):
        s, p = places[f"S of {of} {part}"], places[f"P of {of} {part}"]
        assert (p.first, 2 * p.count) == (s.first, s.count)


def assert_numbers_follow(kernel: KernelPlan) -> None:
    """Every formula gives its number from the ones above it; tiles start aligned."""
    known: dict[str, int] = {}
    for number in (*kernel.chosen, *kernel.derived):
        assert bool(number.reason) == (number.origin == "planned")
        assert bool(number.formula) == (number.origin == "derived")
        if number.formula:
            assert (
                eval(number.formula, {"math": math}, sm100.CONSTANTS | known)
                == number.value
            ), number
        assert number.name not in known
        known[number.name] = number.value
    offset = 0
    for region in kernel.kernels[0].smem:
        if region.name.startswith("s") and region.name != "stats":
            assert offset % sm100.SMEM_ALIGN == 0
        if region.name != "padding":
            assert eval(region.formula, {}, known) == region.nbytes, region
        offset += region.nbytes


def absent_words(fields: Fields, has: Mapping[str, Any]) -> dict[str, str]:
    """What the code of a kernel must not speak of: feature that is off -> pattern."""
    fixed = {axis: n != "dynamic" for axis, n in fields["seqlen"].items()}
    words = {
        "lse": (fields["lse"], r"\blse\b|LSE|\bLN_2\b"),
        "sink": (fields["sink"], r"(?i)sink"),
        "bias": ("bias" in fields, r"bias_|Bias|BIAS"),
        "cluster": (fields["cluster"] != [1, 1], r"(?i)cluster"),
        "pair": ("cta_group" in fields, r"is_two_cta|TWO|MMA_ROWS|both CTAs share"),
        "multicast": (fields["multicast"] != "none", r"(?i)multicast|mcast|peers"),
        "edges": (has["edges"], r"(?i)causal|diagonal|common_keys"),
        "window": (
            fields["window"] != support.NO_WINDOW,
            r"WINDOW|mask_left|\bRange\b",
        ),
        "sections": (has["lpt_order"], r"(?i)section|SMS_PER_HEAD"),
        "odd waves": (has["lpt_order"] or has["lists"], r"backwards"),
        "lists": (has["lists"], r"\bLists\b|[lL]isted|kv_indices|is_listed"),
        "softcap": (
            fields.get("softcap", "none") != "none",
            r"(?i)softcap|tanh|\bcap_",
        ),
        "scores": (
            {"alibi", "score"} & fields.keys(),
            r"score_of|(?i:slope)|SCORE_FACTOR",
        ),
        "waves": (fields["schedule"] == "persistent", r"\bwave\b|num_tiles\b.*problem"),
        "seqlen_q at run time": (not fixed["q"], r"problem\.(seqlen_q|q_tiles)"),
        "seqlen_kv at run time": (not fixed["kv"], r"problem\.seqlen_kv|seqlen_kv="),
    }
    return {name: pattern for name, (on, pattern) in words.items() if not on}


FULLEST = {  # every feature at once
    "arch": "sm100",
    "op": "fmha_fwd",
    "dtype": "bf16",
    "head_dim": {"qk": 192, "v": 128},
    "seqlen": {"q": "dynamic", "kv": "dynamic"},
    "heads": {"q_per_kv": 128},
    "mask": "causal",
    "window": {"left": 1023, "right": "none"},
    "lse": True,
    "sink": True,
    "cluster": [2, 1],
    "multicast": "kv",
    "schedule": "persistent",
    "tile": {},
    "stages": {},
}


# A pair, and a query tile that is one box: the limit of lines is meant for this one.
LONGEST = FULLEST | {
    "seqlen": {"q": 100, "kv": "dynamic"},
    "multicast": "none",
    "cta_group": 2,
}
SHORTEST = FULLEST | {  # and with none: roles that need not know the problem
    "head_dim": 64,
    "seqlen": {"q": "dynamic", "kv": 77},
    "mask": "none",
    "window": support.NO_WINDOW,
    "lse": False,
    "sink": False,
    "cluster": [1, 1],
    "multicast": "none",
    "schedule": "single",
}


@few
@given(valid.filter(fits))
@example(FULLEST)
@example(LONGEST)
@example(SHORTEST)
def test_text(fields: Fields) -> None:
    kernel = planned(fields)
    text = render.render_kernel(kernel)
    assert lint.lint(text) == []
    assert render.render_kernel(planned(fields)) == text
    assert render.format_source(text) == text
    code = text.partition("\nDTYPE = ")[2]
    for feature, pattern in absent_words(fields, kernel.context).items():
        lines = [line for line in code.splitlines() if re.search(pattern, line)]
        assert not lines, f"{feature} is off: {lines}"


@few
@given(valid.filter(fits))
def test_lse_off_changes_what_names_outputs(fields: Fields) -> None:
    texts = [
        render.render_kernel(planned(fields | {"lse": lse})) for lse in (True, False)
    ]
    difference = support.unified_diff(*texts, "before", "after")
    _, added = support.changed_lines(difference)
    digests, *others = sorted(added, reverse=True)
    assert digests.startswith("spec sha256:")
    others.remove('    "lse": False,')
    # Of many inputs the outputs are counted from the end; a score need not read batch and head.
    words = ("out", "Tensor", "len(spans)", "= work_tile(")
    assert all(any(word in line for word in words) for line in others)


@many
@given(valid)
def test_what_is_given_is_kept(fields: Fields) -> None:
    assume(fits(fields))
    kernel = planned(fields)
    numbers = {number.name: number.value for number in kernel.chosen}
    assert numbers["TILE_KV"] == fields["tile"].get("kv", numbers["TILE_KV"])
    assert numbers["KV_STAGES"] == fields["stages"].get("kv", numbers["KV_STAGES"])

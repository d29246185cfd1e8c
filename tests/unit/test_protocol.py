# SPDX-License-Identifier: Apache-2.0
"""The steps that are explained and drawn are those of the kernel: its calls, its counts."""

from __future__ import annotations

import ast
import functools
import graphlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
import support
from fmha_gen.build import render
from fmha_gen.ops.forward import FORWARD
from fmha_gen.planning.backward import CLUSTER_CTAS
from fmha_gen.planning.kernel_plan import DevicePlan, KernelPlan
from fmha_gen.planning.protocol import Lane, Phase, arrows
from fmha_gen.show import backward

# A kernel for each structure: cluster, pair, one stage of Q or O, one to three warpgroups.
STEMS = (
    "sm90_d128_bf16_causal_c2x1_kvmc_lse",
    "sm90_d128_bf16_causal_gqa8_c1x2_vmc",
    "sm90_d128_bf16_causal_t64x64",
    "sm90_d256_bf16_causal_lse",
    "sm90_d64_bf16_causal",
    "sm100_d128_bf16_causal_gqa4_c2x1_kvmc_lse",
    "sm100_d128_fp16_full_c2x1_cta2",
    "sm100_d192x128_bf16_causal_lse",
    "sm100_d256_bf16_causal_gqa4_c2x1_cta2_lse",
    "sm100_d64_bf16_causal_gqa8_single",
)
FUNCTIONS = {
    "producer": "load_qkv",
    "consumer": "attend",
    "load": "load_qkv",
    "mma": "multiply",
    "softmax": "softmax",
    "correction": "correct",
    "store": "store_o",
}
CALLS = {
    "consumer_wait": "wait {}_full",
    "consumer_release": "signal {}_empty",
    "producer_acquire": "wait {}_empty",
    "producer_commit": "signal {}_full",
}
PIPELINE = re.compile(r"(?:rings|pipes)\.(\w+)\.(\w+)\(")
OF_NO_STEP = {"skip_blocks"}  # functions about blocks that only other warpgroups need
# In no lane: once per kernel.
ONCE = {"tmem"}

each_shipped = pytest.mark.parametrize("stem", support.SHIPPED)
# Of the backward pass tests/backward/test_shown.py knows what fills a stage.
each_forward = pytest.mark.parametrize("stem", support.shipped(FORWARD))
each_structure = pytest.mark.parametrize("stem", STEMS)


@each_structure
def test_the_steps_of_a_block_are_the_loop_of_the_kernel(stem: str) -> None:
    block, _ = support.shipped_plan(stem).kernels[0].phases
    module = ast.parse(kernel(stem))
    functions = {
        node.name: node for node in module.body if isinstance(node, ast.FunctionDef)
    }
    for lane in block.lanes:
        code = Code(functions, 1 if lane.role.startswith("softmax") else _halves(stem))
        loop = loops(functions[FUNCTIONS[lane.role.split()[0]]])[-1]
        assert said(lane) == list(code.calls(loop.body)), lane.role


@each_structure
def test_the_steps_between_tiles_are_what_is_around_the_loops(stem: str) -> None:
    plan = support.shipped_plan(stem)
    _, tile = plan.kernels[0].phases
    module = ast.parse(kernel(stem))
    functions = {
        node.name: node for node in module.body if isinstance(node, ast.FunctionDef)
    }
    for lane in tile.lanes:
        code = Code(functions, 1 if lane.role.startswith("softmax") else _halves(stem))
        function = functions[FUNCTIONS[lane.role.split()[0]]]
        before, after = code.around(function)
        if lane.role in ("producer", "load"):
            # The last of the loop, then the first of the next tile's.
            loop = loops(function)[-1].body
            after = list(code.calls(loop))[-2:]
            first = list(code.calls(loop, first=True))
            before += first if plan.arch == "sm90" else first[:2]
        again = plan.context["persistent"]
        assert said(lane) == (after + before if again else before + after), lane.role


@functools.cache
def protocol(stem: str) -> DevicePlan:
    """What is explained and drawn of the kernel of a call that has barriers."""
    plan = backward.shown(support.shipped_plan(stem))
    (found,) = (each for each in plan.kernels if each.barriers)
    return found


@functools.cache
def kernel(stem: str) -> str:
    """The text that the plan gives."""
    return render.render_kernel(support.shipped_plan(stem))


def said(lane: Lane) -> list[str]:
    """The waits and signals of a lane."""
    return [
        call
        for step in lane.steps
        for call in (
            *(f"wait {wait.barrier}" for wait in step.waits),
            *(f"signal {signal.barrier}" for signal in step.signals),
        )
    ]


def _halves(stem: str) -> int:
    numbers = support.shipped_plan(stem).derived
    return next((each.value for each in numbers if each.name == "HALVES"), 1)


def loops(function: ast.FunctionDef) -> list[ast.For]:
    """Those over KV blocks, in their order; of those without a mask there is one, the last."""
    found = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.For)
        and "cutlass.range(" in (text := ast.unparse(node.iter))
        and "HALVES" not in text
        and "skipped" not in text
    ]
    return sorted(found, key=lambda loop: loop.lineno)


class Code:
    """Waits and signals in the order of the text, with those of the functions it calls."""

    def __init__(self, functions: dict[str, ast.FunctionDef], halves: int) -> None:
        self._functions = {
            name: node for name, node in functions.items() if name not in OF_NO_STEP
        }
        self._halves = halves

    def calls(self, body: list[ast.stmt], *, first: bool = False) -> Iterator[str]:
        """Those of a loop's body in a round that is the first, or in the middle."""
        for statement in body:
            if isinstance(statement, ast.If):
                test = ast.unparse(statement.test)
                taken = {"i == 0": first, "i > 0": not first}.get(test, True)
                branch = statement.body if taken else statement.orelse
                yield from self.calls(branch, first=first)
            elif isinstance(statement, ast.For):
                text = ast.unparse(statement.iter)
                rounds = self._halves if "HALVES" in text else "skipped" not in text
                for _ in range(rounds):
                    yield from self.calls(statement.body, first=first)
            elif not isinstance(statement, ast.FunctionDef):
                nodes = list(ast.walk(statement))
                # A list of what is called is of halves.
                listed = any(isinstance(node, ast.ListComp) for node in nodes)
                for _ in range(self._halves if listed else 1):
                    for call in nodes:
                        if isinstance(call, ast.Call):
                            yield from self._call(call)

    def around(self, function: ast.FunctionDef) -> tuple[list[str], list[str]]:
        """Those of a tile before its loops over KV blocks, and those after them."""
        body = function.body
        for node in ast.walk(function):
            if isinstance(node, ast.While):
                body = node.body
        found = [body.index(loop) for loop in loops(function)]
        first, last = (found[0], found[-1]) if found else (0, -1)
        return list(self.calls(body[:first])), list(self.calls(body[last + 1 :]))

    def _call(self, call: ast.Call) -> Iterator[str]:
        text = ast.unparse(call)
        if found := PIPELINE.match(text):
            ring, method = found.groups()
            if method in CALLS:
                yield CALLS[method].format(ring)
        elif text.startswith("load_stage("):
            ring = text.split(",")[0].rpartition(".")[2]
            yield f"wait {ring}_empty"
            yield f"signal {ring}_full"
        elif text.startswith("cute.arch.barrier") and "TMEM" not in text:
            what = "order" if "turn_of(" in text else "store"
            arrives = text.startswith("cute.arch.barrier_arrive")
            yield f"signal {what}" if arrives else f"wait {what}"
        elif function := self._functions.get(ast.unparse(call.func)):
            yield from self.calls(function.body)


@each_shipped
def test_arrivals_add_up_to_what_a_barrier_counts(stem: str) -> None:
    counts = {barrier.name: barrier.count for barrier in protocol(stem).barriers}
    assert protocol(stem).phases
    for phase in protocol(stem).phases:
        for (place, _), arrivals in arrived(phase).items():
            name = place.partition("[")[0]
            assert arrivals == counts[name], place


def arrived(phase: Phase) -> dict[tuple[str, int], int]:
    """Arrivals by barrier and by how often it was completed before in this phase."""
    found: dict[tuple[str, int], int] = defaultdict(int)
    for lane in phase.lanes:
        seen: Counter[str] = Counter()
        for step in lane.steps:
            for signal in step.signals:
                found[signal.place, seen[signal.place]] += signal.total
                seen[signal.place] += 1
        seen.clear()
        for step in lane.steps:
            for wait in step.waits:
                found[wait.place, seen[wait.place]] += wait.arrivals
                seen[wait.place] += 1
    return {key: value for key, value in found.items() if value}


@each_shipped
def test_counts_are_those_of_the_constants_and_of_the_words(stem: str) -> None:
    plan = support.shipped_plan(stem)
    numbers = {each.name: each.value for each in (*plan.chosen, *plan.derived)}
    checked = 0
    for barrier in protocol(stem).barriers:
        words = re.match(r"(\d+) \* (\d+)|\d+", barrier.arrivals)
        assert words
        assert barrier.count == eval(words.group())  # digits and a star
        releases = f"{barrier.name.removesuffix('_empty').upper()}_RELEASES"
        if barrier.name.endswith("_empty") and releases in numbers:
            assert barrier.count == numbers[releases]
            checked += 1
    # Others are always one commit, and those of the backward pass are in words alone.
    of_forward = 3 if plan.arch == "sm90" else 1
    assert checked >= (1 if plan.context["backward"] else of_forward)


@each_shipped
def test_every_barrier_is_waited_for_and_signalled(stem: str) -> None:
    steps = [
        s for phase in protocol(stem).phases for lane in phase.lanes for s in lane.steps
    ]
    waited = {wait.barrier for step in steps for wait in step.waits}
    signalled = {signal.barrier for step in steps for signal in step.signals}
    alone = {wait.barrier for step in steps for wait in step.waits if wait.arrivals}
    names = {barrier.name for barrier in protocol(stem).barriers} - ONCE
    assert waited == names
    assert signalled | alone == names


@each_shipped
def test_no_step_waits_for_itself_and_none_for_nothing(stem: str) -> None:
    for phase in protocol(stem).phases:
        found = arrows(phase)
        targets = {(arrow.target, arrow.wait.place) for arrow in found}
        graph = graphlib.TopologicalSorter[tuple[int, int]]()
        for arrow in found:
            graph.add(arrow.target, arrow.source)
        for number, lane in enumerate(phase.lanes):
            for index, step in enumerate(lane.steps):
                if index:
                    graph.add((number, index), (number, index - 1))
                for wait in step.waits:
                    known = ((number, index), wait.place) in targets
                    assert known or wait.earlier or wait.barrier == "store", wait
        graph.prepare()  # raises CycleError


@each_forward
def test_transaction_bytes_are_the_constants_and_the_loads(stem: str) -> None:
    plan = support.shipped_plan(stem)
    numbers = {each.name: each.value for each in (*plan.chosen, *plan.derived)}
    block, tile = plan.kernels[0].phases
    for phase in (block, tile):
        for lane in phase.lanes:
            for step in lane.steps:
                for signal in (each for each in step.signals if each.tx_bytes):
                    if "bias" in step.text:
                        assert signal.tx_bytes == numbers["BIAS_TX_BYTES"]
                        continue
                    (tensor,) = re.findall(r"\b([QKV])\b", step.text)
                    names = [f"{tensor}_TX_BYTES", "K_TX_BYTES"]
                    name = next(each for each in names if each in numbers)
                    parts = numbers["K_WARPS"] if "half of" in step.text else 1
                    assert signal.tx_bytes * parts == numbers[name]
                    assert signal.tx_bytes * parts == tx_bytes_of(plan, tensor)


def tx_bytes_of(plan: KernelPlan, tensor: str) -> int:
    """What a barrier waits for: all slices that CTA 0 receives, or in a pair those of both."""
    pair = plan.spec_file.spec.cta_group > 1
    loads = [load for load in plan.kernels[0].loads if load.tensor == tensor]
    nbytes = sum(load.nbytes for load in loads if pair or 0 in load.receivers)
    halves = _halves(plan.stem)
    return nbytes // halves if tensor == "Q" else nbytes


@each_shipped
def test_the_slices_of_a_cluster_make_whole_tiles(stem: str) -> None:
    plan = support.shipped_plan(stem)
    pair = plan.spec_file.spec.cta_group > 1
    ctas = range(math.prod(plan.spec_file.spec.cluster))
    if plan.context.get("paired"):
        ctas = range(CLUSTER_CTAS)
    assert {load.cta for load in protocol(stem).loads} == set(ctas)
    assert {load.tensor for load in protocol(stem).loads} >= {*"QKV"}
    for tensor in {load.tensor for load in protocol(stem).loads}:
        loads = [load for load in protocol(stem).loads if load.tensor == tensor]
        for cta in ctas:
            # Of the other CTA's K each CTA of a pair that exchanges dS has some columns.
            together = (pair and tensor != "Q") or tensor == backward.PEERS_K
            received = [each for each in loads if together or cta in each.receivers]
            covered = Counter(
                (row, column)
                for load in received
                for row in range(load.rows[0], sum(load.rows))
                for column in range(load.columns[0], sum(load.columns), 8)
            )
            rows, columns = loads[0].tile
            assert set(covered.values()) == {1}
            assert len(covered) == rows * columns // 8


@each_shipped
def test_stages_of_shared_memory_are_those_of_the_barriers(stem: str) -> None:
    stages = {barrier.name: barrier.stages for barrier in protocol(stem).barriers}
    rings = {"sQ": "q", "sK": "k", "sV": "v", "sKV": "kv", "sO": "out", "sdO": "do"}
    if "out_full" not in stages:  # of e4m3 O has a buffer that is no ring
        del rings["sO"]
    regions = [region for region in protocol(stem).smem if region.name in rings]
    tensors = {load.tensor for load in protocol(stem).loads}
    assert len(regions) == len(tensors - {backward.PEERS_K})  # behind K
    for region in regions:
        assert region.stages == stages[f"{rings[region.name]}_full"]
        assert region.nbytes % region.stages == 0

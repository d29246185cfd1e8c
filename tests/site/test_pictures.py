# SPDX-License-Identifier: Apache-2.0
"""Pictures of all shipped kernels: well-formed, to scale, complete, and nothing over anything."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import support
from fmha_gen.cli import app
from fmha_gen.ops import backward as operation
from fmha_gen.planning import plan
from fmha_gen.planning.kernel_plan import DevicePlan, KernelPlan
from fmha_gen.show import backward
from fmha_gen.show.picture import lanes, maps, page
from fmha_gen.show.picture.svg import SIZES, Panel, document, width_of
from typer.testing import CliRunner

SVG = "{http://www.w3.org/2000/svg}"
# Beside the shipped ones: two rows of heads, fixed lengths, pairs of CTAs in order.
MADE_UP = {
    "sm90_d64_bf16_gqa2_bwd": "head_dim: 64\ndtype: bf16\nheads: {q_per_kv: 2}\n",
    "sm90_d128_fp16_bwd_s1024": "head_dim: 128\ndtype: fp16\nseqlen: 1024\n",
    "sm90_d192x128_fp16_bwd_det": (
        "head_dim: {qk: 192, v: 128}\ndtype: fp16\ndeterministic: true\n"
    ),
}
each_shipped = pytest.mark.parametrize("stem", [*support.SHIPPED, *MADE_UP])
each_backward = pytest.mark.parametrize(
    "stem", [*support.shipped(operation.BACKWARD), *MADE_UP]
)


class Box(NamedTuple):
    """What an element covers."""

    left: float
    top: float
    right: float
    bottom: float
    what: str

    def meets(self, other: Box) -> bool:
        """More than a touch."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across > 0.5 and down > 0.5


@functools.cache
def planned(stem: str) -> KernelPlan:
    """The plan of a kernel, of a backward one with what is shown of it."""
    if stem in support.SHIPPED:
        return backward.shown(support.shipped_plan(stem))
    text = f"arch: sm90\nop: fmha_bwd\n{MADE_UP[stem]}"
    return backward.shown(plan.resolve(support.load_text(text, stem)))


def main_of(stem: str) -> DevicePlan:
    """The kernel that has phases."""
    (found,) = (each for each in planned(stem).kernels if each.phases)
    return found


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


@functools.cache
def drawn(stem: str) -> ElementTree.Element:
    """The page of a shipped kernel."""
    return parse(page.render(planned(stem)))


def texts(root: ElementTree.Element) -> Iterator[Box]:
    """Every text, as wide as the widest usual font makes it."""
    for element, (dx, dy) in walk(root):
        if element.tag != f"{SVG}text":
            continue
        words, kinds = element.text or "", element.get("class", "").split()
        sizes = (set(SIZES) - {"text"}) & set(kinds) or {"text"}
        (size,) = sizes
        width, height = width_of(words, size), {"title": 18, "head": 14}.get(size, 10)
        if transform := element.get("transform"):
            x, y = map(float, re.findall(r"[\d.]+", transform)[:2])
            yield Box(x + dx, y + dy, x + dx + 8, y + dy + width, words)
            continue
        x, y = float(element.get("x", 0)) + dx, float(element.get("y", 0)) + dy
        left = {"start": x, "middle": x - width / 2, "end": x - width}
        first = left[element.get("text-anchor", "start")]
        yield Box(first, y - height + 2, first + width, y + 2, words)


def rects(root: ElementTree.Element) -> Iterator[Box]:
    for element, (dx, dy) in walk(root):
        if element.tag == f"{SVG}rect":
            x, y, width, height = (
                float(element.get(name, 0)) for name in ("x", "y", "width", "height")
            )
            kind = element.get("class", "")
            yield Box(x + dx, y + dy, x + dx + width, y + dy + height, kind)


def walk(
    element: ElementTree.Element, at: tuple[float, float] = (0.0, 0.0)
) -> Iterator[tuple[ElementTree.Element, tuple[float, float]]]:
    """Every element, with how far the groups that it is in are moved."""
    if element.tag == f"{SVG}g":
        x, y = map(float, re.findall(r"[\d.]+", element.get("transform", "")))
        at = (at[0] + x, at[1] + y)
    yield element, at
    for child in element:
        yield from walk(child, at)


@each_shipped
def test_no_text_is_over_another_or_outside(stem: str) -> None:
    root = drawn(stem)
    _, _, width, height = map(float, root.get("viewBox", "").split())
    found = list(texts(root))
    assert len(found) > 40
    for one, other in itertools.combinations(found, 2):
        assert not one.meets(other), f"{one.what!r} is over {other.what!r}"
    for each in found:
        assert each.left >= 0 and each.right <= width, each
        assert each.top >= 0 and each.bottom <= height, each


@each_shipped
def test_text_in_a_box_is_all_inside_it(stem: str) -> None:
    root = drawn(stem)
    boxes = [each for each in rects(root) if each.what.startswith("box")]
    for words in texts(root):
        for box in boxes:
            if words.meets(box):
                inside = (
                    box.left - 0.5 <= words.left
                    and words.right <= box.right + 0.5
                    and box.top - 0.5 <= words.top
                    and words.bottom <= box.bottom + 0.5
                )
                assert inside, f"{words} crosses the edge of {box}"


@each_shipped
def test_no_arrow_runs_through_a_step_or_over_text(stem: str) -> None:
    for panel in page.phases(main_of(stem)):
        root = parse(document(panel, style=False))
        # What runs beside a step is a narrow bar, which an arrow may cross.
        steps = [
            each
            for each in rects(root)
            if each.what.startswith("box") and each.right - each.left > 14
        ]
        words = [each for each in texts(root) if each.right - each.left > 14]
        for segment in segments(root):
            for box in (*steps, *words):
                assert not segment.meets(box), f"{segment} runs through {box}"


def segments(root: ElementTree.Element) -> Iterator[Box]:
    """The straight parts of the arrows, a pixel wide."""
    for element, _ in walk(root):
        if element.tag == f"{SVG}polyline" and element.get("class") == "arrow":
            numbers = [
                tuple(map(float, p.split(",")))
                for p in element.get("points", "").split()
            ]
            for (x0, y0), (x1, y1) in itertools.pairwise(numbers):
                left, right = sorted((x0, x1))
                top, bottom = sorted((y0, y1))
                yield Box(left - 0.6, top - 0.6, right + 0.6, bottom + 0.6, "arrow")


@each_shipped
def test_every_step_and_barrier_is_drawn(stem: str) -> None:
    words = " ".join(each.what for each in texts(drawn(stem)))
    for phase in main_of(stem).phases:
        for lane in phase.lanes:
            assert f"{lane.registers} registers" in words
            for step in lane.steps:
                assert step.text in words
                for label in (*step.waits, *step.signals):
                    assert label.place in words
                for line in (line for each in step.signals for line in each.lines):
                    assert line in words


@each_shipped
def test_shared_memory_is_to_scale(stem: str) -> None:
    kernel, limit = main_of(stem), planned(stem).architecture.smem_bytes
    panel = maps.shared_memory(kernel, limit)
    found = list(rects(parse(document(panel, style=False))))
    sizes = [
        region.nbytes // region.stages
        for region in kernel.smem
        if region.nbytes
        for _ in range(region.stages)
    ]
    sizes.append(limit - kernel.smem_bytes)
    scale = sum(box.bottom - box.top for box in found) / sum(sizes)
    for box, size in zip(found, filter(None, sizes), strict=True):
        assert box.bottom - box.top == pytest.approx(size * scale, abs=0.15)


@each_shipped
def test_an_arrow_goes_down_to_another_row(stem: str) -> None:
    for phase in main_of(stem).phases:
        row = lanes.rows(phase)
        for each in lanes.arrows(phase):
            assert row[each.source] < row[each.target]
        for number, lane in enumerate(phase.lanes):
            places = [row[number, index] for index in range(len(lane.steps))]
            assert places == sorted(set(places))


@each_backward
def test_a_backward_kernel_has_its_products_and_kernels(stem: str) -> None:
    words = [each.what for each in texts(drawn(stem))]
    for product in backward.products(planned(stem)):
        assert " x ".join(map(str, product.shape)) in words
    places = backward.places(planned(stem))
    for each in ("dV += P^T dO", places.ds, "sums of dQ, fp32"):
        assert each in words
    assert f"{places.results}: the next two rows" in words
    names = [each.name for each in planned(stem).kernels]
    for each in ("stats", "finish"):
        assert words.count(each) == names.count(each)


@each_backward
def test_arrows_of_products_are_over_no_text(stem: str) -> None:
    """Boxes that an arrow leaves or comes to are touched, and no others."""
    (panel,) = page.flow(planned(stem), main_of(stem))
    root = parse(document(panel, style=False))
    for segment in segments(root):
        for box in (*rects(root), *texts(root)):
            assert not segment.meets(box) or box.what.startswith("box"), segment


def test_the_same_plan_gives_the_same_bytes() -> None:
    found = support.shipped_plan(support.SHIPPED[0])
    assert page.render(found) == page.render(found)


def test_explain_writes_the_picture(tmp_path: Path) -> None:
    stem, file = support.SHIPPED[0], tmp_path / "picture.svg"
    spec = str(support.SPECS / f"{stem}.yaml")
    out = str(support.GENERATED)
    done = CliRunner().invoke(app, ["explain", spec, "--out", out, "--svg", str(file)])
    assert done.exit_code == 0
    assert file.read_text("utf-8") == page.render(support.shipped_plan(stem))


def test_a_picture_is_of_one_kernel(tmp_path: Path) -> None:
    file = tmp_path / "picture.svg"
    done = CliRunner().invoke(app, ["explain", str(support.SPECS), "--svg", str(file)])
    assert done.exit_code == 2
    assert "a picture is of one kernel" in done.output
    assert not file.exists()


def test_text_is_escaped() -> None:
    hostile = Panel('<b> & "', "<script>", 10, 10, ())
    root = parse(document(hostile))
    assert root.get("aria-label") == '<b> & "'
    assert root.findtext(f"{SVG}desc") == "<script>"

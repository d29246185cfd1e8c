# SPDX-License-Identifier: Apache-2.0
"""The picture shows every panel and line, in a way that prints without colours."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fmha_gen.bench import contenders, plot, results
from fmha_gen.bench.results import OURS, Cell, Report
from fmha_gen.errors import EnvironmentProblem, UsageProblem

from .test_problems import problem
from .test_results import report, timing

LENGTHS = (512, 1024, 2048, 4096)


def run() -> Report:
    cells = []
    for dim, causal in ((64, False), (64, True), (128, False), (128, True)):
        for length in LENGTHS:
            one = problem(16384 // length, 16, 16, length, length, dim, causal=causal)
            cells.append(Cell(one, ["x"]))
    for length in (256, 512, 1024):
        one = problem(1, 16, 16, length, length, 128, causal=True)
        cells.append(Cell(one, ["x"]))
    for cell in cells:
        speeds = {"x": 300.0, "fa4": 280.0, "cudnn": 260.0}
        growth = cell.problem.q / 4096 * 300
        cell.timings = {
            name: timing(speed + growth, cell.problem) for name, speed in speeds.items()
        }
    return report(*cells)


def test_a_panel_per_family_and_what_its_problems_share() -> None:
    found = plot.panels(results.lines(run().cells))
    assert [(panel.column, panel.mask) for panel in found] == [
        (("d64 bf16", "16384 tokens"), "none"),
        (("d64 bf16", "16384 tokens"), "causal"),
        (("d128 bf16", "16384 tokens"), "none"),
        (("d128 bf16", "16384 tokens"), "causal"),
        (("d128 bf16", "batch 1"), "causal"),
    ]
    assert all(set(panel.lines) == {"ours", "fa4", "cudnn"} for panel in found)
    assert [length for length, _ in found[0].lines["ours"]] == list(LENGTHS)
    assert found[0].lines["ours"][-1] == (4096, pytest.approx(600))
    assert [length for length, _ in found[4].lines["fa4"]] == [256, 512, 1024]


def test_a_problem_that_could_be_on_two_lines_is_on_that_of_its_tokens() -> None:
    tokens = [problem(4096 // n, 16, 16, n, n) for n in (512, 1024, 2048)]
    both = problem(1, 16, 16, 4096, 4096)
    alone = [problem(1, 16, 16, n, n) for n in (128, 256, 512)]
    times = dict.fromkeys([*alone, *tokens, both], 1.0)
    found = plot.panels({"d128 bf16 none": {"ours": times}})
    lengths = {panel.column[1]: [n for n, _ in panel.lines["ours"]] for panel in found}
    assert lengths == {
        "batch 1": [128, 256, 512],
        "4096 tokens": [512, 1024, 2048, 4096],
    }


def test_the_svg_has_every_line_and_its_text(tmp_path: Path) -> None:
    file = tmp_path / "bench.svg"
    plot.draw(run(), file)
    text = file.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    for panel in plot.panels(results.lines(run().cells)):
        variant, shared = panel.column
        assert f">{variant}, {panel.mask}<" in text and f">{shared}<" in text
    for words in ("ours", "fa4", "cudnn", "TFLOPS", "NVIDIA H200", "512", "1k", "4k"):
        assert f">{words}" in text
    assert "fa3" not in text
    thick = re.findall(r"<path [^>]*stroke-width: 2\.2;[^>]*>", text)
    assert len(thick) == 5 + 1  # ours: one line a panel, and the legend's
    plot.draw(run(), tmp_path / "again.svg")
    assert text == (tmp_path / "again.svg").read_text(encoding="utf-8")


def test_panels_stand_by_head_dim_and_mask_and_show_every_point() -> None:
    places = [place for place in plot.figure_of(run()).axes if place.axison]
    titles = [place.get_title().replace("\n", ", ") for place in places]
    assert titles == [
        "d64 bf16, none, 16384 tokens",
        "d128 bf16, none, 16384 tokens",
        "d64 bf16, causal, 16384 tokens",
        "d128 bf16, causal, 16384 tokens",
        "d128 bf16, causal, batch 1",
    ]
    for place in places:
        bottom, top = place.get_ylim()
        assert bottom == 0
        assert len(place.lines) == 3
        assert 600 <= max(max(line.get_ydata()) for line in places[0].lines) < top
        assert all(max(line.get_ydata()) < top for line in place.lines)


def test_many_variants_go_below_each_other() -> None:
    cells = [
        Cell(problem(4, 16, 16, 4096, 4096, dim), ["x"], None, {"x": timing(1.0)})
        for dim in range(64, 64 * 9, 64)
    ]
    places = plot.figure_of(report(*cells)).axes
    assert len(places) == 2 * plot.MOST_COLUMNS
    assert [place.axison for place in places] == [True] * 8 + [False] * 2


def test_other_masks_follow_one_another_below_their_names() -> None:
    masks = {"causal": {}, "kv <= q and (q - kv < 1024 or kv < 4)": {"softcap": 30.0}}
    cells = [
        Cell(problem(4, 16, 16, 4096, 4096, dim, mask=mask, **more), ["x"])
        for dim in (64, 128, 256)
        for mask, more in masks.items()
    ]
    for cell in cells:
        cell.timings = {"x": timing(1.0), "flex": timing(0.5)}
    figure = plot.figure_of(report(*cells))
    places = [place for place in figure.axes if place.axison]
    assert [len(place.lines) for place in places] == [2] * 6
    assert [place.get_title() for place in places[:2]] == [
        "d64 bf16, causal\n16384 tokens",
        "d64 bf16 softcap 30,\nkv <= q and not 4 <= kv <= q -\n1024\n16384 tokens",
    ]
    assert [place.axison for place in figure.axes] == [True] * 6 + [False] * 4


def test_contenders_differ_without_colour() -> None:
    dashes = {style["linestyle"] for style in plot.STYLES.values()}
    markers = {style["marker"] for style in plot.STYLES.values()}
    assert len(dashes) == len(markers) == len(plot.STYLES)
    greys = {"black", "0.25", "0.5"}
    assert {style["color"] for style in plot.STYLES.values()} <= greys


def test_a_row_for_each_kernel_with_its_ratios() -> None:
    figure = plot.ratios({"a": [1.1, 0.9], "b": [1.3]})
    (place,) = figure.axes
    a, b, one = place.lines
    assert (list(a.get_xdata()), list(a.get_ydata())) == ([1.1, 0.9], ["a", "a"])
    assert (list(b.get_xdata()), list(b.get_ydata())) == ([1.3], ["b"])
    assert list(one.get_xdata()) == [1, 1]
    bottom, top = place.get_ylim()
    assert bottom > top  # the first kernel is above


def test_a_bar_for_each_contender_from_zero() -> None:
    found = {"s512": {"ours": 600.0, "fa4": 500.0}, "s1k": {"ours": 610.0}}
    (place,) = plot.bars(found).axes
    assert [bar.get_width() for bar in place.patches] == [600, 500, 610]
    assert {bar.get_x() for bar in place.patches} == {0}
    words = [text.get_text() for text in place.texts]
    assert words == ["600 ours", "500 fa4", "610 ours"]
    assert [tick.get_text() for tick in place.get_yticklabels()] == ["s512", "s1k"]
    fills = {(bar.get_facecolor(), bar.get_hatch()) for bar in place.patches}
    assert len(fills) == 2


def test_contenders_have_bars_as_they_have_lines() -> None:
    assert plot.BARS.keys() == plot.STYLES.keys() == {OURS, *contenders.PEERS}
    assert len(set(plot.BARS.values())) == len(plot.BARS)


def test_a_png(tmp_path: Path) -> None:
    plot.draw(run(), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_an_empty_run_is_an_empty_picture(tmp_path: Path) -> None:
    plot.draw(report(), tmp_path / "bench.svg")
    assert "NVIDIA H200" in (tmp_path / "bench.svg").read_text(encoding="utf-8")


def test_what_cannot_be_drawn_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plot.require(Path("bench.png"))
    with pytest.raises(UsageProblem, match=r"bench\.jpg: the name must end in \.png"):
        plot.require(Path("bench.jpg"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'fmha-gen\[plot\]'"):
        plot.require(Path("bench.png"))

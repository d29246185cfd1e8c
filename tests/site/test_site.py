# SPDX-License-Identifier: Apache-2.0
"""The static site: complete, well-formed, linked, the same bytes each time, and safe to rewrite."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest
import support
from fmha_gen.bench import draws, problems
from fmha_gen.cli import app
from fmha_gen.errors import CheckFailed, EnvironmentProblem
from fmha_gen.show.website import command as website
from fmha_gen.show.website import decisions, pages, speed
from fmha_gen.spec.model import load_specs
from typer.testing import CliRunner

VOID = {"meta", "link", "br", "hr", "img", "rect", "circle", "polyline", "polygon"}
STEM = "sm90_d64_bf16_full"  # that the small sites are about


class Page(HTMLParser):
    """Tags must close in order; links and text are kept."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.unlinked: list[str] = []  # words that are neither a link nor code
        self.words: list[str] = []
        self._open: list[str] = []
        self.tags: set[str] = set()
        self.feed(file.read_text("utf-8"))
        self.close()
        assert not self._open, f"{file}: {self._open} not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if not {"a", "code", "pre", "title"} & set(self._open):
            self.unlinked.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def small(tmp_path: Path, *stems: str) -> tuple[Path, Path, Path]:
    """Specs and kernels of a few stems, and where their site goes."""
    specs, generated = tmp_path / "specs", tmp_path / "generated"
    for folder in (specs, generated / "records"):
        folder.mkdir(parents=True)
    for stem in stems:
        shutil.copy(support.SPECS / f"{stem}.yaml", specs)
        shutil.copy(support.GENERATED / f"{stem}.py", generated)
        record = f"records/{stem}.json"
        shutil.copy(support.GENERATED / record, generated / record)
    return specs, generated, tmp_path / "site"


# By length, of ours and of a peer.
FULL = [(512, 444.0, {"fa4": 305.0}), (1024, 480.0, {"fa4": 380.0})]


def benchmark(
    generated: Path,
    stem: str,
    gpu: str = "NVIDIA H200",
    cells: Sequence[tuple[int, float, Mapping[str, float]]] = FULL,
    drawn: Sequence[Any] = (),
    counts: Sequence[Mapping[str, int]] = (),
    **more: Any,
) -> None:
    """Give a kernel's record a run, whatever it has.

    drawn: what the mask of each cell read. counts: of each, where they are others. more: of all
    cells.
    """
    path = generated / "records" / f"{stem}.json"
    record = json.loads(path.read_text("utf-8"))
    spec = support.shipped_plan(stem).context["spec"]
    heads, made = problems.default_heads(spec), []
    for length, tflops, peers in cells:
        figures = dict.fromkeys(("burst_tflops", "sustained_tflops"), tflops)
        usual = {"heads": heads, "kv_heads": heads // spec["q_per_kv"]}
        usual |= {"batch": 16384 // length, "q": length, "kv": length}
        by_peer = {name: {"graph_tflops": each} for name, each in peers.items()}
        figures |= {"graph_tflops": tflops, "mask": "none", "peers": by_peer}
        made.append({**figures, **usual, **more})
    for cell, each in zip(made, drawn, strict=False):
        cell["drawn"] = each
    for cell, others in zip(made, counts, strict=False):
        cell |= others
    named = {key: record["compiled"][key] for key in ("ptx_sha256", "launch_sha256")}
    run = {"gpu": gpu, "driver": "580", "rounds": 5, "cells": made, **named}
    versions = {"dsl": "4.8.1", "fa3": None, "fa4": "4.0"}
    run |= {"body_sha256": record["body_sha256"], "versions": versions}
    # A benchmark counts where its GPU also validated the kernel.
    worst = {"case": "plain", "of_bound": 0.5, "absolute": 1e-3}
    about = {"dsl": "4.8.1", "cases": 1, "misuses": 1, "repeats": 1, "sanitizer": None}
    validated = {**run, **about, "worst": worst, "lse_worst": None}
    record |= {"benchmarked": [run], "validated": [validated]}
    path.write_text(json.dumps(record), "utf-8")


def texts(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_every_link_resolves_and_every_file_is_linked(site: Path) -> None:
    linked = {site / "index.html", site / website.LOCK}
    for file in site.rglob("*.html"):
        for link in Page(file).links:
            parts = urlsplit(link)
            assert not parts.netloc, f"{file} loads {link}"
            if parts.scheme:
                assert link == "data:,"  # no icon
                continue
            target = (file.parent / unquote(parts.path)).resolve()
            if not parts.path:
                target = file.resolve()
            assert target.is_file(), f"{file}: {link} is not there"
            if parts.fragment:
                assert f'id="{parts.fragment}"' in target.read_text("utf-8"), link
            assert target.is_relative_to(site.resolve())
            linked.add(site / target.relative_to(site.resolve()))
    assert linked == {path for path in site.rglob("*") if path.is_file()}


def test_nothing_comes_from_elsewhere_and_nothing_runs(site: Path) -> None:
    for file in [*site.rglob("*.html"), *site.rglob("*.svg"), site / "style.css"]:
        text = file.read_text("utf-8")
        names = re.sub(r'<!DOCTYPE[^>]*>|xmlns(:\w+)?="[^"]*"', "", text)
        assert "http" not in names, file
        assert "@import" not in text
        assert "url(" not in text.replace("url(#", "")
        assert "<script" not in text


def test_every_decision_that_is_mentioned_is_linked(site: Path) -> None:
    known = decisions.shipped()
    assert len(known) == len(list((support.ROOT / "codegen/decisions").glob("*.md")))
    for file in site.rglob("*.html"):
        words = " ".join(Page(file).unlinked)
        own = file.name[:4] if file.parent.name == "decisions" else None
        found = set(re.findall(r"(?<![\d.])\d{4}\b", words)) & known.keys()
        assert found <= {own}, file
    for number, one in known.items():
        words = "".join(Page(site / one.page).text.split())
        assert f"{number}:{''.join(one.title.split())}" in words


MARKDOWN = """\
# 0001: One `thing`

<!-- table: begin -->
| a | b |
| --- | ---: |
| 0002, [0003](0003-black-default-style.md) | `0004` |
<!-- table: end -->

See 0001, 0002 and 9999 <b>: 0.0003.

```sh
echo 0002
```
"""


def test_a_decision_as_a_page(tmp_path: Path) -> None:
    decision = decisions.Decision("0001-one-thing", MARKDOWN)
    file = tmp_path / "page.html"
    file.write_text(decisions.html(decision), "utf-8")
    page = Page(file)
    second, third = (f"{decisions.shipped()[n].stem}.html" for n in ("0002", "0003"))
    assert page.links == [second, third, second]
    assert decision.title == "One thing"
    assert page.text == (
        "0001: One thing a b 0002 , 0003 0004 See 0001, 0002 and 9999 <b>: 0.0003. echo 0002"
    )
    assert file.read_text("utf-8").count('<div class="scroll"') == 2


class Rows(HTMLParser):
    """The cells of a page's tables by the titles of levels 2 and 3 that each stands below."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.by_titles: dict[tuple[str, str], list[list[str]]] = {}
        self._above = ""  # the title of level 2
        self._words: list[str] | None = None  # of a title or a cell that is open
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("h2", "h3", "th", "td"):
            self._words = []
        elif tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        if tag in ("h2", "h3", "th", "td"):
            words, self._words = "".join(self._words or ()), None
            if tag == "h2":
                self._above = words
            elif tag == "h3":
                self.rows = self.by_titles.setdefault((self._above, words), [])
            else:
                self.rows[-1].append(words)

    def handle_data(self, data: str) -> None:
        if self._words is not None:
            self._words.append(data)


def rows_of_speed(folder: Path) -> dict[tuple[str, str], list[dict[str, str]]]:
    """The tables of the speed page by machine and kind: a dict for each problem."""
    found = {}
    for titles, (heads, *rows) in Rows(folder / "speed.html").by_titles.items():
        found[titles] = [dict(zip(heads, row, strict=True)) for row in rows]
    return found


def test_the_speed_page_has_the_fastest_of_every_problem(site: Path) -> None:
    best: dict[tuple[str, str], float] = {}
    for stem in support.SHIPPED:
        path = support.GENERATED / "records" / f"{stem}.json"
        record = json.loads(path.read_text("utf-8"))
        spec = support.shipped_plan(stem).context["spec"]
        runs = record.get("benchmarked", ())
        for run, cell in ((each, cell) for each in runs for cell in each["cells"]):
            counts = {name: cell[name] for name in ("batch", "heads", "q", "kv")}
            drawn = {x: cell.get("drawn", {}).get(x) for x in draws.FIELDS}
            read = {x: said for x, said in drawn.items() if said is not None}
            one = problems.problem_for(spec, **counts, **read)
            key = run["gpu"], f"{one.shape}, {one}"
            best[key] = max(best.get(key, 0), cell["graph_tflops"])
    shown = {
        (machine.partition(",")[0], row["problem"]): row["ours"]
        for (machine, _), rows in rows_of_speed(site).items()
        for row in rows
    }
    assert len(shown) > 30
    assert shown == {key: f"{tflops:.0f}" for key, tflops in best.items()}


# Kernels of each kind, and of a problem with 8192 keys its first words and what is visible.
KINDS = {
    "causal and full": {
        "sm90_d128_bf16_causal": ("d128 bf16, b2 h16 s8192 causal", "50.0%"),
        "sm90_d128_bf16_full": ("d128 bf16, b2 h16 s8192 none", "100.0%"),
    },
    "windows": {
        "sm90_d128_bf16_causal_w1023": (
            "d128 bf16, b2 h16 s8192 q - 1023 <= kv",
            "11.7%",
        ),
        "sm90_d128_bf16_full_w255x256": (
            "d128 bf16, b2 h16 s8192 q - 255 <= kv",
            "6.1%",
        ),
    },
    "windows, softcap": {
        "sm90_d256_bf16_causal_gqa2_w4095_cap50": (
            "d256 bf16 GQA 2, b2 h8/4 s8192 q - 4095 <= kv <= q softcap 50",
            "37.5%",
        )
    },
    "windows, sinks": {
        "sm90_d64_bf16_causal_gqa8_pack_w127_sink": (
            "d64 bf16 GQA 8, b2 h32/4 s8192 q - 127 <= kv <= q sink",
            "1.5%",
        )
    },
    "documents": {"sm90_d128_bf16_causal_docs": ("d128 bf16, b2 h16 s8192", "12.3%")},
    "prefix": {"sm90_d128_bf16_causal_prefix": ("d128 bf16, b2 h16 s8192", "12.3%")},
    "block lists": {
        "sm90_d128_bf16_causal_lists": (
            "d128 bf16, b2 h16 s8192 causal blocks lists tile q 128 kv 128",
            "25.5%",
        )
    },
    "mask expressions": {
        "sm90_d64_bf16_dilated512x4": ("d64 bf16, b2 h32 s8192 q - 2047", "5.5%"),
        "sm90_d128_bf16_gqa5_chunk8192": (
            "d128 bf16 GQA 5, b2 h15/3 s8192 8192 * (q // 8192) <= kv <= q",
            "50.0%",
        ),
    },
    "softcap": {
        "sm90_d128_bf16_causal_cap30": (
            "d128 bf16, b2 h16 s8192 causal softcap 30",
            "50.0%",
        )
    },
    "ALiBi": {
        "sm90_d128_bf16_causal_alibi": ("d128 bf16, b2 h16 s8192 causal ALiBi", "50.0%")
    },
    "score expressions": {
        "sm90_d64_bf16_full_near": ("d64 bf16, b2 h32 s8192 none score s - ", "100.0%")
    },
    "bias": {
        "sm90_d128_bf16_causal_bias": (
            "d128 bf16, b2 h16 s8192 causal bf16 bias [1",
            "50.0%",
        )
    },
    "sinks": {
        "sm90_d128_bf16_causal_sink": ("d128 bf16, b2 h16 s8192 causal sink", "50.0%")
    },
}


class Kept(pages.Charts):
    """Keeps charts as matplotlib's Figures."""

    def add(self, path: str, title: str, chart: Any, root: str = "") -> dict[str, Any]:
        self.files[path] = chart
        return {"title": title}


def test_every_kind_of_mask_and_score_has_curves_and_a_table(tmp_path: Path) -> None:
    stems = [stem for kernels in KINDS.values() for stem in kernels]
    specs, generated, _ = small(tmp_path, *stems)
    for number, stem in enumerate(stems, start=1):
        peers = {"flex": 100.0 * number, "fa3": 90.0}
        cells = [(n, 150.0 * number, peers) for n in (4096, 8192)]
        # The record alone says what documents and prefixes left.
        read = {"visible": 0.123} if re.search("docs|prefix", stem) else {}
        benchmark(generated, stem, cells=cells, **read)
    kernels = [website.load(spec, generated) for spec in load_specs([specs])]
    (machine,) = speed.sections(kernels, charts := Kept())
    assert [kind["title"] for kind in machine["kinds"]] == [*KINDS]
    for kind in machine["kinds"]:
        rows = {row["stem"]: row for row in kind["rows"] if "s8192" in row["problem"]}
        assert {*rows} == {*KINDS[kind["title"]]}
        assert (kind["mean"], kind["peers"]) == ("1.50", ["fa3", "flex"])
        for stem, (problem, visible) in KINDS[kind["title"]].items():
            number, row = stems.index(stem) + 1, rows[stem]
            assert row["problem"].startswith(problem)
            assert (row["visible"], row["ratio"]) == (visible, "1.50 of flex")
            assert (row["ours"], row["peers"]) == (
                f"{150 * number}",
                ["90", f"{100 * number}"],
            )
        panels = [x for x in charts.files[f"{kind['name']}.svg"].axes if x.axison]
        assert len(panels) == len(
            rows
        )  # of a kernel each, with a point for each length
        for panel in panels:
            assert [len(line.get_xdata()) for line in panel.lines] == [2, 2, 2]


def test_a_launch_takes_as_long_as_its_visible_scores(tmp_path: Path) -> None:
    stem = "sm90_d64_bf16_causal_w1023"
    specs, generated, folder = small(tmp_path, stem)
    benchmark(generated, stem, cells=[(8192, 250.0, {"fa4": 200.0})])
    website.write([specs], generated, folder)
    ((row,),) = rows_of_speed(folder).values()
    pairs = 8192 * 1024 - 1024 * 1023 / 2 - 8192 / 2  # half of the diagonal
    seconds = 2 * 32 * pairs * 4 * 64 / 250e12
    assert row["us"] == f"{seconds * 1e6:.0f}"


def test_two_machines_are_two_sections(tmp_path: Path) -> None:
    other = "sm90_d64_bf16_full_s512"
    specs, generated, folder = small(tmp_path, STEM, other)
    benchmark(generated, STEM, gpu="NVIDIA H100")
    benchmark(generated, other)
    website.write([specs], generated, folder)
    text = Page(folder / "speed.html").text
    assert text.index("NVIDIA H100, driver") < text.index("NVIDIA H200, driver")


def words_of(chart: Path) -> set[str]:
    return {words.strip() for words in ElementTree.parse(chart).getroot().itertext()}


def test_charts_show_the_figures_of_the_records(tmp_path: Path) -> None:
    specs, generated, folder = small(tmp_path, STEM)
    benchmark(generated, STEM)
    website.write([specs], generated, folder)
    bars = words_of(folder / "kernels" / f"{STEM}.speed1.svg")
    assert {"batch 32, heads 32, length 512", "444 ours", "305 fa4"} <= bars
    assert STEM in words_of(folder / "ratios.svg")
    speeds = words_of(folder / "speed1.svg")
    assert {"d64 bf16, none", "16384 tokens", "ours", "fa4"} <= speeds
    for page, chart in (
        ("index.html", "ratios.svg"),
        ("speed.html", "speed1.svg"),
        (f"kernels/{STEM}.html", f"../kernels/{STEM}.speed1.svg"),
    ):
        assert Page(folder / page).links.count(chart) == 1
    before = texts(folder)
    assert website.write([specs], generated, folder) == 0
    assert texts(folder) == before


def test_draws_are_told_apart(tmp_path: Path) -> None:
    """Two cells of one length, of which each had its own documents, beside FlexAttention."""
    stem = "sm90_d128_bf16_causal_docs"
    specs, generated, folder = small(tmp_path, stem)
    drawn = [{"ranges": {"documents": [512, 4096]}, "seed": seed} for seed in (0, 1)]
    cells = [(512, 444.0, {"flex": 305.0}), (512, 480.0, {"flex": 380.0})]
    benchmark(generated, stem, cells=cells, drawn=drawn)
    website.write([specs], generated, folder)
    bars = words_of(folder / "kernels" / f"{stem}.speed1.svg")
    assert {"444 ours", "480 ours", "305 flex"} <= bars
    assert {f"documents 512:4096 seed {seed}" for seed in (0, 1)} <= bars
    rows = Page(folder / "speed.html").text
    for seed in (0, 1):
        assert f"s512 causal documents 512:4096 seed {seed}" in rows
    assert {"d128 bf16 documents, causal"} <= words_of(folder / "speed1.svg")


def test_packed_sequences_and_pages_are_kinds_of_their_own(tmp_path: Path) -> None:
    """Cells as `bench` records them, beside the figures of a kernel of another layout."""
    stems = {
        "sm90_d128_bf16_causal_varlen_lse": "",
        "sm90_d128_bf16_causal_gqa4_page16_varlen_lse": "nhd",
    }
    specs, generated, folder = small(tmp_path, *stems)
    for stem, pool in stems.items():
        spec = support.shipped_plan(stem).context["spec"]
        drawn, counts = [], []
        for said in ("8x2048", "zipf", "5x99:200/300", "32x1/8192"):
            one = problems.packed_problem_for(
                spec, heads=16, sequences=said, seed=3, pool=pool
            )
            drawn.append(json.loads(json.dumps(draws.drawn_of(one))))
            names = ("batch", "heads", "kv_heads", "q", "kv")
            counts.append({name: getattr(one, name) for name in names})
        cells = [(one["q"], 500.0, {"fa3": 400.0, "fa4": 450.0}) for one in counts]
        beside = {"other": {"layout": "dense", "graph_tflops": 600.0}}
        benchmark(
            generated, stem, cells=cells, drawn=drawn, counts=counts, beside=beside
        )
    website.write([specs], generated, folder)
    packed, paged = rows_of_speed(folder).items()
    assert packed[0][1] == "packed sequences"
    assert paged[0][1] == "packed sequences, paged K and V"
    words = "causal packed"
    for rows, shape, heads in (
        (packed[1], "d128 bf16", "16"),
        (paged[1], "d128 bf16 GQA 4", "16/4"),
    ):
        assert {row["problem"] for row in rows} == {
            f"{shape}, h{heads} 8x2048 {words}",
            f"{shape}, h{heads} zipf {words}",
            f"{shape}, h{heads} 5x99:200/300 {words} seed 3",
            f"{shape}, h{heads} 32x1/8192 {words}",
        }
        assert {row["of best peer"] for row in rows} == {"1.11 of fa4"}
        words = "causal page 16 nhd"
    bars = words_of(folder / "kernels" / f"{stem}.speed1.svg")
    assert {"heads 16/4, lengths 8x2048, nhd pool", "500 ours", "seed 3"} <= bars


def test_charts_need_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, generated, folder = small(tmp_path, STEM)
    benchmark(generated, STEM)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'fmha-gen\[plot\]'"):
        website.write([specs], generated, folder)


def test_without_a_benchmark_there_is_no_speed_page(tmp_path: Path) -> None:
    specs, generated, folder = small(tmp_path, "sm90_d160_fp16_full")
    website.write([specs], generated, folder)
    assert not (folder / "speed.html").exists()
    assert "speed.html" not in Page(folder / "index.html").links


def test_every_kernel_has_its_page_and_files(site: Path) -> None:
    index = Page(site / "index.html")
    for stem in support.SHIPPED:
        assert f"kernels/{stem}.html" in index.links
        place = site / "kernels"
        source = (place / f"{stem}.py").read_bytes()
        assert source == (support.GENERATED / f"{stem}.py").read_bytes()
        spec = (place / f"{stem}.yaml").read_bytes()
        assert spec == (support.SPECS / f"{stem}.yaml").read_bytes()
        ElementTree.parse(place / f"{stem}.svg")


def test_a_page_says_what_the_record_says(site: Path) -> None:
    for stem in support.SHIPPED:
        page = Page(site / "kernels" / f"{stem}.html").text
        path = support.GENERATED / "records" / f"{stem}.json"
        record = json.loads(path.read_text("utf-8"))
        assert f"Rung: {record['rung']} ." in page
        assert ("No GPU has run it." in page) == ("validated" not in record)
        assert ("TFLOPS by CUDA graph" in page) == ("benchmarked" in record)
        for cell in (
            cell for run in record.get("benchmarked", ()) for cell in run["cells"]
        ):
            best = max(peer["graph_tflops"] for peer in cell["peers"].values())
            assert f"{cell['graph_tflops'] / best:.2f} of " in page


def test_a_page_has_the_numbers_and_steps_of_the_plan(site: Path) -> None:
    for stem in support.SHIPPED:
        plan = support.shipped_plan(stem)
        page = Page(site / "kernels" / f"{stem}.html").text
        for number in (*plan.chosen, *plan.derived):
            assert f"{number.name} {number.value}" in page
        for barrier in (each for kernel in plan.kernels for each in kernel.barriers):
            assert f"{barrier.name} {barrier.stages} {barrier.arrivals}" in page
        for statement in plan.statements:
            assert " ".join(statement.split()) in page


def test_pages_are_well_formed_and_say_what_they_are(site: Path) -> None:
    for file in site.rglob("*.html"):
        page = Page(file)
        assert {"title", "h1", "main"} <= page.tags
        text = file.read_text("utf-8")
        assert text.startswith("<!DOCTYPE html>\n")
        assert 'lang="en"' in text
        assert 'name="viewport"' in text


def test_a_second_time_changes_nothing(tmp_path: Path) -> None:
    specs, generated, folder = small(tmp_path, STEM)
    assert website.write([specs], generated, folder) == len(texts(folder))
    before = texts(folder)
    assert website.write([specs], generated, folder) == 0
    assert texts(folder) == before
    other = tmp_path / "other"
    website.write([specs], generated, other)
    assert texts(other) == before


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_bytes_are_the_same_whatever_the_hash_seed(
    tmp_path: Path, seed: str
) -> None:
    specs, generated, folder = small(tmp_path, STEM, "sm100_d128_bf16_full")
    website.write([specs], generated, folder)
    options = ["--specs", str(specs), "--out", str(generated)]
    subprocess.run(
        [sys.executable, "-m", "fmha_gen.cli", "site", str(tmp_path / "b"), *options],
        env={**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": "C"},
        check=True,
    )
    assert texts(tmp_path / "b") == texts(folder)


def test_a_kernel_that_is_gone_takes_its_files_along(tmp_path: Path) -> None:
    gone = "sm100_d64_bf16_causal_lse"
    specs, generated, folder = small(tmp_path, STEM, gone)
    website.write([specs], generated, folder)
    (specs / f"{gone}.yaml").unlink()
    website.write([specs], generated, folder)
    assert not [path for path in texts(folder) if gone in path]
    assert gone not in (folder / "index.html").read_text("utf-8")


@pytest.mark.parametrize("file", ["notes.txt", "kernels/mine.html", ".hidden"])
def test_a_folder_with_files_of_others_is_refused(tmp_path: Path, file: str) -> None:
    specs, generated, folder = small(tmp_path, STEM)
    website.write([specs], generated, folder)
    (folder / file).write_text("mine")
    (folder / "style.css").unlink()
    before = texts(folder)
    with pytest.raises(CheckFailed, match=f"{file}: not of this site"):
        website.write([specs], generated, folder)
    assert texts(folder) == before


def test_an_edited_page_is_refused(tmp_path: Path) -> None:
    specs, generated, folder = small(tmp_path, STEM)
    website.write([specs], generated, folder)
    page = folder / "kernels" / f"{STEM}.html"
    page.write_text(page.read_text("utf-8").replace("Evidence", "Proof"), "utf-8")
    before = texts(folder)
    with pytest.raises(CheckFailed, match="edited by hand"):
        website.write([specs], generated, folder)
    assert texts(folder) == before


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("an edited kernel", "* scale_log2", "* scale_log3"),
        ("a kernel of another plan", "K_STAGES = 3", "K_STAGES = 2"),
    ],
)
def test_a_kernel_that_is_not_its_specs_is_refused(
    tmp_path: Path, what: str, old: str, new: str
) -> None:
    specs, generated, folder = small(tmp_path, STEM)
    kernel = generated / f"{STEM}.py"
    text = kernel.read_text("utf-8")
    assert old in text, what
    kernel.write_text(text.replace(old, new), "utf-8")
    with pytest.raises(CheckFailed, match="not what its spec says"):
        website.write([specs], generated, folder)
    assert not folder.exists()


def test_a_spec_that_has_changed_since_the_build_is_refused(tmp_path: Path) -> None:
    specs, generated, folder = small(tmp_path, STEM)
    with (specs / f"{STEM}.yaml").open("a", encoding="utf-8") as file:
        file.write("lse: true\n")
    with pytest.raises(CheckFailed, match="not what its spec says"):
        website.write([specs], generated, folder)


def test_a_kernel_that_is_not_built_is_named(tmp_path: Path) -> None:
    specs, generated, folder = small(tmp_path, STEM)
    (generated / f"{STEM}.py").unlink()
    with pytest.raises(CheckFailed, match="not there; build it first"):
        website.write([specs], generated, folder)


def entries_of(record: dict[str, Any], rung: str) -> list[dict[str, Any]]:
    """What a record has of a rung, on GPUs an entry for each."""
    found = record.get(rung, [])
    return found if isinstance(found, list) else [found]


def test_stale_evidence_is_not_shown(tmp_path: Path) -> None:
    specs, generated, folder = small(tmp_path, STEM)
    path = generated / "records" / f"{STEM}.json"
    record = json.loads(path.read_text("utf-8"))
    for rung in ("emulated", "validated", "benchmarked"):
        for entry in entries_of(record, rung):
            entry |= {"body_sha256": "0" * 64, "ptx_sha256": "0" * 64}
    path.write_text(json.dumps(record), "utf-8")
    website.write([specs], generated, folder)
    page = Page(folder / "kernels" / f"{STEM}.html").text
    assert "No GPU has run it." in page
    assert "TFLOPS" not in page
    assert "NVIDIA H200" not in page


def test_what_a_spec_says_is_text(tmp_path: Path) -> None:
    specs, generated, folder = small(tmp_path, STEM)
    with (specs / f"{STEM}.yaml").open("a", encoding="utf-8") as file:
        file.write("# <script>alert(1)</script> & more\n")
    website.write([specs], generated, folder)
    page = Page(folder / "kernels" / f"{STEM}.html")
    assert "script" not in page.tags
    assert "<script>alert(1)</script> & more" in page.text


def test_command(tmp_path: Path) -> None:
    specs, generated, folder = small(tmp_path, STEM)
    options = ["--specs", str(specs), "--out", str(generated)]
    done = CliRunner().invoke(app, ["site", str(folder), *options])
    assert done.exit_code == 0
    assert f"{folder / 'index.html'}: " in done.output
    (folder / "mine").touch()
    done = CliRunner().invoke(app, ["site", str(folder), *options])
    assert done.exit_code == 1
    assert "not of this site" in done.output

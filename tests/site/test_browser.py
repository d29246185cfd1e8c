# SPDX-License-Identifier: Apache-2.0
"""The site in headless Chromium: no message on its console, no page wider than its window."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fmha_gen.show.picture.svg import SIZES, width_of

WIDTHS = (390, 1280)  # [CSS pixels] a phone, a desktop
NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
PICTURES = (
    "sm90_d64_bf16_causal",
    "sm90_d128_bf16_causal_c2x1_kvmc_lse",
    "sm100_d128_bf16_causal_gqa4_c2x1_cta2_lse",
    "sm100_d256_bf16_causal_gqa4_c2x1_cta2_lse",
)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed"
)

# Chromium's window has a least width, a frame has none. What is found goes into the DOM.
FRAMES = """\
<!DOCTYPE html>
<html><body>{frames}<pre id="found"></pre>
<script>
window.onload = () => {{
  const found = [...document.querySelectorAll("iframe")].map((frame) => {{
    const page = frame.contentDocument, window = frame.contentWindow;
    const root = page.documentElement;
    const pictures = [...page.querySelectorAll("svg")];
    return {{
      page: frame.getAttribute("src"),
      width: frame.clientWidth,
      asked: root.scrollWidth,
      scale: Math.min(...pictures.map(
        (svg) => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)),
      font: Math.min(...[...page.querySelectorAll("p, td, th, li, a, pre")].map(
        (each) => parseFloat(window.getComputedStyle(each).fontSize))),
      texts: {texts} ? [...page.querySelectorAll("svg text")].map(
        (each) => [each.getAttribute("class") || "text", each.textContent,
          each.getComputedTextLength()]) : [],
    }};
  }});
  document.getElementById("found").textContent = JSON.stringify(found);
}};
</script></body></html>
"""
FRAME = '<iframe src="{}" width="{}" height="800" style="border: 0"></iframe>\n'


def browse(
    page: Path, profile: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run the browser on a page; its console is on stderr."""
    assert BROWSER
    return subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--enable-logging=stderr",
            "--v=0",
            f"--user-data-dir={profile}",
            "--window-size=1400,900",
            *options,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )


def look(
    folder: Path, pages: list[Path], profile: Path, *, texts: bool = False
) -> tuple[list[dict[str, Any]], list[str]]:
    """What each page measures at each width, and the messages on the console."""
    frames = [
        FRAME.format(page.relative_to(folder).as_posix(), width)
        for page in pages
        for width in WIDTHS
    ]
    wrapper = folder / "frames.html"
    wrapper.write_text(
        FRAMES.format(frames="".join(frames), texts=str(texts).lower()), "utf-8"
    )
    done = browse(wrapper, profile, "--dump-dom", "--allow-file-access-from-files")
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    messages = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(html.unescape(found)), messages


@pytest.fixture(scope="module")
def copied(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, where files may be added."""
    folder = tmp_path_factory.mktemp("browser") / "site"
    shutil.copytree(site, folder)
    return folder


@needs_browser
def test_all_pages_fit_phone_and_desktop(copied: Path, tmp_path: Path) -> None:
    pages = sorted(copied.rglob("*.html"))
    found, messages = look(copied, pages, tmp_path)
    assert not messages
    assert len(found) == len(pages) * len(WIDTHS)
    for each in found:
        assert each["width"] in WIDTHS
        assert (
            each["asked"] <= each["width"]
        ), f"{each['page']} is wider than its window"
        assert each["font"] >= 13, each["page"]
        if each["page"] == "speed.html" or each["page"].startswith("kernels/"):
            assert 0.9 < each["scale"] <= 1.001, f"{each['page']}: a picture is shrunk"


@needs_browser
def test_texts_are_no_wider_than_planned(copied: Path, tmp_path: Path) -> None:
    pages = [copied / "kernels" / f"{stem}.html" for stem in PICTURES]
    found, _ = look(copied, pages, tmp_path, texts=True)
    texts = [text for each in found for text in each["texts"]]
    assert len(texts) > 1000
    for kind, words, width in texts:
        (size,) = set(SIZES) & set(kind.split()) or {"text"}
        planned = width_of(words, size)
        # A short word may have wide letters only: the margin of a box is for it.
        margin = 1 if size in ("mono", "small") else 10
        assert width <= planned + margin, f"{words!r} takes {width}, not {planned}"


@needs_browser
@pytest.mark.parametrize("stem", PICTURES[1:3])
def test_a_picture_is_printed_on_one_page(
    copied: Path, tmp_path: Path, stem: str
) -> None:
    file = tmp_path / "print.pdf"
    picture = copied / "kernels" / f"{stem}.svg"
    browse(picture, tmp_path / "profile", f"--print-to-pdf={file}")
    assert len(re.findall(rb"/Type\s*/Page\b", file.read_bytes())) == 1


@needs_browser
def test_a_message_and_a_wide_page_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        '<!DOCTYPE html><p>x</p><div style="width: 2000px">wide</div>'
        '<svg width="10" viewBox="0 0 20 20"></svg>'
        '<img src="missing.png"><script>console.error("seen")</script>',
        "utf-8",
    )
    (phone, _), messages = look(tmp_path, [page], tmp_path / "profile")
    assert phone["asked"] > phone["width"] == 390
    assert phone["scale"] == 0.5
    assert any("seen" in message for message in messages)

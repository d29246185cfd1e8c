# SPDX-License-Identifier: Apache-2.0
"""Every diagnostic code has a case here whose whole text is compared.

A case is `<code>_<what>.stderr` beside a spec or a folder of that name; specs that are not text
files are in `BYTES`. `FMHA_GEN_ACCEPT=1` writes new texts, and prints what changed.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import support
from fmha_gen.build import engine
from fmha_gen.errors import CODES, SpecError

HERE = Path(__file__).parent
VALID = b"arch: sm90\nop: fmha_fwd\ndtype: bf16\nhead_dim: 128\n"

# Written when the test runs: too long to keep, or bytes that editors and diffs garble.
BYTES = {
    "fg003_too_long": VALID + b"#" * 65536,
    "fg004_latin_1": VALID + b"# caf\xe9\n",
    "fg005_byte_order_mark": b"\xef\xbb\xbf" + VALID,
    "fg006_nul": VALID + b"mask: n\x00ne\n",
    "fg006_escape": VALID + b'mask: "\\ud800"\n"\\0": 1\n',
    "fg006_line_separator": VALID + "# one\u2028mask: oops\n".encode(),
    "fg007_tab": VALID + b"tile:\n\tq: 128\n",
    "fg008_escape_out_of_range": VALID + b'mask: "\\U00110000"\n',
}

SPECS = {
    path.name.removesuffix(".yaml")
    for path in HERE.glob("fg*")
    if path.suffix != ".stderr"
}
CASES = sorted(SPECS | BYTES.keys())


def report(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what a build of a case's specs reports, with paths relative to the case's folder."""
    if case in BYTES:
        (folder / f"{case}.yaml").write_bytes(BYTES[case])
    elif (HERE / case).is_dir():
        shutil.copytree(HERE / case, folder / case, symlinks=True)
    else:
        shutil.copy(HERE / f"{case}.yaml", folder)
    monkeypatch.chdir(folder)
    root = Path(case)
    nested = sorted(path for path in root.glob("*") if path.is_dir())
    paths = nested or [root] if root.is_dir() else [Path(f"{case}.yaml")]
    with pytest.raises(SpecError) as raised:
        engine.build(paths, Path("out"), compile=False)
    assert not Path("out").exists()
    assert raised.value.exit_code == 2
    return f"{raised.value}\n"


@pytest.mark.parametrize("case", CASES)
def test_text(
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = report(case, tmp_path, monkeypatch)
    code = case.split("_")[0].upper()
    assert f"error[{code}]" in text, text
    support.check_accepted(HERE / f"{case}.stderr", text, capsys)


def test_every_text_has_its_case() -> None:
    assert sorted(path.stem for path in HERE.glob("*.stderr")) == CASES


def test_every_code_has_a_case() -> None:
    accepted = "".join(path.read_text("utf-8") for path in HERE.glob("*.stderr"))
    reported = set(re.findall(r"error\[(\w+)\]", accepted))
    assert reported == CODES.keys()
    assert {case.split("_")[0].upper() for case in CASES} == CODES.keys()


def test_codes_are_explained_in_one_line() -> None:
    for code, meaning in CODES.items():
        assert re.fullmatch(r"FG[0-4]\d\d", code)
        assert meaning and "\n" not in meaning
    assert list(CODES) == sorted(CODES)

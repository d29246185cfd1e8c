# SPDX-License-Identifier: Apache-2.0
"""From the command line to tables, JSON, picture and records; GPU and kernels are models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fmha_gen import cli
from fmha_gen.bench import command, timing
from fmha_gen.build import records
from fmha_gen.build.render import DIGEST_PLACEHOLDER, body_digest, finish
from fmha_gen.errors import CheckFailed
from fmha_gen.host import tools
from fmha_gen.ops import masks
from fmha_gen.ops.documents import document_ids, document_starts
from fmha_gen.ops.masks import MASKS
from typer.testing import CliRunner

from . import model
from .test_problems import spec

torch = pytest.importorskip(
    "torch", reason="PyTorch is missing: pip install 'fmha-gen[torch]'"
)

from fmha_gen.bench import contenders  # noqa: E402

KERNEL = '''"""K.

{placeholder}
"""

from {here} import compute

SPEC = {spec!r}


def fmha(q, k, v):
    return compute("ours", q, k, v, SPEC["mask"] == "causal")
'''
DOCUMENTS = '''"""K."""

from {here} import compute

SPEC = {spec!r}


def fmha(q, k, v, *, document_start):
    return compute("ours", q, k, v, True, document_start)
'''
FA4 = '''"""Stands in for FlashAttention-4."""

from {here} import compute, starts_of


def flash_attn_func(q, k, v, *, causal, return_lse):
    return compute("fa4", q, k, v, causal)


def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, causal, **given):
    tensors = (x[None] for x in (q, k, v))
    return compute("fa4", *tensors, causal, starts_of(cu_seqlens_q))[0]
'''
TFLOPS = {"ours": 600e12, "fa4": 500e12}
HOST = {"ours": 10e-6, "fa4": 60e-6}
BARE = 2e-6
faults: set[str] = set()
device = model.ModelDevice()


def starts_of(cu_seqlens: Any) -> Any:
    """Where each token's document begins."""
    return document_starts(document_ids(cu_seqlens))


def compute(who: str, q: Any, k: Any, v: Any, causal: bool, starts: Any = None) -> Any:
    """Attention on the CPU, which on the model takes what its FLOPs say, but for documents."""
    from fmha_gen.ops.reference import attention

    if f"{who} raises" in faults:
        raise RuntimeError("no such shape\nat all")
    pairs = q.shape[0] * q.shape[1] * k.shape[1] * q.shape[2] / (2 if causal else 1)
    # as if the problem were ten million times as large: few launches fill a graph
    device.spend(HOST[who], 1e7 * 4 * pairs * q.shape[3] / TFLOPS[who], who)
    mask = MASKS["causal" if causal else "none"]
    if starts is not None:
        documents = masks.of_spec(spec(mask="causal", documents=True))
        mask = documents.given({"document_start": starts.numpy()})
    out = attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask).out.to(q.dtype)
    if f"{who} is NaN" in faults:
        return out * float("nan")
    return out * (1.1 if f"{who} is wrong" in faults else 1)


@pytest.fixture
def generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, Path]]:
    """Two kernels, one with the records of a validated one; FA4 is there, cuDNN is not run."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    (tmp_path / "flash_attn" / "cute.py").write_text(FA4.format(here=__name__))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(command, "require_gpu", lambda: "580.1")
    monkeypatch.setattr(command, "find_gpu", model.ModelGauge)
    monkeypatch.setattr("fmha_gen.evidence.trial.environment_problem", lambda arch: "")
    monkeypatch.setattr("fmha_gen.bench.contenders.MATMUL_SIZE", 8)
    global device
    device = model.ModelDevice()
    monkeypatch.setattr("fmha_gen.bench.cuda.CudaDevice", lambda: device)
    monkeypatch.setattr(
        "fmha_gen.bench.contenders.matmul", lambda name: device.kernel(1.4e-3)
    )
    monkeypatch.setattr(
        "fmha_gen.bench.contenders.bare",
        lambda kernel, inputs: device.kernel(1e-6, host=BARE),
    )
    folder = tmp_path / "generated"
    (folder / "records").mkdir(parents=True)
    for stem, more in (("full", {}), ("causal", {"mask": "causal"})):
        text = KERNEL.format(
            here=__name__,
            placeholder=DIGEST_PLACEHOLDER,
            spec=spec(16, arch="sm90", **more),
        )
        (folder / f"{stem}.py").write_text(finish(text, "0" * 64))
    digest = body_digest((folder / "full.py").read_text())
    record = None
    for rung in ("compiled", "validated"):
        record = records.merge_rung(
            record, kernel="full", body_sha256=digest, rung=rung, result=RAN
        )
    (folder / "records" / "full.json").write_text(records.dump(record or {}))
    faults.clear()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are tiny, and other tests run beside these
    yield folder, tmp_path
    torch.set_num_threads(threads)
    for name in ("full", "causal", "docs", "flash_attn", "flash_attn.cute"):
        sys.modules.pop(name, None)


RAN = {"gpu": "NVIDIA H200"}
SIZES = ("--heads", "2", "--tokens", "128", "--seqlen", "64,128")


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


def test_a_run(generated: tuple[Path, Path]) -> None:
    folder, outside = generated
    found, picture = outside / "run.json", outside / "run.svg"
    result = invoke(
        *(folder, *SIZES, "--against", "fa4", "--record"),
        *("--json", found, "--plot", picture),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[1][:6] == ["causal", "b2", "h2", "s64", "causal", "0"]
    assert lines[4][6:] == [
        *("0", "fa4", "1.20", "0", "1.20", "0", "1.20", "0", "1.20"),
        *("10.0/2.0", "1701", "-"),
    ]
    assert "4 problems: geometric mean 1.200, least 1.200" in result.stdout

    data = json.loads(found.read_text())
    ours = data["cells"][0]["contenders"]["causal"]
    assert {regime: len(one["rounds"]) for regime, one in ours["regimes"].items()} == {
        "graph": 5,
        "eager": 5,
        "burst": 5,
        "sustained": 1,
    }
    assert ours["host_seconds"] == pytest.approx(10e-6)
    assert ours["error"] < 0.01
    assert data["versions"]["torch"] == torch.__version__
    assert "d16 bf16, causal" in picture.read_text()

    record = records.load(folder / "records" / "full.json")
    assert record is not None and record["rung"] == "benchmarked"
    digest = body_digest((folder / "full.py").read_text())
    (found,) = record["benchmarked"]
    assert found["body_sha256"] == digest
    assert [cell["q"] for cell in found["cells"]] == [64, 128]
    assert found["cells"][0]["peers"].keys() == {"fa4"}
    other = records.load(folder / "records" / "causal.json")
    assert other is not None and other["rung"] == "rendered"  # never validated


def test_documents_are_drawn_for_everyone_and_recorded(
    generated: tuple[Path, Path],
) -> None:
    folder, outside = generated
    path, found = folder / "docs.py", outside / "run.json"
    made = spec(16, arch="sm90", mask="causal", documents=True)
    path.write_text(DOCUMENTS.format(here=__name__, spec=made))
    options = ("--documents", "5:30", "--seed", "7,8", "--batch", 2, "--json", found)
    sizes = ("--heads", 2, "--seqlen", 64, "--rounds", 1, "--regime", "graph")
    result = invoke(
        path, folder / "full.py", *options, *sizes, "--against", "cudnn,fa4"
    )
    assert (result.exit_code, result.stderr) == (0, "")
    docs, other, plain = json.loads(found.read_text())["cells"]
    assert docs["contenders"].keys() == other["contenders"].keys() == {"docs", "fa4"}
    assert docs["missing"] == {"cudnn": "takes no documents"}
    assert "drawn" not in plain
    lengths = docs["drawn"]["values"]["documents"]
    assert [sum(each) for each in lengths] == [64, 64] and lengths[0] != lengths[1]
    assert docs["flops"] == 4 * 2 * 16 * sum(
        n * n / 2 for each in lengths for n in each
    )
    assert [one["drawn"]["seed"] for one in (docs, other)] == [7, 8]
    assert other["drawn"]["values"]["documents"] != lengths
    of = "b2 h2 s64 causal documents 5:30 seed 7"
    assert f"\ndrawn for d16 bf16 documents causal {of}: " in result.stdout
    again = invoke(found)
    assert again.stdout == result.stdout
    refused = invoke(folder / "full.py", "--documents", "5:30", "--param", "w=1")
    assert refused.exit_code == 2
    assert "--documents, --param w: no kernel reads it" in refused.stderr


def test_a_regime_may_be_run_alone(generated: tuple[Path, Path]) -> None:
    folder, outside = generated
    options = (folder, *SIZES, "--against", "fa4", "--json", outside / "run.json")
    result = invoke(*options, "--regime", "graph")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[0].endswith("best peer  /best")
    data = json.loads((outside / "run.json").read_text())
    timed = [data["matmul"]["after"], *data["cells"][0]["contenders"].values()]
    assert [list(one["regimes"]) for one in timed] == [["graph"]] * 3
    assert "bare_host_seconds" in timed[1] and timed[1]["bare_host_seconds"] is None


def test_who_cannot_do_a_problem_is_not_called_and_says_why(
    generated: tuple[Path, Path],
) -> None:
    folder, _ = generated
    path = folder / "causal.py"
    path.write_text(path.read_text().replace("'lse'", "'rotary': True, 'lse'"))
    options = (*SIZES, "--against", "fa4,cudnn", "--regime", "graph")
    result = invoke(path, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    of = "d16 bf16 rotary causal b2 h2 s64 causal rotary and 1 more"
    assert result.stdout.splitlines()[-2:] == [
        f"no {peer} for {of}: takes no rotary" for peer in ("fa4", "cudnn")
    ]
    assert not any(who == "fa4" for _, who in device.log)


def test_a_run_is_shown_again_from_its_json(generated: tuple[Path, Path]) -> None:
    folder, outside = generated
    found, picture = outside / "run.json", outside / "run.svg"
    first = invoke(folder, *SIZES, "--against", "fa4", "--json", found)
    again = invoke(found, "--plot", picture, "--json", outside / "again.json")
    assert (again.exit_code, again.stderr) == (0, "")
    assert again.stdout == first.stdout
    assert (outside / "again.json").read_text() == found.read_text()
    assert picture.exists()
    refused = invoke(found, "--record")
    assert refused.exit_code == 2
    assert refused.stderr.endswith("a run is only shown, with --plot and --json\n")
    for text in ("", "[]", "{}", '{"gpu": 1}'):
        found.write_text(text)
        refused = invoke(found)
        assert refused.exit_code == 1
        assert "run.json: not the JSON of a run: " in refused.stderr


def test_nothing_is_recorded_unless_asked(generated: tuple[Path, Path]) -> None:
    folder, _ = generated
    before = (folder / "records" / "full.json").read_bytes()
    assert invoke(folder, *SIZES, "--against", "fa4").exit_code == 0
    assert (folder / "records" / "full.json").read_bytes() == before
    assert not (folder / "records" / "causal.json").exists()


def test_a_peer_may_fail_and_is_named(generated: tuple[Path, Path]) -> None:
    folder, _ = generated
    faults.add("fa4 raises")
    result = invoke(folder / "full.py", *SIZES, "--against", "fa4", "--rounds", 1)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == (
        "no fa4 for d16 bf16 none b2 h2 s64 none and 1 more: RuntimeError: no such shape"
    )
    before = (folder / "records" / "full.json").read_bytes()
    result = invoke(folder / "full.py", *SIZES, "--against", "fa4", "--record")
    assert result.exit_code == 1
    assert result.stderr.endswith("benchmarked: not recorded: a problem has no peer\n")
    assert (folder / "records" / "full.json").read_bytes() == before


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("ours raises", "RuntimeError: no such shape"),
        ("ours is wrong", "RuntimeError: computes something else: relative error 0.1"),
        ("ours is NaN", "RuntimeError: computes something else: relative error nan"),
    ],
)
def test_a_kernel_that_fails_loses_its_rung(
    fault: str, reason: str, generated: tuple[Path, Path]
) -> None:
    folder, _ = generated
    path = folder / "records" / "full.json"
    options = (folder / "full.py", *SIZES, "--against", "fa4", "--record")
    assert invoke(*options).exit_code == 0
    faults.add(fault)
    result = invoke(*options)
    assert result.exit_code == 1
    first, second = result.stderr.splitlines()
    assert first.startswith(f"{folder / 'full.py'}: b2 h2 s64 none: {reason}")
    assert second.startswith(f"{folder / 'full.py'}: b1 h2 s128 none: {reason}")
    record = records.load(path)
    assert record is not None and record["rung"] == "validated"


def test_a_gpu_that_breaks_spoils_no_record_and_not_what_was_timed(
    generated: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, outside = generated
    path = folder / "records" / "full.json"
    before = path.read_bytes()
    graph_round = timing.graph_round
    taken = 0

    def breaks(*arguments: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken > 20:  # the matrix product, the first problem, and half of the second
            raise RuntimeError("unspecified launch failure")
        return graph_round(*arguments)

    monkeypatch.setitem(timing.TAKE, "graph", breaks)  # type: ignore[arg-type]
    found = outside / "run.json"
    options = ("--against", "fa4", "--record", "--json", found)
    result = invoke(folder / "full.py", *SIZES, *options)
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "the GPU stopped working, no records",
        f"{folder / 'full.py'}: b1 h2 s128 none: RuntimeError: unspecified launch failure",
    ]
    assert "the GPU stopped working: RuntimeError: unspecified" in result.stdout
    first, second = json.loads(found.read_text())["cells"]
    assert first["contenders"].keys() == {"full", "fa4"}
    assert (second["contenders"], second["missing"].keys()) == ({}, {"full", "fa4"})
    assert path.read_bytes() == before


def test_a_gpu_that_breaks_at_the_first_problem_does_not_end_the_run(
    generated: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, outside = generated
    found = outside / "run.json"
    broken = False

    def breaks(*_: Any) -> Any:
        nonlocal broken
        broken = True
        raise RuntimeError("an illegal memory access\nwas encountered")

    def on_the_gpu(function: Any) -> Any:
        return lambda *given, **named: (breaks if broken else function)(*given, **named)

    for name in ("make_inputs", "matmul"):
        place = f"fmha_gen.bench.contenders.{name}"
        monkeypatch.setattr(place, on_the_gpu(getattr(contenders, name)))
    monkeypatch.setattr("fmha_gen.bench.contenders.bare", breaks)
    options = ("--against", "fa4", "--record", "--json", found)
    result = invoke(folder / "full.py", *SIZES, *options)
    why = "RuntimeError: an illegal memory access"
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "the GPU stopped working, no records",
        f"{folder / 'full.py'}: b2 h2 s64 none: {why}",
        f"{folder / 'full.py'}: b1 h2 s128 none: {why}",
    ]
    cells = json.loads(found.read_text())["cells"]
    everyone = {"full": why, "fa4": why}
    assert [(one["contenders"], one["missing"]) for one in cells] == [
        ({}, everyone)
    ] * 2


def test_a_problem_that_does_not_fit_leaves_the_others_and_the_record(
    generated: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, outside = generated
    path, found = folder / "records" / "full.json", outside / "run.json"
    options = ("--against", "fa4", "--record", "--json", found)
    assert invoke(folder / "full.py", *SIZES, *options).exit_code == 0
    before = path.read_bytes()
    make = contenders.make_inputs

    def only_long(problem: Any, name: str) -> Any:
        if problem.q == 64:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        return make(problem, name)

    monkeypatch.setattr("fmha_gen.bench.contenders.make_inputs", only_long)
    result = invoke(folder / "full.py", *SIZES, *options)
    assert result.exit_code == 1
    kernel = folder / "full.py"
    assert result.stderr.splitlines() == [
        f"{kernel}: b2 h2 s64 none: OutOfMemoryError: tried to allocate 9 GiB",
        f"{kernel}: benchmarked: not recorded: nobody was timed at a problem",
    ]
    cells = json.loads(found.read_text())["cells"]
    assert [one["contenders"].keys() for one in cells] == [set(), {"full", "fa4"}]
    assert path.read_bytes() == before


def test_without_tvm_ffi_nothing_is_called(
    generated: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = generated
    monkeypatch.setattr(tools, "FFI", "no-such-distribution")
    result = invoke(folder, *SIZES)
    assert result.exit_code == 3
    assert result.stderr.startswith("no-such-distribution is not installed: pip")
    assert device.log == []


def test_names_that_would_be_mistaken_are_refused(
    generated: tuple[Path, Path],
) -> None:
    folder, outside = generated
    (outside / "full.py").write_text((folder / "full.py").read_text())
    with pytest.raises(CheckFailed, match="the same name"):
        command.load([folder / "full.py", outside / "full.py"])
    (outside / "fa4.py").write_text((folder / "full.py").read_text())
    with pytest.raises(CheckFailed, match="the name of a peer"):
        command.load([outside / "fa4.py"])


def test_a_machine_that_cannot_run_them(
    generated: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = generated
    monkeypatch.setattr(
        "fmha_gen.evidence.trial.environment_problem", lambda arch: "no GPU"
    )
    result = invoke(folder / "full.py")
    assert (result.exit_code, result.stderr) == (3, f"{folder / 'full.py'}: no GPU\n")
    (folder / "full.py").write_text("import no_such_package\n")
    result = invoke(folder / "full.py")
    assert result.exit_code == 3
    assert "cannot import" in result.stderr


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def f(:\n", "SyntaxError: "),
        ("TILE = NO_SUCH_NAME\n", "NameError: "),
        ("SPEC = {}\n", "KeyError: 'arch'"),
        ("", "AttributeError: "),
    ],
)
def test_what_is_no_kernel_is_told_in_a_line(
    generated: tuple[Path, Path], text: str, why: str
) -> None:
    path = generated[0] / "full.py"
    path.write_text(text)
    result = invoke(path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"{path}: no kernel: {why}")
    assert len(result.stderr.splitlines()) == 1

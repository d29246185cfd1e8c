# SPDX-License-Identifier: Apache-2.0
"""Runs of packed sequences, from the command line to tables, JSON and records; GPU and all are
models.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fmha_gen.build import records
from fmha_gen.build.render import DIGEST_PLACEHOLDER, finish

torch = pytest.importorskip(
    "torch", reason="PyTorch is missing: pip install 'fmha-gen[torch]'"
)

from fmha_gen.bench import fa3, timing  # noqa: E402

from . import test_run as run  # noqa: E402
from .test_packed import Attention, Operators, kernel  # noqa: E402
from .test_problems import spec  # noqa: E402
from .test_run import invoke  # noqa: E402

two_kernels = run.generated  # a fixture

KERNEL = '''"""K.

{placeholder}
"""

from {here} import called

SPEC = {spec!r}


def fmha(*tensors, **by_name):
    return called(SPEC, *tensors, **by_name)
'''
SPEED = {
    "paged": 500e12,
    "packed": 600e12,
    "dense": 750e12,
    "fa3": 400e12,
    "fa4": 450e12,
}
PAGED = {"paged": {"page": 16}}
faults: set[str] = set()


def spend(who: str, seconds: float) -> None:
    """As if the problem were large."""
    run.device.spend(10e-6, seconds / SPEED[who], who)


def called(made: dict[str, Any], *tensors: Any, **by_name: Any) -> Any:
    """A kernel of ours, on the model as fast as its layout allows."""
    who = "paged" if made.get("kv") else "packed" if made.get("batch") else "dense"
    spend(who, 1e12)
    if f"{who} is wrong" in faults:
        return kernel(made).fmha(*tensors, **by_name) * 1.1
    return kernel(made).fmha(*tensors, **by_name)


class Timed(Operators):
    """FlashAttention-3, which is fastest with its own splits and metadata, or then wrong."""

    def _forward(
        self, *, scheduler_metadata: Any, num_splits: int, **given: Any
    ) -> Any:
        best = scheduler_metadata is not None and num_splits == 0
        spend("fa3", 1e12 if best else 1.2e12)
        given |= {"num_splits": num_splits, "scheduler_metadata": scheduler_metadata}
        (out,) = super()._forward(**given)
        return [out * 1.1 if best and "fa3 is wrong" in faults else out]


@pytest.fixture
def kernels(two_kernels: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Kernels of three layouts, alone in a folder, and where else a test may write."""
    folder, outside = two_kernels
    for path in folder.glob("*.py"):
        path.unlink()
    same = {"arch": "sm90", "mask": "causal", "q_per_kv": 2}
    of_pages = spec(16, **same, batch="varlen", lse=True) | {"kv": PAGED}
    packed, dense = spec(16, **same, batch="varlen"), spec(16, **same)
    for stem, made in (("paged", of_pages), ("packed", packed), ("dense", dense)):
        text = KERNEL.format(here=__name__, placeholder=DIGEST_PLACEHOLDER, spec=made)
        (folder / f"{stem}.py").write_text(finish(text, "0" * 64))
    attention = Attention()

    def fa4(**given: Any) -> Any:
        spend("fa4", 1e12)
        return attention(**given)

    monkeypatch.setattr("flash_attn.cute.flash_attn_varlen_func", fa4, raising=False)
    monkeypatch.setitem(sys.modules, fa3.VLLM, sys.modules[__name__])
    monkeypatch.setattr(fa3, "library", lambda: "library")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", Timed(attention), raising=False)
    faults.clear()
    yield folder, outside
    for name in ("paged", "packed", "dense"):
        sys.modules.pop(name, None)


SIZES = ("--heads", 4, "--against", "cudnn,fa3,fa4")


def test_a_run_of_packed_sequences(kernels: tuple[Path, Path]) -> None:
    folder, outside = kernels
    found, picture = outside / "run.json", outside / "run.svg"
    lengths = ("--lengths", "2x32,3x1/50,3x9:40", "--seed", 7)
    result = invoke(
        *(folder, *SIZES, *lengths, "--record", "--json", found, "--plot", picture)
    )
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    head = lines[0].split()
    assert head[head.index("/best") + 1 :][:4] == [
        "packed",
        "/packed",
        "dense",
        "/dense",
    ]
    rows = {line.partition("  ")[0]: [] for line in lines[1:7]}
    for line in lines[1:7]:
        rows[line.partition("  ")[0]].append(line.split())
    # As graphs: ours over the best peer, over ours of packed rows, and of dense tensors.
    of_pages, _, drawn = rows["paged"]
    assert of_pages[1:7] == ["h4/2", "2x32", "causal", "page", "16", "vllm"]
    at = of_pages.index("fa4")
    assert [of_pages[at + n] for n in (1, 3, 5)] == ["1.11", "0.83", "0.67"]
    at = drawn.index("fa4")
    assert [drawn[at + n] for n in (1, 3, 4, 5)] == ["1.11", "0.83", "-", "-"]
    assert drawn[7:9] == ["seed", "7"]
    at = rows["packed"][0].index("fa4")
    assert [rows["packed"][0][at + n] for n in (1, 2, 3, 5)] == [
        "1.33",
        "-",
        "-",
        "0.80",
    ]
    where = "d16 bf16 GQA 2 page 16 vllm causal h4/2"
    said = [line for line in lines if line.startswith(f"drawn for {where}")]
    name = "3x9:40 causal page 16 vllm seed 7"
    assert [x.startswith(f"drawn for {where} {name}: 3 seq") for x in said] == [True]
    (speeds,) = [x for x in lines if x.startswith(f"TB/s of K and V, {where}")]
    assert f"{where} 3x1/50 causal page 16 vllm: paged" in speeds
    assert {x.split()[0] for x in speeds.partition("vllm: ")[2].split(", ")} == {
        *("paged", "packed", "dense", "fa3", "fa4"),
    }
    ways = [line for line in lines if line.startswith("fastest of several ways")]
    assert len(ways) == 6 and all(
        x.endswith(": fa3 own splits, metadata") for x in ways
    )
    refused = [line for line in lines if line.startswith("no cudnn")]
    assert any("no packed sequences, no paged K and V" in line for line in refused)

    data = json.loads(found.read_text())
    first, _, last = (one for one in data["cells"] if one["ours"] == ["paged"])
    assert first["beside"] == {"packed": "packed", "dense": "dense"}
    assert first["contenders"].keys() == {"paged", "packed", "dense", "fa3", "fa4"}
    taken = first["contenders"]["fa3"]
    assert taken["way"] == "own splits, metadata"
    counts = {name: len(each["rounds"]) for name, each in taken["regimes"].items()}
    assert counts == {"graph": 5, "eager": 5, "burst": 5, "sustained": 1}
    assert first["best_peer"]["name"] == "fa4"  # not ours of another layout
    drawn = last["drawn"]
    assert (drawn["sequences"], drawn["pool"], drawn["seed"]) == ("3x9:40", "vllm", 7)
    assert first["kv_bytes"] == 64 * 2 * 32 * 2
    again = invoke(found, "--json", outside / "again.json")
    assert again.stdout == result.stdout
    assert (outside / "again.json").read_text() == found.read_text()
    assert "packed" in picture.read_text()


def test_a_record_of_packed_sequences(kernels: tuple[Path, Path]) -> None:
    from fmha_gen.build.render import body_digest

    folder, _ = kernels
    path = folder / "paged.py"
    record: Any = None
    for rung in ("compiled", "validated"):
        record = records.merge_rung(
            record,
            kernel="paged",
            body_sha256=body_digest(path.read_text()),
            rung=rung,
            result={"gpu": "NVIDIA H200"},
        )
    (folder / "records" / "paged.json").write_text(records.dump(record))
    result = invoke(folder, *SIZES, "--lengths", "2x32", "--record")
    assert (result.exit_code, result.stderr) == (0, "")
    kept = records.load(folder / "records" / "paged.json")
    assert kept is not None
    (cell,) = kept["benchmarked"][0]["cells"]
    assert (cell["batch"], cell["q"], cell["kv"]) == (2, 64, 64)
    assert cell["drawn"] == {
        **{"ranges": {}, "seed": 0, "sequences": "2x32", "pool": "vllm"},
        **{"lengths": [[32, 32], [32, 32]], "values": {}},
    }
    assert cell["peers"].keys() == {"fa3", "fa4"}
    assert cell["peers"]["fa3"]["way"] == "own splits, metadata"
    beside = {stem: each["layout"] for stem, each in cell["beside"].items()}
    assert beside == {"packed": "packed", "dense": "dense"}


def test_a_way_that_is_wrong_is_named_and_the_others_count(
    kernels: tuple[Path, Path],
) -> None:
    folder, outside = kernels
    faults.add("fa3 is wrong")
    options = ("--lengths", "2x32", "--regime", "graph", "--json", outside / "x.json")
    result = invoke(folder / "packed.py", *SIZES, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "no fa3, own splits, metadata for" in result.stdout
    (cell,) = json.loads((outside / "x.json").read_text())["cells"]
    assert cell["contenders"]["fa3"]["way"] != "own splits, metadata"
    assert "computes something else" in cell["missing"]["fa3, own splits, metadata"]


def test_our_kernel_beside_that_is_wrong_is_an_error(
    kernels: tuple[Path, Path],
) -> None:
    folder, _ = kernels
    faults.add("dense is wrong")
    options = ("--lengths", "2x32", "--regime", "graph")
    result = invoke(folder / "packed.py", folder / "dense.py", *SIZES, *options)
    assert result.exit_code == 1
    path = folder / "dense.py"
    what = "computes something else: relative error 0.1"
    assert (
        result.stderr
        == f"{path}: beside h4/2 2x32 causal packed: RuntimeError: {what}\n"
    )


def test_the_best_way_is_chosen_by_rounds_of_its_own() -> None:
    import random

    from .model import ModelDevice, ModelGauge

    device, gauge = ModelDevice(), ModelGauge()
    ready = {
        way: timing.prepare(device.kernel(seconds, who=way), device)
        for way, seconds in (("slow", 1.1e-3), ("fast", 1e-3), ("slower", 1.2e-3))
    }
    dice = random.Random(1)
    assert timing.fastest(ready, device, gauge, dice) == "fast"
    before = len(device.log)
    assert timing.fastest({"x": ready["slow"]}, device, gauge, dice) == "x"
    assert len(device.log) == before

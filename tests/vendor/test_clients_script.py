# SPDX-License-Identifier: Apache-2.0
"""tests/hardware/clients.py on the CPU, with small sizes and stand-ins for kernels."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .standins import imported

torch = pytest.importorskip("torch", reason="the script's clients use PyTorch")
clients = importlib.import_module("..hardware.clients", __package__)


class Cpu:
    """In place of clients.Gpu: a graph is the call itself, and nothing is timed."""

    name = "cpu"

    def graph(self, call: clients.Call) -> clients.Call:
        return call

    def streams(self) -> list[Any]:
        return [contextlib.nullcontext(), contextlib.nullcontext()]

    def synchronize(self) -> None:
        pass

    def seconds(self, call: clients.Call) -> float:
        return 0.0

    def host_seconds(self, call: clients.Call) -> float:
        call()
        return 0.0

    kernel_seconds = host_seconds


SMALL = clients.Sizes(
    hidden=128,
    intermediate=128,
    layers=2,
    heads=4,
    kv_heads=1,
    candidates=24,
    prompts=3,
    longest_prompt=32,
    new_tokens=5,
    packed=(17, 1, 40, 3),
    mixed=((17, 17), (256, 300), (0, 0), (1, 1), (1, 40), (0, 0)),
    decoding=(33, 16, 1),
    longest=128,
    rounds=2,
)


@pytest.fixture
def setup(tmp_path: Path) -> clients.Setup:
    package, _ = imported(tmp_path, clients.STEMS, clients.ADAPTERS)
    return clients.Setup(package, Cpu(), SMALL)


@pytest.fixture(autouse=True)
def pytorch_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """varlen_attn, whose own kernels are for GPUs."""
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return
    from torch.nn import attention
    from torch.nn.attention import _fa4, varlen

    monkeypatch.setattr(_fa4, "_fa4_forward_support_error", lambda *_: None)

    def varlen_attn(
        q: Any, k: Any, v: Any, starts: Any, ends: Any, *sizes: int, **more: Any
    ) -> Any:
        assert more["window_size"] == (-1, 0) and more["return_aux"].lse
        given = (q, k, v, starts, ends, *sizes, 0.0, True, False)
        if attention.current_flash_attention_impl() == "fmha_gen":
            return _fa4._fa4_flash_attention_forward_impl(*given)[:2]
        lengths = starts.diff().tolist()
        parts = [x.split(lengths) for x in (q, k, v)]
        rows = [
            clients.reference(*x, dtype=q.dtype)[0] for x in zip(*parts, strict=True)
        ]
        return torch.cat(rows), None

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)


OF_TRANSFORMERS = ("generate", "continuous", "graphs", "packed")


@pytest.mark.parametrize("part", clients.PARTS)
def test_a_part(part: str, setup: clients.Setup) -> None:
    if part in OF_TRANSFORMERS:
        pytest.importorskip("transformers", reason="the part needs transformers")
    found = clients.outcome(part, setup)
    if found.status == "absent":
        pytest.skip(found.said)
    assert found.status == "passed", found.said
    assert json.loads(json.dumps(found)) and part in found.line()


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It makes the folder; its own kernels take nothing of a CPU, so that a part fails."""
    monkeypatch.setattr(clients, "Gpu", Cpu)
    monkeypatch.setattr(clients, "Sizes", lambda: SMALL)
    folder, file = tmp_path / "attention_of_clients", tmp_path / "found.json"
    asked = [str(folder), "--only", "vllm,streams", "--json", str(file)]
    assert clients.main(asked) == 1
    assert (folder / "vllm_adapter.py").exists()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("vllm:        FAILED; ValueError: no kernel takes arch")
    assert lines[-1] == "0 passed, 2 FAILED, 0 absent"
    assert [each["status"] for each in json.loads(file.read_text())] == ["FAILED"] * 2
    with pytest.raises(SystemExit):
        clients.main([str(folder), "--only", "nothing"])
    assert "nothing: the parts are generate, " in capsys.readouterr().err


def forgetting(kernel: Any, of: Callable[[Any], Any]) -> Any:
    """A kernel that forgets the last keys of each sequence, so many of its length."""

    def fmha(q: Any, k: Any, v: Any, **given: Any) -> Any:
        if "seqused_k" in given:
            used = given["seqused_k"]
            given["seqused_k"] = (used - of(used)).clamp(min=0)
        else:
            ends = given["cu_seqlens_k"].tolist()
            v = v.clone()
            for begin, end in itertools.pairwise(ends):
                v[max(begin, end - of(end - begin)) : end] = 0
        return kernel(q, k, v, **given)

    return fmha


@pytest.mark.parametrize(
    "part", [name for name in clients.PARTS if name not in ("host", "streams")]
)
def test_a_part_fails_with_wrong_kernels(
    part: str, setup: clients.Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key is missed by errors, half of them by tokens."""
    if part in OF_TRANSFORMERS:
        pytest.importorskip("transformers", reason="the part needs transformers")
    by_tokens = part in ("continuous", "graphs")
    for name in setup.package.KERNELS:
        kernel = setup.package.load(name)
        of = (lambda n: n // 2) if by_tokens else (lambda n: 1)
        monkeypatch.setattr(kernel, "fmha", forgetting(kernel.fmha, of))
    found = clients.outcome(part, setup)
    if found.status == "absent":
        pytest.skip(found.said)
    assert found.status == "FAILED"
    assert ("other tokens" if by_tokens else "sequence") in found.said

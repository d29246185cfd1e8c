# SPDX-License-Identifier: Apache-2.0
"""tests/hardware/train.py on the CPU: tiny models, stand-ins for kernels, and curves made up."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import pairs
from .standins import imported, source_of_texts

torch = pytest.importorskip("torch", reason="the script trains by PyTorch")
script = importlib.import_module("..hardware.train", __package__)

TINY = script.Sizes(
    layers=1, heads=4, kv_heads=2, head_dim=64, inner=64, batch=2, length=48, steps=12
)._replace(rate=3e-3, rising=2)
SMALL = script.SMALL._replace(steps=24, rate=3e-3, rising=4)
DATA = bytes(range(32, 127)) * 40


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of tiny products wait for each other, on a busy machine for long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(run: str, sizes: Any = TINY, **more: Any) -> list[dict[str, Any]]:
    (one,) = script.runs_of([run])
    folder = more.pop("folder", None)
    attention = script.attention_of(one.attention, folder)
    return list(script.train(one, sizes, attention, "cpu", DATA, **more))


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture
def package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[str], Any]:
    """A folder of kernels for TINY, what they were called, and the package."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    known = pairs.texts()
    stems = (f"{pairs.GQA}_lse", f"{pairs.GQA}_bwd", pairs.ORDERED)
    source = source_of_texts(tmp_path / "generated", {x: known[x] for x in stems})
    package, calls = imported(tmp_path, stems, source=source)
    return tmp_path / package.__name__, calls, package


def test_a_model_learns() -> None:
    """A text that says what comes next is known soon."""
    found = losses(trained("sdpa:0", SMALL))
    assert len(found) == SMALL.steps and found[0] == pytest.approx(math.log(256), 0.02)
    assert found[-1] < found[0] - 1
    assert losses(trained("sdpa:0", SMALL)) == found
    assert losses(trained("sdpa:1", SMALL)) != found


@pytest.mark.parametrize("whole", [False, True])
def test_ours_is_trained_as_sdpa_is(
    package: Any, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, calls, _ = package
    real = torch.compile

    def traced(model: Any, **asked: Any) -> Any:
        torch._dynamo.reset()
        return real(model, backend="aot_eager", **asked)

    monkeypatch.setattr(torch, "compile", traced)
    ours = trained("ours:0", folder=folder, whole=whole)
    name = pairs.GQA
    assert calls == [f"{name}_lse", f"{name}_bwd"] * TINY.steps
    right = losses(trained("sdpa:0"))
    assert right[-1] < right[0] - 0.5
    assert losses(ours) == pytest.approx(right, abs=0.02)
    assert ours[-1]["compiled"] == whole


def test_a_fixed_order_repeats(package: Any) -> None:
    folder, calls, _ = package
    lines = [
        line
        for _ in range(2)
        for line in trained("ours-deterministic:3", folder=folder)
    ]
    assert set(calls) == {f"{pairs.GQA}_lse", pairs.ORDERED}
    assert not torch.are_deterministic_algorithms_enabled()
    assert script.repeated(lines, "ours-deterministic").holds


def test_wrong_gradients_are_seen(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same criterion as on a GPU: -dV in place of dV costs more than a seed does."""
    folder, _, module = package
    sizes = TINY._replace(steps=20)
    monkeypatch.setattr(script, "WINDOW", 5)

    def lines(name: str) -> list[dict[str, Any]]:
        return [x for n in (0, 1) for x in trained(f"{name}:{n}", sizes, folder=folder)]

    right = lines("sdpa")
    assert script.compared([*right, *lines("ours")], "ours").holds
    kernel = module.load(f"{pairs.GQA}_bwd")
    function = kernel.fmha_bwd

    def damaged(*given: Any, **asked: Any) -> Any:
        dq, dk, dv = function(*given, **asked)
        return dq, dk, dv.neg()

    monkeypatch.setattr(kernel, "fmha_bwd", damaged)
    assert not script.compared([*right, *lines("ours")], "ours").holds


def test_the_model_looks_back_only() -> None:
    model = script.Model(SMALL, script.sdpa)
    tokens = torch.randint(0, 256, (1, SMALL.length))
    other = tokens.clone()
    other[0, 12] += 1
    with torch.no_grad():
        found, changed = model(tokens), model(other % 256)
    assert torch.equal(found[:, :12], changed[:, :12])
    assert not torch.allclose(found[:, 12:], changed[:, 12:])


def test_places_matter() -> None:
    """RoPE turns pairs by their place, and leaves lengths and the first row."""
    model = script.Model(SMALL, script.sdpa)
    x = torch.randn(1, 9, 2, SMALL.head_dim)
    found = script.turned(x, model.turns[:, :9])
    torch.testing.assert_close(found[:, 0], x[:, 0])
    torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1))
    same = x[:, :1].expand(x.shape)
    by_distance = torch.einsum(
        "bqhd,bkhd->qk", *[script.turned(same, model.turns[:, :9])] * 2
    )
    torch.testing.assert_close(by_distance[1:, 1:], by_distance[:-1, :-1])


def test_the_size_of_the_model() -> None:
    with torch.device("meta"):
        model = script.Model(script.Sizes(), script.sdpa)
    assert sum(x.numel() for x in model.parameters()) == 101_731_328


def test_the_text_and_its_batches() -> None:
    data = script.text()
    assert b"import" in data and len(data) > 5_000_000
    one, other = (script.batches(data, TINY) for _ in range(2))
    for _ in range(3):
        tokens = next(one)
        assert torch.equal(tokens, next(other))
        assert tokens.shape == (2, 49)
        assert all(bytes(row.tolist()) in data for row in tokens)
    assert not torch.equal(tokens, next(one))


def test_the_rate() -> None:
    sizes = script.Sizes()
    rates = [script.rate_at(step, sizes) for step in range(sizes.steps)]
    assert max(rates) == rates[sizes.rising - 1] == rates[sizes.rising] == sizes.rate
    assert rates[: sizes.rising] == sorted(rates[: sizes.rising])
    assert rates[sizes.rising :] == sorted(rates[sizes.rising :], reverse=True)
    assert rates[-1] == pytest.approx(sizes.rate / 10, rel=1e-3)


def made_up(attention: str, *curves: list[float]) -> list[dict[str, Any]]:
    return [
        {"attention": attention, "seed": seed, "step": step, "loss": loss}
        for seed, curve in enumerate(curves)
        for step, loss in enumerate(curve)
    ]


def flat(*levels: float) -> list[list[float]]:
    return [[level] * (2 * script.WINDOW) for level in levels]


def test_a_seed_that_is_there_twice_counts_once() -> None:
    """Two runs of a seed by a fixed order do not differ: their spread is not that of seeds."""
    ours, theirs = made_up("ours", *flat(1.0)), made_up("sdpa", *flat(1.01, 1.11))
    alone = script.compared([*ours, *ours, *theirs], "ours")
    assert not alone.holds and "ours: 1 seeds, sdpa: 2: too few" in alone.said
    both = made_up("ours", *flat(1.0, 1.1))
    once, twice = (
        script.compared([*both, *more, *theirs], "ours") for more in ([], ours)
    )
    assert once == twice and once.holds and "differ by 0.10 of" in once.said


@pytest.mark.parametrize(
    ("ours", "holds", "said"),
    [
        (flat(1.01, 1.11), True, "differ by 0.10 of"),
        (flat(1.0, 1.1), True, "differ by 0.00 of"),
        (flat(1.2, 1.22), False, "in 2 windows by more than it"),
        (flat(1.0), False, "ours: 1 seeds, sdpa: 2: too few"),
        (flat(math.nan, 1.0), False, "in 2 windows by more"),
        ([[1.0] * 3] * 2, False, "too few"),
        (
            [
                [*[1.0 + n] * script.WINDOW, *[1.2 + n] * script.WINDOW]
                for n in (0, 0.01)
            ],
            False,
            "in window 1 means differ by 1.5",
        ),
    ],
)
def test_curves_are_compared(ours: Any, holds: bool, said: str) -> None:
    lines = made_up("sdpa", *flat(1.0, 1.1)) + made_up("ours", *ours)
    found = script.compared(lines, "ours")
    assert found.holds == holds and said in found.said


def test_two_equal_groups_without_a_spread() -> None:
    lines = made_up("sdpa", *flat(1.0, 1.0)) + made_up("ours", *flat(1.0, 1.0))
    assert script.compared(lines, "ours").holds
    lines = made_up("sdpa", *flat(1.0, 1.0)) + made_up("ours", *flat(1.1, 1.1))
    assert not script.compared(lines, "ours").holds


def test_weights_are_compared() -> None:
    name = "ours-deterministic"

    def line(seed: int, weights: str) -> dict[str, Any]:
        return {"attention": name, "seed": seed, "weights": weights}

    assert script.repeated([line(0, "a"), line(0, "a"), line(1, "b")], name).holds
    assert not script.repeated([line(0, "a"), line(1, "a")], name).holds
    found = script.repeated([line(0, "a"), line(0, "b")], name)
    assert found == (False, f"{name}: other weights with seed 0")


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "text", lambda: DATA)
    file = tmp_path / "runs.jsonl"
    asked = ["sdpa:0,1", "--small", "--steps", "3", "--out", str(file)]
    assert script.main(asked) == 0
    printed = capsys.readouterr().out.splitlines()
    assert file.read_text().splitlines() == printed and len(printed) == 2 * 4
    last = json.loads(printed[-1])
    assert (last["attention"], last["seed"], last["steps"]) == ("sdpa", 1, 3)
    assert script.main(["--compare", str(file)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("sdpa: ") and said[1:] == ["FAILS: no run of ours"]
    lines = made_up("sdpa", *flat(1.0, 1.1)) + made_up("ours", *flat(1.0, 1.1))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert script.main(["--compare", str(file)]) == 0
    for wrong in ("fa2:0", "ours:x"):
        with pytest.raises(SystemExit):
            script.main(["sdpa", wrong])
    with pytest.raises(ValueError, match=r"^ours: needs DIR"):
        script.main(["ours:0", "--small"])

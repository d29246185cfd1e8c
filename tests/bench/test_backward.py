# SPDX-License-Identifier: Apache-2.0
"""Backward kernels beside the backward passes of peers; tensors are on the CPU."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fmha_gen.bench import overhead, problems, tables
from fmha_gen.bench.grid import Row
from fmha_gen.bench.problems import problem_for, problems_for
from fmha_gen.bench.results import Cell
from fmha_gen.build import records
from fmha_gen.build.render import DIGEST_PLACEHOLDER, finish
from fmha_gen.ops import masks
from fmha_gen.ops.masks import MASKS, Mask
from fmha_gen.show.website import speed

torch = pytest.importorskip(
    "torch", reason="PyTorch is missing: pip install 'fmha-gen[torch]'"
)

from fmha_gen.bench import contenders, fa4, of_torch  # noqa: E402
from fmha_gen.ops import gradients  # noqa: E402
from unit.fake_backward import FakeBackward, spec  # noqa: E402

from . import test_run  # noqa: E402
from .model import error_of, launch_of  # noqa: E402
from .test_results import report, timing  # noqa: E402
from .test_run import generated, invoke  # noqa: E402, F401


def asked(
    q: int = 48, kv: int = 48, *, causal: bool = True, group: int = 2, **more: Any
) -> Any:
    fields = {"mask": "causal" if causal else "none", "q_per_kv": group, **more}
    return problem_for(spec(**fields), batch=2, heads=4, q=q, kv=kv)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny, and other tests run beside these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- problems -----------------------------------------------------------------------------


def test_the_default_problem_and_its_name() -> None:
    (one,) = problems_for(spec(mask="causal", q_per_kv=8))
    assert (one.batch, one.heads, one.kv_heads, one.q, one.kv) == (4, 32, 4, 4096, 4096)
    assert one.family == "d64 bf16 GQA 8 backward causal"
    assert str(one) == "b4 h32/4 s4096 causal backward"
    assert one.backward and not one.lse and one.without_lse is one
    (of_forward,) = problems_for(spec(mask="causal", q_per_kv=8, op="fmha_fwd"))
    assert of_forward != one and not of_forward.backward
    (ordered,) = problems_for(spec(mask="causal", q_per_kv=8, deterministic=True))
    assert ordered != one and ordered.deterministic and not one.deterministic
    assert ordered.family == "d64 bf16 GQA 8 backward deterministic causal"


@pytest.mark.parametrize("mask", MASKS)
def test_flops_are_those_of_five_products(mask: str) -> None:
    dim = {"qk": 192, "v": 128}
    one = problem_for(spec(mask=mask, head_dim=dim), batch=2, heads=3, q=512, kv=512)
    scores = 512 * 512 / (2 if mask == "causal" else 1)
    assert one.flops == 2 * 2 * 3 * scores * (3 * 192 + 2 * 128)
    assert one.visible == (0.5 if mask == "causal" else 1)
    square = problem_for(spec(mask=mask), batch=2, heads=3, q=512, kv=512)
    assert square.flops == 10 * 2 * 3 * scores * 64


def test_rows_of_a_grid_are_of_the_forward_pass() -> None:
    row = Row("bf16", 64, 64, "none", 1, 4, 4096, 1.3)
    assert row.problem(spec()) is None


def test_a_kind_of_the_page_about_speed() -> None:
    assert speed.title_of(speed.kind_of(asked())) == "backward"
    ordered = asked(deterministic=True)
    assert speed.title_of(speed.kind_of(ordered)) == "backward, deterministic"


def test_the_model_counts_tiles_of_keys_and_five_products() -> None:
    one = asked(512, 1024, causal=False, group=1)
    assert overhead.tiles_and_blocks(one) == (2 * 4 * 8, 4.0)
    assert overhead.block_flops(one) == 2 * 128 * 128 * 5 * 64
    causal = asked(512, 512, group=1)
    assert overhead.tiles_and_blocks(causal) == (2 * 4 * 4, 2.5)
    tiles, blocks = overhead.tiles_and_blocks(one)
    assert tiles * blocks * overhead.block_flops(one) == one.flops


def test_a_run_says_what_its_flops_are() -> None:
    cell = Cell(asked(), ["x"], timings={"x": timing(400, asked())})
    assert tables.BACKWARD_FLOPS in tables.closing_lines(report(cell))
    assert "10 * batch * heads * s^2 * d, half when causal" in tables.BACKWARD_FLOPS
    forward = problem_for(spec(op="fmha_fwd", lse=False), batch=1, heads=1, q=8, kv=8)
    plain = Cell(forward, ["x"], timings={"x": timing(400, forward)})
    assert tables.BACKWARD_FLOPS not in tables.closing_lines(report(plain))


# --- inputs and ours ----------------------------------------------------------------------


@pytest.mark.parametrize(("q", "kv"), [(48, 48), (48, 20), (20, 48)])
def test_o_and_lse_are_those_of_the_definition(q: int, kv: int) -> None:
    """With more queries than keys some rows see none."""
    one = asked(q, kv)
    inputs = contenders.make_inputs(one, "cpu")
    assert inputs.gradient is not None and not inputs.by_name
    dout, out, lse = inputs.gradient
    assert dout.shape == out.shape == (2, q, 4, 64) and lse.shape == (2, 4, q)
    assert (dout.dtype, out.dtype, lse.dtype) == (torch.bfloat16,) * 2 + (
        torch.float32,
    )
    assert 0.9 < float(dout.float().std()) < 1.1
    keys = inputs.k.double().repeat_interleave(2, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", inputs.q.double(), keys) / 8
    seen = torch.ones(q, kv, dtype=torch.bool).tril(kv - q)
    expected = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    assert torch.allclose(lse.double(), expected, atol=1e-5)
    assert bool((lse == -torch.inf).any()) == (q > kv)
    again = contenders.make_inputs(one, "cpu")
    assert all(
        torch.equal(a, b) for a, b in zip(again.leading, inputs.leading, strict=True)
    )


@pytest.mark.parametrize(("q", "kv"), [(48, 48), (48, 20), (20, 48)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_ours_is_right(q: int, kv: int, causal: bool, group: int) -> None:
    one = asked(q, kv, causal=causal, group=group)
    inputs = contenders.make_inputs(one, "cpu")
    launch = contenders.ours(FakeBackward(spec(**one.spec)), inputs)
    assert [tuple(x.shape) for x in launch()] == [
        *((2, q, 4, 64), (2, kv, 4 // group, 64), (2, kv, 4 // group, 64)),
    ]
    assert 0 < error_of(launch, one, inputs) < contenders.WRONG / 3


@pytest.mark.parametrize(
    "fault", ["leaves D out", "dK without scale", "last row of dq unwritten"]
)
def test_whoever_computes_something_else_is_found(fault: str) -> None:
    one = asked()
    inputs = contenders.make_inputs(one, "cpu")
    launch = contenders.ours(FakeBackward(spec(**one.spec), fault), inputs)
    assert not error_of(launch, one, inputs) <= contenders.WRONG


@pytest.mark.parametrize("which", range(3))
def test_each_gradient_is_looked_at(which: int) -> None:
    one = asked(causal=False)
    inputs = contenders.make_inputs(one, "cpu")
    found = list(contenders.ours(FakeBackward(spec(**one.spec)), inputs)())
    found[which] = found[which].clone()
    found[which][-1, :, -1] *= 1.1
    assert error_of(lambda: tuple(found), one, inputs) == pytest.approx(0.1, rel=0.1)
    right = contenders.right_of(one, inputs)
    found[which] = found[which][:, :-1]
    name = ("dq", "dk", "dv")[which]
    with pytest.raises(RuntimeError, match=f"returned {name} as .*47.* instead of"):
        right.error_of(lambda: tuple(found))
    with pytest.raises(RuntimeError, match="returned 2 tensors instead of dq, dk, dv"):
        right.error_of(lambda: tuple(found[:2]))


def test_what_a_launch_allocates_is_free_for_the_next() -> None:
    """Else a graph of many launches would hold as many outputs and workspaces."""
    made: list[Any] = []
    one = asked()
    inputs = contenders.make_inputs(one, "cpu")

    def fmha_bwd(*tensors: Any) -> Any:
        outputs = tuple(map(torch.empty_like, tensors[1:4]))
        made.extend(weakref.ref(x) for x in (*outputs, torch.empty(8)))
        return outputs

    launch = contenders.ours(SimpleNamespace(fmha_bwd=fmha_bwd), inputs)  # type: ignore[arg-type]
    launch()
    launch()
    gc.collect()
    assert len(made) == 8 and all(x() is None for x in made)


def test_the_bare_callable_is_told_of_every_tensor_and_a_workspace() -> None:
    one = asked()
    inputs = contenders.make_inputs(one, "cpu")
    calls: list[Any] = []
    kernel: Any = FakeBackward(spec(**one.spec))
    kernel.compile = lambda: lambda *arguments: calls.append(arguments)
    contenders.bare(kernel, inputs)()
    ((*tensors, dq, dk, dv, workspace, scale, processors),) = calls
    assert inputs.gradient is not None
    dout, out, lse = inputs.gradient
    expected = (dout, inputs.q, inputs.k, inputs.v, out, lse)
    assert all(x is y for x, y in zip(tensors, expected, strict=True))
    for x, like in ((dq, inputs.q), (dk, inputs.k), (dv, inputs.v)):
        assert x.shape == like.shape
    assert workspace.numel() == kernel.workspace_size(2, 48, 4)
    assert (workspace.dtype, scale, processors) == (torch.float32, 64**-0.5, 132)


# --- peers --------------------------------------------------------------------------------


def of_sides(causal: bool, left: int | None = None, right: int | None = None) -> Mask:
    """The mask that peers are told of: by its two sides, or as causal."""
    return masks.window(left, 0 if causal else right)


def exact(
    q: Any, k: Any, v: Any, dout: Any, mask: Mask, cap: float | None = None
) -> Any:
    """The gradients as a kernel returns them; tensors are [batch, rows, heads, d]."""
    scale = q.shape[-1] ** -0.5
    found = gradients.gradients(q, k, v, dout, scale=scale, mask=mask, cap=cap)
    return tuple(x.to(q.dtype) for x in found)


class Operator:
    """An operator of PyTorch: takes what its schema says, and hands it to a function by name."""

    def __init__(self, name: str, function: Any) -> None:
        self.schema = getattr(torch.ops.aten, name).default._schema
        self.function = function

    def __call__(self, *values: Any, **more: Any) -> Any:
        names = [x.name for x in self.schema.arguments if not x.kwarg_only]
        assert len(values) <= len(names)
        given = dict(zip(names, values, strict=False)) | more
        needed = {x.name for x in self.schema.arguments if not x.has_default_value()}
        optional = {x.name for x in self.schema.arguments if x.name == "scale"}
        assert (
            needed - optional <= given.keys() <= {x.name for x in self.schema.arguments}
        )
        return self.function(**given)


CUDNN, FLASH = "cudnn", "flash"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Stands in for FlashAttention-4 and PyTorch's operators; what they were called with."""
    found: list[tuple[str, dict[str, Any]]] = []
    marks = {x: object() for x in ("cum_seq_q", "cum_seq_k", "state", "unused")}

    def fa4_backward(
        q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, **options: Any
    ) -> Any:
        assert lse.dtype == torch.float32 and tuple(lse.shape) == (
            *(q.shape[0], q.shape[2], q.shape[1]),
        )
        assert out.shape == dout.shape == (*q.shape[:3], v.shape[3])
        found.append(("fa4", options))
        sides = (options.get(f"window_size_{side}") for side in ("left", "right"))
        mask = of_sides(options["causal"], *sides)
        return exact(q, k, v, dout, mask, options.get("softcap"))

    package = ModuleType("flash_attn.cute")
    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_bwd = fa4_backward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, interface.__name__, interface)

    def forward(which: str) -> Any:
        def run(query: Any, key: Any, value: Any, **given: Any) -> Any:
            assert query.shape[1] == 4 and query.shape[3] == 64, "heads before rows"
            found.append((f"{which} forward", given))
            q_len, kv_len = query.shape[2], key.shape[2]
            more = (marks["cum_seq_q"], marks["cum_seq_k"], q_len, kv_len)
            return ("out", "lse", *more, marks["state"], marks["unused"], None)

        return run

    def backward(which: str) -> Any:
        def run(**given: Any) -> Any:
            found.append((f"{which} backward", given))
            assert (given["out"], given["logsumexp"]) == ("out", "lse")
            assert given["cum_seq_q"] is marks["cum_seq_q"]
            assert given["cum_seq_k"] is marks["cum_seq_k"]
            assert given["philox_seed"] is marks["state"]
            assert given["philox_offset"] is marks["unused"]
            assert (given["max_q"], given["max_k"]) == (48, 48)
            assert given["dropout_p"] == 0.0 and given.get("attn_bias") is None
            names = ("query", "key", "value", "grad_out")
            rows = [given[name].transpose(1, 2) for name in names]
            made = exact(*rows, of_sides(given["is_causal"]))
            return [x.transpose(1, 2) for x in made]

        return run

    for which in (CUDNN, FLASH):
        name = f"_scaled_dot_product_{which}_attention"
        for each, function in (
            (name, forward(which)),
            (f"{name}_backward", backward(which)),
        ):
            monkeypatch.setattr(torch.ops.aten, each, Operator(each, function))
    return found


@pytest.mark.parametrize("name", ["cudnn", "fa4", "flash"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 2])
def test_every_peer_computes_the_problem(
    name: str, causal: bool, group: int, calls: list[Any]
) -> None:
    one = asked(causal=causal, group=group)
    inputs = contenders.make_inputs(one, "cpu")
    assert contenders.PEERS[name].refusal(one) == ""
    launch = launch_of(name, one, inputs)
    begun = len(calls)
    assert [tuple(x.shape) for x in launch()] == [
        *((2, 48, 4, 64), (2, 48, 4 // group, 64), (2, 48, 4 // group, 64)),
    ]
    assert 0 < error_of(launch, one, inputs) < 0.005
    launched = [who for who, _ in calls[begun:]]
    assert not any(
        "forward" in who for who in launched
    ), "it is the backward pass alone"
    if name == "fa4":
        assert calls[-1][1] == {"causal": causal, "deterministic": False}
    else:
        (_, of_forward), *_ = calls
        assert of_forward.get("compute_log_sumexp", True) is True
        assert of_forward["is_causal"] is calls[-1][1]["is_causal"] is causal
        assert calls[-1][1]["grad_out"].data_ptr() == inputs.gradient.dout.data_ptr()  # type: ignore[union-attr]
    wrong = launch_of(name, asked(causal=not causal, group=group), inputs)
    assert error_of(wrong, one, inputs) > contenders.WRONG


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"window": {"left": 7, "right": "none"}},
            {"causal": True, "window_size_left": 7},
        ),
        (
            {"causal": False, "window": {"left": 9, "right": 4}},
            {"window_size_left": 9, "window_size_right": 4},
        ),
        ({"softcap": 2.0}, {"causal": True, "softcap": 2.0}),
    ],
)
def test_fa4_is_told_of_windows_and_softcap(
    fields: dict[str, Any], told: dict[str, Any], calls: list[Any]
) -> None:
    one = asked(**fields)
    inputs = contenders.make_inputs(one, "cpu")
    assert contenders.PEERS["fa4"].refusal(one) == ""
    launch = launch_of("fa4", one, inputs)
    assert 0 < error_of(launch, one, inputs) < 0.005
    given = {name: x for name, x in calls[-1][1].items() if x not in (None, False)}
    assert given == told
    plain = asked(causal=fields.get("causal", True))
    assert error_of(launch_of("fa4", plain, inputs), one, inputs) > contenders.WRONG
    assert "takes no" in contenders.PEERS["cudnn"].refusal(one)


def test_a_fixed_order_has_peers_of_a_fixed_order(calls: list[Any]) -> None:
    ordered = asked(deterministic=True)
    inputs = contenders.make_inputs(ordered, "cpu")
    launch_of("fa4", ordered, inputs)()
    assert calls[-1][1] == {"causal": True, "deterministic": True}
    lacks = "takes no fixed order of sums"
    found = {name: peer.refusal(ordered) for name, peer in contenders.PEERS.items()}
    no = "takes no backward pass, no fixed order of sums"
    assert found == {"cudnn": lacks, "flash": lacks, "fa4": "", "fa3": no, "flex": no}


def test_what_sums_of_dq_are_in_is_a_kernels_own_affair() -> None:
    in_fp16 = asked(dq_sums="fp16")
    assert in_fp16.further["dq_sums"] == "fp16"
    assert contenders.PEERS["fa4"].refusal(in_fp16) == ""
    assert contenders.PEERS["cudnn"].refusal(in_fp16) == ""


def test_who_has_no_backward_pass_or_no_mask_of_unequal_lengths(
    calls: list[Any],
) -> None:
    found = {name: peer.refusal(asked(32)) for name, peer in contenders.PEERS.items()}
    unequal, no = "causal mask of unequal lengths", "backward pass"
    assert found == {
        **{"cudnn": f"takes no {unequal}", "flash": f"takes no {unequal}", "fa4": ""},
        **dict.fromkeys(("fa3", "flex"), f"takes no {unequal}, no {no}"),
    }
    assert contenders.PEERS["cudnn"].refusal(asked(32, causal=False)) == ""


def test_pytorchs_flash_attention_is_asked_for_by_its_backend() -> None:
    """On the CPU, where PyTorch has one of that name, too."""
    fields = spec(op="fmha_fwd", lse=False, mask="causal")
    one = problem_for(fields, batch=1, heads=2, q=32, kv=32)
    inputs = contenders.make_inputs(one, "cpu")
    launch = launch_of("flash", one, inputs)
    assert 0 < error_of(launch, one, inputs) < 0.005


def test_backends_are_pytorchs() -> None:
    from torch.nn.attention import SDPBackend

    for name in (of_torch.CUDNN, of_torch.FLASH):
        assert name in SDPBackend.__members__
    assert fa4.PACKAGE == "flash_attn.cute"
    assert problems.default_heads(spec()) == 32


# --- a run --------------------------------------------------------------------------------

KERNEL = '''"""K.

{placeholder}
"""

from {here} import compute

SPEC = {spec!r}


def fmha_bwd(dout, q, k, v, out, lse):
    return compute("ours", SPEC["mask"] == "causal", dout, q, k, v)
'''


def compute(who: str, causal: bool, dout: Any, q: Any, k: Any, v: Any) -> Any:
    """The gradients, which on the model take what their FLOPs say."""
    pairs = q.shape[0] * q.shape[1] * k.shape[1] * q.shape[2] / (2 if causal else 1)
    speed_of = {"ours": 450e12, "fa4": 500e12}[who]
    flops = 1e7 * 10 * pairs * q.shape[3]  # of few launches, which fill a graph
    test_run.device.spend(10e-6, flops / speed_of, who)
    return exact(q, k, v, dout, of_sides(causal))


def test_a_run_is_timed_shown_and_recorded(
    generated: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    folder, outside = generated
    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_bwd = (  # type: ignore[attr-defined]
        lambda q, k, v, out, dout, lse, *, causal, deterministic: compute(
            "fa4", causal, dout, q, k, v
        )
    )
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    path, found = folder / "bwd.py", outside / "run.json"
    made = spec(mask="causal", name="bwd")
    placeholder = {"placeholder": DIGEST_PLACEHOLDER, "here": __name__}
    path.write_text(finish(KERNEL.format(**placeholder, spec=made), "0" * 64))
    options = ("--heads", 2, "--tokens", 128, "--seqlen", "64,128", "--against", "fa4")
    files = ("--record", "--json", found, "--plot", outside / "run.svg")
    result = invoke(path, *options, *files)
    sys.modules.pop("bwd", None)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "b2 h2 s64 causal backward" in result.stdout
    assert "2 problems: geometric mean 0.900" in result.stdout
    assert tables.BACKWARD_FLOPS in result.stdout.splitlines()
    cells = json.loads(found.read_text())["cells"]
    assert [cell["flops"] for cell in cells] == [
        10 * b * 2 * s * s * 64 / 2 for b, s in ((2, 64), (1, 128))
    ]
    assert all(cell["contenders"]["bwd"]["error"] < 0.005 for cell in cells)
    record = records.load(folder / "records" / "bwd.json")
    assert record is not None
    (run,) = record["benchmarked"]
    assert [cell["visible"] for cell in run["cells"]] == [0.5, 0.5]
    assert "d64 bf16 backward" in (outside / "run.svg").read_text()
    again = invoke(found)
    assert again.stdout == result.stdout

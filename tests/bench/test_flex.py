# SPDX-License-Identifier: Apache-2.0
"""FlexAttention computes what our kernels do: traced as on a GPU, run without its fused kernel."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from fmha_gen.expressions.language import Name, parse
from fmha_gen.expressions.solve import form_of
from fmha_gen.ops import lists

from .model import error_of, launch_of
from .test_problems import problem

torch = pytest.importorskip(
    "torch", reason="PyTorch is missing: pip install 'fmha-gen[torch]'"
)

from fmha_gen.bench import contenders, fa4, flex  # noqa: E402

LEFT, BOTH = {"left": 9, "right": "none"}, {"left": 40, "right": 33}
NEAR = "where(kv < 4 or not (q > 9 and kv != 20), s, max(s, -8) - 0.125 * abs(kv - q))"
MIXED = "softcap(2 * s, 3) + tanh(s / 2) * (h + b) - min(row, h_kv * 8, 30) % 7 / 16 + q // 9"
BIAS = {"shape": [1, "h", "q", "kv"], "dtype": "bf16"}
STARTS = {"start": {"shape": ["row", "h_kv"], "dtype": "int32", "monotone": "row"}}
RANGES = {"documents": [9, 40], "window_left": [20, 20]}
CHUNKS = "kv <= q and kv // 32 == q // 32"


OF_SCORE = {"slope": {"shape": ["h"], "dtype": "fp32"}, "heat": "fp32"}


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces a function and generates no code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.mark.parametrize(
    ("q", "kv", "fields"),
    [
        (48, 48, {}),
        (150, 150, {"mask": "causal"}),
        (48, 150, {"mask": "causal"}),
        (150, 48, {"mask": "causal"}),  # rows that see no key
        (150, 150, {"mask": "causal", "window": LEFT, "lse": True}),
        (48, 150, {"window": BOTH}),
        (150, 150, {"mask": CHUNKS}),
        (48, 150, {"mask": CHUNKS}),
        (150, 150, {"mask": "kv <= max(q, 63)"}),
        (150, 150, {"mask": "kv <= q and (q - kv < 40 or kv < 4)"}),
        (48, 150, {"mask": "kv <= q and q - kv < 64 and (q - kv) % 4 == 0"}),
        (150, 150, {"mask": "kv <= q and kv >= min(q - 20, row * 2 // 3)"}),
        (150, 150, {"mask": "causal", "documents": True}),
        (48, 150, {"documents": True}),
        (150, 150, {"mask": "causal", "documents": True, "window": LEFT}),
        (48, 150, {"mask": CHUNKS, "documents": True}),
        (150, 150, {"mask": "causal", "prefix": True, "lse": True}),
        (150, 150, {"mask": "causal", "window": {**LEFT, "left": "argument"}}),
        (48, 150, {"mask": "kv <= q and q - kv < w", "params": {"w": "int32"}}),
        (150, 150, {"mask": "kv <= q and start[row, h_kv] <= kv", "params": STARTS}),
        (150, 150, {"mask": "causal", "softcap": 2.0}),
        (48, 150, {"params": OF_SCORE, "score": "heat * s - slope[h] * abs(q - kv)"}),
        (150, 150, {"mask": "causal", "sink": True}),
        (150, 48, {"mask": CHUNKS, "softcap": 0.5, "sink": True, "lse": True}),
        (48, 150, {"mask": "causal", "alibi": True, "lse": True}),
        (150, 150, {"score": NEAR}),
        (48, 150, {"mask": "causal", "score": MIXED, "sink": True}),
        (150, 150, {"mask": "causal", "bias": BIAS, "lse": True}),
        (48, 150, {"bias": {"shape": ["b", 1, 1, "kv"], "dtype": "fp32"}}),
    ],
)
def test_it_computes_the_problem(q: int, kv: int, fields: dict[str, Any]) -> None:
    one = problem(2, 4, 2, q, kv, 32, 16, ranges=RANGES, **fields)
    inputs = contenders.make_inputs(one, "cpu")
    assert contenders.PEERS["flex"].refusal(one) == ""
    launch = launch_of("flex", one, inputs)
    assert launch().shape == (2, q, 4, 16)
    assert 0 < error_of(launch, one, inputs) < 0.005


@pytest.mark.parametrize(
    "wrong",
    [{"softcap": 1.0}, {"mask": "none"}, {"sink": 9.0}, {"score": "s + kv / 9"}],
)
def test_another_problem_is_an_error(wrong: dict[str, Any]) -> None:
    fields = {"mask": "causal", "softcap": 0.5, "sink": True}
    one = problem(1, 2, 2, 48, 48, 32, **fields)
    other = problem(1, 2, 2, 48, 48, 32, **{**fields, **wrong})
    inputs = contenders.make_inputs(one, "cpu")
    given = inputs._replace(
        by_name={"sink": torch.full((2,), float(wrong.get("sink", 0)))}
    )
    launch = contenders.flex_attention(other, given if "sink" in wrong else inputs)
    assert error_of(launch, one, inputs) > contenders.WRONG


def test_blocks_without_a_key_are_not_in_its_lists() -> None:
    one = problem(2, 4, 2, 512, 512, 32, mask="causal", window={"left": 99, "right": 0})
    lists = flex.block_mask(one, {}, torch.device("cpu"))
    assert (lists.kv_num_blocks + lists.full_kv_num_blocks).tolist() == [
        [[1, 2, 2, 2]]  # of all batches and heads
    ]
    assert flex.block_mask(problem(1, 1, 1, 64, 64), {}, torch.device("cpu")) is None


def test_lists_are_those_of_the_call() -> None:
    """Without its fused kernel it looks at none of them, so its result says nothing here."""
    listed = {"blocks": "lists", "tile": {"q": 128, "kv": 64}}
    one = problem(2, 4, 2, 200, 300, 32, mask="causal", **listed)
    given = contenders.make_inputs(one, "cpu").by_name
    made = flex.block_mask(one, given, torch.device("cpu"))
    assert made.seq_lengths == (200, 300) and made.BLOCK_SIZE == (128, 64)
    assert all(getattr(made, name) is given[name] for name in lists.NAMES)


def test_a_mask_may_read_tensors_and_the_head() -> None:
    """As `values.evaluate` has it of arrays."""
    start = torch.tensor([[0, 3, 3], [1, 1, 2]])
    at = {"start": start, "h": torch.tensor(5), "h_kv": 2, "seqlen_kv": 7}
    at |= {"b": torch.tensor(1), "row": torch.tensor(2)}
    assert flex.value(Name("start", ("b", "row")), at, torch.where) == 2
    tree = parse("0 <= max(h - 9, -h % 4, h_kv) + min(seqlen_kv, 9) * -3 // 2")
    found = flex.value(form_of(tree.operands[1]).node(), at, torch.where)
    assert found == 3 + -11


def test_fa4_is_told_of_an_expression_by_the_same_lists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model of FlashAttention-4 that reads scores of its lists' blocks alone."""

    class Lists(NamedTuple):
        mask_block_cnt: Any
        mask_block_idx: Any
        full_block_cnt: Any
        full_block_idx: Any
        block_size: tuple[int, int]

    def flash_attn_func(
        *tensors: Any, mask_mod: Any, block_sparse_tensors: Lists, return_lse: bool
    ) -> Any:
        q, k, v = (x.double().transpose(1, 2) for x in tensors)
        rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        cut, cuts, whole, wholes, block = block_sparse_tensors
        seen = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool)
        for tile in range(cut.shape[-1]):
            at = slice(tile * block[0], (tile + 1) * block[0])
            for counts, of_tile, test in ((cut, cuts, True), (whole, wholes, False)):
                for n in of_tile[0, 0, tile, : counts[0, 0, tile]].tolist():
                    some = slice(n * block[1], (n + 1) * block[1])
                    found = mask_mod(0, 0, rows[at], keys[some], None, None)
                    seen[at, some] = found if test else True
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
        out = (scores.softmax(-1) @ v).transpose(1, 2)
        return (out, "lse") if return_lse else out

    package, lists = ModuleType("flash_attn.cute"), ModuleType("block_sparsity")
    package.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    lists.BlockSparseTensorsTorch = Lists  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", lists)
    chunks = {"mask": "kv <= q and kv // 128 == q // 128"}
    number = {"mask": "kv <= q and q - kv <= n", "params": {"n": "int32"}}
    gap = {"mask": "kv <= q and (kv < 4 or q - kv < 60)"}
    strided = {"mask": "kv <= q and q - kv < 99 and (q - kv) % 4 == 0"}
    several = [
        problem(1, 2, 2, 300, 400, 32, **each) for each in (chunks, gap, strided)
    ]
    several += [
        problem(1, 2, 2, 300, 400, 32, ranges={"n": [n, n]}, **number) for n in (9, 200)
    ]
    hashes = set()
    for one in several:
        assert contenders.PEERS["fa4"].refusal(one) == ""
        inputs = contenders.make_inputs(one, "cpu")
        assert error_of(contenders.fa4(one, inputs), one, inputs) < 1e-6
        hashes.add(fa4.mask_mod(one, inputs.by_name).__cute_hash__)
    assert len(hashes) == 5
    longer = problem(1, 2, 2, 300, 401, 32, **chunks)
    assert fa4.mask_mod(longer, {}).__cute_hash__ not in hashes
    assert fa4.mask_mod(several[0], {}).__cute_hash__ in hashes

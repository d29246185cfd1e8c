# SPDX-License-Identifier: Apache-2.0
"""A kernel module written in PyTorch for the CPU: right by default, or wrong in one named way."""

from __future__ import annotations

import math
from typing import Any

import torch
from fmha_gen.evidence.trial import DTYPES
from fmha_gen.ops import lists, scores
from fmha_gen.ops.masks import MASKS, Lengths, of_spec
from fmha_gen.ops.params import declared
from fmha_gen.ops.reference import attention


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "name": "fake",
        "arch": "sm90",
        "op": "fmha_fwd",
        "dtype": "bf16",
        "head_dim": {"qk": 64, "v": 64},
        "seqlen": {"q": "dynamic", "kv": "dynamic"},
        "q_per_kv": 1,
        "mask": "none",
        "lse": True,
        "cluster": [1, 1],
        "multicast": "none",
        **changes,
    }


class FakeKernel:
    """What a generated module offers. ``fault``: the one thing that it does wrong."""

    def __init__(self, SPEC: dict[str, Any], fault: str = "") -> None:
        self.SPEC = SPEC
        self.fault = fault
        self.launches = 0

        # What `tiles_of` reads of a module.
        self.TILE_Q, self.TILE_KV, self.Q_STAGES = 64, 64, 1
        self.RESCALE_SLACK = 8.0

    @staticmethod
    def sm_count(_device: int) -> int:
        return 132

    def compile(self) -> None:
        if self.fault == "does not compile":
            raise RuntimeError("ptxas says no")

    def fmha(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        sink=None,
        document_start=None,
        window_left=None,
        bias=None,
        softmax_scale=None,
        out=None,
        lse=None,
        stream=None,
        **listed: Any,
    ) -> Any:
        self._listed = listed
        if self.fault == "checks after the launch" and out is not None:
            out.fill_(1.0)
        if self.fault != "checks nothing":
            self._check(q, k, v, sink, bias, out, lse)
            self._check_lists(q, k, listed)
            self._check_edges(q, document_start, window_left)
            inputs = {"q": q, "k": k, "v": v, "sink": sink, "bias": bias, **listed}
            inputs["document_start"] = document_start
            given = {**inputs, "out": out, "lse": lse}
            self._check_memory(given)
            if softmax_scale is not None and not 1e-37 < softmax_scale < 1e37:
                raise ValueError("softmax_scale is wrong")
        self.launches += 1
        batch, rows, heads, _ = q.shape
        if out is None:
            out = torch.empty(batch, rows, heads, v.shape[-1], dtype=q.dtype)
        if lse is None and self.SPEC["lse"]:
            lse = torch.empty(batch, heads, rows)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        if self.fault == "ignores softmax_scale":
            scale = q.shape[-1] ** -0.5
        if self.fault == "takes the next batch's documents":
            document_start = document_start.roll(1, 0)
        if document_start is not None:
            document_start = document_start.numpy()
        self.edges = {"document_start": document_start, "window_left": window_left}
        bias = self._bias(bias, scale)
        result, natural = self._compute(q, k, v, self._sink(sink, scale), bias, scale)
        if self.fault == "lse without the sink":
            natural = self._compute(q, k, v, None, bias, scale)[1]
        if self.fault == "last row unwritten":
            out[:, :-1] = result[:, :-1]
        else:
            out.copy_(result)
        if lse is not None:
            lse.copy_(natural)
        self._spoil(q, out, lse)
        return (out, lse) if self.SPEC["lse"] else out

    def _sink(self, sink, scale):
        if self.fault == "ignores the sink":
            return None
        if self.fault == "scales the sink":
            return sink * scale
        if self.fault == "takes the next head's sink":
            return sink.roll(1)
        if self.fault == "sink in base 2":
            return sink * math.log(2)
        return sink

    def _bias(self, bias, scale):
        if self.fault == "ignores the bias":
            return None
        if self.fault == "scales the bias":
            return bias * scale
        if self.fault == "takes the next row's bias":
            return bias.roll(1, 2)
        if self.fault == "takes the next head's bias":
            return bias.roll(1, 1)
        if self.fault == "takes the bias for 0 or -inf":
            return bias.where(bias == -math.inf, 0.0)
        return bias

    def _compute(self, q, k, v, sink, bias, scale):
        mask = of_spec(self.SPEC).given(self.edges)
        if self.fault == "skips the last key":
            k, v = k[:, :-1], v[:, :-1]
        if self.fault == "top-left mask" and q.shape[1] != k.shape[1]:
            rows = min(q.shape[1], k.shape[1])
            first = attention(
                q[:, :rows],
                k[:, :rows],
                v[:, :rows],
                scale=scale,
                mask=MASKS["causal"],
            )
            rest = attention(q, k, v, scale=scale, mask=MASKS["none"])
            rest.out[:, :rows], rest.lse[..., :rows] = first
            return rest
        if self.fault == "weights in 4 bits":
            v = v + v.abs() * 0.03
        if self.fault == "rounds the scaled maximum":
            return self._rounded_maximum(q, k, v, scale)
        given = {name: x.numpy() for name, x in self._listed.items()}
        if self.fault == "swaps the lists":
            names, numbers = [*given], [*given.values()]
            given = dict(zip(names, numbers[2:] + numbers[:2], strict=True))
        if self.fault == "loses a block":
            given["full_kv_num_blocks"] = given["full_kv_num_blocks"] - 1
        blocks = lists.of_tensors(self.SPEC, given)
        score = scores.of_spec(self.SPEC)
        read = {} if bias is None else {"score": score, "tensors": {"bias": bias}}
        options = {"mask": mask, "sink": sink, "lists": blocks, **read}
        out, lse = attention(q, k, v, scale=scale, **options)
        if self.fault == "lse in base 2":
            lse = lse / math.log(2)
        if self.fault == "lse 0 where no key":
            lse = lse.masked_fill(lse == -math.inf, 0.0)
        if self.fault == "out 1 where no key":
            lengths = Lengths(q.shape[1], k.shape[1])
            seen = torch.from_numpy(mask.visible(range(lengths.q), lengths).any(-1))
            out[:, ~seen] = 1.0
        return out, lse

    def _rounded_maximum(self, q, k, v, scale):
        """exp2(fma(s, scale, -round(max * scale))) with weights in the 16-bit dtype."""
        log2_scale = scale * math.log2(math.e)
        scores = (
            (q.double().transpose(1, 2) @ k.double().transpose(1, 2).mT)
            .float()
            .double()
        )
        maximum = (scores.amax(-1, keepdim=True) * log2_scale).float().double()
        weights = (scores * log2_scale - maximum).exp2().float()
        total = weights.sum(-1, keepdim=True)
        out = (weights.to(q.dtype).float() @ v.float().transpose(1, 2)) / total
        lse = (maximum + total.double().log2())[..., 0] * math.log(2)
        return out.transpose(1, 2), lse

    def _spoil(self, q, out, lse):
        later = self.launches > 1
        if self.fault == "writes a row too many":
            out.as_strided(
                (1,), (1,), out.storage_offset() + out.shape[1] * out.stride(1)
            )[0] = 0.0
        if self.fault == "writes before head_dim":
            out.as_strided((1,), (1,), out.storage_offset() - 1)[0] = 0.0
        if self.fault == "writes lse past its row" and lse is not None:
            lse.as_strided((1,), (1,), lse.storage_offset() + lse.shape[2])[0] = 0.0
        if self.fault == "writes an input":
            q[0, 0, 0, 0] = 1.0
        if self.fault == "one bit differs now and then" and later:
            torch.ops.aten.copy_(out[0, 0, 0, 0], out[0, 0, 0, 0] * 1.01)
        if self.fault == "lse differs now and then" and later:
            lse[0, 0, 0] += 1e-5

    def _check(self, q, k, v, sink, bias, out, lse):
        spec = self.SPEC
        dtype, dim = DTYPES[spec["dtype"]], spec["head_dim"]

        def refuse(name: str) -> None:
            blamed = "the call" if self.fault == "names no argument" else name
            kind = TypeError if self.fault == "raises TypeError" else ValueError
            raise kind(f"{blamed} is wrong")

        def check_16bit(name, x, shape):
            if x.device.type != "cpu" or x.dtype != dtype or x.dim() != 4:
                refuse(name)
            if any(
                want is not None and want != have
                for want, have in zip(shape, x.shape, strict=True)
            ):
                refuse(name)
            if 0 in x.shape or x.stride(-1) != 1 or x.data_ptr() % 16:
                refuse(name)
            if any(x.stride(axis) * 2 % 16 for axis in range(3) if x.shape[axis] > 1):
                refuse(name)

        def fixed(side):
            return None if spec["seqlen"][side] == "dynamic" else spec["seqlen"][side]

        check_16bit("q", q, (None, fixed("q"), None, dim["qk"]))
        check_16bit("k", k, (q.shape[0], fixed("kv"), None, dim["qk"]))
        check_16bit("v", v, (q.shape[0], k.shape[1], k.shape[2], dim["v"]))
        if q.shape[2] != k.shape[2] * spec["q_per_kv"]:
            refuse("q")
        if sink is not None:
            if not spec.get("sink") or sink.device.type != "cpu":
                refuse("sink")
            if sink.shape != q.shape[2:3] or sink.dtype != torch.float32:
                refuse("sink")
        if bias is not None:
            self._check_bias(q, k, bias, refuse)
        if out is not None:
            check_16bit("out", out, (q.shape[0], q.shape[1], q.shape[2], dim["v"]))
        if lse is not None:
            expected = (q.shape[0], q.shape[2], q.shape[1])
            if not spec["lse"] or lse.device.type != "cpu":
                refuse("lse")
            if lse.shape != expected or lse.dtype != torch.float32:
                refuse("lse")

    def _check_lists(self, q, k, listed):
        wanted = lists.NAMES if self.SPEC.get("blocks") else ()
        if {*wanted} != {*listed}:
            raise TypeError(f"{', '.join(listed)}: not these lists")
        for name, x in listed.items():
            shape = [-(-q.shape[1] // 64), -(-k.shape[1] // 64)][: x.dim() - 2]
            rank = 4 if name.endswith("indices") else 3
            fits = x.dim() == rank and [*x.shape[2:]] == shape and 0 not in x.shape
            of_all = x.shape[0] in (1, q.shape[0]) and x.shape[1] in (1, q.shape[2])
            like = x.shape[:3] == listed[wanted[0]].shape
            if not fits or not of_all or not like:
                raise ValueError(
                    f"{name} is wrong beside q and k and {', '.join(listed)}"
                )
            if x.dtype != torch.int32 or x.device.type != "cpu":
                raise ValueError(f"{name} is wrong")

    def _check_edges(self, q, document_start, window_left):
        if document_start is not None:
            right = (
                document_start.device.type == "cpu"
                and document_start.shape == q.shape[:2]
            )
            if not right or document_start.dtype != torch.int32:
                raise ValueError("document_start is wrong")
        if any(x.name == "window_left" for x in declared(self.SPEC)) and not (
            isinstance(window_left, int) and 0 <= window_left <= 2**24
        ):
            raise ValueError("window_left is wrong")

    def _check_bias(self, q, k, bias, refuse):
        if not self.SPEC.get("bias") or bias.device.type != "cpu":
            refuse("bias")
        found, sizes = self.SPEC["bias"], (q.shape[0], q.shape[2], q.shape[1])
        axes = zip(found["shape"], (*sizes, k.shape[1]), strict=True)
        if bias.shape != tuple(1 if axis == 1 else size for axis, size in axes):
            refuse("bias")
        width = bias.element_size()
        steps = [x for x, n in zip(bias.stride(), bias.shape, strict=True) if n > 1]
        if bias.dtype != DTYPES[found["dtype"]] or bias.data_ptr() % 16:
            refuse("bias")
        if (bias.shape[3] > 1 and steps.pop() != 1) or any(
            x * width % 16 or x == 0 for x in steps
        ):
            refuse("bias")

    def _check_memory(self, given):
        used = set()
        for name, x in given.items():
            if x is None:
                continue
            place = x.untyped_storage().data_ptr()
            if name in ("out", "lse") and (place in used or not distinct(x)):
                raise ValueError(f"{name} is wrong")
            used.add(place)


def distinct(x: torch.Tensor) -> bool:
    """Whether each element has memory of its own, if strides are nested."""
    end = 1
    for step, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and step < end:
            return False
        end += step * (size - 1)
    return True


class CpuDevice:
    """Stands in for the GPU. ``graph_works``: whether a replay does anything."""

    name = "cpu"

    def __init__(self, *, graph_works: bool = True, streams_work: bool = True) -> None:
        self.graph_works = graph_works
        self.streams_work = streams_work

    def synchronize(self) -> None:
        pass

    def captured(self, launch):
        return launch if self.graph_works else (lambda: None)

    def on_late_stream(self, work) -> None:
        if self.streams_work:
            work()

    def elsewhere(self, x: torch.Tensor) -> torch.Tensor:
        return x.to("meta")

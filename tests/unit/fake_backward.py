# SPDX-License-Identifier: Apache-2.0
"""A backward module written in PyTorch for the CPU: right by default, or wrong in a named way."""

from __future__ import annotations

from typing import Any

import torch
from fmha_gen.evidence.trial import DTYPES
from fmha_gen.ops.masks import Lengths, of_spec
from unit.fake_kernel import distinct


def spec(**changes: Any) -> dict[str, Any]:
    return {
        **{"name": "fake", "arch": "sm90", "op": "fmha_bwd", "dtype": "bf16"},
        "head_dim": {"qk": 64, "v": 64},
        "seqlen": {"q": "dynamic", "kv": "dynamic"},
        **{"q_per_kv": 1, "mask": "none", "deterministic": False},
        **changes,
    }


class FakeBackward:
    """What a generated module offers. ``fault``: the one thing that it does wrong."""

    def __init__(self, SPEC: dict[str, Any], fault: str = "") -> None:
        self.SPEC, self.fault, self.launches = SPEC, fault, 0
        self.TILE_Q, self.TILE_KV, self.Q_STAGES = 64, 128, 2

    @staticmethod
    def sm_count(_device: int) -> int:
        return 132

    def compile(self) -> Any:
        return self.launch

    def workspace_size(self, batch: int, seqlen_q: int, heads: int) -> int:
        rows = -(-seqlen_q // self.TILE_Q) * self.TILE_Q
        return batch * heads * rows * (self.SPEC["head_dim"]["qk"] + 2) + 1

    def fmha_bwd(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        *,
        softmax_scale: float | None = None,
        dq: Any = None,
        dk: Any = None,
        dv: Any = None,
        workspace: Any = None,
        stream: Any = None,
    ) -> Any:
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        given |= {"dq": dq, "dk": dk, "dv": dv, "workspace": workspace}
        if self.fault != "checks nothing":
            self._check(given, scale)
        dq, dk, dv = (
            torch.empty_like(x) if into is None else into
            for x, into in zip((q, k, v), (dq, dk, dv), strict=True)
        )
        if workspace is None:
            size = self.workspace_size(q.shape[0], q.shape[1], q.shape[2])
            workspace = torch.empty(size)
        self.launch(dout, q, k, v, out, lse, dq, dk, dv, workspace, scale, 132)
        return (dq, dk, dv)

    def launch(
        self,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        dq: Any,
        dk: Any,
        dv: Any,
        workspace: Any,
        scale: float,
        _sm_count: int,
    ) -> None:
        self.launches += 1
        group = q.shape[2] // k.shape[2]
        of_q, of_o = (x.double().transpose(1, 2) for x in (q, dout))
        of_k, of_v = (
            x.double().transpose(1, 2).repeat_interleave(group, 1) for x in (k, v)
        )
        scores = of_q @ of_k.mT * scale
        lengths = (q.shape[1], k.shape[1])
        mask = of_spec(self.SPEC)
        seen = torch.from_numpy(mask.visible(range(lengths[0]), Lengths(*lengths)))
        near = lse.double()[..., None]
        p = (scores - near).exp().masked_fill(~seen, 0.0)
        p = p.masked_fill(near == -torch.inf, 0.0)
        sums = (of_o * out.double().transpose(1, 2)).sum(-1, keepdim=True)
        if self.fault == "leaves D out":
            sums = sums * 0
        slopes = of_o @ of_v.mT - sums
        ds = (p * slopes).to(q.dtype).double()
        p = p.to(q.dtype).double()
        found = {
            "dq": (ds @ of_k * scale).transpose(1, 2),
            "dk": self._of_group(ds.mT @ of_q * scale, group),
            "dv": self._of_group(p.mT @ of_o, group),
        }
        if self.fault == "dK without scale":
            found["dk"] = found["dk"] / scale
        for name, into in (("dq", dq), ("dk", dk), ("dv", dv)):
            into.copy_(found[name])
        workspace.fill_(3.0)
        self._spoil(q, dq, dk, workspace)

    @staticmethod
    def _of_group(x: torch.Tensor, group: int) -> torch.Tensor:
        return x.unflatten(1, (-1, group)).sum(2).transpose(1, 2)

    def _spoil(self, q: Any, dq: Any, dk: Any, workspace: Any) -> None:
        later = self.launches > 1
        if self.fault == "writes behind the workspace":
            end = workspace.storage_offset() + workspace.numel()
            workspace.as_strided((1,), (1,), end)[0] = 0.0
        if self.fault == "writes before dk":
            dk.as_strided((1,), (1,), dk.storage_offset() - 1)[0] = 0.0
        if self.fault == "last row of dq unwritten":
            dq[:, -1] = torch.nan
        if self.fault == "a last place of dq differs" and later:
            bits = dq.view(torch.int16)
            bits[0, 0, 0, :3] += 1
        if self.fault == "two places of dq differ" and later:
            bits = dq.view(torch.int16)
            bits[0, 0, 0, :3] += 3
        if self.fault == "a last place of dk differs" and later:
            bits = dk.view(torch.int16)
            bits[0, 0, 0, 0] += 1
        if self.fault == "writes an input":
            q[0, 0, 0, 0] = 1.0

    def _check(self, given: dict[str, Any], scale: float) -> None:
        def refuse(name: str) -> None:
            raise ValueError(f"{name} is wrong")

        if not 1e-37 < scale < 1e37:
            refuse("softmax_scale")
        batch, rows, heads, d = self._sizes(given["dout"], refuse, "dout")
        _, keys, heads_kv, _ = self._sizes(given["k"], refuse, "k")
        dim, fixed = self.SPEC["head_dim"], self.SPEC["seqlen"]
        for side, name, count in (("q", "dout", rows), ("kv", "k", keys)):
            if fixed[side] not in ("dynamic", count):
                refuse(name)
        of_q, of_k = (batch, rows, heads), (batch, keys, heads_kv)
        shapes = {"dout": (*of_q, dim["v"]), "q": (*of_q, dim["qk"])}
        shapes |= {"k": (*of_k, dim["qk"]), "v": (*of_k, dim["v"])}
        shapes |= {"out": shapes["dout"], "lse": (batch, heads, rows)}
        shapes |= {"dq": shapes["q"], "dk": shapes["k"], "dv": shapes["v"]}
        used: dict[int, str] = {}
        for name, x in given.items():
            if x is None:
                continue
            if x.device.type != "cpu" or 0 in x.shape:
                refuse(name)
            if name == "workspace":
                needs = self.workspace_size(batch, rows, heads)
                whole = x.dim() == 1 and x.is_contiguous() and not x.data_ptr() % 16
                if not whole or x.dtype != torch.float32 or x.numel() < needs:
                    refuse(name)
            elif name == "lse":
                if x.dtype != torch.float32 or tuple(x.shape) != shapes[name]:
                    refuse(name)
            else:
                self._check_rows(name, x, shapes[name], refuse)
            place = x.untyped_storage().data_ptr()
            if name in ("dq", "dk", "dv", "workspace") and (
                place in used or not distinct(x)
            ):
                refuse(name)
            used[place] = name
        if heads != heads_kv * self.SPEC["q_per_kv"]:
            refuse("dout and k")
        assert d

    @staticmethod
    def _sizes(x: Any, refuse: Any, name: str) -> Any:
        if x.dim() != 4:
            refuse(name)
        return x.shape

    def _check_rows(self, name: str, x: Any, shape: Any, refuse: Any) -> None:
        if x.dtype != DTYPES[self.SPEC["dtype"]] or tuple(x.shape) != shape:
            refuse(f"{name} beside dout and k")
        if x.stride(-1) != 1 or x.data_ptr() % 16:
            refuse(name)
        steps = [x.stride(axis) for axis in range(3) if x.shape[axis] > 1]
        if any(step * 2 % 16 or step == 0 for step in steps):
            refuse(name)

# SPDX-License-Identifier: Apache-2.0
"""Who computes a problem, each called as its own users call it: tensors in, fresh outputs back.

In a graph of several launches the outputs and workspaces of one are free for the next: PyTorch's
pool hands the same memory out again. Tensors are [batch, rows, heads, dim], or as packed sequences
have them. FlashAttention-4 and FlexAttention write LSE if our kernel does, FlashAttention-3 always,
cuDNN never. Inputs are random and normal: zeros would run faster. O and LSE that a backward pass is
given are those of the definition, rounded.
What a peer takes is said in `PEERS`, which needs no PyTorch; launches do.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ..ops import params
from ..ops.backward import BACKWARD, DOUT, DQ_SUMS, GIVEN_LSE, forward_of
from ..ops.e4m3 import (
    E4M3,
    OWN_FIELDS,
    V_PERMUTED,
    has_block_factors,
    is_e4m3,
    is_permuted,
    natural_v,
    permute_v,
)
from ..ops.forward import FORWARD, OUT
from ..ops.operation import Given
from ..ops.varlen import rows_of
from . import fa3 as fa3_module
from . import fa4 as fa4_module
from . import flex, layouts, of_torch
from .problems import DENSE, Problem
from .timing import SEED, Launch

if TYPE_CHECKING:
    import torch

WRONG = 0.02  # relative error beyond which a contender computes something else
WRONG_IN_8_BITS = 0.06  # the same where P is rounded to e4m3, which alone is 0.026
MATMUL_SIZE = 8192  # rows and columns of the product that says how fast a card is
MATMUL_FLOPS = 2 * MATMUL_SIZE**3


class Gradient(NamedTuple):
    """What a backward pass is given beside Q, K and V: dO and O [batch, q, heads, d_v], LSE
    [batch, heads, q] fp32.
    """

    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class Inputs(NamedTuple):
    """q [batch, q, heads, d_qk], k [batch, kv, kv_heads, d_qk], v [batch, kv, kv_heads, d_v], or as
    the operation of packed sequences or of paged K and V has them.

    by_name: what our kernels take by name alone, as the operation has it: tensors, and then numbers
    that a mask reads. gradient: of a backward pass.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    by_name: Mapping[str, Any] = {}
    gradient: Gradient | None = None

    @property
    def leading(self) -> tuple[torch.Tensor, ...]:
        """What our kernels take by position."""
        if self.gradient is None:
            return self.qkv
        dout, out, lse = self.gradient
        return (dout, *self.qkv, out, lse)

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What every problem has."""
        return self.q, self.k, self.v

    @property
    def sink(self) -> torch.Tensor | None:
        """[heads] fp32; None where heads have none."""
        return self.by_name.get("sink")

    def given(self, problem: Problem) -> Given:
        """The call, as the operation's definition reads it."""
        inputs = {"q": self.q, "k": self.k, "v": self.v, **self.by_name}
        inputs |= self.gradient._asdict() if self.gradient else {}
        return Given(problem.spec, inputs, problem.d_qk**-0.5)


Draw = Callable[["tuple[int, ...]", "torch.Generator"], "torch.Tensor"]


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.randn(shape, device=generator.device, generator=generator)


def _of_bf16(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Values that bf16 has, for peers that take no others."""
    return _normal(shape, generator).bfloat16().float()


def _of_alibi(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Slopes as models with ALiBi have them: 2^(-8 / heads) and its powers."""
    import torch

    heads = torch.arange(1, shape[0] + 1, device=generator.device)
    return torch.exp2(-8.0 * heads / shape[0])


def _factors(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Of a quantiser: near 1, and no two alike."""
    import torch

    return 0.5 + torch.rand(shape, device=generator.device, generator=generator)


DRAWN: Final[Mapping[str, Draw]] = {
    **{"q": _normal, "k": _normal, "v": _normal, "bias": _normal, "dout": _normal},
    **{"sink": _of_bf16, "slopes": _of_alibi},
    **dict.fromkeys(fa3_module.DESCALES, _factors),
}
"""The values of each input, by name."""


def make_inputs(problem: Problem, device: str) -> Inputs:
    """The same values whoever asks; in pages those that packed K and V have."""
    import torch

    from ..evidence.trial import DTYPES

    if problem.packed is not problem:
        packed = make_inputs(problem.packed, device)
        pool = layouts.in_pages(problem, packed._asdict())
        indices = problem.operation.indices(problem.spec, problem)
        known = {**packed.by_name, **indices}
        reads = [x.name for x in problem.operation.inputs(problem.spec) if x.when]
        named = {x: torch.as_tensor(known[x], device=device) for x in reads}
        return Inputs(packed.q, **pool, by_name=named)
    generator, spec = torch.Generator(device).manual_seed(SEED), problem.spec
    inputs = problem.operation.inputs(spec)
    indices = problem.operation.indices(spec, problem)
    made = {name: torch.tensor(x, device=device) for name, x in indices.items()}
    for x in problem.operation.params(spec):
        made[x.name] = torch.tensor(problem.drawn[x.name], device=device)
    for x in inputs:
        if problem.backward and x.name in (OUT.name, GIVEN_LSE.name):
            continue  # follow from the others
        if x.name not in made:
            shape = x.shape(spec, problem)
            if x is V_PERMUTED:
                batch, heads, head_dim, _ = shape
                shape = (batch, problem.kv, heads, head_dim)
            drawn = DRAWN[x.name](shape, generator).to(DTYPES[x.type(spec)])
            made[x.name] = permute_v(drawn) if x is V_PERMUTED else drawn
    by_name: dict[str, Any] = {x.name: made.pop(x.name) for x in inputs if x.when}
    for number in problem.operation.numbers(spec):
        by_name[number.name] = problem.drawn[number.name]
    if problem.backward:
        dout = made.pop(DOUT.name)
        of_forward = Given(forward_of(spec), made, problem.d_qk**-0.5)
        found = FORWARD.exact(of_forward)
        out, lse = found[OUT.name].to(dout.dtype), found[GIVEN_LSE.name].float()
        return Inputs(**made, by_name=by_name, gradient=Gradient(dout, out, lse))
    return Inputs(**made, by_name=by_name)


def beside(problem: Problem, inputs: Inputs, layout: str) -> Inputs:
    """What a kernel of another layout takes for the same sequences; see `layout_beside`."""
    found = layouts.laid_out(problem, inputs.given(problem), layout)
    q, k, v = (found.pop(name) for name in "qkv")
    return Inputs(q, k, v, found)


def ours(kernel: ModuleType, inputs: Inputs) -> Launch:
    """A generated kernel's public entry, which allocates its outputs and its workspace.

    Of a backward pass these are (dQ, dK, dV), by three kernels.
    """
    if inputs.gradient is not None:
        return lambda: kernel.fmha_bwd(*inputs.leading)
    return lambda: _out(kernel.fmha(*inputs.qkv, **inputs.by_name))


def bare(kernel: ModuleType, inputs: Inputs) -> Launch:
    """What a generated kernel's ``compile()`` returns, given all its tensors, e4m3 as bytes."""
    import torch

    is_forward = inputs.gradient is None
    entry = getattr(kernel, (FORWARD if is_forward else BACKWARD).function)
    outputs = entry(*inputs.leading, **inputs.by_name)
    by_name = inputs.by_name.values()
    numbers = [x for x in by_name if isinstance(x, int)]
    tensors = [*inputs.leading, *(x for x in by_name if not isinstance(x, int))]
    tensors += outputs if isinstance(outputs, tuple) else (outputs,)
    if not is_forward:
        size = kernel.workspace_size(*inputs.q.shape[:3])
        tensors.append(torch.empty(size, device=inputs.q.device))
    tensors = [x.view(torch.uint8) if x.element_size() == 1 else x for x in tensors]
    run, scale = kernel.compile(), inputs.q.shape[-1] ** -0.5
    processors = kernel.sm_count(inputs.q.get_device())
    return lambda: run(*tensors, scale, *numbers, processors)


# --- peers --------------------------------------------------------------------------------

UNEQUAL: Final = "causal mask of unequal lengths"
WINDOW: Final = "window"
EXPRESSION: Final = "mask expression"
BESIDE_DOCUMENTS: Final = "mask expression beside documents"
BLOCK_FACTORS: Final = "factors by block"
OF_SEQUENCES: Final = "mask expression of packed sequences"
SEQUENCES: Final = "packed sequences"
PAGES: Final = "paged K and V"
BACKWARD_PASS: Final = "backward pass"
DETERMINISTIC: Final = "fixed order of sums"
_FIELDS: Final[Mapping[str, str]] = {
    **{"batch": SEQUENCES, "kv": PAGES},
    **{"op": BACKWARD_PASS, "deterministic": DETERMINISTIC},
}


@dataclass(frozen=True)
class Peer:
    """packages: what brings it, the first that is installed, by what it takes of `asks` there.

    of_forward: calls of it, by the way that each takes, of which the fastest counts. backward: what
    it takes of `asks` of a backward pass, that one among them; of_backward: its calls then.
    """

    packages: Mapping[str, frozenset[str]]
    of_forward: Callable[[Problem, Inputs], Mapping[str, Launch]]
    backward: frozenset[str] = frozenset()
    of_backward: Callable[[Problem, Inputs], Mapping[str, Launch]] | None = None

    def launches(self, problem: Problem, inputs: Inputs) -> Mapping[str, Launch]:
        """See the class."""
        if not problem.backward:
            return self.of_forward(problem, inputs)
        assert self.of_backward is not None, "refused"
        return self.of_backward(problem, inputs)

    @property
    def package(self) -> str | None:
        """What brings it here; None where nothing does."""
        return next(filter(_installed, self.packages), None)

    def refusal(self, problem: Problem) -> str:
        """Why it cannot compute a problem; empty where it can."""
        takes = self.packages[self.package] if self.package else frozenset()
        if problem.backward:
            takes = self.backward
        lacking = [ask for ask in asks(problem) if ask not in takes]
        return f"takes no {', no '.join(lacking)}" if lacking else ""


def asks(problem: Problem) -> Iterator[str]:
    """What a problem has that not every attention does: of its mask, and each further field."""
    band, further = problem.band, problem.further
    if is_e4m3(problem.spec):  # which has fields of its own
        yield E4M3
        if has_block_factors(problem.spec):
            yield BLOCK_FACTORS
        further = {name: x for name, x in further.items() if name not in OWN_FIELDS}
    if problem.backward:
        further = {name: x for name, x in further.items() if name != DQ_SUMS}
    if band is None:
        beside = BESIDE_DOCUMENTS if "documents" in further else EXPRESSION
        yield OF_SEQUENCES if problem.lengths else beside
    elif band.window:
        yield WINDOW
    elif band.causal and any(q != kv for q, kv in problem.each):
        yield UNEQUAL
    # A window of the call is asked for above, and numbers are part of an expression.
    without = {"window"} if params.has_tensors(problem.spec) else {"window", "params"}
    yield from (_FIELDS.get(name, name) for name in further if name not in without)


def _installed(package: str) -> bool:
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except ImportError:  # of the package that it would be in
        return False


def fa4(problem: Problem, inputs: Inputs) -> Launch:
    """FlashAttention-4."""
    function = fa4_module.launch(problem, *inputs.qkv, inputs.by_name)
    return lambda: _out(function())


def fa4_backward(problem: Problem, inputs: Inputs) -> Launch:
    """FlashAttention-4's backward pass."""
    assert inputs.gradient is not None, "a forward pass"
    return fa4_module.backward(problem, *inputs.qkv, *inputs.gradient)


def _of_torch(backend: str) -> Callable[[Problem, Inputs], Launch]:
    """Attention of cuDNN or FlashAttention-2, as PyTorch offers it."""

    def launch(problem: Problem, inputs: Inputs) -> Launch:
        return of_torch.forward(backend, problem, *inputs.qkv)

    return launch


def _backward_of_torch(backend: str) -> Callable[[Problem, Inputs], Launch]:
    """Its backward pass."""

    def launch(problem: Problem, inputs: Inputs) -> Launch:
        assert inputs.gradient is not None, "a forward pass"
        dout = inputs.gradient.dout
        return of_torch.backward(backend, problem, *inputs.qkv, dout)

    return launch


def fa3(problem: Problem, inputs: Inputs) -> dict[str, Launch]:
    """FlashAttention-3, in the ways that it has."""

    def out_of(function: Launch) -> Launch:
        return lambda: _out(function())

    if is_e4m3(problem.spec):
        inputs = _with_rows_of_v(problem, inputs)
    found = fa3_module.launches(problem, *inputs.qkv, inputs.by_name)
    return {way: out_of(function) for way, function in found.items()}


def _with_rows_of_v(problem: Problem, inputs: Inputs) -> Inputs:
    """V as others take it: [batch, kv, kv_heads, d_v]; factors of 1 where there are none."""
    import torch

    shape = problem.batch, problem.kv_heads
    ones = torch.ones(shape, device=inputs.k.device)
    by_name = {**dict.fromkeys(fa3_module.DESCALES, ones), **inputs.by_name}
    v = inputs.v
    if is_permuted(problem.spec):
        rows = natural_v(v, inputs.k.shape[1])
        # A copy, for `rows` steps through V^T: a batch of 1 would be packed as it lies.
        v = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        v.copy_(rows)
    return inputs._replace(v=v, by_name=by_name)


def flex_attention(problem: Problem, inputs: Inputs) -> Launch:
    """FlexAttention, compiled; its block mask is made here."""
    return flex.launch(problem, *inputs.qkv, inputs.by_name)


def _alone(
    launch: Callable[[Problem, Inputs], Launch],
) -> Callable[[Problem, Inputs], Mapping[str, Launch]]:
    """The launches of a peer that has one way."""
    return lambda problem, inputs: {"": launch(problem, inputs)}


_FUSED: Final = frozenset({UNEQUAL, WINDOW, "softcap", "documents", SEQUENCES})
_OF_VLLM: Final = frozenset({"sink", PAGES, E4M3})
_OF_FA4: Final = frozenset({EXPRESSION, "sink", PAGES})
_OF_FLEX: Final = frozenset(
    {EXPRESSION, BESIDE_DOCUMENTS, OF_SEQUENCES, "sink", "score", "alibi"}
    | {"blocks", "tile", "prefix", "params", "bias"}
)
PEERS: Final[Mapping[str, Peer]] = {
    "cudnn": Peer(
        {"torch": frozenset()},
        _alone(_of_torch(of_torch.CUDNN)),
        frozenset({BACKWARD_PASS}),
        _alone(_backward_of_torch(of_torch.CUDNN)),
    ),
    "fa3": Peer({fa3_module.OWN: _FUSED, fa3_module.VLLM: _FUSED | _OF_VLLM}, fa3),
    "fa4": Peer(
        {fa4_module.PACKAGE: _FUSED | _OF_FA4},
        _alone(fa4),
        frozenset({BACKWARD_PASS, UNEQUAL, WINDOW, "softcap", DETERMINISTIC}),
        _alone(fa4_backward),
    ),
    "flash": Peer(
        {"torch": frozenset()},
        _alone(_of_torch(of_torch.FLASH)),
        frozenset({BACKWARD_PASS}),
        _alone(_backward_of_torch(of_torch.FLASH)),
    ),
    "flex": Peer({"torch": _FUSED | _OF_FLEX}, _alone(flex_attention)),
}


# --- what they are held against -----------------------------------------------------------


def matmul(device: str) -> Launch:
    """A bf16 product of two `MATMUL_SIZE` squared matrices."""
    import torch

    generator = torch.Generator(device).manual_seed(SEED)
    a, b = (_normal((MATMUL_SIZE, MATMUL_SIZE), generator).bfloat16() for _ in range(2))
    return lambda: a @ b


def wrong_from(problem: Problem) -> float:
    """The relative error beyond which a contender computes something else than a problem."""
    return WRONG_IN_8_BITS if is_e4m3(problem.spec) else WRONG


@dataclass(frozen=True)
class Right:
    """What is right of a problem's outputs, in float64: of O, or of dQ, dK and dV, the last head of
    the last batch, or all packed sequences that have queries.

    names, shapes: of each output. parts: the number of an output, rows of it, and their values.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[int, Any, torch.Tensor], ...]

    def error_of(self, launch: Callable[[], Any]) -> float:
        """The largest relative error of a part; NaN where one has NaN.

        Raises RuntimeError for other shapes. Where all is 0, the error is absolute.
        """
        import torch

        found = launch()
        outputs = found if isinstance(found, tuple) else (found,)
        if len(outputs) != len(self.shapes):
            raise RuntimeError(
                f"returned {len(outputs)} tensors instead of {', '.join(self.names)}"
            )
        for name, out, shape in zip(self.names, outputs, self.shapes, strict=True):
            if tuple(out.shape) != shape:
                which = f"{name} as " if len(outputs) > 1 else ""
                raise RuntimeError(
                    f"returned {which}{[*out.shape]} instead of {[*shape]}"
                )
        errors = []
        for number, at, truth in self.parts:
            size = truth.norm()
            error = (outputs[number][at].double() - truth).norm()
            errors.append(error / torch.where(size > 0, size, torch.ones_like(size)))
        return float(torch.stack(errors).max())


def right_of(problem: Problem, inputs: Inputs) -> Right:
    """By the definition of the problem's operation, whoever computes it."""
    operation, spec = problem.operation, problem.spec
    outputs = operation.outputs(spec)
    outputs = outputs if problem.backward else outputs[:1]
    places: list[Any] = [(-1, slice(None), -1)]
    if problem.lengths:
        rows = [each.q for each in rows_of(problem.packed)]
        places = [(each, -1) for each in rows if each.start < each.stop]
    shapes = tuple(x.shape(spec, problem) for x in outputs)
    wanted = np.zeros(shapes[0][:-1], bool)
    for at in places:
        wanted[at] = True
    truth = operation.exact(inputs.given(problem), wanted)
    return Right(
        tuple(x.name for x in outputs),
        shapes,
        tuple(
            (number, at, truth[x.name][at])
            for number, x in enumerate(outputs)
            for at in places
        ),
    )


def versions() -> dict[str, str | int | None]:
    """Of everything that takes part; None where it is not installed as a distribution."""
    import cutlass
    import torch

    backends: Any = torch.backends  # its annotations are not complete
    found: dict[str, str | int | None] = {
        "dsl": cutlass.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": backends.cudnn.version(),
    }
    found["fa3"] = fa3_module.version()
    found["fa4"] = fa4_module.version()
    return found


def as_packed(launch: Launch, layout: str) -> Launch:
    """A launch of ours whose O has the rows of packed sequences: a view of a dense one."""
    if layout != DENSE:
        return launch
    return lambda: launch().flatten(0, 1)  # type: ignore[attr-defined]


def _out(found: Any) -> Any:
    """Versions differ in whether LSE comes along."""
    return found[0] if isinstance(found, tuple) else found

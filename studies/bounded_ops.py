"""Compares torch's own kernels with the oracle's bounds: `python -m studies.bounded_ops SECONDS`.

A bound is derived, so one element beyond it means that a rounding was forgotten.  The table has a row per operation and
dtype: elements, violations, and the largest and mean margin (error over allowance).  A margin near zero means a loose
bound.  Pointwise backward kernels are judged in 16 bits on every number of the dtype, whatever SECONDS says.  Below the
table are kernels whose largest margin is less than 0.05, with the reason, and kernels of the installed torch that
nothing judges.  The exit code is 1 if there is a violation, a kernel that nothing judges, or such a margin without a
reason.

SGD is run without fused=True, which corrupts its momentum in 16 bits (torch 2.13.0).
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from equivtest.families.training.oracle import optimizers
from equivtest.oracle import activations, contractions
from equivtest.oracle.rounding import TORCH_CPU, Arithmetic, Bounded
from equivtest.tensors import DTYPES
from studies.bounded_kernels import kernels
from studies.bounded_pointwise import LEAST, NARROW, REASONS, ROWS, backward_kernels, functions, not_judged
from tests.oracle.running_modules import MODULES
from tests.oracle.running_programs import SCALES as SCALES_OF_X
from tests.oracle.running_programs import bound_of, given_of, programs

Found = Iterator[tuple[str, torch.Tensor, Bounded]]
"""Yields (name of an operation, torch's result, the oracle's value with its bound)."""

SCALES = (0.01, 0.3, 1.0, 4.0)
SIZES = (1, 2, 3, 5, 8, 16, 31, 33, 64, 127, 300)
SHORT = (1, 2, 3, 5, 8, 17)


@dataclass
class Margins:
    elements: int = 0
    violations: int = 0
    open: int = 0
    largest: float = 0.0
    total: float = 0.0
    allows_nothing: bool = True

    def add(self, actual: torch.Tensor, bound: Bounded) -> None:
        finite = bound.allowed.isfinite()
        result = actual.detach().double()
        is_same = (result == bound.value) | (result.isnan() & bound.value.isnan())
        ratio = torch.where(is_same, 0.0, (result - bound.value).abs() / bound.allowed)[finite].nan_to_num(
            nan=torch.inf
        )
        self.elements += ratio.numel()
        self.open += int((~finite & bound.value.isfinite()).sum())
        self.allows_nothing &= not bool(bound.allowed[bound.value.isfinite()].any())
        self.violations += int((ratio > 1).sum())
        if ratio.numel():
            self.largest = max(self.largest, float(ratio.max()))
            self.total += float(ratio.sum())


class Draw:
    """Random sizes and tensors of one dtype from one seed."""

    def __init__(self, dtype: str, seed: int) -> None:
        self.name, self.seed = dtype, seed
        self.arithmetic: Arithmetic = TORCH_CPU[dtype]
        self.dtype = DTYPES[dtype]
        self.source = torch.Generator().manual_seed(seed)

    def pick(self, table: tuple[float, ...]) -> float:
        return table[int(torch.randint(len(table), (), generator=self.source))]

    def size(self, table: tuple[int, ...] = SIZES) -> int:
        return int(self.pick(table))

    def normal(self, *shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=self.source, dtype=torch.float64) * self.pick(SCALES)
        return values.to(self.dtype)


def linears(draw: Draw) -> Found:
    """Runs nn.functional.linear in one process, on 1 to 3 dims, with and without bias, forward and backward."""
    tokens, features, outputs = draw.size(), draw.size(), draw.size()
    leading = {0: (tokens,), 1: (1, tokens), 2: ()}[draw.size((0, 0, 1, 2))]
    tokens = tokens if leading else 1
    x, weight = draw.normal(*leading, features).requires_grad_(), draw.normal(outputs, features).requires_grad_()
    bias = draw.normal(outputs).requires_grad_() if draw.size((0, 1)) else None
    source = x if draw.size((0, 1)) or not leading else x.transpose(-1, -2).contiguous().transpose(-1, -2)
    output = functional.linear(source, weight, bias)
    cotangent = draw.normal(*leading, outputs)
    output.backward(cotangent)
    x_TK, g_TN = x.detach().reshape(tokens, features), cotangent.reshape(tokens, outputs)
    bound = contractions.linear(x_TK, weight.detach(), None if bias is None else bias.detach(), draw.arithmetic)
    yield "linear" if bias is None else "linear + bias", output.reshape(tokens, outputs), bound
    assert x.grad is not None and weight.grad is not None
    grad_x = contractions.linear_grad_x(g_TN, weight.detach(), draw.arithmetic)
    yield "linear grad.x", x.grad.reshape(tokens, features), grad_x
    yield "linear grad.weight", weight.grad, contractions.linear_grad_weight(g_TN, x_TK, draw.arithmetic)
    if bias is not None and bias.grad is not None:
        yield "linear grad.bias", bias.grad, contractions.linear_grad_bias(g_TN, draw.arithmetic)


def split_linears(draw: Draw) -> Found:
    """Runs a linear whose contraction is split over ranks.  Each adds its share of the bias, then all are summed."""
    ranks, tokens, features, outputs = draw.size((2, 3, 4, 5, 8)), draw.size(), draw.size(), draw.size()
    x, weight, bias = draw.normal(tokens, features), draw.normal(outputs, features), draw.normal(outputs)
    shares = list(zip(x.chunk(ranks, -1), weight.chunk(ranks, -1), strict=True))
    share_of_bias = bias / ranks
    found = [functional.linear(x_r, w_r, share_of_bias) for x_r, w_r in shares]
    found += [share_of_bias.expand(tokens, outputs)] * (ranks - len(found))
    partials = torch.stack([(x_r.double() @ w_r.double().T).abs() for x_r, w_r in shares]).sum(0)
    options = {"ranks": ranks, "partials": partials}
    yield "split linear + bias", _in_order(found), contractions.linear(x, weight, bias, draw.arithmetic, **options)
    bare = [functional.linear(x_r, w_r) for x_r, w_r in shares]
    yield "split linear", _in_order(bare), contractions.linear(x, weight, None, draw.arithmetic, **options)
    free = contractions.linear(x, weight, None, draw.arithmetic, ranks=ranks)
    yield "split linear, any partition", _in_order(bare), free
    late = _in_order(bare) + bias
    yield "split linear, late bias", late, contractions.linear(x, weight, bias, draw.arithmetic, **options)


def _in_order(operands: list[torch.Tensor]) -> torch.Tensor:
    whole = operands[0]
    for operand in operands[1:]:
        whole = whole + operand  # rounds to the tensors' dtype
    return whole


def elementwise(draw: Draw) -> Found:
    for name, forward, bound, bound_grad in (
        ("relu", functional.relu, activations.relu, activations.relu_grad),
        ("gelu", functional.gelu, activations.gelu, activations.gelu_grad),
        ("silu", functional.silu, activations.silu, activations.silu_grad),
    ):
        x = (draw.normal(draw.size(), draw.size()) * draw.pick((1.0, 5.0, 30.0))).requires_grad_()
        cotangent = draw.normal(*x.shape)
        y = forward(x)
        y.backward(cotangent)
        assert x.grad is not None
        yield name, y, bound(x.detach(), draw.arithmetic)
        yield f"{name} backward", x.grad, bound_grad(x.detach(), cotangent, draw.arithmetic)


def sums(draw: Draw) -> Found:
    terms = draw.normal(draw.size(), draw.size())
    for dim in (0, 1):
        yield f"sum({dim})", terms.sum(dim), contractions.total(terms, dim, draw.arithmetic)


def reductions(draw: Draw) -> Found:
    """Computes what gloo's collectives compute, in rank order and in the tensors' dtype."""
    ranks = draw.size((2, 3, 4, 5, 7, 8))
    operands = draw.normal(ranks, draw.size(), draw.size()) * draw.pick((1.0, 2.0**-12))
    added = _in_order(list(operands))
    yield "reduce sum", added, contractions.all_reduce(operands, draw.arithmetic)
    averaged = contractions.all_reduce(operands, draw.arithmetic, average=True)
    yield "reduce avg, divided after", added / ranks, averaged
    yield "reduce avg, divided before", _in_order([operand / ranks for operand in operands]), averaged
    yield "reduce avg, times 1 / w", added * torch.tensor(1 / ranks, dtype=draw.dtype), averaged


def sgd(draw: Draw) -> Found:
    """Runs two steps of SGD. Each step is judged from the state before it."""
    momentum, nesterov = draw.pick((0.0, 0.9, 0.5)), bool(draw.size((0, 1)))
    options = optimizers.SgdOptions(
        lr=draw.pick((0.1, 1e-3, 2.0)),
        momentum=momentum,
        dampening=0.0 if nesterov else draw.pick((0.0, 0.3)),
        weight_decay=draw.pick((0.0, 0.01)),
        nesterov=nesterov and momentum > 0,
    )
    param = torch.nn.Parameter(draw.normal(draw.size(), draw.size()))
    optimizer = torch.optim.SGD([param], foreach=bool(draw.size((0, 1))), **vars(options))
    for _ in range(2):
        before, buffer = param.detach().clone(), optimizer.state[param].get("momentum_buffer")
        param.grad = draw.normal(*param.shape)
        grad, buffer = param.grad.clone(), None if buffer is None else buffer.clone()
        optimizer.step()
        bounds = optimizers.sgd_step(before, buffer, grad, options, draw.arithmetic)
        yield "SGD param", param.detach(), bounds["param"]
        if momentum:
            yield "SGD momentum_buffer", optimizer.state[param]["momentum_buffer"], bounds["momentum_buffer"]


def adamw(draw: Draw) -> Found:
    """Runs two steps of AdamW, in its looped, foreach or fused implementation."""
    options = optimizers.AdamOptions(
        lr=draw.pick((1e-3, 0.1)),
        beta1=draw.pick((0.9, 0.3)),
        beta2=draw.pick((0.999, 0.9)),
        eps=draw.pick((1e-8, 1e-3)),
        weight_decay=draw.pick((0.0, 0.01)),
    )
    how = [{"foreach": False}, {"foreach": True}, {"fused": True}][draw.size((0, 1, 2))]
    param = torch.nn.Parameter(draw.normal(draw.size(), draw.size()))
    optimizer = torch.optim.AdamW(
        [param],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        **how,
    )
    zeros = torch.zeros_like(param)
    for step in (1, 2):
        before, state = param.detach().clone(), optimizer.state[param]
        moments = [state.get(name, zeros).clone() for name in ("exp_avg", "exp_avg_sq")]
        param.grad = draw.normal(*param.shape)
        optimizer.step()
        bounds = optimizers.adamw_step(before, moments, param.grad, step, options, draw.arithmetic)
        yield f"AdamW param, step {step}", param.detach(), bounds["param"]
        for name in ("exp_avg", "exp_avg_sq"):
            yield f"AdamW {name}", optimizer.state[param][name], bounds[name]


def whole_modules(draw: Draw) -> Found:
    scale, offset = SCALES_OF_X[draw.seed % len(SCALES_OF_X)]
    for name, make in MODULES.items():
        given = given_of(make, draw.dtype, scale, offset, draw.seed)
        right = bound_of(make, given)
        for found in programs(make, given, draw.seed):
            for tensor, bounded in right.items():
                yield f"module: {name}", found[tensor], bounded


OPERATIONS: tuple[Callable[[Draw], Found], ...] = (
    linears, split_linears, elementwise, sums, reductions, sgd, adamw, whole_modules,
)  # fmt: skip

Table = dict[tuple[str, str], Margins]


def run_dense(table: Table) -> None:
    """Adds to the table every pointwise kernel and function, on every number of each 16-bit dtype."""
    for dtype in NARROW:
        for seed in (0, 1):
            for name, actual, bound in (*backward_kernels(dtype, seed), *functions(dtype, seed)):
                table[name, dtype].add(actual, bound)


def wide(table: Table) -> Iterator[tuple[str, str, float]]:
    """Yields (kernel, dtype, largest margin) of backward kernels with a margin below LEAST and a bound above zero."""
    for name in ROWS:
        for dtype in NARROW:
            margins = table[f"dense: {name}", dtype]
            if margins.largest < LEAST and not margins.allows_nothing:
                yield name, dtype, margins.largest


def run_round(seed: int, table: Table, operations: Sequence[Callable[[Draw], Found]] = OPERATIONS) -> None:
    for dtype in DTYPES:
        draw = Draw(dtype, seed)
        for operation in operations:
            for name, actual, bound in operation(draw):
                table[name, dtype].add(actual, bound)


def new_table() -> Table:
    return defaultdict(Margins)


def show(table: Table) -> Iterator[str]:
    yield f"{'operation':28} {'dtype':9} {'elements':>12} {'beyond':>7} {'open':>9} {'largest':>8} {'mean':>8}"
    for (name, dtype), margins in sorted(table.items()):
        mean = margins.total / max(1, margins.elements)
        yield (
            f"{name:28} {dtype:9} {margins.elements:12,} {margins.violations:7,} {margins.open:9,} "
            f"{margins.largest:8.4f} {mean:8.4f}"
        )


def main(seconds: float) -> int:
    torch.set_num_threads(1)
    table = new_table()
    run_dense(table)
    until_s, rounds = time.monotonic() + seconds, 0
    while rounds == 0 or time.monotonic() < until_s:
        run_round(rounds, table, (*OPERATIONS, kernels))
        rounds += 1
    violations = sum(margins.violations for margins in table.values())
    elements = sum(margins.elements for margins in table.values())
    lines = [*show(table), f"{elements:,} elements in {rounds:,} rounds, {violations:,} beyond their bound"]
    lines += [f"{name}, {dtype}: {largest:.3f}, {REASONS.get(name, 'why?')}" for name, dtype, largest in wide(table)]
    lines += [f"not judged: {name}" for name in not_judged()]
    sys.stdout.write("\n".join(lines) + "\n")
    has_no_reason = any(name not in REASONS for name, _, _ in wide(table))
    return 1 if violations or has_no_reason or not_judged() else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0))

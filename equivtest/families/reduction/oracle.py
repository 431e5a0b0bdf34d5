"""One reduction or softmax: exact if its operands allow that, else the float64 reference and its bound.

Bounds: `equivtest.oracle.reductions`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from equivtest.cases.values import draw
from equivtest.families.reduction.case import SOFTMAXES, ReductionCase
from equivtest.layout import shard_bounds
from equivtest.oracle import expect
from equivtest.oracle.contractions import total
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.exact import InexactData, Sum, find_integers, sum_terms
from equivtest.oracle.expected import COPIED, Expected, ExpectedTensor
from equivtest.oracle.operations import Found
from equivtest.oracle.reductions import (
    amax_grad,
    log_softmax,
    log_softmax_grad,
    mean,
    mean_grad,
    norm,
    norm_grad,
    softmax,
    softmax_grad,
)
from equivtest.tensors import DTYPES


@expect.register
def expect_reduction(case: ReductionCase, index: int) -> Expected:
    """Output and gradient of the unsharded operation.

    Raises:
        InexactData: the operands of a partial sum do not add up exactly.
    """
    given = draw(case, index)
    x = _whole(case, given["x"])
    found = {"output": _forward(case, x)}
    if case.requires_grad:
        found["grad.x"] = _backward(case, x, given["cotangent"].double())
    tensors = {
        name: ExpectedTensor(
            value=_in_place(case, name, each.value),
            allowed=None if each.allowed is None else _in_place(case, name, each.allowed),
            layout=case.layouts()[name],
            dtype=case.dtype,
            derivation=each.derivation,
            requires_grad=bool(case.requires_grad) if name == "output" else None,
        )
        for name, each in found.items()
    }
    return Expected(tensors, {name: each.bits_used for name, each in found.items() if each.bits_used})


def _whole(case: ReductionCase, x: torch.Tensor) -> torch.Tensor:
    """x (rows, R), float64: its reduced dims last; of a partial one the sum of its operands, which must be exact."""
    if case.is_partial:
        operands = find_integers("x", x.reshape(case.world_size, -1))
        x = sum_terms("x", operands, DTYPES[case.dtype]).value.reshape(case.shape)
    return _rows(case, x.double())


def _rows(case: ReductionCase, x: torch.Tensor) -> torch.Tensor:
    return x.movedim(case.dims, tuple(range(-len(case.dims), 0))).reshape(-1, case.num_terms)


def _in_place(case: ReductionCase, name: str, rows: torch.Tensor) -> torch.Tensor:
    """Reverses `_rows`, or arranges one number per row, in the shape of the answer."""
    shape = case.shapes()[name]
    if rows.dim() == 1:
        return rows.reshape(shape)
    kept = [size for dim, size in enumerate(case.shape) if dim not in case.dims]
    apart = rows.reshape(*kept, *(case.shape[dim] for dim in case.dims))
    return apart.movedim(tuple(range(-len(case.dims), 0)), case.dims)


def _forward(case: ReductionCase, x: torch.Tensor) -> Found:
    """One number per row, or the softmax of each."""
    arithmetic, ranks = arithmetic_of(case.dtype), case.world_size if case.reduces_shards else 1
    if case.op == "amax":
        return Found(x.amax(1), None, "equal: the largest is one of them")
    if case.op == "sum":
        try:
            return Found.exactly(_sum_exactly(case, x), DTYPES[case.dtype])
        except InexactData:
            ranks = case.world_size if case.is_partial else ranks
            return Found.within(total(x, 1, arithmetic, ranks=ranks, partials=_partials(case, x)))
    bounds: dict[str, Callable[[], object]] = {
        "mean": lambda: mean(x, arithmetic, ranks=ranks, partials=_partials(case, x)),
        "norm": lambda: norm(x, arithmetic, ranks=ranks),
        "softmax": lambda: softmax(x, arithmetic),
        "log_softmax": lambda: log_softmax(x, arithmetic),
    }
    return Found.within(bounds[case.op]())  # type: ignore[arg-type]


def _partials(case: ReductionCase, x: torch.Tensor) -> torch.Tensor | None:
    """Returns (rows,), the sum over the ranks of |the sum of their terms|; None if the terms are not divided."""
    if not case.reduces_shards:
        return None
    dim = case.layouts()["x"].placements[0].dim  # type: ignore[union-attr]
    bounds = [shard_bounds(case.shape[dim], case.world_size, rank) for rank in range(case.world_size)]
    terms = x.reshape(len(x), *(case.shape[each] for each in case.dims))
    at = 1 + case.dims.index(dim)
    return torch.stack([terms.narrow(at, a, b - a).reshape(len(x), -1).sum(1).abs() for a, b in bounds]).sum(0)


def _sum_exactly(case: ReductionCase, x: torch.Tensor) -> Sum:
    """The sums of rows; operands of a partial one are as large as all terms together."""
    times = case.world_size if case.is_partial else 1
    return sum_terms("sum", find_integers("x", x.T), DTYPES[case.dtype], times=times)


def _backward(case: ReductionCase, x: torch.Tensor, cotangent: torch.Tensor) -> Found:
    """(rows, R)."""
    arithmetic, ranks = arithmetic_of(case.dtype), case.world_size if case.reduces_shards else 1
    given = _rows(case, cotangent) if case.op in SOFTMAXES else cotangent.reshape(-1, 1)
    if case.op == "sum":
        return Found(given.expand(x.shape).clone(), None, COPIED)
    bounds: dict[str, Callable[[], object]] = {
        "mean": lambda: mean_grad(x, given, arithmetic),
        "amax": lambda: amax_grad(x, given, arithmetic),
        "norm": lambda: norm_grad(x, given, arithmetic, ranks=ranks),
        "softmax": lambda: softmax_grad(x, given, arithmetic),
        "log_softmax": lambda: log_softmax_grad(x, given, arithmetic),
    }
    return Found.within(bounds[case.op]())  # type: ignore[arg-type]

"""Bounds of special functions, products of many factors and triangular systems: no correct program is beyond them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.oracle.running_modules import Function, of
from tests.oracle.running_programs import bound_of, given_of, programs
from tests.oracle.test_running import margin

ABOVE_ONE: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.lgamma, torch.digamma, torch.acosh, torch.i0, torch.special.i0e, torch.special.i1, torch.special.i1e,
    torch.special.erfcx, torch.special.log_ndtr, torch.cosh, lambda x: torch.polygamma(1, x),
    lambda x: torch.special.zeta(torch.tensor(2.0, dtype=x.dtype), x),
    lambda x: torch.igamma(torch.tensor(1.5, dtype=x.dtype), x),
)  # fmt: skip
BELOW_ONE: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.asin, torch.acos, torch.atanh, torch.erfinv, torch.tan, lambda x: torch.special.ndtri((x + 1) / 2),
    lambda x: torch.hypot(x, x + 2), lambda x: torch.atan2(x, x + 2), lambda x: x.logcumsumexp(-1),
    lambda x: (x + 2).prod(-1, keepdim=True), lambda x: (x + 2).cumprod(-1),
)  # fmt: skip


PIVOTS = torch.tensor([2, 2, 5, 4, 5], dtype=torch.int32)


def triangular(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Solved from either side, by rows below and above the diagonal."""
    matrix = (x @ w).sigmoid()[:, :5] / 8 + torch.eye(5, dtype=x.dtype)
    found = [
        torch.linalg.solve_triangular(matrix, x, upper=True),
        torch.linalg.solve_triangular(matrix, x, upper=False, unitriangular=True),
        torch.linalg.solve_triangular(matrix, x.mT, upper=True, left=False).mT,
        torch.cholesky_solve(x, matrix),
        *(torch.linalg.lu_solve(matrix, PIVOTS, x, adjoint=adjoint) for adjoint in (False, True)),
        torch.linalg.lu_solve(matrix, PIVOTS, x.mT, left=False).mT,
    ]
    return torch.cat(found, -1)


FUNCTIONS: dict[str, Function] = {
    "above one": lambda x, w: torch.cat([f((x @ w).sigmoid() + 1.2) for f in ABOVE_ONE], -1),
    "below one": lambda x, w: torch.cat([f((x @ w).tanh() * 0.7) for f in BELOW_ONE], -1),
    "triangular": triangular,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_functions_are_within_their_bounds_and_small_errors_exceed_them(name: str, dtype: torch.dtype) -> None:
    make: Callable[[], nn.Module] = of(FUNCTIONS[name])
    given = given_of(make, dtype)
    right = bound_of(make, given)

    assert all(margin(right, found) <= 1 for found in programs(make, given))
    output = right["output"]
    assert bool((output.allowed < 1000 * torch.finfo(dtype).eps * output.value.abs().max()).all())

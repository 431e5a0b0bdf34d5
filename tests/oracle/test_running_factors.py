"""Factors and inverses of matrices on which no step rounds: exact beside float64, with bounds of their gradients."""

from __future__ import annotations

import pytest
import torch

from equivtest.families.operators import case_table
from equivtest.oracle import running_factors
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.exact import InexactData
from equivtest.oracle.running import RunningError

TRIANGULAR = ("cholesky_inverse", "linalg.inv_ex", "linalg.lu", "linalg.lu_factor_ex", "linalg.qr", "lu_unpack")
SQUARES = ("cholesky", "linalg.cholesky_ex")
NAMES = (*TRIANGULAR, *SQUARES, "linalg.pinv")


def matrices_for(name: str) -> torch.Tensor:
    """Eight of five rows: unit triangles of -1, 0 and 1, such times their transposes, or diagonals of powers of two."""
    source = torch.Generator().manual_seed(0)
    if name == "linalg.pinv":
        return torch.diag_embed(torch.exp2(torch.rand(8, 5, generator=source).argsort(-1)) * -1)
    upper = torch.randint(-1, 2, (8, 5, 5), generator=source).float().triu(1) + torch.eye(5)
    return upper.mT @ upper if name in SQUARES else upper


def run(name: str, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.detach().requires_grad_()
    found = [each for each in case_table.run(name, (leaf,), ()) if each.requires_grad]
    torch.autograd.backward(found, [torch.ones_like(each) for each in found])
    assert leaf.grad is not None
    return [*(each.detach() for each in found), leaf.grad]


@pytest.mark.parametrize("name", NAMES)
def test_float32_factorizations_equal_float64_and_their_gradients_are_within_small_bounds(name: str) -> None:
    x = matrices_for(name)
    counted = RunningError(arithmetic_of("float32"), 1)
    given = counted.exactly(x)
    with counted:
        found = run(name, given)
    *results, gradient = map(counted.bounded, found)

    for own, right, bounded in zip(run(name, x), run(name, x.double()), [*results, gradient], strict=True):
        assert bool(((own.double() - right).abs() <= bounded.allowed).all())
    assert not any(bool(bounded.allowed.any()) for bounded in results)
    assert 0 < float(gradient.allowed.max()) < 1e-2 * float(gradient.value.abs().max())


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([[1.0, 2.0], [0.0, 1.0]]),
        torch.tensor([[2.0, 1.0], [0.0, 1.0]]),
        torch.tensor([[-1.0, 1.0], [0.0, 1.0]]),
        torch.tensor([[1.0, 0.0], [1.0, 1.0]]),
        torch.eye(60) - torch.ones(60, 60).triu(1),
    ],
)
def test_factorization_that_may_round_has_no_known_bound(x: torch.Tensor) -> None:
    """With entries of 2, other diagonals, lower triangles, or an inverse too large for a significand."""
    counted = RunningError(arithmetic_of("float32"), 1)
    for name in ("linalg.inv_ex", "linalg.pinv"):
        given = counted.exactly(x)
        with counted, pytest.raises(InexactData, match="no step of it rounds"):
            case_table.run(name, (given,), ())


def test_inexact_matrix_has_no_known_bound() -> None:
    counted = RunningError(arithmetic_of("float32"), 1)
    given = counted.exactly(torch.eye(2))
    with counted, pytest.raises(InexactData, match="no step of it rounds"):
        torch.linalg.inv_ex(given / 3 * 3)


def test_rules_for_factorizations_load_although_torch_lacks_an_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Aten:
        def __getattr__(self, name: str) -> object:
            raise AttributeError(f"'_OpNamespace' 'aten' object has no attribute {name!r}")

    monkeypatch.setattr(torch.ops, "aten", Aten())

    assert callable(running_factors._exactly("cholesky", lambda _matrices, _dtype: True))

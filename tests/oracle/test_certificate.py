"""The certificate: what is proved exact, and what is refused, operation by operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from equivtest.oracle.certificate import Certificate
from equivtest.oracle.exact import InexactData

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SQUARE = torch.full((4, 4), 3.0, dtype=torch.float64)
DIAGONAL = torch.eye(4).bool()
IDS = torch.tensor([0, 1, 1, 1])
NEGATIVE = -1 * SQUARE  # made here, as a constant of a module is: not seen by the certificate


def convolved(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, size: int = 3) -> torch.Tensor:
    return functional.conv2d(x[None, None], w[None, None, :size, :size], bias, padding=size // 2)[0, 0]


def bits_of(function: Function, left: torch.Tensor = SQUARE, right: torch.Tensor = SQUARE) -> int:
    """The bits that the function's sums take on magnitudes, forward and backward, in bfloat16, which has 8."""
    left, right = left.clone().requires_grad_(), right.clone().requires_grad_()
    certificate = Certificate(torch.bfloat16)
    with certificate:
        function(left, right).backward(torch.ones(4, 4, dtype=torch.float64))
    return certificate.bits_used


@pytest.mark.parametrize(
    ("function", "bits"),
    [
        (lambda x, w: x + w, 3),  # 6
        (lambda x, w: x - w, 3),  # 6 of magnitudes, though 0 of values
        (lambda x, w: x * w, 4),  # 9
        (lambda x, w: x @ w, 6),  # 4 * 9 = 36
        (lambda x, w: functional.linear(x, w, w[0]), 6),  # 39
        (lambda x, w: functional.linear(x[None], w)[0], 6),
        (lambda x, w: x.relu() + w.t(), 3),
        (lambda x, w: torch.cat([x[:2], w[2:]]) * 0.5 + x, 4),  # 9 halves
        (lambda x, w: torch.baddbmm(x[None], x[None], w[None])[0], 6),
        (lambda x, w: x.sum(0, keepdim=True) + w, 4),  # 15
        (lambda x, w: x[torch.tensor([0, 0, 1, 1])] + w, 3),
        (lambda x, w: convolved(x, w, w[0, :1]), 7),  # 9 * 9 + 3 = 84
        (lambda x, w: functional.pad(x, (-1, 1), value=-60.0) + w, 6),  # 63
    ],
    ids=[
        "add",
        "sub",
        "mul",
        "mm",
        "linear",
        "bmm",
        "moves",
        "halves",
        "baddbmm",
        "sum",
        "index",
        "windows",
        "padding",
    ],
)
def test_certificate_depends_on_the_largest_sum_of_magnitudes(function: Function, bits: int) -> None:
    assert bits_of(function) == bits


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, w: (x @ w) @ w, "may reach 432 units, but bfloat16 is exact only up to 256"),
        (lambda x, w: (x - w) @ w @ w, "mm may reach 864"),
        (lambda x, w: (x * w) * (x * w) * (x * w), "mul may reach 729"),
        (lambda x, w: convolved(x * w, x * w), "convolution may reach 729"),
        (lambda x, w: convolved(x, w, size=1) * 16.0, "convolution_backward may reach 768"),
        (lambda x, w: x * 0.1 + w, "mul may reach"),
        (lambda x, w: x / w, "div may round"),
        (lambda x, w: x + torch.randint(9, (4, 4)), "randint draws at random"),
        (lambda x, w: x.softmax(-1) + w, "_softmax may round"),
        (lambda x, w: functional.gelu(x) + w, "gelu may round"),
        (lambda x, w: functional.layer_norm(x, (4,)) + w, "native_layer_norm may round"),
        (lambda x, w: x.mean(0, keepdim=True) + w, "mean may round"),
        (lambda x, w: x.exp() + w, "exp may round"),
    ],
    ids=[
        "two layers",
        "difference",
        "cubes",
        "windows",
        "windows, backward",
        "a tenth",
        "div",
        "random",
        "softmax",
        "gelu",
        "norm",
        "mean",
        "exp",
    ],
)
def test_certificate_refuses_an_operation_that_could_round(function: Function, reason: str) -> None:
    with pytest.raises(InexactData, match=reason):
        bits_of(function)


def test_certificate_counts_the_sums_of_the_backward() -> None:
    """Forward takes 100; the gradient of the weights adds four rows of 100, each times the cotangent."""
    large = torch.full((4, 4), 100.0, dtype=torch.float64)

    assert bits_of(lambda x, w: x * w.detach(), large, SQUARE / 3) == 7
    with pytest.raises(InexactData, match="sum may reach 400"):
        bits_of(lambda x, w: x * w, large, SQUARE[:1] / 3)


def test_certificate_does_not_cancel_common_powers_of_two() -> None:
    """4 * 16 = 64, and 4 * 64: a rank's share of the first sum may be 48, and is multiplied before it is added."""
    fours = torch.full((4, 4), 4.0, dtype=torch.float64)

    with pytest.raises(InexactData, match="mm may reach 1024"):
        bits_of(lambda x, w: x @ w @ w, fours, fours)


@pytest.mark.parametrize(
    ("function", "bits"),
    [
        (lambda x, w: torch.add(x, w, alpha=-1), 3),  # 6 of magnitudes
        (lambda x, w: x * -1 + w, 3),
        (lambda x, w: x * -21.0, 6),  # 63
        (lambda x, w: torch.addmm(x, x, w, beta=-1, alpha=-1), 6),  # 39
        (lambda x, w: x.clone().add_(w, alpha=-1), 3),
        (lambda x, w: NEGATIVE.clone().add_(x).add_(w), 4),  # 9
        (lambda x, w: x - SQUARE + w, 4),
        (lambda x, w: x + NEGATIVE + w, 4),
        (lambda x, w: NEGATIVE.relu() + torch.maximum(NEGATIVE, NEGATIVE) + x, 4),  # 9
        (lambda x, w: x.sum(-1, keepdim=True) + w.select(-1, -1).unsqueeze(-1) + x, 5),  # 18
    ],
    ids=[
        "alpha",
        "integer",
        "float",
        "beta",
        "in place",
        "in place of a constant",
        "less",
        "constant",
        "choices",
        "dims",
    ],
)
def test_certificate_uses_absolute_values_of_constants(function: Function, bits: int) -> None:
    assert bits_of(function) == bits


def test_certificate_refuses_a_product_whose_unit_is_too_small_for_float64() -> None:
    """0.1 takes 55 bits behind the point, and its square 110."""
    tenth = SQUARE * 0 + 0.1

    with (
        pytest.raises(InexactData, match=r"mul may reach \d{32} units, but float64 is exact"),
        Certificate(torch.float64),
    ):
        tenth * tenth


def test_certificate_refuses_infinite_data() -> None:
    with pytest.raises(InexactData, match="infinite or NaN"):
        bits_of(lambda x, w: x + w, left=torch.full((4, 4), float("inf"), dtype=torch.float64))


def test_certified_sum_has_the_same_bits_in_any_order() -> None:
    """512 terms of up to 2**p units in all: every permutation, and every split, sums to the same."""
    source = torch.Generator().manual_seed(0)
    left = torch.randint(-1, 2, (1, 128), generator=source).double()
    right = torch.randint(-2, 3, (128, 1), generator=source).double()
    certificate = Certificate(torch.bfloat16)
    right_sum = left @ right
    with certificate:
        left.abs() @ right.abs()

    for seed in range(50):
        order = torch.randperm(128, generator=torch.Generator().manual_seed(seed))
        total = torch.zeros((), dtype=torch.bfloat16)
        for index in order.tolist():
            total = total + left[0, index].bfloat16() * right[index, 0].bfloat16()
        assert total == right_sum


def test_certificate_refuses_values_that_a_conversion_to_float32_would_round() -> None:
    """2**24 + 1 is no float32 number, whatever the module's own dtype."""
    large = torch.full((4, 4), 2.0**22, dtype=torch.float64)
    with Certificate(torch.float64) as certificate:
        large.float() * 3
        assert certificate.bits_used == 24
        with pytest.raises(InexactData, match=r"mul may reach .* units, but float32 is exact only up to 16777216"):
            large.float() * 5
        with pytest.raises(InexactData, match=r"a conversion may reach .* float32 is exact"):
            (large * 5 + 1).float()


def test_certificate_uses_the_actual_values_of_ids_and_masks() -> None:
    ids, weight = torch.tensor([0, 1, 1]), torch.full((2, 3), 3.0, dtype=torch.float64, requires_grad=True)
    with Certificate(torch.bfloat16) as certificate:
        rows = functional.embedding(ids, weight).masked_fill((ids * 2 > 1)[:, None], 0.0)
        rows.backward(torch.full_like(rows, 5.0))
    assert certificate.bits_used == 3  # for one cotangent: the mask leaves one row


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, w: x * (x > 2).double(), "gt may round"),
        (lambda x, w: x + x.long(), "a conversion to integers"),
        (lambda x, w: x + torch.tensor(3) / 7 * w, "div may round"),
        (lambda x, w: x.masked_fill(DIAGONAL, 0.3) + w, "masked_fill may reach"),
        (lambda x, w: x.masked_fill(DIAGONAL, -torch.inf) + w, "an operand is infinite or NaN"),
        (lambda x, w: functional.embedding(IDS, x, scale_grad_by_freq=True) * w, "divides each row by its count"),
    ],
    ids=["compared", "converted", "a quotient of integers", "a third", "an infinity", "by frequency"],
)
def test_certificate_refuses_an_operation_without_a_rule(function: Function, reason: str) -> None:
    with pytest.raises(InexactData, match=reason):
        bits_of(function)

"""Operations on lists of tensors: the oracle judges them as the operation on each element."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from equivtest.oracle.certificate import Certificate
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.running import RunningError

Tensors = list[torch.Tensor]


def written(function: Callable[..., object], x: Tensors, *others: object) -> Tensors:
    copies = [each.mul(1) for each in x]
    function(copies, *others)
    return copies


PAIRS: dict[str, tuple[Callable[[Tensors], object], Callable[[torch.Tensor], torch.Tensor]]] = {
    "mul": (lambda x: torch._foreach_mul(x, x), lambda x: x * x),
    "number": (lambda x: torch._foreach_add(x, 2.0), lambda x: x + 2.0),
    "alpha": (lambda x: torch._foreach_add(x, x, alpha=-2), lambda x: torch.add(x, x, alpha=-2)),
    "factor": (lambda x: torch._foreach_addcmul(x, x, x, -2), lambda x: torch.addcmul(x, x, x, value=-2)),
    "norm": (lambda x: torch._foreach_norm(x, 2), torch.linalg.vector_norm),
    "written": (lambda x: written(torch._foreach_mul_, x, 2.0), lambda x: x.mul(1).mul_(2.0)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_running_error_of_an_operation_on_lists_is_that_of_the_operation_on_each_element(name: str) -> None:
    on_lists, on_one = PAIRS[name]
    mode, apart = (RunningError(arithmetic_of("float32"), ranks=2) for _ in range(2))
    x = [torch.arange(1.0, 4.0), torch.full((2, 2), 0.3)]
    operands, others = ([each.exactly(one) for one in x] for each in (mode, apart))
    with mode:
        found = on_lists(operands)
    with apart:
        expected = [on_one(each) for each in others]

    for one, other in zip(found, expected, strict=True):  # type: ignore[call-overload]
        assert torch.equal(mode.bounded(one).value, apart.bounded(other).value)
        assert torch.equal(mode.bounded(one).allowed, apart.bounded(other).allowed)


def test_operation_on_lists_with_a_number_for_each_element_takes_each_number_once() -> None:
    mode = RunningError(arithmetic_of("float32"), ranks=2)
    ones = [mode.exactly(torch.ones(2)) for _ in range(2)]
    with mode:
        first, second = torch._foreach_mul(ones, (2.0, -3.0))

    assert (mode.bounded(first).value == 2).all()
    assert (mode.bounded(second).value == -3).all()


def test_certificate_counts_the_bits_of_a_sum_of_lists() -> None:
    certificate = Certificate(torch.bfloat16)
    with certificate:
        torch._foreach_add([torch.full((2,), 3.0).double()], [torch.full((2,), 3.0).double()])

    assert certificate.bits_used == 3

"""The product of a number and the whole tensor: rounded once, so that there is one right value."""

from __future__ import annotations

from equivtest.cases.values import draw
from equivtest.families.scale.case import ScaleCase
from equivtest.oracle import expect
from equivtest.oracle.expected import Expected, ExpectedTensor
from equivtest.tensors import DTYPES


@expect.register
def expect_scale(case: ScaleCase, index: int) -> Expected:
    """Expects y = x factor, and the cotangent times the factor as the gradient of x.

    One product is rounded once, to nearest (IEEE 754-2019, 4.3.1): for float64 by the multiplication itself, for the
    others from the product in float64, which is exact, since no other significand has more than half of float64's bits.
    """
    given, dtype = draw(case, index), DTYPES[case.dtype]
    operands = {"output": given["x"], "grad.x": given["cotangent"]}
    tensors = {}
    for name in case.answer_names():
        scaled = (operands[name].double() * case.factor).to(dtype)
        tensors[name] = ExpectedTensor(
            value=scaled.double(),
            allowed=None,
            layout=case.layouts()[name],
            dtype=case.dtype,
            derivation="equal: one product, rounded once",
            bits=scaled,
        )
    return Expected(tensors, {})

"""Computes the product of the whole tensor and a number. The product is rounded once, so only one value is right."""

from __future__ import annotations

from equivtest.cases.values import draw
from equivtest.families.scale.case import ScaleCase
from equivtest.oracle import expect
from equivtest.oracle.expected import Expected, ExpectedTensor
from equivtest.tensors import DTYPES


@expect.register
def expect_scale(case: ScaleCase, index: int) -> Expected:
    """Returns y = x * factor, and the cotangent times the factor as the gradient of x.

    A product is rounded once, to nearest (IEEE 754-2019, 4.3.1). For float64 the multiplication itself rounds. For the
    other dtypes the product in float64 is exact, because their significands have at most half of float64's bits. Then
    the cast to the dtype rounds the product.
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

"""Computes right results: unsharded references that know nothing of ranks, meshes or processes.

A package with its own case class registers the expected values:

    @expect.register
    def expect_mine(case: MyCase, index: int) -> Expected: ...
"""

from __future__ import annotations

from equivtest.cases.case import Case, Refused
from equivtest.cases.parts import by_case
from equivtest.errors import Misuse
from equivtest.oracle.expected import Expected
from equivtest.oracle.held import Held

__all__ = ["expect", "expect_held"]


@by_case("oracle")
def expect(case: Case, index: int) -> Expected:
    """Returns the right value of each tensor for one draw of a case, `case.values[index]`.

    If the subject must refuse the case, the result has no tensors.

    Raises:
        Misuse: no function is registered for this class.
        InexactData: the drawn values break the conditions for equality.
        IndexError: the case has no such draw.
    """
    raise Misuse(
        f"no expected values are registered for {type(case).__name__}: decorate the function that computes them with "
        "equivtest.oracle.expect.register, in the module that defines the class"
    )


@by_case("oracle")
def expect_held(case: Case, index: int, held: Held) -> Expected:
    """Returns the right values for one draw. Derives some of these values from tensors that the ranks returned.

    For example, the right values of the second step of training start from the parameters that the ranks had after the
    first step. So the bounds of the second step need not allow for roundings of the first step. If no function is
    registered for the class of the case, this function returns the result of `expect`, which ignores the ranks'
    tensors.

    Args:
        held: For each rank, a mapping from names to the tensors that the rank returned.
    """
    return expect(case, index)


@expect.register
def expect_refusal(case: Refused, index: int) -> Expected:
    return Expected({}, {})

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
    """Returns the right answers to one draw of a case, `case.values[index]`.

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
    """Returns the right answers to one draw, some of them derived from other answers of the ranks.

    An example is the second step of training: its right answers start from the parameters that the ranks had after the
    first step, so the bounds of the second step need not allow for roundings of the first.  For case classes without a
    registered function the result is that of `expect`, which ignores the ranks' answers.

    Args:
        held: rank -> name of an answer -> that rank's answer.
    """
    return expect(case, index)


@expect.register
def expect_refusal(case: Refused, index: int) -> Expected:
    """Returns no expected tensor, because a `Refused` case is outside the contract."""
    return Expected({}, {})

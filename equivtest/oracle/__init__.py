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
    """Returns the right answers for the draw that `case.values[index]` stands for; empty if the subject must refuse.

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
    """Returns the right answers like `expect`, but may derive an answer from the ranks' other answers.

    A class registers this if roundings may add up: in steps of training, or from layer to layer.

    Args:
        held: rank -> name -> its answer.
    """
    return expect(case, index)


@expect.register
def expect_refusal(case: Refused, index: int) -> Expected:
    """Returns no expected tensor, because a `Refused` case is outside the contract."""
    return Expected({}, {})

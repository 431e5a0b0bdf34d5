"""What is right: unsharded references that know nothing of ranks, meshes or processes.

A package with a case class of its own registers what is expected of it:

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
    """What a correct subject answers for draw `index` of case.values; nothing if it must refuse.

    Raises:
        Misuse: nobody registered what is expected of this class.
        InexactData: the drawn values break the conditions under which equality can be asked for.
        IndexError: the case has no such draw.
    """
    raise Misuse(
        f"nothing is known to be expected of {type(case).__name__}: decorate the function that computes it with "
        "equivtest.oracle.expect.register, in the module that defines the class"
    )


@by_case("oracle")
def expect_held(case: Case, index: int, held: Held) -> Expected:
    """As `expect`, but where an answer follows from other answers: from what the ranks hold of those.

    A class registers this where roundings may add up: steps of training, one layer after another.

    Args:
        held: rank -> what it answered, by name.
    """
    return expect(case, index)


@expect.register
def expect_refusal(case: Refused, index: int) -> Expected:
    """No tensor at all, for a case outside the contract."""
    return Expected({}, {})

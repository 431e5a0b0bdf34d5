"""Whether the bound of a module says something; where it does not: from where on, and what to do about it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from equivtest import limits
from equivtest.errors import Misuse
from equivtest.families.module.case import ModuleCase
from equivtest.families.module.case_boundaries import BOUNDARY, CHOSEN
from equivtest.families.module.oracle_steps import NOT_SEEN
from equivtest.families.module.oracle_within import ran_within_bounds
from equivtest.kit.oracle import expect
from equivtest.kit.oracle.expected import says_nothing
from equivtest.kit.oracle.rounding import Bounded
from equivtest.kit.values import draw
from equivtest.verdicts.elements import is_too_wide


class TooWide(Misuse):
    """The bound of a case says nothing: the message says of what, `explained` from where on.

    Attributes:
        first: The first part, in the order of the run, of which the bound says nothing; '' where no part was judged.
    """

    def __init__(self, case: ModuleCase, answer: str, first: str) -> None:
        self.case, self.answer, self.first = case, answer, first
        super().__init__(self.told())

    def told(self, where: str = "", ways: str = "") -> str:
        """The message, with what has been found out besides."""
        return (
            f"{self.case.build}: in {self.case.dtype}, with {self.case.takes}, the roundings of a correct module may "
            f"come to more than {limits.TOO_WIDE:g} of {self.answer}{where}: {ways}judge a smaller part, or take "
            "smaller shapes (to anything where torch.finfo(dtype).min in a mask may overflow, or equal numbers are "
            "compared)"
        )


def require_bounds(case: ModuleCase) -> None:
    """Raises Misuse where some answer may be off by so much that nothing is to be concluded."""
    tensors = expect(case, 0).tensors
    wide = [name for name, tensor in tensors.items() if is_too_wide(tensor)]
    answers = [name for name in wide if not tensors[name].is_inner]
    if not answers:
        return
    undecided = next((name for name in wide if tensors[name].derivation.startswith("undecided: ")), None)
    if undecided:
        raise Misuse(
            f"{case.build}: in {case.dtype}, with {case.takes}: {tensors[undecided].derivation}: a correct module may "
            "choose otherwise; judge what is before the choice and what is behind it"
        )
    if unseen := next((name for name in answers if tensors[name].derivation == NOT_SEEN), None):
        raise Misuse(
            f"{case.build}: in {case.dtype}, with {case.takes}, of {unseen} nothing can be concluded: {NOT_SEEN}: "
            "take a larger learning rate, or leave this dtype out"
        )
    raise TooWide(case, answers[0], wide[0] if wide[0] != answers[0] else "")


def explained(error: Misuse) -> str:
    """The message of a refusal; where a bound is too wide, from where on, and in which other way it would do."""
    return error.told(*_looked_into(error.case, error.first)) if isinstance(error, TooWide) else str(error)


@functools.lru_cache(maxsize=64)
def _looked_into(case: ModuleCase, first: str) -> tuple[str, str]:
    """From where on the bound says nothing, and the ways that lead around it, by trying."""
    try:
        first = first or ("" if case.by_parts else _first_wide(case))
    except Misuse:  # what the parts compute cannot be followed one by one
        first = ""
    where = "; of all that comes before the bound says something"
    if first and case.by_parts:
        where = f"; the first part of which the bound says nothing is {_in_words(first)}"
    elif first:
        where = f"; the bound says nothing from {_in_words(first)} on"
    ways = ""
    if not case.by_parts and _would_do(case, by_parts=True):
        ways += "say by_parts=True, or nothing of it, for each part to be judged by itself; or "
    if case.dtype != "float64" and _would_do(case, dtype="float64"):
        ways += "take float64, in which it would do (--dtypes float64); or "
    elif case.dtype != "float64":
        where += " (nor would float64 do)"
    return where, ways


def _would_do(case: ModuleCase, **fields: Any) -> bool:
    try:
        require_bounds(replace(case, **fields))
    except Misuse:  # of the bound, or there is no such case
        return False
    return True


def _first_wide(case: ModuleCase) -> str:
    """The first boundary between parts, in the order of the run, of which the bound of the whole says nothing."""
    found: list[str] = []

    def note(name: str, right: Bounded) -> None:
        if not found and not name.endswith(CHOSEN) and says_nothing(right.value, right.allowed):
            found.append(name)

    ran_within_bounds(case, draw(case, 0), [note] * (case.num_parts if case.is_divided else 1))
    return next(iter(found), "")


def _in_words(boundary: str) -> str:
    """What a boundary is."""
    name = boundary.removeprefix("grad.").removeprefix(BOUNDARY)
    return f"the gradient that comes back to {name}" if boundary.startswith("grad.") else f"what {name} gives"

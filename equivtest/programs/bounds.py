"""Checks if a module's bound can show an error.

If not, the module finds the part that makes the bound too wide, and a remedy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from equivtest.base import limits
from equivtest.cases.case import Case
from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.oracle import expect
from equivtest.oracle.expected import says_nothing
from equivtest.oracle.rounding import Bounded
from equivtest.programs.boundaries import BOUNDARY, CHOSEN
from equivtest.programs.case import ModuleCase
from equivtest.programs.inputs import BATCH
from equivtest.programs.oracle.steps import NOT_SEEN
from equivtest.programs.oracle.within import ran_within_bounds
from equivtest.verdicts.elements import is_too_wide

WIDEST = "float64"
"""The dtype with the narrowest bounds."""

ALL_BEFORE = "; the bounds of all parts before it are narrow enough"


class TooWide(Misuse):
    """Raised if a case allows no conclusion.

    `explained` adds to the message the first part with too wide a bound, and remedies.

    Attributes:
        what: The reason, as text.
        way_out: A remedy that the message always names, beside the remedies that `explained` finds.
        first: The first part of the run whose bound is too wide. It is '' if no part was judged, and None if the reason
            is not a bound.
    """

    def __init__(self, case: ModuleCase, what: str, way_out: str, first: str | None = None) -> None:
        self.case, self.what, self.way_out, self.first = case, what, way_out, first
        super().__init__(self.told())

    def told(self, where: str = "", ways: str = "") -> str:
        case = self.case
        return f"{case.build}: in {case.dtype}, with {case.takes}{self.what}{where}: {ways}{self.way_out}"


def require_bounds(case: ModuleCase) -> None:
    tensors = expect(case, 0).tensors
    wide = [name for name, tensor in tensors.items() if is_too_wide(tensor)]
    answers = [name for name in wide if not tensors[name].is_inner]
    if not answers:
        return
    undecided = next((name for name in wide if tensors[name].derivation.startswith("undecided: ")), None)
    if undecided:
        what = f": {tensors[undecided].derivation}: a correct module may choose otherwise"
        raise TooWide(case, what, "judge the parts before the choice and the parts after it")
    if unseen := next((name for name in answers if tensors[name].derivation == NOT_SEEN), None):
        what = f", no conclusion on {unseen} is possible: {NOT_SEEN}"
        raise TooWide(case, what, "use a larger learning rate, or leave this dtype out")
    what = f", the roundings of a correct module may add up to more than {limits.TOO_WIDE:g} times {answers[0]}"
    way_out = (
        "judge a smaller part. Other causes: torch.finfo(dtype).min in a mask, which may overflow, and comparisons of "
        "equal numbers"
    )
    raise TooWide(case, what, way_out, wide[0] if wide[0] != answers[0] else "")


def reason_in(case: Case) -> str:
    """Returns why a case of a module allows no conclusion, with remedies, or '' if it allows one."""
    if isinstance(case, ModuleCase):
        try:
            require_bounds(case)
        except Misuse as error:
            return explained(error)
    return ""


def explained(error: Misuse) -> str:
    return error.told(*_looked_into(error.case, error.first)) if isinstance(error, TooWide) else str(error)


@functools.lru_cache(maxsize=64)
def _looked_into(case: ModuleCase, first: str | None) -> tuple[str, str]:
    """Returns two texts: the place at which the bound becomes too wide, and remedies.

    The function finds remedies by trying `by_parts`, the widest dtype and smaller shapes. If none of these helps, the
    remedies are ''.
    """
    ways = ""
    if not case.judge.by_parts and would_do(case, by_parts=True):
        ways += "pass by_parts=True, or omit by_parts, to judge each part alone; or "
    others = [dtype for dtype in (WIDEST,) if dtype != case.dtype]
    dtypes = [dtype for dtype in others if would_do(case, dtype=dtype)]
    ways += "".join(f"use {dtype}, which is enough (--dtypes {dtype}); or " for dtype in dtypes)
    nor = [dtype for dtype in others if dtype not in dtypes]
    where = "" if first is None else _where(case, first)
    if not ways:
        smaller = next((each for each in _smaller(case) if would_do(each)), None)
        ways = "" if smaller is None else f"use {smaller.takes} in {smaller.dtype}, which is enough; or "
        nor += ["the smallest shapes"] * (smaller is None)
    return where + f" ({' or '.join(nor)} would not be enough)" * bool(nor), ways


def _where(case: ModuleCase, first: str) -> str:
    try:
        first = first or ("" if case.judge.by_parts else _first_wide(case))
    except Misuse:  # the operations of the parts cannot be followed one by one
        first = ""
    if first and case.judge.by_parts:
        return f"; the first bound that is too wide is that of {_in_words(first)}"
    return f"; the bound is too wide from {_in_words(first)} on" if first else ALL_BEFORE


def _smaller(case: ModuleCase) -> Iterator[ModuleCase]:
    """Yields cases with smaller sizes, each in the dtype of `case` and in float64.

    In each of the first cases, one size is as small as possible. In the last case, all sizes are. The last dim of a
    single input x keeps its size, because the module may fix that size, such as a number of features.
    """
    fewest = case.training.micro_batches * (case.num_parts if case.has_own_rows else 1)
    arguments = case.arguments
    whole = dict(arguments.sizes) if arguments.inputs else {str(dim): n for dim, n in enumerate(arguments.x_shape)}
    rows = BATCH if arguments.inputs else "0"
    names = list(whole) if arguments.inputs else list(whole)[:-1]
    least = {name: fewest if name == rows else 1 for name in names}
    for sizes in [{**whole, name: size} for name, size in least.items()] + [{**whole, **least}]:
        fields: dict[str, Any] = {"x_shape": tuple(sizes.values())}
        fields = {"sizes": tuple(sizes.items())} if arguments.inputs else fields
        for dtype in dict.fromkeys((case.dtype, WIDEST)):
            with contextlib.suppress(Misuse):  # such a case may be invalid
                yield replace(case, dtype=dtype, **fields)


def would_do(case: ModuleCase, **fields: Any) -> bool:
    try:
        require_bounds(replace(case, **fields))
    except Misuse:  # the bound is too wide, or such a case is invalid
        return False
    return True


def _first_wide(case: ModuleCase) -> str:
    """Returns the first boundary, in the order of the run, at which the whole module's bound is too wide, or ''."""
    boundaries: list[str] = []

    def note(name: str, right: Bounded) -> None:
        if not boundaries and not name.endswith(CHOSEN) and says_nothing(right.value, right.allowed):
            boundaries.append(name)

    ran_within_bounds(case, draw(case, 0), [note] * (case.num_parts if case.is_divided else 1))
    return next(iter(boundaries), "")


def _in_words(boundary: str) -> str:
    name = boundary.removeprefix("grad.").removeprefix(BOUNDARY)
    return f"the gradient at {name}" if boundary.startswith("grad.") else f"the value at {name}"

"""Finds the cases of your module that can be judged.

Such a case is judged on integers, as a whole within a bound, or part by part.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from equivtest.base.importing import suggestion
from equivtest.cases.case import Shape, require
from equivtest.errors import Misuse, PropertyMisuse
from equivtest.programs.bounds import explained, require_bounds, would_do
from equivtest.programs.case import EXACT_MODE, LARGEST, REAL_DTYPES, REAL_MODE, WHOLE, ModuleCase, call_builder
from equivtest.programs.inputs import BATCH
from equivtest.programs.mesh import meshes_of
from equivtest.programs.oracle.exact import prove_exact
from equivtest.programs.reference import refusal_in
from equivtest.tensors import SIGNIFICAND_BITS

BATCH_SIZES = (1, 2, 3, 4, 5, 7)
OTHER_SIZES = (2, 3, 5)
"""Sizes to draw from if a property names none: few, since each one runs before anything is drawn."""

Fields = tuple[tuple[str, Any], ...]


class Candidate(NamedTuple):
    """Fields of a case that can be judged.

    A candidate has no mesh, no dtype and none of the fields that all cases of a search share.

    Attributes:
        mode: Exact integers or real values.
        choice: Value of the case's field `x_shape` or `sizes`.
        largest: Largest magnitude of the integers.
        by_parts: True if each part is judged alone.
    """

    mode: str
    choice: Any
    largest: int
    by_parts: bool


class CandidateSearch(NamedTuple):
    """The input of a search for cases that can be judged.

    Attributes:
        varied: The field in which candidates differ, 'x_shape' or 'sizes'.
        by_parts: True if each part is judged alone. If None, each part is judged alone only if no other way gives a
            conclusion.
    """

    build: str
    parallelize: str
    varied: str
    choices: tuple[Any, ...]
    fields: Fields
    by_parts: bool | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(dict(self.fields).get("axes", ()))

    @property
    def unsharded(self) -> CandidateSearch:
        """This search without `parallelize`, so that the cached results serve every way to parallelize the module."""
        return self._replace(parallelize="")

    @property
    def is_stepped(self) -> bool:
        return any(dict(self.fields).get(name) for name in ("optimizer", "step"))

    @property
    def tries_parts(self) -> bool:
        return self.by_parts is not False

    @property
    def shortest(self) -> dict[str, int]:
        """Fields that shorten a trial. One step is enough, because every step starts from the ranks' values."""
        return {"steps": 1} if self.is_stepped else {}

    def make(self, **fields: Any) -> ModuleCase:
        common = {"values": ((REAL_MODE, 0),)} if self.is_stepped else {}
        common |= dict(self.fields)
        fields |= {"members": ()}
        return ModuleCase(build=self.build, parallelize=self.parallelize, **{**common, **fields})


def combinations(names: Sequence[str], sizes: Mapping[str, Sequence[int]]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Lists combinations of sizes to try.

    First each value of one size is combined with the first values of all other sizes. Then later values are combined.

    For a in (1, 2) and b in (3, 4), the order is a=1 b=3, a=2 b=3, a=1 b=4 and a=2 b=4. Only the last combination has
    both second values.

    Raises:
        Misuse: a size is in no shape, or has no values of at least 1.
    """
    unknown = [name for name in sizes if name not in names]
    which = suggestion(unknown[0], names) if unknown and names else "no shape names a size"
    require(not unknown, f"sizes= may name only sizes in the shapes of inputs, got {', '.join(unknown)}: {which}")
    given = {name: sizes.get(name, BATCH_SIZES if name == BATCH else OTHER_SIZES) for name in names}
    for name, table in given.items():
        is_table = isinstance(table, Sequence) and bool(table)
        is_table = is_table and all(isinstance(size, int) and size >= 1 for size in table)
        said = f"list at least one number, each at least 1, such as sizes={{{name!r}: (2, 3)}}"
        require(is_table, f"sizes of {name} must {said}, got {table!r}")
    tables = {name: tuple(table) for name, table in given.items()}
    simplest = {name: table[0] for name, table in tables.items()}
    one_by_one = [{**simplest, name: size} for name, table in tables.items() for size in table]
    longest = max(map(len, tables.values()), default=1)
    together = [
        {name: table[min(place, len(table) - 1)] for name, table in tables.items()} for place in range(1, longest)
    ]
    return tuple(dict.fromkeys(tuple(found.items()) for found in (*one_by_one, *together))) or ((),)


ByDtype = dict[str, list[Candidate]]
Reasons = dict[str, Misuse]
"""Dtype -> the first reason against a case in this dtype."""
Reason = TypeVar("Reason", str, Misuse)


def candidates_by_mesh(
    search: CandidateSearch, batch: str, world_size: int, dtypes: tuple[str, ...]
) -> dict[Shape, ByDtype]:
    """Returns mesh -> dtype -> candidates. A mesh without candidates is left out.

    The candidates of a mesh have integers with exact sums. If there are no such candidates, they have real values with
    narrow bounds, of the whole module or of each part.

    Raises:
        Misuse: no mesh has a candidate, or a shape does not fit the module.
    """
    fitting, reasons = tried(search.unsharded, batch, world_size, dtypes)
    if not fitting:
        raise Misuse(next(iter(reasons.values())))
    return fitting


@functools.lru_cache(maxsize=64)
def tried(
    search: CandidateSearch, batch: str, world_size: int, dtypes: tuple[str, ...]
) -> tuple[dict[Shape, ByDtype], dict[str, str]]:
    """Returns (mesh -> dtype -> candidates, dtype -> the reason why some mesh has no candidates in it).

    Both may be empty.

    Raises:
        Misuse: the batch cannot be divided on any mesh.
    """
    fitting: dict[Shape, ByDtype] = {}
    reasons: dict[str, str] = {}
    mistakes: list[Misuse] = []
    for mesh in meshes_of(world_size, len(search.axes)):
        try:
            fields, why = _tried_on(mesh, search, batch, world_size, dtypes)
        except PropertyMisuse:
            raise
        except Misuse as error:
            mistakes.append(error)
        else:
            fitting |= {mesh: fields} if fields else {}
            reasons = _with(reasons, why)
    if mistakes and not fitting and not reasons:
        raise mistakes[0]
    return fitting, reasons


@functools.lru_cache(maxsize=64)
def refusals(search: CandidateSearch, batch: str, dtypes: tuple[str, ...]) -> dict[str, str]:
    """Returns dtype -> reason, for each dtype in which the unsharded module does not run.

    If no case can be made in any of `dtypes`, the module or the inputs are wrong, and the result is empty.
    """
    make = functools.partial(search.make, world_size=1, batch=batch, mesh=(1,) * len(search.axes), **search.shortest)
    for dtype, choice in itertools.product(dtypes, search.choices):
        with contextlib.suppress(Misuse):
            program = make(dtype=dtype, **{search.varied: choice}).program
            return {each: why for each in dtypes if (why := refusal_in(program, each))}
    return {}


def _tried_on(
    mesh: Shape, search: CandidateSearch, batch: str, world_size: int, dtypes: tuple[str, ...]
) -> tuple[ByDtype, dict[str, str]]:
    varied, choices = search.varied, search.choices
    dtypes = tuple(dtype for dtype in dtypes if dtype not in refusals(search, batch, dtypes))
    make = functools.partial(search.make, world_size=world_size, batch=batch, mesh=mesh, **search.shortest)
    if batch != WHOLE and dtypes:
        dtype = REAL_DTYPES[0] if search.is_stepped else dtypes[0]  # real values in 16 bits go by parts alone
        choices = _divisible(search, functools.partial(make, dtype=dtype), world_size)
    fitting: ByDtype = {}
    reasons: Reasons = {}
    if search.by_parts is not True and not search.is_stepped:
        fitting, reasons = _exact(search, make, dtypes, choices)
        if fitting:
            return fitting, _in_words(reasons, fitting)
    if search.by_parts is not True:
        too_wide: Reasons = {}
        narrow: set[Any] = set()
        for dtype in (dtype for dtype in REAL_DTYPES if dtype in dtypes):
            real = [make(dtype=dtype, values=((REAL_MODE, 0),), **{varied: choice}) for choice in choices]
            found, more_reasons = _bounded(search, real, narrow, gives_up=search.by_parts is None)
            narrow |= {each.choice for each in found.get(dtype, ())}
            fitting |= found
            too_wide |= more_reasons
        reasons = _with(too_wide, reasons)
    if search.tries_parts:
        others = [dtype for dtype in dtypes if dtype not in fitting]
        found, more_reasons = _by_parts(search, make, others, choices)
        fitting |= found
        reasons = _with(more_reasons, reasons)
    if not fitting and not reasons and dtypes:
        reasons = {dtypes[0]: _too_narrow(search, make, dtypes, choices)}
    return fitting, _in_words(reasons, fitting)


def _in_words(reasons: Reasons, fitting: ByDtype) -> dict[str, str]:
    """Returns the reasons for dtypes without candidates. If no dtype has any, the first reason has remedies."""
    missing = {dtype: reason for dtype, reason in reasons.items() if dtype not in fitting}
    first = "" if fitting else next(iter(missing), "")
    return {dtype: explained(reason) if dtype == first else str(reason) for dtype, reason in missing.items()}


def _with(reasons: dict[str, Reason], others: dict[str, Reason]) -> dict[str, Reason]:
    """Returns `reasons`, followed by the `others` for further dtypes."""
    return reasons | {dtype: reason for dtype, reason in others.items() if dtype not in reasons}


def _too_narrow(
    search: CandidateSearch, make: Callable[..., ModuleCase], dtypes: Sequence[str], choices: Sequence[Any]
) -> Misuse:
    fields = [(dtype, choice) for dtype in REAL_DTYPES for choice in choices]
    would = dict.fromkeys(dtype for dtype, choice in fields if would_do(make(dtype=dtype, **{search.varied: choice})))
    way_out = f"use --dtypes {','.join(would)}, which is enough" if would else "judge a smaller module"
    nor = "" if would else ", and here both have bounds that are too wide"
    return Misuse(
        f"{search.build}: by_parts=False judges a step as a whole, which needs {' or '.join(REAL_DTYPES)}, got "
        f"{', '.join(dtypes)}{nor}: {way_out}; or leave by_parts out"
    )


def _by_parts(
    search: CandidateSearch, make: Callable[..., ModuleCase], dtypes: Sequence[str], choices: Sequence[Any]
) -> tuple[ByDtype, Reasons]:
    """Tries only the simplest choice, in one process, because a part's bound depends little on shapes and ranks."""
    fitting: ByDtype = {}
    reasons: Reasons = {}
    for dtype, choice in itertools.product(dtypes, choices):
        made = {search.varied: choice, "dtype": dtype, "values": ((REAL_MODE, 0),), "by_parts": True}
        reason: Misuse | None = None
        try:
            make(**made)  # raises Misuse if the rows cannot be divided
            if dtype not in fitting:
                reason = _reason_against_parts(
                    search.make(world_size=1, mesh=(1,) * len(search.axes), **made, **search.shortest)
                )
        except PropertyMisuse:
            raise
        except Misuse as error:
            reason = error
        if reason is None:
            fitting.setdefault(dtype, []).append(Candidate(REAL_MODE, choice, 1, by_parts=True))
        else:
            reasons.setdefault(dtype, reason)
    return fitting, reasons


def _divisible(search: CandidateSearch, make: Callable[..., ModuleCase], world_size: int) -> tuple[Any, ...]:
    """Returns the choices (values of `x_shape` or `sizes`) whose batch has at least one row for each rank.

    If no choice has enough rows, the result is the first choice with more rows.
    """
    fitting, reasons = _accepted(search, make, search.choices)
    if not fitting:
        with contextlib.suppress(PropertyMisuse):  # the module need not support rows that you did not list
            fitting, _ = _accepted(search, make, _with_more_rows(search, world_size))
    if not fitting:
        call_builder(search.build)  # its own error is more precise, if it fails
        what = "x of shape" if search.varied == "x_shape" else "sizes of"
        said = "; ".join(dict.fromkeys(reasons))
        raise Misuse(f"the ranks can divide no {what} {', '.join(map(str, search.choices))}: {said}")
    return tuple(fitting)


def _accepted(
    search: CandidateSearch, make: Callable[..., ModuleCase], choices: Sequence[Any]
) -> tuple[list[Any], list[str]]:
    fitting, reasons = [], []
    for choice in choices:
        try:
            make(**{search.varied: choice})
        except PropertyMisuse:
            raise
        except Misuse as error:
            reasons.append(str(error))
        else:
            fitting.append(choice)
    return fitting, reasons


def _with_more_rows(search: CandidateSearch, world_size: int) -> list[Any]:
    """Returns the first choice with one row for each micro-batch of a rank, and with almost two."""
    fewest = world_size * dict(search.fields)["micro_batches"]
    first = search.choices[0]
    if search.varied == "x_shape":
        return [(rows, *first[1:]) for rows in (fewest, 2 * fewest - 1) if first]
    return [tuple({**dict(first), BATCH: rows}.items()) for rows in (fewest, 2 * fewest - 1)]


def _exact(
    search: CandidateSearch, make: Callable[..., ModuleCase], dtypes: Sequence[str], choices: Sequence[Any]
) -> tuple[ByDtype, Reasons]:
    """Tries integers, in the dtypes with few significand bits first, and large integers before small ones.

    Sums that are exact are also exact in a dtype with more bits, and with smaller integers, so these are not tried.
    """
    exact: dict[str, set[tuple[Any, int]]] = {}
    against: dict[tuple[str, Any, int], Misuse] = {}
    for dtype in sorted(dtypes, key=SIGNIFICAND_BITS.__getitem__):
        exact[dtype] = set().union(*exact.values()) & {(choice, each) for choice in choices for each in LARGEST[dtype]}
        for choice, largest in itertools.product(choices, reversed(LARGEST[dtype])):
            if (choice, largest) not in exact[dtype]:
                try:
                    prove_exact(make(dtype=dtype, largest=largest, **{search.varied: choice}))
                except PropertyMisuse:
                    raise
                except Misuse as error:
                    against[dtype, choice, largest] = error
                else:
                    exact[dtype] |= {(choice, each) for each in LARGEST[dtype] if each <= largest}
    fitting: ByDtype = {}
    reasons: Reasons = {}
    for dtype in dtypes:
        for choice, largest in itertools.product(choices, LARGEST[dtype]):
            if (choice, largest) in exact[dtype]:
                fitting.setdefault(dtype, []).append(Candidate(EXACT_MODE, choice, largest, by_parts=False))
            else:
                reasons.setdefault(dtype, against[dtype, choice, largest])
    return fitting, reasons


def _bounded(
    search: CandidateSearch, cases: Sequence[ModuleCase], trusted: Collection[Any], *, gives_up: bool
) -> tuple[ByDtype, Reasons]:
    """Returns dtype -> candidates for cases on real values with narrow bounds, and the reasons against other cases.

    Args:
        trusted: Choices that fit in a dtype with wider bounds. After the first case that fits, cases with these choices
            are not tried.
        gives_up: If True, the function stops if the bounds of the first case are too wide. The first case has the
            simplest choice, so all other cases would be refused too.
    """
    fitting: ByDtype = {}
    reasons: Reasons = {}
    for case in cases:
        choice = getattr(case.arguments, search.varied)
        try:
            if not fitting or choice not in trusted:
                require_bounds(case)
        except PropertyMisuse:
            raise
        except Misuse as error:
            reasons.setdefault(case.dtype, error)
            if gives_up and not fitting:
                break
        else:
            candidate = Candidate(case.values[0][0], choice, case.arguments.largest, by_parts=False)
            fitting.setdefault(case.dtype, []).append(candidate)
    return fitting, reasons


@functools.lru_cache(maxsize=256)
def _reason_against_parts(case: ModuleCase) -> Misuse | None:
    """Returns the exception of `require_bounds` or None. It is cached, because every world size checks equal cases."""
    try:
        require_bounds(case)
    except PropertyMisuse:
        raise
    except Misuse as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)  # the frames of all of them hold every tensor of the run
    return None

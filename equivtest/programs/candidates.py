"""Which cases of a module of anybody's own can be judged: on integers, as a whole within a bound, or part by part."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from equivtest.base.importing import suggestion
from equivtest.cases.case import Shape, require
from equivtest.errors import Misuse, PropertyMisuse
from equivtest.programs.bounds import explained, require_bounds, would_do
from equivtest.programs.case import LARGEST, REAL_DTYPES, REAL_MODE, WHOLE, ModuleCase, call_builder
from equivtest.programs.inputs import BATCH
from equivtest.programs.mesh import meshes_of
from equivtest.programs.oracle.exact import prove_exact
from equivtest.programs.reference import refusal_in

BATCH_SIZES = (1, 2, 3, 4, 5, 7)
OTHER_SIZES = (2, 3, 5)
"""What a size is drawn from that nobody says more about: few, as each is run before anything is drawn."""

Fields = tuple[tuple[str, Any], ...]


class Door(NamedTuple):
    """A module as its property describes it.

    Attributes:
        varied: The field of a case in which layouts differ, 'x_shape' or 'sizes'.
        layouts: What it holds, the simplest first.
        fields: What every case has alike.
        by_parts: Whether each part is judged by itself; None: where nothing else says something.
    """

    build: str
    parallelize: str
    varied: str
    layouts: tuple[Any, ...]
    fields: Fields
    by_parts: bool | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes; empty: one without a name."""
        return tuple(dict(self.fields).get("axes", ()))

    @property
    def unsharded(self) -> Door:
        """The module alone, the same for every way to parallelize it."""
        return self._replace(parallelize="")

    @property
    def is_stepped(self) -> bool:
        """Whether there is more than one forward and backward."""
        return any(dict(self.fields).get(name) for name in ("optimizer", "step"))

    @property
    def tries_parts(self) -> bool:
        """Whether cases are judged by parts, or may be."""
        return self.by_parts is not False

    @property
    def shortest(self) -> dict[str, int]:
        """Fields of cases that are only tried: each step goes on from what was held, the optimizer from its state."""
        return {"steps": 1} if self.is_stepped else {}

    def make(self, **fields: Any) -> ModuleCase:
        """Returns a case on the whole world, so that the default group is the mesh's; steps are on real values."""
        common = {"values": ((REAL_MODE, 0),)} if self.is_stepped else {}
        common |= dict(self.fields)
        fields |= {"members": ()}
        return ModuleCase(build=self.build, parallelize=self.parallelize, **{**common, **fields})


def combinations(names: Sequence[str], sizes: Mapping[str, Sequence[int]]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Yields every value of each size beside the simplest of the others, then all sizes further on at once.

    Raises:
        Misuse: a size is in no shape, or has no values of at least 1.
    """
    unknown = [name for name in sizes if name not in names]
    which = suggestion(unknown[0], names) if unknown and names else "no shape has one"
    require(not unknown, f"sizes must be named in shapes of inputs, got {', '.join(unknown)}: {which}")
    given = {name: sizes.get(name, BATCH_SIZES if name == BATCH else OTHER_SIZES) for name in names}
    for name, table in given.items():
        is_table = isinstance(table, Sequence) and bool(table)
        is_table = is_table and all(isinstance(size, int) and size >= 1 for size in table)
        said = f"numbers of at least 1, one at least, such as sizes={{{name!r}: (2, 3)}}"
        require(is_table, f"sizes of {name} must be {said}, got {table!r}")
    tables = {name: tuple(table) for name, table in given.items()}
    simplest = {name: table[0] for name, table in tables.items()}
    one_by_one = [{**simplest, name: size} for name, table in tables.items() for size in table]
    longest = max(map(len, tables.values()), default=1)
    together = [
        {name: table[min(place, len(table) - 1)] for name, table in tables.items()} for place in range(1, longest)
    ]
    return tuple(dict.fromkeys(tuple(found.items()) for found in (*one_by_one, *together))) or ((),)


Layout = tuple[str, Any, int, bool]
"""(mode, x_shape or sizes, largest magnitude, by_parts) of a case."""

ByDtype = dict[str, list[Layout]]


def judged_layouts(door: Door, batch: str, world_size: int, dtypes: tuple[str, ...]) -> dict[Shape, ByDtype]:
    """By mesh: dtype -> of every case whose sums are exact; where there is none, of those whose bounds say something.

    A mesh on which there is none of these is left out.

    Raises:
        Misuse: there is none on any, or a shape does not fit the module.
    """
    fitting, reasons = tried(door.unsharded, batch, world_size, dtypes)
    if not fitting:
        raise Misuse(reasons[0])
    return fitting


@functools.lru_cache(maxsize=64)
def tried(door: Door, batch: str, world_size: int, dtypes: tuple[str, ...]) -> tuple[dict[Shape, ByDtype], list[str]]:
    """What `judged_layouts` gives, empty where there is none, and why cases were left out.

    Raises:
        Misuse: on no mesh can a batch be divided.
    """
    fitting: dict[Shape, ByDtype] = {}
    reasons: list[str] = []
    mistakes: list[Misuse] = []
    for mesh in meshes_of(world_size, len(door.axes)):
        try:
            found, why = _tried_on(mesh, door, batch, world_size, dtypes)
        except PropertyMisuse:
            raise
        except Misuse as error:
            mistakes.append(error)
        else:
            fitting |= {mesh: found} if found else {}
            reasons += why
    if mistakes and not fitting and not reasons:
        raise mistakes[0]
    return fitting, reasons


@functools.lru_cache(maxsize=64)
def refusals(door: Door, batch: str, dtypes: tuple[str, ...]) -> dict[str, str]:
    """Says why the unsharded module does not run in some dtypes, by their names; empty if it runs in none."""
    make = functools.partial(door.make, world_size=1, batch=batch, mesh=(1,) * len(door.axes), **door.shortest)
    for dtype, layout in itertools.product(dtypes, door.layouts):
        with contextlib.suppress(Misuse):
            program = make(dtype=dtype, **{door.varied: layout}).program
            return {each: why for each in dtypes if (why := refusal_in(program, each))}
    return {}


def _tried_on(
    mesh: Shape, door: Door, batch: str, world_size: int, dtypes: tuple[str, ...]
) -> tuple[ByDtype, list[str]]:
    """The same of one mesh."""
    varied, layouts = door.varied, door.layouts
    dtypes = tuple(dtype for dtype in dtypes if dtype not in refusals(door, batch, dtypes))
    make = functools.partial(door.make, world_size=world_size, batch=batch, mesh=mesh, **door.shortest)
    if batch != WHOLE and dtypes:
        dtype = REAL_DTYPES[0] if door.is_stepped else dtypes[0]  # real values in 16 bits go by parts alone
        layouts = _divisible(door, functools.partial(make, dtype=dtype))
    fitting: ByDtype = {}
    reasons: list[Misuse] = []
    if door.by_parts is not True and not door.is_stepped:
        exact = [
            make(dtype=dtype, largest=largest, **{varied: layout})
            for dtype in dtypes
            for layout, largest in itertools.product(layouts, LARGEST[dtype])
        ]
        fitting, reasons = _fitting(door, exact, prove_exact)
        if fitting:
            return fitting, []
    if door.by_parts is not True:
        too_wide: list[Misuse] = []
        for dtype in (dtype for dtype in REAL_DTYPES if dtype in dtypes):
            real = [make(dtype=dtype, values=((REAL_MODE, 0),), **{varied: layout}) for layout in layouts]
            found, more_reasons = _fitting(door, real, require_bounds, gives_up=door.by_parts is None)
            fitting |= found
            too_wide += more_reasons
        reasons = too_wide or reasons
    if door.tries_parts:
        others = [dtype for dtype in dtypes if dtype not in fitting]
        found, more_reasons = _by_parts(door, make, others, layouts)
        fitting |= found
        reasons = more_reasons or reasons
    if not fitting and not reasons and dtypes:
        reasons = [_too_narrow(door, make, dtypes, layouts)]
    return fitting, list(map(str if fitting else explained, reasons[:1]))


def _too_narrow(door: Door, make: Callable[..., ModuleCase], dtypes: Sequence[str], layouts: Sequence[Any]) -> Misuse:
    """Says that a step is not judged as a whole in these dtypes, and in which it is, by trying."""
    fields = [(dtype, layout) for dtype in REAL_DTYPES for layout in layouts]
    would = dict.fromkeys(dtype for dtype, layout in fields if would_do(make(dtype=dtype, **{door.varied: layout})))
    way_out = f"take --dtypes {','.join(would)}, in which it would do" if would else "judge a smaller module"
    nor = "" if would else ", and neither says something here"
    return Misuse(
        f"{door.build}: with by_parts=False a step is judged as a whole, in {' or '.join(REAL_DTYPES)}, got "
        f"{', '.join(dtypes)}{nor}: {way_out}; or leave by_parts out"
    )


def _by_parts(
    door: Door, make: Callable[..., ModuleCase], dtypes: Sequence[str], layouts: Sequence[Any]
) -> tuple[ByDtype, list[Misuse]]:
    """By dtype the layouts in which each part is judged by itself; why there are none.

    One layout is tried, the simplest, in one process: of a part the bound hangs little on shapes, and on ranks.
    """
    fitting: ByDtype = {}
    reasons: list[Misuse] = []
    for dtype, layout in itertools.product(dtypes, layouts):
        made = {door.varied: layout, "dtype": dtype, "values": ((REAL_MODE, 0),), "by_parts": True}
        try:
            make(**made)  # which may not divide
            if dtype not in fitting:
                _require_bounds_of_parts(door.make(world_size=1, mesh=(1,) * len(door.axes), **made, **door.shortest))
        except PropertyMisuse:
            raise
        except Misuse as error:
            reasons.append(error)
        else:
            fitting.setdefault(dtype, []).append((REAL_MODE, layout, 1, True))
    return fitting, reasons


def _divisible(door: Door, make: Callable[..., ModuleCase]) -> tuple[Any, ...]:
    """The layouts that give each rank rows.

    Raises:
        Misuse: there is none.
    """
    fitting, reasons = [], []
    for layout in door.layouts:
        try:
            make(**{door.varied: layout})
        except PropertyMisuse:
            raise
        except Misuse as error:
            reasons.append(str(error))
        else:
            fitting.append(layout)
    if not fitting:
        call_builder(door.build)  # which says more where that is what fails
        what = "x of x_shapes" if door.varied == "x_shape" else "sizes of"
        said = "; ".join(dict.fromkeys(reasons))
        raise Misuse(f"no {what} {', '.join(map(str, door.layouts))} can be divided: {said}")
    return tuple(fitting)


def _fitting(
    door: Door, cases: Sequence[ModuleCase], require_fit: Callable[[ModuleCase], object], *, gives_up: bool = False
) -> tuple[ByDtype, list[Misuse]]:
    """By dtype the layouts of the cases that fit; why the others do not.

    Args:
        gives_up: Whether none fits where the first, of the simplest layout, does not.
    """
    fitting: ByDtype = {}
    reasons: list[Misuse] = []
    for case in cases:
        try:
            require_fit(case)
        except PropertyMisuse:
            raise
        except Misuse as error:
            reasons.append(error)
            if gives_up and not fitting:
                break
        else:
            layout = (case.values[0][0], getattr(case.arguments, door.varied), case.arguments.largest, False)
            fitting.setdefault(case.dtype, []).append(layout)
    return fitting, reasons


_require_bounds_of_parts = functools.lru_cache(maxsize=64)(require_bounds)
"""Asked again for each world size."""

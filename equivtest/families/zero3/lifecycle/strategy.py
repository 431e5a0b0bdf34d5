"""Draws sequences of operations on ZeRO-3's parameters. Most operations are possible, and some must be refused."""

from __future__ import annotations

from typing import Any

from equivtest.cases.picks import Cases, Draw, free, pick, pick_run
from equivtest.families.zero3.fetch.case import PADDINGS
from equivtest.families.zero3.fetch.strategy import pick_parameter
from equivtest.families.zero3.lifecycle.case import FETCHES, MAX_OPERATIONS, VERBS, WITHOUT_NAMES, LifecycleCase
from equivtest.property import Space

LIFECYCLE_MODES = (("dense",), ("index",), ("dense", "index"))
NUM_PARAMETERS = (1, 1, 1, 2, 2, 3)
RECORDS = (False, False, False, True)  # more often than elsewhere: a single fetch shows no sequence
VERBS_DRAWN = (
    *("fetch",) * 3,
    *("release",) * 3,
    *("use",) * 4,
    *("step",) * 6,
    *("update",) * 4,
    *("save",) * 3,
    *("load",) * 3,
    *("launch",) * 2,
    *("wait",) * 2,
    *("fail",) * 4,
)
PLACES = ((0,), (1,), (2,), (0, 1), (1, 0), (0, 2), (0, 1, 2), (2, 0, 1))
"""Which parameters an operation names: indices into the possible ones, modulo their number."""

REQUESTS = (
    *((verb, places, "can be done") for verb in VERBS_DRAWN for places in PLACES),
    *(("load", places, "after a change") for _ in range(6) for places in PLACES),
    *((verb, places, "any") for verb in (*VERBS, *("step",) * 6, "load") for places in PLACES[:4]),
    *((verb, (place, place), "twice") for _ in range(2) for verb in ("fetch", "launch", "fail") for place in (0, 0, 1)),
)
"""Requests for an operation: a verb, which parameters, and whether the operation must be possible.

An operation is one draw, because Hypothesis drops up to five neighbouring draws at once, and so also two operations
that undo each other.
"""

MORE = (False, *(True,) * 24)
NO_MORE = (False, False)


class Course:
    """Tracks the state of a sequence of operations, from which the next possible operation is drawn.

    A `Course` decides which operations are drawn, but never which answers are right.
    """

    def __init__(self, num_parameters: int) -> None:
        self.everything = range(num_parameters)
        self.available: set[int] = set()
        self.in_flight: set[int] = set()
        self.saved: set[int] = set()
        self.changed: set[int] = set()  # since they were saved
        self.used: set[int] = set()

    def candidates(self, verb: str) -> list[int]:
        """Returns the parameters that `verb` may name now."""
        away = [index for index in self.everything if index not in self.available | self.in_flight]
        if verb == "load":
            return [index for index in away if index in self.saved]
        return away if verb in FETCHES else sorted(self.available)

    def lead(self, verb: str, how: str) -> str:
        """Returns `verb` if it is possible now, otherwise a verb that leads to it.

        If `how` is 'after a change' and no saved parameter has changed since its save, returns 'update', or a verb that
        leads to it.
        """
        if how == "after a change" and self.saved and not self.changed:
            verb = "update"
        while before := self._before(verb):
            verb = before
        return verb

    def _before(self, verb: str) -> str:
        """Returns the verb that must come before `verb`, or '' if `verb` is possible or no verb makes it so."""
        if verb == "step":
            return "use" if not self.used else "release" if self.used & self.available else ""
        if verb == "load" and not self.saved:
            return "save"
        if verb in (*WITHOUT_NAMES, *FETCHES) or self.candidates(verb):
            return ""
        if verb == "load":
            return "release" if self.available else "wait"
        return "wait" if self.in_flight else "fetch"

    def follow(self, verb: str, named: tuple[int, ...]) -> None:
        """Tracks the effect of an operation on the real parameters. A refused operation changes nothing."""
        if verb == "wait":
            self.available, self.in_flight = self.available | self.in_flight, set()
        elif verb == "step":
            self.changed |= self.used & self.saved
            self.used = self.used & (self.available | self.in_flight)
        elif set(named) <= set(self.candidates(verb)) and len(set(named)) == len(named):
            match verb:
                case "fetch":
                    self.available |= set(named)
                case "launch":
                    self.in_flight |= set(named)
                case "release":
                    self.available -= set(named)
                case "use":
                    self.used |= set(named)
                case "save":
                    self.saved, self.changed = self.saved | set(named), self.changed - set(named)
                case "update":
                    self.changed |= set(named) & self.saved
                case "load":
                    self.changed -= set(named)


@Cases
def lifecycle_cases(draw: Draw, space: Space, *, collective: str) -> LifecycleCase:
    """Shrinks to one fetch of one parameter of one element."""
    world_size = pick(draw, "world_size", space.world_sizes)
    dtype = pick(draw, "dtype", space.dtypes)
    num_parameters = pick(draw, "num_parameters", NUM_PARAMETERS)
    fields: dict[str, Any] = {
        "operations": _pick_operations(draw, Course(num_parameters)),
        "mixed_dtypes": pick(draw, "mixed_dtypes", (False, False, False, True)),
        "padding": pick(draw, "padding", PADDINGS),
        "measures": pick(draw, "measures", (False, True)),
        **pick_run(draw, world_size, LIFECYCLE_MODES, records=RECORDS),
    }
    picked = [pick_parameter(draw, f"parameter {index}", world_size) for index in range(num_parameters)]
    return LifecycleCase(
        world_size=world_size,
        dtype=dtype,
        collective=collective,
        parameters=tuple(shape for shape, _ in picked),  # drawn last: shrinking drops one without moving other draws
        requires_grad=tuple(flag for _, flag in picked),
        **fields,
    )


def _pick_operations(draw: Draw, course: Course) -> tuple[str, ...]:
    """Draws a bool before each further operation, so that shrinking can drop an operation."""
    operations = [_pick_operation(draw, "operation 0", course)]
    for number in range(1, MAX_OPERATIONS + 1):
        if not pick(draw, f"operation {number}?", MORE if number < MAX_OPERATIONS else NO_MORE, free):
            break
        operations.append(_pick_operation(draw, f"operation {number}", course))
    return tuple(operations)


def _pick_operation(draw: Draw, name: str, course: Course) -> str:
    verb, places, how = pick(draw, name, REQUESTS, free)
    if how != "any":
        verb = course.lead(verb, how)
    candidates = course.everything if how == "any" else course.candidates(verb) or course.everything
    named = tuple(candidates[place % len(candidates)] for place in places) if verb not in WITHOUT_NAMES else ()
    if how not in ("any", "twice") or verb not in FETCHES:
        named = tuple(dict.fromkeys(named))
    course.follow(verb, named)
    return " ".join([verb, *map(str, named)])

"""A property of a module of your own, in one line of a test file."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from equivtest import limits
from equivtest.check import DEFAULT_CLAIMS
from equivtest.errors import Misuse
from equivtest.families.module.case import (
    BATCHES,
    LARGEST,
    MEAN_OF_PARTS,
    REAL_DTYPES,
    REAL_MODE,
    WHOLE,
    ModuleCase,
    call_builder,
)
from equivtest.families.module.case_inputs import BATCH, Input, ids, mask, positions, real, sizes_in, targets, written
from equivtest.families.module.oracle import prove_exact
from equivtest.kit.case import require
from equivtest.kit.oracle import expect
from equivtest.property import Property, Space
from equivtest.ranks.first_cause import first_cause
from equivtest.verdicts.claims import keeps_layout_of_parameter, repeats_itself
from equivtest.verdicts.elements import is_too_wide

__all__ = ["Input", "ids", "mask", "module_property", "positions", "real", "targets"]

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from equivtest.kit.case import Shape
    from equivtest.ranks.backend import Backend
    from equivtest.ranks.pool import Pool
    from equivtest.ranks.reply import Reply

CLAIMS = (*(claim for claim in DEFAULT_CLAIMS if claim is not keeps_layout_of_parameter), repeats_itself)
"""What is claimed of a module; how it divides its parameters is its own affair."""

BATCH_SIZES = (1, 2, 3, 4, 5, 7)
OTHER_SIZES = (2, 3, 5)
"""Of which a size is drawn that nobody says more of: few, as every one of them is run before anything is drawn."""

CONTRACT_OF = "equivtest.families.module.subject:contract_of"


def module_property(
    build: str,
    parallelize: str,
    x_shapes: Sequence[Shape] | None = None,
    *,
    inputs: Mapping[str, Input] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    positional: Sequence[str] = (),
    outputs: Sequence[str] = (),
    loss: str = "",
    batch: str | None = None,
    examples: Sequence[ModuleCase] = (),
    conclusive_dtypes: Sequence[str] = (),
    without_collectives: str = "",
) -> Property:
    """That a parallelized module computes what the unsharded one computes, forward and backward.

    Assigned to a name of a test module, it is collected by pytest and judged as the shipped properties are.

    Args:
        build: 'package.module:NAME' of a function without arguments that makes the unsharded module.  What of it
            requires a gradient is trained.  Where it only adds, multiplies, takes maxima and moves
            values, it is judged on integers, for equality in every dtype; else on real numbers, within a bound, in
            float64 and, where the bound says something, in float32: a block rather than a model, since bounds grow.
        parallelize: 'package.module:NAME' of a function (module, mesh) -> module, which every rank calls.
        x_shapes: Of a module of one floating-point x: of which its shape is drawn, the simplest first; in each dtype
            those whose sums it holds, or
            whose bounds say something, and on so many ranks those of which each can have a row of a divided batch.
        inputs: Of any other module: its inputs by name, made by `real`, `ids`, `mask`, `targets` and `positions`, with
            shapes of numbers and of names of sizes; of a divided batch each rank has rows of those whose first dim is
            'batch', and the whole of all others.
        sizes: Of which each named size is drawn, the simplest first; BATCH_SIZES or OTHER_SIZES where it is not named.
        positional: Which inputs are handed over by place, in order; all others are by name.
        outputs: Which of several outputs are judged, ('logits',) or ('0', '1.hidden'); empty: all, None is none.
        loss: The output from which backward starts, with 1.  '': one that is called 'loss', or the only one, where it
            is one number; else backward starts from all, each with a cotangent of its own.
        batch: 'whole': the result takes the whole batch and gives the whole output on every rank.  'mean of parts':
            each rank has rows of its own, and gradients are averaged over the ranks; 'sum of parts': they are added up.
            None: 'mean of parts' where DistributedDataParallel, fully_shard or the like is in what `parallelize`
            makes, which the ranks are asked for once; else 'whole'.  Where a rank raises, hangs or dies when it is
            asked, the property ends as misuse.
        examples: Cases that are always run.
        conclusive_dtypes: In which a conformance run wants conclusions, where some hold no sums; () for all.
        without_collectives: Why the parallel module calls no collective, where that is right.

    Raises:
        Misuse: x_shapes is no sequence of shapes, inputs are no inputs, both or neither is given, or there is no such
            batch.
    """
    require(batch is None or batch in BATCHES, f"batch must be one of {', '.join(BATCHES)} or None, got {batch!r}")
    require(
        (x_shapes is None) != (inputs is None),
        "a module takes x_shapes, of one floating-point x, or inputs={'name': ids(vocab=11, shape=('batch', 'seq'))}, "
        f"got {'neither' if inputs is None else 'both'}",
    )
    if inputs is None:
        require(
            isinstance(x_shapes, Sequence)
            and bool(x_shapes)
            and all(isinstance(shape, Sequence) for shape in x_shapes),
            f"x_shapes must hold shapes, one at least, such as [(2, 3), (4, 3)], got {x_shapes!r}",
        )
        require(not sizes and not positional, "sizes and positional go with inputs, not with x_shapes")
        fields: Fields = (("outputs", tuple(outputs)), ("loss", loss))
        door = Door(build, parallelize, "x_shape", tuple(map(tuple, x_shapes or ())), fields)
    else:
        fields = (
            ("inputs", written(inputs)),
            ("positional", tuple(positional)),
            ("outputs", tuple(outputs)),
            ("loss", loss),
        )
        door = Door(build, parallelize, "sizes", _combinations(sizes_in(written(inputs)), sizes or {}), fields)
    return Property(
        subject="module",
        statement=f"{parallelize} computes what {build} computes.",
        source=build,
        cases=partial(_cases, door, batch or WHOLE),
        claims=CLAIMS,
        examples=tuple(examples),
        shards=False,
        conclusive_dtypes=tuple(conclusive_dtypes),
        without_collectives=without_collectives,
        leaves_out=partial(_left_out, door, batch or WHOLE),
        resolve=partial(_resolve, door) if batch is None else None,
    )


Fields = tuple[tuple[str, Any], ...]


class Door(NamedTuple):
    """A module as its property describes it.

    Attributes:
        varied: The field of a case in which layouts differ, 'x_shape' or 'sizes'.
        layouts: What it holds, the simplest first.
        fields: What every case has alike.
    """

    build: str
    parallelize: str
    varied: str
    layouts: tuple[Any, ...]
    fields: Fields

    @property
    def unsharded(self) -> Door:
        """The module alone, the same for every way to parallelize it."""
        return self._replace(parallelize="")

    def make(self, **fields: Any) -> ModuleCase:
        """A case of the module."""
        return ModuleCase(build=self.build, parallelize=self.parallelize, **dict(self.fields), **fields)


def _combinations(names: Sequence[str], sizes: Mapping[str, Sequence[int]]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Of each size all values beside the simplest of the others, then all of them further on at once.

    Raises:
        Misuse: a size is in no shape, or has no values of at least 1.
    """
    unknown = [name for name in sizes if name not in names]
    require(not unknown, f"sizes must be named in shapes of inputs, got {', '.join(unknown)}")
    tables = {name: tuple(sizes.get(name, BATCH_SIZES if name == BATCH else OTHER_SIZES)) for name in names}
    for name, table in tables.items():
        is_table = bool(table) and all(isinstance(size, int) and size >= 1 for size in table)
        require(is_table, f"sizes of {name} must be numbers of at least 1, one at least, got {table}")
    simplest = {name: table[0] for name, table in tables.items()}
    one_by_one = [{**simplest, name: size} for name, table in tables.items() for size in table]
    longest = max(map(len, tables.values()), default=1)
    together = [
        {name: table[min(place, len(table) - 1)] for name, table in tables.items()} for place in range(1, longest)
    ]
    return tuple(dict.fromkeys(tuple(found.items()) for found in (*one_by_one, *together))) or ((),)


def _resolve(door: Door, prop: Property, pool: Pool, space: Space) -> Property:
    """The property of a batch that is divided where what `parallelize` makes reduces gradients."""
    case = door.make(world_size=space.world_sizes[0], **{door.varied: door.layouts[0]})
    batch = _batch_of(case, pool, space)
    return replace(prop, cases=partial(_cases, door, batch), leaves_out=partial(_left_out, door, batch), resolve=None)


_batches: dict[tuple[ModuleCase, Backend], str] = {}
"""What ranks have answered, by the case that they were asked on."""


def _batch_of(case: ModuleCase, pool: Pool, space: Space) -> str:
    """What the ranks say, in the first dtype that they can compute with.

    'whole' where the backend refuses in every dtype what `parallelize` calls: it refuses each case alike.

    Raises:
        Misuse: `parallelize` makes no module, or other ones on other ranks; or a rank raised, hung or died.
    """
    for each in (replace(case, dtype=dtype) for dtype in space.dtypes):
        if (each, pool.backend) in _batches:
            return _batches[each, pool.backend]
        replies = pool.run(CONTRACT_OF, each)
        if misused := next((reply for reply in replies if reply.outcome == "misused"), None):
            raise Misuse(misused.error_text)
        if cause := first_cause(replies):
            raise Misuse(_on_silence(each, cause))
        if all(reply.outcome == "answered" for reply in replies):
            return _batches.setdefault((each, pool.backend), _agreed(each, replies))
    return WHOLE


def _on_silence(case: ModuleCase, cause: Reply) -> str:
    """What kept the ranks from an answer, and the way out."""
    what = {"timed_out": "did not answer", "lost": "ended"}.get(cause.outcome, f"raised {cause.error_type}")
    said = (cause.error_text.strip().splitlines() or [""])[0]
    return (
        f"{case.parallelize}: whether what it makes reduces gradients is not known: asked in {case.dtype}, rank "
        f"{cause.rank} of {case.world_size} {what}{': ' * bool(said)}{said}. Mend that, or say how rows are handed "
        "out: module_property(..., batch='whole'), 'mean of parts' or 'sum of parts'"
    )


def _agreed(case: ModuleCase, replies: Sequence[Reply]) -> str:
    said = case.answer_names()[0]
    reducing = [reply.rank for reply in replies if bool(reply.answers[0].tensors[said].local)]
    require(
        len(reducing) in (0, len(replies)),
        f"{case.parallelize} makes modules that reduce their gradients on ranks {reducing} of {len(replies)} alone: "
        "make the same on every rank",
    )
    return MEAN_OF_PARTS if reducing else WHOLE


def _cases(door: Door, batch: str, space: Space) -> SearchStrategy[ModuleCase]:
    from equivtest.families.module.strategy import module_cases

    layouts = {size: _layouts(door, batch, size, space.dtypes) for size in space.world_sizes}
    return module_cases(space, partial(door.make, batch=batch), door.varied, layouts)


def _left_out(door: Door, batch: str, space: Space) -> tuple[str, ...]:
    """The dtypes in which no sums are exact and no bounds say anything; none where it is so in every dtype there is."""
    others = tuple(dtype for dtype in limits.DTYPES if dtype not in space.dtypes)
    judged = {dtype for size in space.world_sizes for dtype in _tried(door.unsharded, batch, size, space.dtypes)[0]}
    if not judged and not any(_tried(door.unsharded, batch, size, others)[0] for size in space.world_sizes):
        return ()  # the property is mistaken, which it says where its cases are drawn
    return tuple(dtype for dtype in space.dtypes if dtype not in judged)


Layout = tuple[str, Any, int]
"""(mode, x_shape or sizes, largest magnitude) of a case."""


def _layouts(door: Door, batch: str, world_size: int, dtypes: tuple[str, ...]) -> dict[str, list[Layout]]:
    """dtype -> of every case whose sums are exact; where there is none, of every case whose bounds say something.

    Raises:
        Misuse: there is none of these either, or a shape does not fit the module.
    """
    fitting, reasons = _tried(door.unsharded, batch, world_size, dtypes)
    if not fitting:
        raise Misuse(reasons[0])
    return fitting


@functools.lru_cache(maxsize=64)
def _tried(
    door: Door, batch: str, world_size: int, dtypes: tuple[str, ...]
) -> tuple[dict[str, list[Layout]], list[str]]:
    """What `_layouts` gives, empty where there is none, and why cases were left out."""
    varied, layouts = door.varied, door.layouts
    if batch != WHOLE and dtypes:
        layouts = _divisible(door, batch, world_size, dtypes[0])
    make = functools.partial(door.make, world_size=world_size, batch=batch)
    exact = [
        make(dtype=dtype, largest=largest, **{varied: layout})
        for dtype in dtypes
        for layout, largest in itertools.product(layouts, LARGEST[dtype])
    ]
    real = [
        make(dtype=dtype, values=((REAL_MODE, 0),), **{varied: layout})
        for dtype, layout in itertools.product(REAL_DTYPES, layouts)
        if dtype in dtypes
    ]
    fitting, reasons = _fitting(door, exact, prove_exact)
    if not fitting:
        fitting, more_reasons = _fitting(door, real, _require_bounds)
        reasons = more_reasons or reasons
    return fitting, list(map(str, reasons))


def _divisible(door: Door, batch: str, world_size: int, dtype: str) -> tuple[Any, ...]:
    """The layouts of which each of so many ranks can have rows.

    Raises:
        Misuse: there is none.
    """
    fitting, reasons = [], []
    for layout in door.layouts:
        try:
            door.make(world_size=world_size, dtype=dtype, batch=batch, **{door.varied: layout})
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
    door: Door, cases: Sequence[ModuleCase], require_fit: Callable[[ModuleCase], object]
) -> tuple[dict[str, list[Layout]], list[Misuse]]:
    """By dtype the layouts of the cases that fit; why the others do not."""
    fitting: dict[str, list[Layout]] = {}
    reasons = []
    for case in cases:
        try:
            require_fit(case)
        except Misuse as error:
            reasons.append(error)
        else:
            layout = (case.values[0][0], getattr(case, door.varied), case.largest)
            fitting.setdefault(case.dtype, []).append(layout)
    return fitting, reasons


def _require_bounds(case: ModuleCase) -> None:
    """Raises Misuse where some answer may be off by so much that nothing is to be concluded."""
    for name, tensor in expect(case, 0).tensors.items():
        if tensor.derivation.startswith("undecided: "):
            raise Misuse(
                f"{case.build}: in {case.dtype}, with {case.takes}: {tensor.derivation}: a correct module may choose "
                "otherwise; judge what is before the choice and what is behind it"
            )
        if is_too_wide(tensor):
            raise Misuse(
                f"{case.build}: in {case.dtype}, with {case.takes}, the roundings of a correct module may "
                f"come to more than {limits.TOO_WIDE:g} of {name}: judge a smaller part, or take smaller shapes "
                "(to anything where torch.finfo(dtype).min in a mask may overflow, or equal numbers are compared)"
            )

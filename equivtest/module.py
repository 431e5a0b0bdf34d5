"""A property of a module of your own, in one line of a test file."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

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
    require_parts,
)
from equivtest.families.module.oracle import prove_exact
from equivtest.kit.case import require
from equivtest.kit.oracle import expect
from equivtest.property import Property, Space
from equivtest.ranks.first_cause import first_cause
from equivtest.verdicts.claims import keeps_layout_of_parameter, repeats_itself
from equivtest.verdicts.elements import is_too_wide

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from equivtest.kit.case import Shape
    from equivtest.ranks.backend import Backend
    from equivtest.ranks.pool import Pool
    from equivtest.ranks.reply import Reply

CLAIMS = (*(claim for claim in DEFAULT_CLAIMS if claim is not keeps_layout_of_parameter), repeats_itself)
"""What is claimed of a module; how it divides its parameters is its own affair."""

CONTRACT_OF = "equivtest.families.module.subject:contract_of"


def module_property(
    build: str,
    parallelize: str,
    x_shapes: Sequence[Shape],
    *,
    batch: str | None = None,
    examples: Sequence[ModuleCase] = (),
    conclusive_dtypes: Sequence[str] = (),
    without_collectives: str = "",
) -> Property:
    """That a parallelized module computes what the unsharded one computes, forward and backward.

    Assigned to a name of a test module, it is collected by pytest and judged as the shipped properties are.

    Args:
        build: 'package.module:NAME' of a function without arguments that makes the unsharded module: one floating-point
            tensor in, one out; all parameters are trained.  Where it only adds, multiplies, takes maxima and moves
            values, it is judged on integers, for equality in every dtype; else on real numbers, within a bound, in
            float64 and, where the bound says something, in float32: a block rather than a model, since bounds grow.
        parallelize: 'package.module:NAME' of a function (module, mesh) -> module, which every rank calls.
        x_shapes: Of which the input's shape is drawn, the simplest first; in each dtype those whose sums it holds, or
            whose bounds say something, and on so many ranks those of which each can have a row of a divided batch.
        batch: 'whole': the result takes the whole x and gives the whole output on every rank.  'mean of parts': each
            rank has rows of its own, and gradients are averaged over the ranks; 'sum of parts': they are added up.
            None: 'mean of parts' where DistributedDataParallel, fully_shard or the like is in what `parallelize`
            makes, which the ranks are asked for once; else 'whole'.  Where a rank raises, hangs or dies when it is
            asked, the property ends as misuse.
        examples: Cases that are always run.
        conclusive_dtypes: In which a conformance run wants conclusions, where some hold no sums; () for all.
        without_collectives: Why the parallel module calls no collective, where that is right.

    Raises:
        Misuse: x_shapes is no sequence of shapes, or there is no such batch.
    """
    require(batch is None or batch in BATCHES, f"batch must be one of {', '.join(BATCHES)} or None, got {batch!r}")
    require(
        isinstance(x_shapes, Sequence) and bool(x_shapes) and all(isinstance(shape, Sequence) for shape in x_shapes),
        f"x_shapes must hold shapes, one at least, such as [(2, 3), (4, 3)], got {x_shapes!r}",
    )
    shapes = tuple(map(tuple, x_shapes))
    return Property(
        subject="module",
        statement=f"{parallelize} computes what {build} computes.",
        source=build,
        cases=partial(_cases, build, parallelize, shapes, batch or WHOLE),
        claims=CLAIMS,
        examples=tuple(examples),
        shards=False,
        conclusive_dtypes=tuple(conclusive_dtypes),
        without_collectives=without_collectives,
        leaves_out=partial(_left_out, build, parallelize, shapes, batch or WHOLE),
        resolve=partial(_resolve, build, parallelize, shapes) if batch is None else None,
    )


def _resolve(
    build: str, parallelize: str, x_shapes: tuple[Shape, ...], prop: Property, pool: Pool, space: Space
) -> Property:
    """The property of a batch that is divided where what `parallelize` makes reduces gradients."""
    case = ModuleCase(world_size=space.world_sizes[0], build=build, parallelize=parallelize, x_shape=x_shapes[0])
    batch = _batch_of(case, pool, space)
    return replace(
        prop,
        cases=partial(_cases, build, parallelize, x_shapes, batch),
        leaves_out=partial(_left_out, build, parallelize, x_shapes, batch),
        resolve=None,
    )


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
    reducing = [reply.rank for reply in replies if bool(reply.answers[0].tensors["output"].local)]
    require(
        len(reducing) in (0, len(replies)),
        f"{case.parallelize} makes modules that reduce their gradients on ranks {reducing} of {len(replies)} alone: "
        "make the same on every rank",
    )
    return MEAN_OF_PARTS if reducing else WHOLE


def _cases(
    build: str, parallelize: str, x_shapes: tuple[Shape, ...], batch: str, space: Space
) -> SearchStrategy[ModuleCase]:
    from equivtest.families.module.strategy import module_cases

    layouts = {size: _layouts(build, parallelize, x_shapes, batch, size, space.dtypes) for size in space.world_sizes}
    return module_cases(space, build=build, parallelize=parallelize, batch=batch, layouts=layouts)


def _left_out(build: str, parallelize: str, x_shapes: tuple[Shape, ...], batch: str, space: Space) -> tuple[str, ...]:
    """The dtypes in which no sums are exact and no bounds say anything; none where it is so in every dtype there is."""
    others = tuple(dtype for dtype in limits.DTYPES if dtype not in space.dtypes)
    tried = partial(_tried, build, parallelize, x_shapes, batch)
    judged = {dtype for size in space.world_sizes for dtype in tried(size, space.dtypes)[0]}
    if not judged and not any(tried(size, others)[0] for size in space.world_sizes):
        return ()  # the property is mistaken, which it says where its cases are drawn
    return tuple(dtype for dtype in space.dtypes if dtype not in judged)


Layout = tuple[str, "Shape", int]
"""(mode, x_shape, largest magnitude) of a case."""


def _layouts(
    build: str, parallelize: str, x_shapes: tuple[Shape, ...], batch: str, world_size: int, dtypes: tuple[str, ...]
) -> dict[str, list[Layout]]:
    """dtype -> of every case whose sums are exact; where there is none, of every case whose bounds say something.

    Raises:
        Misuse: there is none of these either, or a shape does not fit the module.
    """
    fitting, reasons = _tried(build, parallelize, x_shapes, batch, world_size, dtypes)
    if not fitting:
        raise Misuse(reasons[0])
    return fitting


@functools.lru_cache(maxsize=64)
def _tried(
    build: str, parallelize: str, x_shapes: tuple[Shape, ...], batch: str, world_size: int, dtypes: tuple[str, ...]
) -> tuple[dict[str, list[Layout]], list[str]]:
    """What `_layouts` gives, empty where there is none, and why cases were left out."""
    x_shapes = x_shapes if batch == WHOLE else _divisible(build, x_shapes, world_size)
    make = functools.partial(ModuleCase, world_size=world_size, build=build, parallelize=parallelize, batch=batch)
    exact = [
        make(dtype=dtype, x_shape=x_shape, largest=largest)
        for dtype in dtypes
        for x_shape, largest in itertools.product(x_shapes, LARGEST[dtype])
    ]
    real = [
        make(dtype=dtype, x_shape=x_shape, values=((REAL_MODE, 0),))
        for dtype, x_shape in itertools.product(REAL_DTYPES, x_shapes)
        if dtype in dtypes
    ]
    fitting, reasons = _fitting(exact, prove_exact)
    if not fitting:
        fitting, more_reasons = _fitting(real, _require_bounds)
        reasons = more_reasons or reasons
    return fitting, list(map(str, reasons))


def _divisible(build: str, x_shapes: tuple[Shape, ...], world_size: int) -> tuple[Shape, ...]:
    """The shapes of which each of so many ranks can have rows.

    Raises:
        Misuse: there is none.
    """
    fitting, reasons = [], []
    for x_shape in x_shapes:
        try:
            require_parts(build, x_shape, world_size)
        except Misuse as error:
            reasons.append(str(error))
        else:
            fitting.append(x_shape)
    if not fitting:
        raise Misuse(f"no x of x_shapes {', '.join(map(str, x_shapes))} can be divided: {'; '.join(reasons)}")
    return tuple(fitting)


def _fitting(
    cases: Sequence[ModuleCase], require_fit: Callable[[ModuleCase], object]
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
            fitting.setdefault(case.dtype, []).append((case.values[0][0], case.x_shape, case.largest))
    return fitting, reasons


def _require_bounds(case: ModuleCase) -> None:
    """Raises Misuse where some answer may be off by so much that nothing is to be concluded."""
    for name, tensor in expect(case, 0).tensors.items():
        if is_too_wide(tensor):
            raise Misuse(
                f"{case.build}: in {case.dtype}, with x of shape {case.x_shape}, the roundings of a correct module may "
                f"come to more than {limits.TOO_WIDE:g} of {name}: judge a smaller part, or take smaller shapes "
                "(to anything where torch.finfo(dtype).min in a mask may overflow, or equal numbers are compared)"
            )

"""A property of a module of your own, in one line of a test file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from equivtest.base import limits
from equivtest.base.functions import Named, name_of
from equivtest.cases.case import require
from equivtest.errors import Misuse
from equivtest.programs.candidates import Door, Fields, combinations, judged_layouts, refusals, tried
from equivtest.programs.case import BATCHES, MEAN_OF_PARTS, PARTS_OF_WHOLE, REAL_DTYPES, WHOLE, ModuleCase
from equivtest.programs.fields import require_axes
from equivtest.programs.inputs import Input, sizes_in, written
from equivtest.programs.mesh import mesh_along
from equivtest.programs.state import STATES
from equivtest.property import Property, Space
from equivtest.ranks.first_cause import first_cause
from equivtest.verdicts.claims import keeps_layout_of_parameter, repeats_itself, trains_like_unsharded
from equivtest.verdicts.judging import DEFAULT_CLAIMS

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from equivtest.cases.case import Shape
    from equivtest.ranks.backend import Backend
    from equivtest.ranks.pool import Pool
    from equivtest.ranks.reply import Reply

CLAIMS = (*(claim for claim in DEFAULT_CLAIMS if claim is not keeps_layout_of_parameter), repeats_itself)
"""What is claimed of a module; how it divides its parameters is its own affair."""

CONTRACT_OF = "equivtest.programs.run.module:contract_of"


def module_property(
    build: Named,
    parallelize: Named,
    x_shapes: Sequence[Shape] | None = None,
    *,
    inputs: Mapping[str, Input] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    positional: Sequence[str] = (),
    outputs: Sequence[str] = (),
    loss: str = "",
    batch: str | None = None,
    optimizer: Named = "",
    step: Named = "",
    steps: int | None = None,
    micro_batches: int = 1,
    max_norm: float = 0.0,
    norm_type: float = 2.0,
    examples: Sequence[ModuleCase] = (),
    conclusive_dtypes: Sequence[str] = (),
    without_collectives: str = "",
    by_parts: bool | None = None,
    axes: Sequence[str] = (),
    batch_axis: str = "",
    placed: Named = "",
    state: str | None = None,
    zero_or_none: Sequence[str] = (),
    needs_world: bool = False,
    set_up: Named = "",
    tear_down: Named = "",
    world_sizes: Sequence[int] = (),
    limit_s: float = limits.CASE_S,
) -> Property:
    """That a parallelized module computes what the unsharded one computes, forward and backward.

    Assigned to a name of a test module, it is collected by pytest and judged as the shipped properties are.

    Args:
        build: A function without arguments that makes the unsharded module.  It is sent to the ranks as file and
            name; a name, 'package.module:NAME' or 'file.py:NAME', is as good, here and below.  Those of its
            parameters that require a gradient are trained.  A module that only adds, multiplies, takes maxima and
            moves values is judged on integers, for equality in every dtype.  Any other is judged on real numbers,
            within a bound: in float64 and float32 that of the whole module where it says something, else that of
            each of its parts.
        parallelize: 'package.module:NAME' of a function (module, mesh) -> module, which every rank calls.
        x_shapes: Shapes that x is drawn from, the simplest first, where the module takes one floating-point x.  A
            shape is left out in a dtype that cannot hold its sums, or in which its bounds say nothing, and, where the
            batch is divided, on more ranks than it has rows.
        inputs: The inputs of any other module, by name, made by `real`, `ids`, `mask`, `targets` and `positions`,
            with shapes of numbers and of names of sizes.  Where the batch is divided, each rank has rows of the
            inputs whose first dim is 'batch', and the whole of all others.
        sizes: What each named size is drawn from, the simplest first; a name that is left out is drawn from
            BATCH_SIZES or OTHER_SIZES.
        positional: Names of the inputs that are handed over by place, in order; all others are handed over by name.
        outputs: Names of the outputs that are judged, ('logits',) or ('0', '1.hidden'); empty: all but those that
            are None.
        loss: The output from which backward starts, with 1.  '': one that is called 'loss', or the only one, where it
            is one number; else backward starts from all, each with a cotangent of its own.
        batch: 'whole': the result takes the whole batch and gives the whole output on every rank.  'mean of parts':
            each rank has rows of its own, and gradients are averaged over the ranks; 'sum of parts': they are added up.
            'parts of the whole', with a `step`: each rank has rows of its own, and the gradients, the numbers that the
            step reports and the updates are those of the whole batch.
            None: 'mean of parts', or with a step 'parts of the whole', where what `parallelize` makes has
            DistributedDataParallel, fully_shard or the like in it, else 'whole'.  The ranks are asked once; where one
            raises, hangs or dies then, the property ends as misuse.
        optimizer: 'package.module:NAME' of a function (module) -> torch.optim.Optimizer.  It is called with the
            parallel module and with the unsharded one; the optimizer's own code, applied to one tensor after the
            other, judges the updates from the gradients that the ranks hold.
        step: 'package.module:NAME' of a function (module, mesh, micro_batches, optimizer) -> outputs: one step of
            training as every rank runs it, from forward to update.  See docs/how-to/training.md.
        steps: Number of steps, each on inputs of its own; None: 2 with an optimizer, else 1.
        micro_batches: Number of micro-batches that a rank's rows are cut into for a step.
        max_norm: The norm that gradients are clipped to before the update; 0: they are not clipped.
        norm_type: The type of that norm: 1, 2 or math.inf.
        examples: Cases that are always run.
        conclusive_dtypes: The dtypes in which a conformance run wants conclusions; (): all.
        without_collectives: Why the parallel module calls no collective, where that is right.
        by_parts: Whether each submodule is judged by itself, from what the ranks held where it begins, so that a bound
            says something however deep the module is: on real numbers, in every dtype.  None: only in those dtypes in
            which the bound of the whole module says nothing, and only where integers judge the module in no dtype.
            In a `step` the submodules are not judged: what the ranks held there makes the bounds of all else narrow.
        axes: Names of the axes of the mesh that `parallelize` is handed, such as ('dp', 'tp'): meshes of every shape
            are drawn, sizes of 1 among them.  Empty: one axis without a name.
        batch_axis: The axis along which a divided batch is divided; along the others all ranks have the same rows.
            '': the first.
        placed: 'package.module:NAME' of a function (parallel module, name of a parameter) -> (tensor, indices), for
            programs from which it cannot be read which elements a rank holds: see `ModuleCase.placed`.
        state: What the buffers follow that the forward changes, if each rank has rows of its own.  'own rows': a rank's
            buffers are the unsharded module's after its own rows, as of BatchNorm under DistributedDataParallel.
            'whole batch': every rank's buffers are the unsharded module's after the whole batch, as of SyncBatchNorm
            or of counts that an all_reduce adds up; the outputs are then rows of what it gives on the whole batch, and
            gradients are its gradients, divided by the ranks if they are averaged.  None: no buffer depends on the
            rows, or a `step` leaves those of the whole batch.
        zero_or_none: Patterns of names of parameters and inputs, such as ('experts.*',): their gradient may be None on
            ranks if each of its elements is 0 in the unsharded module, as of an expert that no token reaches.
        needs_world: True if the program reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR or MASTER_PORT from the
            environment.
        set_up, tear_down: 'package.module:NAME' of functions (mesh) -> None that ranks call around each draw; either
            implies needs_world.  With set_up alone each case has fresh ranks.
        world_sizes: Numbers of ranks that the program runs on, such as those that divide its heads; empty: any.  A run
            on others leaves it out there, and says so.  What else it does not support it says by `NotSupported`.
        limit_s: Seconds that one visit of one case may take on all ranks, before it has timed out; at most 300.

    Raises:
        Misuse: x_shapes is no sequence of shapes, inputs are no inputs, both or neither is given, or there is no such
            batch; or limit_s is no such number.
    """
    build, parallelize = name_of(build, "build"), name_of(parallelize, "parallelize")
    optimizer, step, placed = name_of(optimizer, "optimizer"), name_of(step, "step"), name_of(placed, "placed")
    set_up, tear_down = name_of(set_up, "set_up"), name_of(tear_down, "tear_down")
    require(batch is None or batch in BATCHES, f"batch must be one of {', '.join(BATCHES)} or None, got {batch!r}")
    require(
        (x_shapes is None) != (inputs is None),
        "a module takes x_shapes, of one floating-point x, or inputs={'name': ids(vocab=11, shape=('batch', 'seq'))}, "
        f"got {'neither' if inputs is None else 'both'}",
    )
    require(state is None or state in STATES, f"state must be {' or '.join(map(repr, STATES))}, got {state!r}")
    require_axes(tuple(axes), batch_axis)
    require(
        all(isinstance(size, int) and size >= 1 for size in world_sizes),
        f"world_sizes must be numbers of ranks, of at least 1, got {tuple(world_sizes)}",
    )
    for name, names in (
        ("outputs", outputs), ("positional", positional), ("axes", axes), ("zero_or_none", zero_or_none)
    ):  # fmt: skip
        require(not isinstance(names, str), f"{name} must hold names, such as {name}=({names!r},), got {names!r}")
    common: Fields = (
        ("axes", tuple(axes)), ("batch_axis", batch_axis), ("placed", placed), ("state", state or ""),
        ("zero_or_none", tuple(zero_or_none)),
        ("needs_world", needs_world or bool(set_up or tear_down)), ("set_up", set_up),
        ("tear_down", tear_down), ("optimizer", optimizer), ("step", step),
        ("steps", (2 if optimizer else 1) if steps is None else steps), ("micro_batches", micro_batches),
        ("max_norm", float(max_norm)), ("norm_type", float(norm_type)),
    )  # fmt: skip
    if inputs is None:
        _require_shapes(x_shapes)
        require(not sizes and not positional, "sizes and positional go with inputs, not with x_shapes")
        fields: Fields = (*common, ("outputs", tuple(outputs)), ("loss", loss))
        door = Door(build, parallelize, "x_shape", tuple(map(tuple, x_shapes or ())), fields, by_parts)
    else:
        fields = (
            *common,
            ("inputs", written(inputs)),
            ("positional", tuple(positional)),
            ("outputs", tuple(outputs)),
            ("loss", loss),
        )
        door = Door(build, parallelize, "sizes", combinations(sizes_in(written(inputs)), sizes or {}), fields, by_parts)
    return Property(
        subject="module",
        statement=f"{parallelize} computes what {build} computes.",
        source=build,
        cases=partial(_cases, door, batch or WHOLE),
        claims=(*CLAIMS, trains_like_unsharded) if optimizer else CLAIMS,
        examples=tuple(examples),
        shards=False,
        conclusive_dtypes=tuple(conclusive_dtypes),
        without_collectives=without_collectives,
        leaves_out=partial(_left_out, door, batch or WHOLE),
        aspects=partial(_aspects, door, batch or WHOLE),
        world_sizes=tuple(world_sizes),
        resolve=partial(_resolve, door) if batch is None else None,
        limit_s=limit_s,
    )


def _require_shapes(x_shapes: object) -> None:
    """Raises Misuse for what is no sequence of shapes, such as one shape."""
    is_sequence = isinstance(x_shapes, Sequence) and not isinstance(x_shapes, str)
    shapes = list(x_shapes) if isinstance(x_shapes, Sequence) and is_sequence else []
    one = f": write [{tuple(shapes)}] for one shape" if shapes and all(isinstance(size, int) for size in shapes) else ""
    are_shapes = all(isinstance(shape, Sequence) and not isinstance(shape, str) for shape in shapes)
    require(
        bool(shapes) and are_shapes,
        f"x_shapes must hold shapes, one at least, such as [(2, 3), (4, 3)], got {x_shapes!r}{one}",
    )
    other = next((shape for shape in shapes if not all(isinstance(size, int) for size in shape)), None)
    require(
        other is None,
        f"a shape of x_shapes must hold numbers, got {other!r}: names of sizes go with inputs={{'x': real({other!r})}}",
    )


def _resolve(door: Door, prop: Property, pool: Pool, space: Space) -> Property:
    """The property of a batch that is divided where what `parallelize` makes reduces gradients."""
    num_ranks = space.world_sizes[0]
    mesh = mesh_along(num_ranks, door.axes, str(dict(door.fields)["batch_axis"]))
    cases = _made_in(
        space.dtypes, partial(door.make, world_size=num_ranks, mesh=mesh, **{door.varied: door.layouts[0]})
    )
    batch = _batch_of(cases, pool, prop.limit_s)
    if cases[0].training.step and batch == MEAN_OF_PARTS:
        batch = PARTS_OF_WHOLE
    return replace(
        prop,
        cases=partial(_cases, door, batch),
        leaves_out=partial(_left_out, door, batch),
        aspects=partial(_aspects, door, batch),
        resolve=None,
    )


def _made_in(dtypes: Sequence[str], make: Callable[..., ModuleCase]) -> list[ModuleCase]:
    """Cases in those dtypes that the unsharded module takes; of steps in REAL_DTYPES if there is none of these.

    Raises:
        Misuse: The module takes none of them.
    """
    made: list[ModuleCase] = []
    mistakes: list[Misuse] = []
    for dtype in dict.fromkeys((*dtypes, *REAL_DTYPES)):
        try:
            case = make(dtype=dtype)
        except Misuse as error:
            mistakes.append(error)
        else:
            made += [case] * (dtype in dtypes or (case.training.is_stepped and not made))
    if not made:
        raise mistakes[0]
    return made


_batches: dict[tuple[ModuleCase, Backend], str] = {}
"""What ranks have answered, by the case that they were asked on."""


def _batch_of(cases: Sequence[ModuleCase], pool: Pool, limit_s: float) -> str:
    """What the ranks say, of the first case in whose dtype they can compute.

    'whole' where in every dtype the backend refuses what `parallelize` calls, or that declines: it does so in each.

    Raises:
        Misuse: `parallelize` makes no module, or other ones on other ranks; or a rank raised, hung or died; or it
            declines the mesh on which it was asked, of several.
    """
    declined = ""
    for each in cases:
        if (each, pool.backend) in _batches:
            return _batches[each, pool.backend]
        replies = pool.run(CONTRACT_OF, each, limit_s=limit_s)
        if misused := next((reply for reply in replies if reply.outcome == "misused"), None):
            raise Misuse(misused.error_text)
        if cause := first_cause(replies):
            raise Misuse(_on_silence(each, cause))
        if all(reply.outcome == "answered" for reply in replies):
            return _batches.setdefault((each, pool.backend), _agreed(each, replies))
        declined = declined or next((reply.error_text for reply in replies if reply.outcome == "declined"), "")
    if declined and len((case := cases[0]).mesh_shape) > 1:
        raise Misuse(
            f"{case.parallelize}: whether what it makes reduces gradients is not known: it does not support the mesh "
            f"{case.mesh_shape} on which it was asked: {declined}. Say how rows are handed out: "
            "module_property(..., batch='whole'), 'mean of parts' or 'sum of parts'"
        )
    return WHOLE


def _on_silence(case: ModuleCase, cause: Reply) -> str:
    """What kept the ranks from an answer, the way out, and the rank's traceback, stacks or output."""
    what = {"timed_out": "did not answer", "lost": "ended"}.get(cause.outcome, f"raised {cause.error_type}")
    said = (cause.error_text.strip().splitlines() or [""])[0]
    detail = "".join(f"\n  {line}" for line in cause.detail.strip().splitlines())
    return (
        f"{case.parallelize}: whether what it makes reduces gradients is not known: asked in {case.dtype}, rank "
        f"{cause.rank} of {case.world_size} {what}{': ' * bool(said)}{said}. Mend that, or say how rows are handed "
        f"out: module_property(..., batch='whole'), 'mean of parts' or 'sum of parts'{detail}"
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
    from equivtest.programs.strategy import module_cases

    layouts = {size: judged_layouts(door, batch, size, space.dtypes) for size in space.world_sizes}
    return module_cases(space, partial(door.make, batch=batch), door.varied, layouts)


def _aspects(door: Door, batch: str, space: Space) -> list[str]:
    """Names the aspects of all cases, in the order of the meshes and layouts that they are drawn from."""
    found: dict[str, None] = {}
    for size in space.world_sizes:
        for mesh, by_dtype in judged_layouts(door, batch, size, space.dtypes).items():
            for dtype, layouts in by_dtype.items():
                for mode, layout, largest, by_parts in layouts:
                    fields = {door.varied: layout, "largest": largest, "by_parts": by_parts, "values": ((mode, 0),)}
                    case = door.make(world_size=size, mesh=mesh, dtype=dtype, batch=batch, **fields)
                    found |= dict.fromkeys(sorted(case.aspects))
    return list(found)


def _left_out(door: Door, batch: str, space: Space) -> dict[str, str]:
    """The dtypes in which the unsharded module does not run, with the reason, or no sums are exact and bounds too wide.

    None if that is so in every dtype there is.
    """
    others = tuple(dtype for dtype in limits.DTYPES if dtype not in space.dtypes)
    judged = {
        dtype
        for size in space.world_sizes
        for by_dtype in tried(door.unsharded, batch, size, space.dtypes)[0].values()
        for dtype in by_dtype
    }
    if not judged and not any(tried(door.unsharded, batch, size, others)[0] for size in space.world_sizes):
        return {}  # the property is mistaken, which it says where its cases are drawn
    reasons = refusals(door.unsharded, batch, space.dtypes)
    whys = (
        []
        if judged
        else [why for size in space.world_sizes for why in tried(door.unsharded, batch, size, space.dtypes)[1]]
    )
    return {dtype: reasons.get(dtype, next(iter(whys), "")) for dtype in space.dtypes if dtype not in judged}

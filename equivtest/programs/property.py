"""Makes the property of your program from its functions."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from equivtest.base import limits
from equivtest.base.functions import Named, name_of, plain, with_arguments
from equivtest.base.importing import load_named, suggestion
from equivtest.base.users_code import users_frames
from equivtest.cases.case import require
from equivtest.errors import Misuse, PropertyMisuse
from equivtest.programs.candidates import CandidateSearch, Fields, candidates_by_mesh, combinations, refusals, tried
from equivtest.programs.case import BATCHES, MEAN_OF_PARTS, PARTS_OF_WHOLE, REAL_DTYPES, WHOLE, ModuleCase
from equivtest.programs.fields import require_axes
from equivtest.programs.groups import Judge, Training, World, flat, refuse_text
from equivtest.programs.inputs import Input, sizes_in, written
from equivtest.programs.mesh import mesh_along
from equivtest.programs.mistakes import way_out_of
from equivtest.programs.state import STATES
from equivtest.programs.strategy import Candidates, Chosen, Judged, ProgramCases
from equivtest.property import Property, Space
from equivtest.ranks.first_cause import first_cause
from equivtest.verdicts.claims import keeps_layout_of_parameter, repeats_itself, trains_like_unsharded
from equivtest.verdicts.judging import DEFAULT_CLAIMS

if TYPE_CHECKING:
    from equivtest.cases.case import Shape
    from equivtest.ranks.backend import Backend
    from equivtest.ranks.pool import Pool
    from equivtest.ranks.reply import Reply

CLAIMS = (*(claim for claim in DEFAULT_CLAIMS if claim is not keeps_layout_of_parameter), repeats_itself)
"""The default claims about a module, without the layout of its parameters, which the module may choose."""

CONTRACT_OF = "equivtest.programs.run.module:contract_of"

HOW_ROWS = "To state how ranks share the batch, pass batch='whole', 'mean of parts' or 'sum of parts'"
"""Advice for the message if the ranks do not show whether a module reduces gradients."""

MOST_VARIANTS = 64
"""Largest number of combinations of options: the unsharded module runs for each before anything is drawn."""

Options = Mapping[str, Sequence[Any]]

P = TypeVar("P", bound=Property)


class Variant(NamedTuple):
    """The program under one combination of its options.

    Attributes:
        options: (name, value as code) of each option.
        batch: How the ranks divide the batch, one of BATCHES. None if the ranks decide this later: see `_resolve`.
    """

    options: Chosen
    search: CandidateSearch
    batch: str | None

    @property
    def rows(self) -> str:
        """The `batch` of the cases, one of BATCHES. It is WHOLE until the ranks have decided."""
        return self.batch or WHOLE


class Described(NamedTuple):
    """A program whose functions need not be imported yet.

    Attributes:
        search: The search for cases, with the names of `build` and `parallelize` without options.
        options: (name, values as code) of each option.
        batches: The `batch` of each variant, or one `batch` for all variants.
    """

    search: CandidateSearch
    options: tuple[tuple[str, tuple[str, ...]], ...]
    batches: tuple[str | None, ...]


def make_property(
    kind: type[P],
    build: Named,
    parallelize: Named,
    inputs: Mapping[str, Input] | Sequence[Shape] | None,
    sizes: Mapping[str, Sequence[int]] | None,
    positional: Sequence[str],
    batch: str | None,
    options: Options | None,
    training: Training,
    world: World,
    judge: Judge,
) -> P:
    are_imported = not isinstance(build, str) and not isinstance(parallelize, str)
    build, parallelize = name_of(build, "build"), name_of(parallelize, "parallelize")
    require(batch is None or batch in BATCHES, f"batch must be one of {', '.join(BATCHES)} or None, got {batch!r}")
    require(
        judge.state is None or judge.state in STATES,
        f"state must be {' or '.join(map(repr, STATES))}, got {judge.state!r}",
    )
    refuse_text(positional=positional)
    require_axes(tuple(world.axes), world.batch_axis)
    varied, choices, taken = _arguments(inputs, sizes, positional)
    common = (*_common_fields(training, world, judge), *taken)
    search = CandidateSearch(build, parallelize, varied, choices, common, judge.by_parts)
    described = Described(search, _codes_of(options or {}), (batch,))
    if are_imported:
        _variants(described)  # raises Misuse now, not when cases are made
    return kind(
        subject="module",
        statement=f"{parallelize} computes what {build} computes.",
        source=build,
        cases=_cases(described),
        claims=(*CLAIMS, trains_like_unsharded) if training.optimizer else CLAIMS,
        examples=tuple(judge.examples),
        shards=False,
        conclusive_dtypes=tuple(judge.conclusive_dtypes),
        without_collectives=judge.without_collectives,
        leaves_out=partial(_left_out, described),
        aspects=partial(_aspects, described),
        world_sizes=tuple(world.world_sizes),
        resolve=partial(_resolve, described) if batch is None else None,
        limit_s=world.limit_s,
    )


def _common_fields(training: Training, world: World, judge: Judge) -> Fields:
    of_training, of_world, of_judge = flat(training), flat(world), flat(judge)
    if of_training["steps"] is None:
        of_training["steps"] = 2 if training.optimizer else 1
    of_training |= {name: float(of_training[name]) for name in ("max_norm", "norm_type")}
    of_world["needs_world"] = world.needs_world or bool(world.set_up or world.tear_down)
    of_judge["state"] = judge.state or ""
    of_property = ("world_sizes", "limit_s", "by_parts", "without_collectives", "conclusive_dtypes", "examples")
    together = of_training | of_world | of_judge
    return tuple((name, value) for name, value in together.items() if name not in of_property)


def _arguments(
    inputs: Mapping[str, Input] | Sequence[Shape] | None,
    sizes: Mapping[str, Sequence[int]] | None,
    positional: Sequence[str],
) -> tuple[str, tuple[Any, ...], Fields]:
    """Returns (name of the field that differs between candidates, values of that field, fields of the inputs)."""
    if isinstance(inputs, Mapping):
        named = written(inputs)
        choices = combinations(sizes_in(named), sizes or {})
        return "sizes", choices, (("inputs", named), ("positional", tuple(positional)))
    require_shapes(inputs, "inputs")
    require(
        not sizes and not positional,
        "sizes= and positional= need inputs with names, inputs={'x': real(('batch', 3))}, got a list of shapes",
    )
    return "x_shape", tuple(map(tuple, inputs or ())), ()


def _codes_of(options: Options) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns (name, values as code) of each option.

    Raises:
        Misuse: An option has no values, a value is not plain data, or there are too many combinations.
    """
    for name, values in options.items():
        is_table = isinstance(values, Sequence) and not isinstance(values, str) and bool(values)
        require(
            is_table,
            f"options must hold the values of each option, such as {{{name!r}: (1, 2)}}, got {values!r} of {name}",
        )
    number = math.prod(map(len, options.values()))
    require(
        number <= MOST_VARIANTS,
        f"options have {number} combinations, but the limit is {MOST_VARIANTS}: take fewer values, or two properties",
    )
    return tuple((name, tuple(plain(value, f"option {name}") for value in values)) for name, values in options.items())


@lru_cache(maxsize=256)
def _variants(described: Described) -> tuple[Variant, ...]:
    """Returns the program under each combination of its options, the simplest first.

    The names of `build` and `parallelize` then contain the options that these functions take. If the program has
    options, both functions are imported.

    Raises:
        Misuse: Neither function takes an option, or a function cannot be imported.
    """
    search, options, batches = described
    if not options:
        return (Variant((), search, batches[0]),)
    names = [name for name, _ in options]
    takers = [_taken_of(names, search.build, "build"), _taken_of(names, search.parallelize, "parallelize")]
    for name in names:
        require(
            any(name in taken for taken, _ in takers),
            f"options: neither build nor parallelize takes {name!r}: "
            f"{suggestion(name, [each for _, known in takers for each in known] or ['none'])}",
        )
    found = []
    combined = list(itertools.product(*(codes for _, codes in options)))
    for codes, batch in zip(combined, itertools.cycle(batches), strict=False):
        chosen = tuple(zip(names, codes, strict=True))
        own = [{name: ast.literal_eval(code) for name, code in chosen if name in taken} for taken, _ in takers]
        build = with_arguments(search.build, (), own[0], "build")
        parallelize = with_arguments(search.parallelize, (), own[1], "parallelize")
        found.append(Variant(chosen, search._replace(build=build, parallelize=parallelize), batch))
    return tuple(found)


def _taken_of(options: Sequence[str], name: str, what: str) -> tuple[list[str], list[str]]:
    """Returns (names in `options` that the function takes, names of all arguments that the function takes by name)."""
    function: Any = load_named(name, what)
    require(callable(function), f"{what} {name!r} is not a function: {function!r}")
    parameters = inspect.signature(function).parameters.values()
    known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return [each for each in options if takes_any or each in known], known


def require_shapes(x_shapes: object, called: str) -> None:
    """Raises Misuse unless the argument is a sequence of shapes. One shape alone is an error."""
    is_sequence = isinstance(x_shapes, Sequence) and not isinstance(x_shapes, str)
    shapes = list(x_shapes) if isinstance(x_shapes, Sequence) and is_sequence else []
    one = f": write [{tuple(shapes)}] for one shape" if shapes and all(isinstance(size, int) for size in shapes) else ""
    are_shapes = all(isinstance(shape, Sequence) and not isinstance(shape, str) for shape in shapes)
    require(
        bool(shapes) and are_shapes,
        f"{called} must hold at least one shape, such as [(2, 3), (4, 3)], got {x_shapes!r}{one}",
    )
    other = next((shape for shape in shapes if not all(isinstance(size, int) for size in shape)), None)
    require(
        other is None,
        f"a shape of {called} must hold numbers, got {other!r}: names of sizes go with inputs={{'x': real({other!r})}}",
    )


def _resolve(described: Described, prop: Property, pool: Pool, space: Space) -> Property:
    """Asks the ranks if the parallel module reduces gradients, and returns a property that depends on the result.

    The cases of the returned property divide the batch if the module reduces gradients, and only then.
    """
    batches = [_resolved_batch(each.search, prop, pool, space) for each in _variants(described)]
    asked = described._replace(batches=tuple(batches))
    return replace(
        prop,
        cases=_cases(asked),
        leaves_out=partial(_left_out, asked),
        aspects=partial(_aspects, asked),
        resolve=None,
    )


def _resolved_batch(search: CandidateSearch, prop: Property, pool: Pool, space: Space) -> str:
    num_ranks = space.world_sizes[0]
    mesh = mesh_along(num_ranks, search.axes, str(dict(search.fields)["batch_axis"]))
    cases = _made_in(
        space.dtypes, partial(search.make, world_size=num_ranks, mesh=mesh, **{search.varied: search.choices[0]})
    )
    batch = _batch_of(cases, pool, prop.limit_s)
    return PARTS_OF_WHOLE if cases[0].training.step and batch == MEAN_OF_PARTS else batch


def _made_in(dtypes: Sequence[str], make: Callable[..., ModuleCase]) -> list[ModuleCase]:
    """Makes a case in each dtype of `dtypes` that the unsharded module takes.

    If the module takes none of these dtypes, and the case has an optimizer or a step, the result is one case, in one of
    REAL_DTYPES.

    Raises:
        Misuse: The module takes none of these dtypes.
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
"""(case, backend) -> 'mean of parts' or 'whole', as the ranks decided with this case."""


def forget_batches() -> None:
    _batches.clear()


def _batch_of(cases: Sequence[ModuleCase], pool: Pool, limit_s: float) -> str:
    """Returns the way in which the ranks divide the batch, 'mean of parts' or 'whole'.

    The ranks decide with the first case in whose dtype they can compute.

    If the ranks can compute in no dtype, because the backend refuses a call of `parallelize` or `parallelize` declines,
    the result is 'whole'. The result does not matter in this situation, because every case will end in the same way.

    Raises:
        Misuse: `parallelize` makes no module, or makes different modules on different ranks; or a rank raised, hung or
            died; or the mesh of the case has several axes, and `parallelize` declines this mesh but may support other
            meshes.
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
            f"{case.parallelize}: it is unknown whether the parallel module reduces gradients, because the function "
            f"does not support the mesh {case.mesh_shape}, on which equivtest tried it: {declined}. {HOW_ROWS}"
        )
    return WHOLE


def _place_in(detail: str) -> list[str]:
    """Returns the two lines of a traceback's last frame in your code. If there is no such frame, returns all lines."""
    lines = detail.strip().splitlines()
    frames = list(users_frames(lines))
    return [line[2:] for line in lines[frames[-1] : frames[-1] + 2]] if frames else lines


def _on_silence(case: ModuleCase, cause: Reply) -> str:
    what = {"timed_out": "did not answer", "lost": "ended"}.get(cause.outcome, f"raised {cause.error_type}")
    said = (cause.error_text.strip().splitlines() or [""])[0]
    lines = _place_in(cause.detail) if cause.outcome == "raised" else cause.detail.strip().splitlines()
    detail = "".join(f"\n  {line}" for line in lines)
    way_out = f": {way_out_of(cause.error_type, said) or 'fix that'}"
    return (
        f"{case.parallelize}: it is unknown whether the parallel module reduces gradients, because in a trial in "
        f"{case.dtype} rank {cause.rank} of {case.world_size} {what}{': ' * bool(said)}{said}{way_out}. "
        f"{HOW_ROWS}{detail}"
    )


def _agreed(case: ModuleCase, replies: Sequence[Reply]) -> str:
    said = case.answer_names()[0]
    reducing = [reply.rank for reply in replies if bool(reply.answers[0].tensors[said].local)]
    require(
        len(reducing) in (0, len(replies)),
        f"{case.parallelize} makes a module that reduces its gradients only on ranks {reducing} of {len(replies)}: "
        "make the same module on every rank",
    )
    return MEAN_OF_PARTS if reducing else WHOLE


@lru_cache(maxsize=256)
def _cases(described: Described) -> ProgramCases:
    """Returns the cases of a program.  Equal programs share one result, and so one covering array."""
    return ProgramCases(lru_cache(maxsize=8)(partial(_judged, described)))


def _judged(described: Described, space: Space) -> dict[Chosen, Judged]:
    """Returns options -> what cases are made of, for each variant that has cases in the space.

    Raises:
        Misuse: No variant has cases.
    """
    variants = _variants(described)
    judged = [each for each in variants if len(variants) == 1 or len(_left_out_of(each, space)) < len(space.dtypes)]
    found = {}
    for each in judged or variants[:1]:
        make = partial(each.search.make, batch=each.rows)
        found[each.options] = Judged(make, each.search.varied, _candidates_of(each, space))
    return found


def _candidates_of(variant: Variant, space: Space) -> Candidates:
    """Returns world size -> mesh -> dtype -> candidates.  A world size without candidates is left out.

    Raises:
        Misuse: No world size of the space has candidates.
    """
    found: Candidates = {}
    mistakes: list[Misuse] = []
    for size in space.world_sizes:
        try:
            found |= {size: candidates_by_mesh(variant.search, variant.rows, size, space.dtypes)}
        except PropertyMisuse:
            raise
        except Misuse as error:
            mistakes.append(error)
    if not found:
        raise mistakes[0]
    return found


def _aspects(described: Described, space: Space) -> list[str]:
    """Lists the words of `ModuleCase.aspects` that drawn cases must cover, with one for each value of each option."""
    variants = _variants(described)
    search, batch = variants[0].search, variants[0].rows
    aspects: dict[str, None] = {}
    for size in space.world_sizes:
        for mesh, by_dtype in candidates_by_mesh(search, batch, size, space.dtypes).items():
            for dtype, candidates in by_dtype.items():
                for mode, choice, largest, by_parts in candidates:
                    fields = {search.varied: choice, "largest": largest, "by_parts": by_parts, "values": ((mode, 0),)}
                    case = search.make(world_size=size, mesh=mesh, dtype=dtype, batch=batch, **fields)
                    aspects |= dict.fromkeys(sorted(case.aspects))
    return [*aspects, *dict.fromkeys(f"{name}={code}" for each in variants for name, code in each.options)]


def _left_out(described: Described, space: Space) -> dict[str, str]:
    first, *others = (_left_out_of(each, space) for each in _variants(described))
    return {dtype: why for dtype, why in first.items() if all(dtype in left_out for left_out in others)}


def _left_out_of(variant: Variant, space: Space) -> dict[str, str]:
    """Returns dtype -> reason, for each dtype in which no case of the variant can be judged.

    The reason is that the module does not run in the dtype, or that the module has neither exact sums nor narrow bounds
    in the dtype. If no dtype can be judged at all, the result is empty. Then the property is wrong, and drawing a case
    reports that.
    """
    search, batch = variant.search, variant.rows
    others = tuple(dtype for dtype in limits.DTYPES if dtype not in space.dtypes)
    found = [tried(search.unsharded, batch, size, space.dtypes) for size in space.world_sizes]
    judged = {dtype for fitting, _ in found for by_dtype in fitting.values() for dtype in by_dtype}
    if not judged and not any(tried(search.unsharded, batch, size, others)[0] for size in space.world_sizes):
        return {}  # the property is wrong, and reports it when its cases are drawn
    whys = dict(refusals(search.unsharded, batch, space.dtypes))
    for _, reasons in found:
        whys = reasons | whys
    return {dtype: whys.get(dtype, "") for dtype in space.dtypes if dtype not in judged}

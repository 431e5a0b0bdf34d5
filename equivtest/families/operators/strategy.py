"""Draws cases of one call of one operator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TypeVar

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from equivtest.base import limits
from equivtest.cases.case import Shape
from equivtest.cases.picks import POISON_TABLE, RECORDS, REPEATS, SMALL_SIZES, pick, pick_members, pick_values
from equivtest.errors import Misuse
from equivtest.families.operators.case import EXACT_MODE, REAL_DTYPES, REAL_MODE, OperatorCase, Placements
from equivtest.families.operators.case_forms import Signature, Signatures
from equivtest.families.operators.case_operator import FLOATS, Operator
from equivtest.families.operators.case_table import HAND_WRITTEN, OPERATORS, results_of, signatures_of
from equivtest.families.operators.strategy_calls import CONVOLUTIONS, OF_THE_WORLD, PROMOTING
from equivtest.property import Space

T = TypeVar("T")
NUM_DIMS = (1, 2, 2, 2, 3, 3, 0)
PICKS = tuple(range(60))
"""Indices that are taken modulo the length of a table, so that draws shrink well if that length changes."""

DENSE = tuple((EXACT_MODE,) * num for num in (1, 2))
REAL = ((REAL_MODE,), (REAL_MODE, EXACT_MODE), (REAL_MODE, REAL_MODE))
OPS = ("sum", "sum", "avg", "max", "min")
VIEWED = frozenset(
    {
        "reshape", "view", "flatten", "unflatten", "repeat", "repeat_interleave", "tile", "roll", "rot90", "unfold",
        "einsum", "matmul", "nn.functional.linear", "outer", "diag_embed", "diagonal", "tensor_split", "expand",
        "chunk", "unbind", "split", "nn.functional.pad", "squeeze", "unsqueeze", "squeeze in place",
        "unsqueeze in place", "mm", "bmm", "mv", "dot", "addmm", "addmm scaled", "baddbmm", "addmv",
        "__getitem__", "cat", "stack", "view_copy", "view_as_complex",
    }
)  # fmt: skip
"""Operators that may view a tensor with other dims. DTensor hangs in them if there is no element: findings/50."""

WRONG_IF_SHARDED = frozenset({"native_group_norm", "_batch_norm_with_update"})
"""Operators that torch computes right only if every operand is replicated and requires a gradient.

Source: findings/65, 66 and 69.
"""

POOLS = frozenset(
    {
        "nn.functional.avg_pool1d", "nn.functional.avg_pool2d", "nn.functional.avg_pool3d", "nn.functional.max_pool2d",
        "nn.functional.max_unpool2d", "nn.functional.max_unpool3d", "native_batch_norm", "_native_batch_norm_legit",
    }
)  # fmt: skip
"""Operators that torch computes right only if every rank has rows and channels: findings/67."""

BATCH_NORMS = frozenset({"native_batch_norm", "_native_batch_norm_legit"})
"""Operators whose backward torch computes right only if every rank has rows and channels: findings/73."""

SOLVED = frozenset({"linalg.solve_triangular", "linalg.lu_solve", "linalg.qr"})
"""Operators that torch computes right only if all operands, or none, are sharded by batch: findings/72."""

REFUSING_STRIDES = frozenset({"view", "view_as_complex"})
"""Operators that torch refuses for some tensors whose last two dims are swapped in memory (2.13.0 and 2.15.0)."""

OTHER_DTYPES = ("",) * 12 + ("float64", "float32")

REDUCTIONS = ("sum", "mean", "amax", "amax of ties", "linalg.vector_norm", "softmax", "log_softmax")
"""Operators along a sharded dim that training needs most."""


def operator_cases(space: Space, *, operators: Sequence[str] = tuple(HAND_WRITTEN)) -> SearchStrategy[OperatorCase]:
    """Draws operators that always round only in float32 and float64, if the space has these dtypes."""
    return _operator_cases(space, tuple(operators))


@st.composite
def reduction_cases(draw: DrawFn, space: Space) -> OperatorCase:
    """Draws operators of `REDUCTIONS`. The collectives of some sums without gradients are recorded and judged."""
    case = draw(operator_cases(space, operators=REDUCTIONS))
    records = pick(draw, "records", RECORDS)
    forward = replace(case, requires_grad=())
    return replace(forward, records=True) if records and forward.is_documented else case


@cache
def sizes_of(world_size: int) -> Shape:
    """Returns sizes to draw from. Sizes that the ranks do not divide evenly occur three times."""
    w = world_size
    near = sorted({1, 2, 3, w - 1, w, w + 1, 2 * w - 1, 2 * w, 2 * w + 1} - {0})
    return (*near, *(size for size in near if size % w), *(size for size in near if size % w), 0)


@cache
def taken_in(dtype: str, operators: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in operators if dtype in REAL_DTYPES or not OPERATORS[name].rounds) or operators


@st.composite
def _operator_cases(draw: DrawFn, space: Space, operators: tuple[str, ...]) -> OperatorCase:
    world_size = pick(draw, "world_size", space.world_sizes)
    dtype = pick(draw, "dtype", space.dtypes)
    names = taken_in(dtype, operators)
    name = pick(draw, "operator", names)
    operator = OPERATORS[name]
    if operator.rounds and dtype not in REAL_DTYPES:
        dtype = next((each for each in space.dtypes if each in REAL_DTYPES), dtype)
    shape = _pick_shape(draw, world_size, operator)
    signatures = signatures_of(name, shape) or _simplest(name)
    if not signatures:
        name, signatures = _first_taken(names)
        operator = OPERATORS[name]
    signature = _entry(draw, "signature", signatures)
    mesh = (2, 2) if world_size == 4 and pick(draw, "two axes", (False,) * 4 + (True,)) else ()
    mesh = () if _picks_one(name, signature) else mesh
    num_axes = len(mesh) or 1
    members = pick_members(draw, world_size)
    placements = tuple(
        _pick_placements(draw, f"operand {number}", each, num_axes, operator.kind_of(number))
        for number, each in enumerate(signature.shapes)
    )
    if pick(draw, "placements alike", (False, False, False, True)):
        placements = tuple(
            _as_the_first(placements, number, signature.shapes[number], operator.kind_of(number))
            for number in range(len(placements))
        )
    placements = tuple(_without_nested(name, each) for each in placements)
    is_short = name in POOLS and _leaves_nothing(signature.shapes[0], world_size)
    if name in WRONG_IF_SHARDED or is_short:
        placements = (("replicate",) * num_axes,) * len(placements)
    if name in CONVOLUTIONS:
        has_rows = signature.shapes[0][0] >= world_size
        placements = tuple(
            _of_rows(each, may_divide=number == 0 and has_rows) for number, each in enumerate(placements)
        )
    floats = tuple(number for number in range(len(signature.shapes)) if operator.kind_of(number) == FLOATS)
    other_dtypes = _pick_dtypes(draw, dtype, name, signature.shapes, floats)
    dtypes = tuple(each or dtype for each in other_dtypes or ("",) * len(signature.shapes))
    results = results_of(name, signature.shapes, signature.arguments, dtypes)
    cotangents = _pick_cotangents(draw, [result.shape for result in results], num_axes)
    if name in SOLVED and len(signature.shapes[0]) == 3:
        columns = (*placements[1:], *cotangents)
        columns = tuple(_beside_matrices(each, placements[0], may_divide=name != "linalg.qr") for each in columns)
        placements, cotangents = (placements[0], *columns[: len(placements) - 1]), columns[len(placements) - 1 :]
    if name in WRONG_IF_SHARDED or (name in BATCH_NORMS and is_short):
        cotangents = ()
    return OperatorCase(
        world_size=world_size,
        dtype=dtype,
        mesh=mesh,
        operator=name,
        operands=signature.shapes,
        arguments=signature.arguments,
        placements=placements,
        other_dtypes=other_dtypes,
        cotangents=tuple(_without_nested(name, each) for each in cotangents),
        requires_grad=_graded(name, _pick_some(draw, "requires_grad", floats)),
        strided=_pick_strided(draw, name, signature.shapes),
        values=pick_values(draw, _modes_of(operator, dtypes)),
        poison=pick(draw, "poison", POISON_TABLE),
        repeats=pick(draw, "repeats", REPEATS),
        members=() if mesh or name in OF_THE_WORLD else members,
    )


def _picks_one(name: str, signature: Signature) -> bool:
    """True if a gather's index picks one row: findings/56 is about such calls on two mesh axes."""
    dim = dict(signature.arguments).get("dim")
    return name in ("gather", "take_along_dim") and isinstance(dim, int) and signature.shapes[1][dim] == 1


def _of_rows(placements: tuple[str, ...], *, may_divide: bool) -> tuple[str, ...]:
    """Shards a convolution's operand by batch only: findings/62 is about other placements."""
    return tuple("shard(0)" if each != "replicate" and may_divide else "replicate" for each in placements)


def _beside_matrices(columns: Placements, matrices: Placements, *, may_divide: bool) -> Placements:
    """Replicates right-hand sides where the matrices are not sharded by batch, or if `may_divide` is False.

    Only 'shard(0)', 'partial(max)' and 'partial(min)' are replaced.
    """
    may_stay = [may_divide and each == "shard(0)" for each in matrices]
    moves = {"shard(0)", "partial(max)", "partial(min)"}
    return tuple(
        "replicate" if each in moves and not stays else each for each, stays in zip(columns, may_stay, strict=True)
    )


def _leaves_nothing(shape: Shape, world_size: int) -> bool:
    """True if one of the first two dims, sharded over all ranks or over two, leaves some rank an empty shard."""
    return any(-(-size // ranks) * (ranks - 1) >= size for size in shape[:2] for ranks in {world_size, 2} if ranks > 1)


def _graded(name: str, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the numbers of the operands that require a gradient: `numbers`, with two exceptions.

    If `numbers` has a convolution's bias alone, all three operands require a gradient (findings/62). For an operator of
    `WRONG_IF_SHARDED` all three operands require a gradient, or none does.
    """
    if name in WRONG_IF_SHARDED:
        return (0, 1, 2) if numbers else ()
    return (0, 1, 2) if name in CONVOLUTIONS and numbers == (2,) else numbers


def _without_nested(name: str, placements: tuple[str, ...]) -> tuple[str, ...]:
    """Replicates on the second axis if both axes shard the same dim of a view: findings/55 is about such shards."""
    is_nested = name in VIEWED and len(placements) == 2 and len(set(placements)) == 1
    return (placements[0], "replicate") if is_nested and placements[0].startswith("shard") else placements


def _entry(draw: DrawFn, name: str, table: Sequence[T]) -> T:
    return table[pick(draw, name, PICKS) % len(table)]


def _pick_shape(draw: DrawFn, world_size: int, operator: Operator) -> Shape:
    drawn = pick(draw, "dims", NUM_DIMS)
    num_dims = drawn if drawn in operator.num_dims else operator.num_dims[0]
    sizes = [_entry(draw, f"size {dim}", sizes_of(world_size)) for dim in range(2)]
    large = pick(draw, "large dims", (2, 2, 1))
    sizes += [pick(draw, "small size", SMALL_SIZES)]
    if large == 1 or world_size > limits.WORLD_SIZES[-1]:  # exact values in bfloat16 allow 256 elements, all different
        sizes[1] = min(sizes[1], SMALL_SIZES[-1])
    if operator.name in VIEWED:
        sizes = [size or 1 for size in sizes]
    order = pick(draw, "order of dims", tuple(itertools.permutations(range(3))))
    return tuple(sizes[place] for place in order if place < num_dims)


def _simplest(name: str) -> Signatures:
    """Returns the signatures for the first small shape that has some. They are used if the drawn shape has none."""
    shapes: tuple[Shape, ...] = ((2,), (2, 2), (2, 2, 2), ())
    return next((found for shape in shapes if (found := signatures_of(name, shape))), ())


def _first_taken(names: Sequence[str]) -> tuple[str, Signatures]:
    """Returns (name, signatures) of the first operator that torch accepts. Raises Misuse if torch accepts none."""
    for name in names:
        if signatures := _simplest(name):
            return name, signatures
    raise Misuse(f"torch {torch.__version__} refuses the calls of {', '.join(names)} in the table of operators")


@cache
def placements_of(num_dims: int, kind: str, num_axes: int) -> tuple[tuple[str, ...], ...]:
    """Returns the combinations of placements, one per axis, that an operand may have. None has two reductions."""
    shards = [f"shard({dim})" for dim in range(num_dims)]
    one = ["replicate", *shards * 3]
    one += [f"partial({op})" for op in OPS] if kind == FLOATS else []
    if num_axes == 1:
        return tuple((each,) for each in one)
    pairs = [(a, b) for a in one for b in one]
    return tuple(pair for pair in pairs if len({each for each in pair if each.startswith("partial")}) <= 1)


def _pick_placements(draw: DrawFn, name: str, shape: Shape, num_axes: int, kind: str) -> tuple[str, ...]:
    table = placements_of(len(shape), kind, num_axes)
    return table[pick(draw, f"{name}: placement", tuple(range(200))) % len(table)]


def _as_the_first(placements: tuple[tuple[str, ...], ...], number: int, shape: Shape, kind: str) -> tuple[str, ...]:
    """Returns the first operand's placements if operand `number` may have them, otherwise the operand's own."""
    may_have = placements[0] in placements_of(len(shape), kind, len(placements[0]))
    return placements[0] if may_have else placements[number]


def _pick_dtypes(
    draw: DrawFn, dtype: str, name: str, shapes: tuple[Shape, ...], floats: tuple[int, ...]
) -> tuple[str, ...]:
    """Draws `OperatorCase.other_dtypes`, mostly empty, for floating-point operands of operators of `PROMOTING`."""
    drawn = [pick(draw, f"other dtype {number}", OTHER_DTYPES) for number in range(3)]
    if dtype not in REAL_DTYPES or len(floats) < 2:
        return ()
    found = tuple(drawn[number % 3] if number in floats else "" for number in range(len(shapes)))
    found = tuple("" if each == dtype else each for each in found)
    return found if any(found) and name in PROMOTING else ()


def _pick_cotangents(draw: DrawFn, shapes: list[Shape], num_axes: int) -> tuple[tuple[str, ...], ...]:
    """Draws `OperatorCase.cotangents`: in two of three draws (), so that the cotangents are replicated."""
    if not pick(draw, "cotangents", (False, False, True)):
        return ()
    dims = [pick(draw, f"cotangent {axis}", tuple(range(12))) for axis in range(num_axes)]
    return tuple(tuple(f"shard({dim % len(shape)})" if shape else "replicate" for dim in dims) for shape in shapes)


def _pick_some(draw: DrawFn, name: str, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Draws a subset of `numbers`: mostly all of them, sometimes one or none."""
    drawn = pick(draw, name, (-1,) * 5 + (-2, 0, 1, 2))
    return () if drawn == -2 else numbers if drawn == -1 else numbers[drawn : drawn + 1]


def _pick_strided(draw: DrawFn, name: str, shapes: tuple[Shape, ...]) -> tuple[int, ...]:
    drawn = pick(draw, "strided", (False, False, True)) and name not in REFUSING_STRIDES
    return tuple(number for number, shape in enumerate(shapes) if drawn and len(shape) >= 2)


def _modes_of(operator: Operator, dtypes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    if operator.is_exact or not set(dtypes) <= set(REAL_DTYPES) or len(set(dtypes)) > 1:
        return DENSE
    return REAL if operator.rounds else (*DENSE, *REAL)

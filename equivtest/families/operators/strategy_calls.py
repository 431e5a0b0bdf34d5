"""Enumerates calls: the forms of every operator, under combinations of its operands' placements.

A combination has a form, the placement of each operand and of the cotangents, and the mode of values. The placement of
the cotangents and the mode alternate from combination to combination. Therefore most forms lack some pair of a
cotangents' placement or mode with an operand's placement.

A combination has twelve more axes:

- whether all operands have one placement, and whether the sharded dim's number names another dim in some operand;
- which operand is the only partial operand, and how it is partial;
- which operand is the only sharded operand, and the same of its sharded dim;
- whether the sharded dims of two operands have different numbers, and which number is larger;
- which dim is sharded in every operand that has this dim;
- whether the dim that the call names is sharded, and whether nothing else is;
- whether a dim is sharded that the result lacks, or that has another number in the result;
- for each form, whether a dim is sharded that the call names or, if it names none, a dim that the result lacks;
- for each form of several operands, whether dim 0 of each is sharded, as a batch is;
- whether the sharded dim lies before the dims that the call names, or behind, and whether the result keeps these;
- the sign of a number beside a partial operand;
- for an operator of `PROMOTING`, whether a partial operand that is broadcast is beside a shard, and has dims.

A table of strength 1 has every value that occurs in some combination. A table of strength 2 has every pair of values
that occurs in some combination. The calls of one operator follow each other in one process, so that a wrong cache would
show.

Three more calls of an operator are on the second axis of a mesh, on two of three processes, and on three ranks. All
elementwise operators share one rule in torch, so an elementwise operator has these calls only if it is in `PROMOTING`.
Three more calls repeat earlier calls with other arguments, and further calls change one argument of an earlier call.
Two calls repeat one with fewer gradients, one has partial cotangents, and two have a shape that no other call has. On a
mesh of 2 x 2 ranks, most operators have two calls with an operand that is sharded on both axes, and one operator of
each kind also has calls with partial operands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import TypeVar

from equivtest.cases.case import Shape
from equivtest.families.operators.case import EXACT_MODE, REAL_DTYPES, REAL_MODE, OperatorCase, Placements
from equivtest.families.operators.case_forms import Signature, Signatures
from equivtest.families.operators.case_operator import FLOATS, Operator
from equivtest.families.operators.case_samples import IN_PLACE, OUT, ROWS, UNDECIDED, way_of
from equivtest.families.operators.case_table import (
    BACKWARD,
    CHANCE,
    ELEMENTWISE,
    HAND_WRITTEN,
    LISTS,
    NOT_DRAWN,
    OPERATORS,
    is_taken,
    kind_of,
    results_of,
)
from equivtest.families.operators.strategy_changes import with_one_change
from equivtest.families.operators.strategy_forms import NAMED, forms_of, places_of, signs_of
from equivtest.layout import Shard, parse_placement
from equivtest.property import Enumeration, Space

T = TypeVar("T")

REDUCTIONS = ("partial(sum)", "partial(avg)", "partial(max)", "partial(min)")
"""Partial placements. At depth 1 an operand after the first has no averages and no minima, unless the operand is
broadcast and the operator is in `PROMOTING`."""
SLOW_IF_SHARDED = frozenset({"_batch_norm_with_update", "nn.functional.batch_norm", "nn.functional.instance_norm"})
"""Operators that are called only on replicated operands, because other placements take longer than a minute.

For their gradient DTensor tries every combination of placements of seven tensors (finding 69).
"""

CONVOLUTIONS = frozenset({"convolution", "convolution transposed"})
"""Operators that DTensor gets wrong if an operand is sharded otherwise than the input by batch (finding 62)."""

OF_THE_WORLD = frozenset({"equal"})
"""Operators that torch computes right only if the mesh has all processes (finding 68)."""

OF_EACH_KIND = (
    "mul", "relu", "add", "sum", "mean", "transpose", "mm", "softmax", "cumsum", "select", "cat", "mul in place",
)  # fmt: skip
"""One operator of each kind. On four ranks a gate has calls of these operators with partial operands."""

PROMOTING = frozenset(
    {
        "add", "sub", "mul", "div", "maximum", "minimum", "where", "eq", "ne", "lt", "le", "gt", "ge", "pow", "cat",
        "stack", "atan2", "remainder", "fmod", "add in place", "mul in place", "copy in place", "addcmul", "logaddexp",
    }
)  # fmt: skip
"""Operators that accept operands of several dtypes."""

WITHOUT_BACKWARD = frozenset({"native_group_norm", "nn.functional.group_norm"})
"""Operators whose backward raises on DTensors (finding 66), so that only a call without gradients shows the results."""

OWN_SHAPE: Shape = (4, 2, 3)
"""Shape of calls that show a cache of rules that ignores the dim."""

VECTOR: Shape = (5,)
"""Shape of calls on an operand of one dim."""

MAX_ROWS = 200
"""Largest number of combinations per form that `covering` chooses from."""

MAX_CHANGES = 3
"""Largest number of calls of an operator that each change one argument of an earlier call."""

MAX_CALLS = {"": 6, IN_PLACE: 4, OUT: 2}
"""Way of calling -> largest number of calls of one operator with forms from torch's list, in a gate."""


REFUSED = frozenset(
    {
        "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "block_diag", "as_strided", "as_strided_copy",
        "nn.functional.unfold", "nn.functional.multi_margin_loss", "nn.functional.multilabel_margin_loss",
        "nn.functional.fractional_max_pool3d", "unravel_index", "unique", "unique_consecutive", "_chunk_cat",
        "bincount", "searchsorted", "unfold_copy", "nonzero", "nonzero_static", "argwhere", "hash_tensor",
        "linalg.lstsq",
    }
)  # fmt: skip
"""Operators with forms from torch's list that a gate leaves out.

torch 2.13.0 refuses each of the three calls that a gate would make, on every rank.
"""

SAMPLED = tuple(row.name for row in ROWS if row.name not in UNDECIDED)
"""Names of other such operators that the oracle can judge."""

WRITING = frozenset(row.name for row in ROWS if way_of(row.name))
"""Names of such operators that write to an operand or to `out=`. On three and four ranks a gate does not call them."""

ALL = (*HAND_WRITTEN, *BACKWARD, *LISTS, *SAMPLED, *(row.name for row in NOT_DRAWN))
"""Names of the operators that a conformance run calls."""
ENUMERATED = tuple(name for name in ALL if name not in REFUSED)
"""Names of the operators that a gate calls. `known_failures.toml` lists all failures of these calls."""
PARTS = {2: 8, 3: 1, 4: 1}
"""World size -> number of searches that the operators are divided among."""


def calls_of(space: Space, depth: int, part: int) -> list[OperatorCase]:
    """Returns the enumerated calls in part `part` of the parts of a world size, at strength `depth`.

    The calls have the first dtype of the space that is in `REAL_DTYPES`. Without such a dtype there are no calls. At
    depth 1, operators of `REFUSED` have no calls. Neighbours in the table of operators are in different parts.
    """
    [world_size] = space.world_sizes
    dtype = next((each for each in space.dtypes if each in REAL_DTYPES), "")
    names = (ENUMERATED if depth == 1 else ALL)[part :: PARTS[world_size]] if dtype else ()
    names = names if world_size == 2 else tuple(name for name in names if name not in WRITING)
    calls = [_with_and_without_gradients(calls_of_operator(name, 2, dtype, depth)) for name in names]
    if world_size > 2:
        on_more = {3: _on_three_ranks, 4: _on_two_axes}[world_size]
        return [case for one in calls for case in on_more(one)]
    listed = [
        case
        for name, one in zip(names, calls, strict=True)
        for case in (*one, *(() if name in WRITING else _further_calls(one, space.dtypes)))
    ]
    on_other_shapes = (_on_a_shape_of_their_own, _on_a_vector)
    listed += [case for calls_on in on_other_shapes for name in names for case in calls_on(name, dtype)]
    return list(dict.fromkeys(listed))


def _further_calls(calls: Sequence[OperatorCase], dtypes: Sequence[str]) -> list[OperatorCase]:
    return [
        *_again(calls),
        *_with_some_gradients(calls),
        *_with_partial_cotangents(calls),
        *_on_other_meshes(calls),
        *_of_two_dtypes(calls, dtypes),
    ]


def _with_and_without_gradients(calls: tuple[OperatorCase, ...]) -> tuple[OperatorCase, ...]:
    """Returns the calls; if the operator is in `WITHOUT_BACKWARD`, each also without gradients."""
    bare = (replace(case, requires_grad=(), cotangents=()) for case in calls if case.operator in WITHOUT_BACKWARD)
    return (*calls, *dict.fromkeys(bare))


def _again(calls: Sequence[OperatorCase]) -> list[OperatorCase]:
    """Returns calls with other arguments than an earlier call with a shard, and one of an earlier partial sum.

    A cache of rules that ignores the arguments would show. Of the earlier calls, the first of those with the most dims
    is taken. If only one argument changes, a shard that lies behind the named dims is preferred: an argument such as
    `keepdim` changes the number of the sharded dim then.
    """
    found = []
    for word, num in (("shard", 2), ("partial(sum)", 1)):
        earlier = [case for case in calls if _has(case, word) and not _raises_in_backward(case)]
        earlier = [case for case in earlier if case.operator not in SLOW_IF_SHARDED | CONVOLUTIONS]
        if earlier:
            found += _with_other_arguments(max(earlier, key=lambda case: len(case.operands[0])))[:num]
        if earlier and word == "shard" and not _draws(earlier[0].operator):
            found += itertools.islice(with_one_change(max(earlier, key=_stays_sharded)), MAX_CHANGES)
    return [case for case in dict.fromkeys(found) if case not in calls]


def _draws(name: str) -> bool:
    """True if the results of the operator are random, except for the arguments of its listed calls."""
    return name in CHANCE or "dropout" in name


def _stays_sharded(case: OperatorCase) -> tuple[int, bool]:
    """Returns the number of dims, and whether a sharded dim lies behind all dims that the call names."""
    place = places_of(Signature(case.operands, case.arguments)).get(case.placements[0][0], ("",))
    return len(case.operands[0]), place[0] == "behind"


def _with_other_arguments(first: OperatorCase) -> list[OperatorCase]:
    """Returns the call with the arguments of the last and of the first other signature of its operands."""
    others = [
        signature
        for signature in OPERATORS[first.operator].form(first.operands[0])
        if (signature.shapes, signature.holds) == (first.operands, first.holds)
        and signature.arguments != first.arguments
        and is_taken(first.operator, signature, first.dtype)
    ]
    chosen = dict.fromkeys((*others[-1:], *others[:1]))
    return [replace(first, arguments=signature.arguments, cotangents=()) for signature in chosen]


def _with_some_gradients(calls: Sequence[OperatorCase]) -> list[OperatorCase]:
    """Returns a call without the gradient of the first operand that has one, and a call with this gradient alone.

    A backward that leaves out gradients has other rules in torch. The first operand of a model's first layer requires
    no gradient, and the weights of a frozen layer require none.
    """
    several = [case for case in calls if len(case.requires_grad) > 1 and _has_further_calls(case) and _can_return(case)]
    sharded = [case for case in several if _has(case, "shard")] or several
    if not sharded:
        return []
    first, last = sharded[0], sharded[-1]
    return [
        replace(first, requires_grad=first.requires_grad[1:]),
        replace(last, requires_grad=last.requires_grad[:1]),
    ]


def _with_partial_cotangents(calls: Sequence[OperatorCase]) -> list[OperatorCase]:
    """Returns a call with a shard whose cotangents are partial sums, as a product with a sharded weight returns them.

    A backward that takes each rank's term for the whole cotangent would show.
    """
    taken = [case for case in calls if case.graded() and _can_return(case) and _has(case, "shard")]
    first = next((case for case in taken if case.operator not in CONVOLUTIONS), None)
    return [] if first is None else [replace(first, cotangents=(("partial(sum)",),) * len(first.results))]


def _on_a_shape_of_their_own(name: str, dtype: str) -> list[OperatorCase]:
    """Returns a call that names another dim than the sharded one, and then a call that names the sharded dim.

    No other call has this shape, so a cache of rules that ignores the dim gives the second call the rule of the first.
    In a third call, another dim is sharded, which lies between the named dim and the last.
    """
    found = dict[bool, Signature]()
    for signature in _signatures_on(OWN_SHAPE, name):
        if (place := places_of(signature).get("shard(0)")) and is_taken(name, signature, dtype):
            found.setdefault(place[0] == NAMED, signature)
    first, second = found.get(False), found.get(True)
    if first is None or second is None or first.shapes != second.shapes:
        return []
    return [_with_one_shard(name, dtype, *each) for each in ((first, 0), (second, 0), (second, 1))]


def _on_a_vector(name: str, dtype: str) -> list[OperatorCase]:
    """Returns calls on a sharded vector, with the first and the last arguments with which the operator takes a vector.

    A rule that takes every operand for a matrix would show.
    """
    signatures = _signatures_on(VECTOR, name)
    taken = [each for each in signatures if each.shapes[0] == VECTOR and is_taken(name, each, dtype)]
    return [_with_one_shard(name, dtype, each, 0) for each in dict.fromkeys((*taken[:1], *taken[-1:]))]


def _signatures_on(shape: Shape, name: str) -> Signatures:
    """Returns the signatures with which a hand-written operator is called on the shape, if it can be sharded freely."""
    operator = OPERATORS[name]
    if operator.has_samples or len(shape) not in operator.num_dims or name in SLOW_IF_SHARDED | CONVOLUTIONS:
        return ()
    return operator.form(shape)


def _with_one_shard(name: str, dtype: str, signature: Signature, dim: int) -> OperatorCase:
    """Returns a call whose first operand is sharded along a dim. All other operands are replicated."""
    texts = (f"shard({dim})", *("replicate",) * (len(signature.shapes) - 1))
    return _case(name, 2, dtype, (signature, texts, "replicate", _modes(OPERATORS[name])[0]))


def _on_two_axes(calls: Sequence[OperatorCase]) -> list[OperatorCase]:
    """Returns calls on a mesh of 2 x 2 ranks, of `OF_EACH_KIND` and by `_sharded_on_two_axes`.

    A partial operand is partial on the first axis in one call, and on the second axis in another. An operator that
    takes the number of all ranks for the number of ranks on an axis would show, and one that looks at one axis alone. A
    twice sharded operand has the same dim sharded on both axes.
    """
    on_axes = list[OperatorCase]()
    for case in calls:
        if case.operator not in OF_EACH_KIND or not (_has(case, "partial") or _has(case, "shard")):
            continue
        texts = [text for (text,) in case.placements]
        ways: list[list[Placements]] = [[(text, text) for text in texts]]
        if _has(case, "partial"):
            ways = [[(text, "replicate") for text in texts], [("replicate", text) for text in texts]]
        on_axes += [replace(case, world_size=4, mesh=(2, 2), placements=tuple(way), cotangents=()) for way in ways]
    return list(dict.fromkeys(on_axes + _sharded_on_two_axes(calls)))


def _sharded_on_two_axes(calls: Sequence[OperatorCase]) -> list[OperatorCase]:
    """Returns a call with two dims of an operand sharded on the two axes, and a call with one dim sharded on both.

    The dims are those that the call names, or any dims if it names none. Of two dims both are even if possible, because
    torch divides a view along even dims only. One dim has four elements or more, so that no shard is empty. A rule that
    looks at one axis alone would show.
    """
    taken = [case for case in calls if _has_further_calls(case) and _can_return(case)]
    found = [(case, number, dims) for case in taken for number, dims in _dims_for_axes(case)]
    two = [each for each in found if len(set(each[2])) == 2 and each[0].operator not in CONVOLUTIONS]
    one = [each for each in found if len(set(each[2])) == 1]
    chosen = [max(each, key=lambda choice: _fits_axes(*choice)) for each in (two, one) if each]
    return [_on_axes(case, number, tuple(f"shard({dim})" for dim in dims)) for case, number, dims in chosen]


def _can_return(case: OperatorCase) -> bool:
    """True unless the call writes to an operand, or has a backward that always raises."""
    return not way_of(case.operator) and not _raises_in_backward(case)


def _raises_in_backward(case: OperatorCase) -> bool:
    return case.operator in WITHOUT_BACKWARD and bool(case.requires_grad)


def _dims_for_axes(case: OperatorCase) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yields (operand, dims for both axes) for each way to shard an operand that the call shards."""
    for number, texts in enumerate(case.placements):
        shape = case.operands[number]
        long = [dim for dim, size in enumerate(shape) if size > 1]
        if texts[0].startswith("shard"):
            yield from ((number, dims) for dims in itertools.combinations(long, 2))
            yield from ((number, (dim, dim)) for dim in long if shape[dim] > 3)


def _fits_axes(case: OperatorCase, number: int, dims: tuple[int, int]) -> tuple[int, int]:
    """Returns how many of the dims the call names, and how many have an even size."""
    shape, given = case.operands[number], dict(case.arguments)
    named = given.get("dim", given.get("dims", tuple(range(len(shape)))))
    listed = named if isinstance(named, tuple) else (named,)
    own = {dim % len(shape) for dim in listed if isinstance(dim, int)}
    return sum(dim in own for dim in dims), sum(shape[dim] % 2 == 0 for dim in dims)


def _on_axes(case: OperatorCase, number: int, texts: Placements) -> OperatorCase:
    """Returns the call on a mesh of 2 x 2 ranks, with `texts` for one operand, and all other operands replicated."""
    whole: Placements = ("replicate", "replicate")
    placements = tuple(texts if each == number else whole for each in range(len(case.operands)))
    return replace(case, world_size=4, mesh=(2, 2), placements=placements, cotangents=())


def _on_other_meshes(calls: Sequence[OperatorCase]) -> list[OperatorCase]:
    """Returns the first call with a shard on the second axis of a mesh, and on two of three processes.

    Without such a call it is the first with a partial operand. Only the first operand that is not replicated keeps its
    placement. The first axis has one rank, so an operator that asks for the rank on the first axis gets 0 on every
    rank. Of the three processes the first is outside of the mesh, so an operator that takes the number of its process
    for its rank is wrong.
    """
    sharded = sorted(filter(_has_further_calls, calls), key=lambda case: not _has(case, "shard"))[:1]
    found = []
    for case in sharded:
        alone = _first_alone(case.placements)
        placements, cotangents = (tuple(("replicate", *texts) for texts in each) for each in (alone, case.cotangents))
        found.append(replace(case, mesh=(1, 2), placements=placements, cotangents=cotangents))
        if case.operator not in OF_THE_WORLD:
            found.append(replace(case, placements=alone, members=(1, 2)))
    return found


def _first_alone(placements: tuple[Placements, ...]) -> tuple[Placements, ...]:
    """Returns the placements, with all operands replicated but the first one that is not."""
    first = next(number for number, texts in enumerate(placements) if texts != ("replicate",))
    return tuple(texts if number == first else ("replicate",) for number, texts in enumerate(placements))


def _on_three_ranks(calls: Sequence[OperatorCase]) -> list[OperatorCase]:
    """Returns the first call with a partial sum beside a whole operand, on three ranks.

    Without such a call it is the first with a partial operand. An operator that always divides by two would show. The
    cotangents are replicated, because a shard of them could be empty on three ranks.
    """
    partial = [case for case in calls if _has_further_calls(case) and _has(case, "partial")]
    partial = [replace(case, world_size=3, cotangents=()) for case in partial]
    return sorted(partial, key=lambda case: not {("partial(sum)",), ("replicate",)} <= set(case.placements))[:1]


def _has_further_calls(case: OperatorCase) -> bool:
    """True if some operand is not replicated, and the operator is not elementwise or belongs to `PROMOTING`."""
    is_chosen = case.operator in PROMOTING or case.operator not in ELEMENTWISE
    return is_chosen and (_has(case, "shard") or _has(case, "partial"))


def _has(case: OperatorCase, word: str) -> bool:
    return any(text.startswith(word) for texts in case.placements for text in texts)


def _of_two_dtypes(calls: Sequence[OperatorCase], dtypes: Sequence[str]) -> list[OperatorCase]:
    """Returns more calls of an operator of `PROMOTING`, in which one operand has another dtype of `dtypes`.

    There is one call for each choice of operands without dims that occurs in `calls`. The first operand without dims
    has the other dtype. If all operands have dims, the second operand has it. If an operand has no dims, no operand is
    partial, because torch confuses such calls with calls on a number (finding 95).
    """
    found = dict[tuple[bool, ...], OperatorCase]()
    for case in calls:
        others = [each for each in dtypes if each in REAL_DTYPES and each != case.dtype]
        numbers = case.requires_grad
        if others and case.operator in PROMOTING and len(numbers) > 1:
            lacks = tuple(not shape for shape in case.operands)
            other = next((number for number in numbers if lacks[number]), numbers[1])
            named = tuple(others[0] if number == other else "" for number in range(len(lacks)))
            placements = tuple(map(_first_shard, case.operands)) if any(lacks) else case.placements
            changed = replace(case, placements=placements, other_dtypes=named, values=((EXACT_MODE, 1),))
            found.setdefault(lacks, changed)
    return list(found.values())


def _first_shard(shape: Shape) -> Placements:
    return ("shard(0)" if shape and shape[0] > 1 else "replicate",)


@lru_cache(maxsize=2**11)
def calls_of_operator(name: str, world_size: int, dtype: str, strength: int) -> tuple[OperatorCase, ...]:
    """Returns the enumerated calls of one operator.

    At strength 1 the calls have every value that occurs in some combination, such as each placement of each operand. At
    strength 2 they have every pair of such values. Forms from torch's list have at most `MAX_CALLS` calls at strength
    1.
    """
    rows = [row for signature in forms_of(name) for row in _rows(name, signature, strength)]
    way = way_of(name)
    is_limited = OPERATORS[name].has_samples and (way or strength == 1)
    num = MAX_CALLS[way] * strength if is_limited else len(rows)
    return tuple(_case(name, world_size, dtype, row) for row in covering(name, rows, strength)[:num])


Row = tuple[Signature, tuple[str, ...], str, str]
"""A combination: the signature, the placement of each operand, the placement of the cotangents, the mode of values."""


def _rows(name: str, signature: Signature, strength: int) -> Iterator[Row]:
    """Yields the combinations for one signature.

    The last combinations replicate all operands if the signature has one operand, if the operator is a convolution or
    in `SLOW_IF_SHARDED`, or if no operand can be sharded or partial. No other combination does so.
    """
    numbers = range(len(signature.shapes))
    whole = ("replicate",) * len(numbers)
    if name in SLOW_IF_SHARDED:
        yield signature, whole, "replicate", REAL_MODE
        return
    if name in CONVOLUTIONS:
        for texts in (("shard(0)", *whole[1:]), whole):
            for mode in _modes(OPERATORS[name]):
                yield signature, texts, "replicate", mode
        return
    tables = [_placements(name, signature, number, strength) for number in numbers]
    every = list(itertools.product(*tables))
    joint = [texts for texts in every if _traits(signature, texts)] if len(every) > MAX_ROWS else []
    joint += [_by_rows(signature)] if _by_rows(signature) in every else []
    chosen = dict.fromkeys((*_spread(every, MAX_ROWS), *joint))
    combinations = [texts for texts in chosen if texts != whole]
    if len(numbers) == 1 or not combinations:
        combinations.append(whole)
    modes = _modes(OPERATORS[name])
    for number, texts in enumerate(combinations):
        yield signature, texts, ("replicate", "shard(0)", "shard(-1)")[number % 3], modes[number % len(modes)]


def _is_whole(texts: Sequence[str]) -> bool:
    return set(texts) <= {"replicate"}


def _spread(rows: Sequence[T], num: int) -> list[T]:
    """Returns at most `num` of all combinations of some axes' values. Each value occurs about equally often."""
    if len(rows) <= num:
        return list(rows)
    step = next(step for step in itertools.count(int(len(rows) * 0.618)) if math.gcd(step, len(rows)) == 1)
    return [rows[number * step % len(rows)] for number in range(num)]


def _modes(operator: Operator) -> tuple[str, ...]:
    """Returns the modes between which calls alternate. Real values show rounding; integers must be equal."""
    return (EXACT_MODE,) if operator.is_exact else (REAL_MODE,) if operator.rounds else (EXACT_MODE, REAL_MODE)


def _placements(name: str, signature: Signature, number: int, strength: int) -> tuple[str, ...]:
    kind = kind_of(OPERATORS[name], signature.holds, number)
    shortest = 0 if number == 0 and name in HAND_WRITTEN else 1
    shards = tuple(f"shard({dim})" for dim, size in enumerate(signature.shapes[number]) if size > shortest)
    has_all = strength > 1 or number == 0 or (name in PROMOTING and _is_repeated(signature, number))
    reductions = REDUCTIONS if has_all else REDUCTIONS[:3:2]
    return (*shards, *(reductions if kind == FLOATS else ()), "replicate")


def _is_repeated(signature: Signature, number: int) -> bool:
    """True if the operand has fewer elements than the first one along some dim, or fewer dims."""
    shape, first = signature.shapes[number], signature.shapes[0]
    return math.prod(shape) < math.prod(first) and all(size in (1, *first) for size in shape)


def covering(name: str, rows: Sequence[Row], strength: int) -> list[Row]:
    """Returns few rows that together have each value, or at strength 2 each pair of values, of all `rows`.

    Each next row is the row with the most values, or pairs, that no earlier row has. Rows with a shard without elements
    come behind all others, and rows with all operands replicated come last. So a form is called with a usual shard or a
    partial sum first.
    """
    seen: set[tuple[object, ...]] = set()
    kept = []
    left = [(_how_usual(row), frozenset(itertools.combinations(_values(name, row), strength)), row) for row in rows]
    while left:
        best = max(left, key=lambda each: (each[0], len(each[1] - seen)))
        if best[1] <= seen:
            break
        seen |= best[1]
        kept.append(best[2])
        left = [each for each in left if not each[1] <= seen]
    return kept


def _values(name: str, row: Row) -> list[tuple[object, ...]]:
    signature, texts, cotangent, mode = row
    values: list[tuple[object, ...]] = [
        ("form", signature),
        *enumerate(texts),
        ("cotangent", cotangent),
        ("mode", mode),
        *_traits(signature, texts),
    ]
    dim = dict(signature.arguments).get("dim")
    if isinstance(dim, int) and signature.shapes[0] and texts[0] == f"shard({dim % len(signature.shapes[0])})":
        values.append(("dim is divided", dim < 0, texts[1:2]))
    changed, moved = _changed_and_moved(name, signature)
    place = places_of(signature).get(texts[0])
    if texts[0] in changed or texts[0] in moved:
        values.append(("changed dim is divided" if texts[0] in changed else "moved dim is divided", texts[0]))
    if place[0] == NAMED if place else texts[0] in changed:
        values.append(("form with its dims divided", signature))
    if place and place[0] == NAMED and _is_whole(texts[1:]):
        values.append(("named dim is divided alone",))
    partial = [(number, text) for number, text in enumerate(texts) if text in REDUCTIONS]
    values += [("beside", *each, *sign) for each in partial for sign in signs_of(signature)]
    if name in PROMOTING:
        is_beside_shard = texts[0].startswith("shard")
        repeated = [each for each in partial if _is_repeated(signature, each[0])]
        values += [("repeated", *each, is_beside_shard, not signature.shapes[each[0]]) for each in repeated]
    if place:
        values.append(("place", *place))
    if len(texts) > 1 and texts == _by_rows(signature):
        values.append(("form by rows", signature))
    if _is_whole(texts):
        values.append(("whole",))
    if _leaves_a_rank_empty(row):
        values.append(("a rank has no elements",))
    return values


def _how_usual(row: Row) -> tuple[bool, bool]:
    return not _is_whole(row[1]), not _leaves_a_rank_empty(row)


def _leaves_a_rank_empty(row: Row) -> bool:
    """True if the first operand is sharded along a dim of size 1, so that one of two ranks has no elements of it."""
    placement = parse_placement(row[1][0])
    return isinstance(placement, Shard) and row[0].shapes[0][placement.dim] == 1


def _traits(signature: Signature, texts: tuple[str, ...]) -> list[tuple[object, ...]]:
    """Returns one value for each of the four facts below that is true of `texts`, the operands' placements.

    First, all placements are equal. Second, one operand is partial or sharded and all others are replicated. Third, two
    operands are sharded along dims with different numbers. Fourth, one letter's dim is sharded in every operand that
    has the letter, and nothing else is sharded.
    """
    if len(texts) < 2:
        return []
    traits = list[tuple[object, ...]]()
    if len(set(texts)) == 1:
        traits.append(("alike", texts[0], _names_other_dim(signature.shapes, texts[0])))
    changed = [number for number, text in enumerate(texts) if text != "replicate"]
    if len(changed) == 1:
        [text] = (texts[number] for number in changed)
        of = text if text in REDUCTIONS else _names_other_dim(signature.shapes, text)
        traits.append(("alone", *changed, of))
    shards = list(dict.fromkeys(text for text in texts if text.startswith("shard")))
    if len(shards) > 1:
        traits.append(("crossed", shards[0] < shards[1]))
    together = ("together", *_dims_by_letter(signature).get(texts, ()))
    return [*traits, together] if len(together) > 1 else traits


def _names_other_dim(shapes: tuple[Shape, ...], text: str) -> bool:
    """True if an operand with fewer dims than another also has a dim with the number that `text` shards."""
    placement = parse_placement(text)
    return isinstance(placement, Shard) and any(placement.dim < len(shape) < max(map(len, shapes)) for shape in shapes)


@cache
def _dims_by_letter(signature: Signature) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Maps placements to a label, with one entry for each letter that several operands share.

    The placements shard the dim with this letter in each operand that has the letter.
    """
    operands = signature.letters
    shared = sorted(letter for letter in set("".join(operands)) if sum(letter in dims for dims in operands) > 1)
    placements = {
        letter: tuple(f"shard({dims.index(letter)})" if letter in dims else "replicate" for dims in operands)
        for letter in shared
    }
    return {texts: (*operands, letter) for letter, texts in placements.items()}


@cache
def _by_rows(signature: Signature) -> tuple[str, ...]:
    """Returns the placements that shard dim 0 of each operand, as a batch is sharded.

    If the operands are a column and a row, the column's rows and the row's columns are sharded.
    """
    shapes = signature.shapes
    if len(shapes) == 2 and shapes[0][-1:] == (1,) == shapes[1][:1] and len(shapes[1]) > 1:
        return "shard(0)", f"shard({len(shapes[1]) - 1})"
    return tuple("shard(0)" if shape and shape[0] > 1 else "replicate" for shape in shapes)


@cache
def _changed_and_moved(name: str, signature: Signature) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the placements that shard a dim which the first result lacks, or a dim that has another number there.

    Both shapes begin with some equal sizes, and end with some. The result lacks the first operand's dims in between.
    """
    shape, dtypes = signature.shapes[0], ("float32",) * len(signature.shapes)
    made = results_of(name, signature.shapes, signature.arguments, dtypes, signature.holds)[0].shape
    begin = _num_equal(shape, made)
    end = len(shape) - _num_equal(shape[begin:][::-1], made[begin:][::-1])
    behind = range(end, len(shape) if len(made) != len(shape) else end)
    changed, moved = (frozenset(f"shard({dim})" for dim in dims) for dims in (range(begin, end), behind))
    return changed, moved


def _num_equal(first: Shape, second: Shape) -> int:
    """Returns the number of leading sizes that are equal."""
    return sum(1 for _ in itertools.takewhile(lambda sizes: sizes[0] == sizes[1], zip(first, second, strict=False)))


def _case(name: str, world_size: int, dtype: str, row: Row) -> OperatorCase:
    signature, texts, cotangent, mode = row
    operator = OPERATORS[name]
    numbers = range(len(signature.shapes))
    dtypes = (dtype,) * len(signature.shapes)
    results = results_of(name, signature.shapes, signature.arguments, dtypes, signature.holds)
    return OperatorCase(
        world_size=world_size,
        dtype=dtype,
        operator=name,
        operands=signature.shapes,
        arguments=signature.arguments,
        holds=signature.holds,
        placements=tuple((text,) for text in texts),
        cotangents=tuple(_cotangent(cotangent, result.shape) for result in results) if cotangent != "replicate" else (),
        requires_grad=tuple(number for number in numbers if kind_of(operator, signature.holds, number) == FLOATS),
        values=((mode, 1),),
    )


def _cotangent(text: str, shape: Shape) -> Placements:
    dim = 0 if text == "shard(0)" else len(shape) - 1
    return (f"shard({dim})" if shape and shape[dim] > 1 else "replicate",)


ENUMERATION = Enumeration(calls_of, PARTS)
"""The calls of `dtensor_operators` on two, three and four ranks."""

"""Enumerates chains of two calls: each ordered pair of some operators, and each operator with two signatures."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from equivtest.cases.axes import Label, itself
from equivtest.cases.case import Shape
from equivtest.families.operators import strategy_calls
from equivtest.families.operators.case import EXACT_MODE, REAL_DTYPES, REAL_MODE
from equivtest.families.operators.case_forms import Arguments
from equivtest.families.operators.case_table import OPERATORS
from equivtest.families.operators.chains.case import REDISTRIBUTE, SPECIALS, THROUGH_LOCAL, WRITE, ChainCase, Step
from equivtest.families.operators.chains.strategy import CHAINED, NAMES, build_chain
from equivtest.property import Enumeration, Space

T = TypeVar("T")

Steps = tuple[Step, ...]

OF_EACH_KIND = (*strategy_calls.OF_EACH_KIND, REDISTRIBUTE, THROUGH_LOCAL, WRITE)
"""One operator of each kind, with the steps that change placements. A gate has each ordered pair of them."""

NORM = "linalg.vector_norm"
REDUCTIONS = ("sum", "mean", "amax", "amin", "prod", NORM)
"""Operators whose result over a sharded dim is partial, each by another reduction."""
AFTER_REDUCTIONS = (
    "neg", "abs", "square", "mul", "add", "sub", "rsub", "div", "clamp", "relu", "sqrt", "exp", "sum", "mean", "amax",
    "softmax", "cumsum", "unsqueeze", "flip", "neg in place", "mul in place", "full_like",
)  # fmt: skip
"""Operators that a gate calls on a partial result. A rule that keeps the result partial must suit the reduction."""

DIVIDED = "div in place"
BESIDE_REDUCTIONS = ("sub", "div", "mul", DIVIDED)
"""Operators that a gate calls on a shard and on its partial result, as a norm of a module does.

The values are real, because the gradient of a largest element that is on several ranks is another one (finding 63).
"""

WITHOUT_GRADIENT = {DIVIDED, "prod"}
"""Operators whose gradient a gate does not ask for. DTensor refuses the backward of `prod`."""

ALONG_STRIDED: tuple[tuple[str, Arguments], ...] = (
    ("sum", (("dim", 0),)), ("mean", (("dim", 0),)), ("amax", (("dim", 0),)), ("softmax", (("dim", 0),)),
    ("log_softmax", (("dim", 0),)), ("cumsum", (("dim", 0),)), ("select", (("dim", 0), ("index", 3))),
    ("narrow", (("dim", 0), ("start", 1), ("length", 4))), ("flip", (("dims", (0,)),)),
    ("roll", (("shifts", 1), ("dims", 0))), ("split", (("sizes", 2), ("dim", 0))), ("diag_embed", ()),
    ("sort", (("dim", 0),)), ("cat", (("dim", 0),)), ("stack", (("dim", 0),)), ("max", (("dim", 0),)),
    ("topk", (("dim", 0), ("k", 2), ("largest", True))), ("kthvalue", (("dim", 0), ("k", 2))),
    ("chunk", (("dim", 0), ("chunks", 3))), ("cummax", (("dim", 0),)),
    ("nn.functional.pad", (("pad", (1, 0)), ("value", 2.0))), (NORM, (("dim", 0),)), ("var", (("dim", 0),)),
    ("logsumexp", (("dim", 0),)), ("repeat", (("repeats", (2,)),)), ("unbind", (("dim", 0),)),
    ("unfold", (("dimension", 0), ("size", 2), ("step", 2))), ("nn.functional.normalize", (("dim", 0),)),
)  # fmt: skip
"""Operators with their arguments that a gate calls along a dim of strided shards."""

BEFORE_STRIDED: tuple[tuple[str, Arguments], ...] = (
    ("sum", (("dim", 0),)), ("mean", (("dim", 0),)), ("amax", (("dim", 0),)), ("select", (("dim", 0), ("index", 1))),
    ("softmax", (("dim", 0),)), ("cumsum", (("dim", 0),)), ("unsqueeze", (("dim", 0),)), ("unbind", (("dim", 0),)),
    ("transpose", (("dim0", 0), ("dim1", 1))), ("movedim", (("dim0", 0), ("dim1", 1))), ("flatten", ()),
    ("sum", (("dim", 0), ("keepdim", True))), ("expand", (("sizes", (2, -1, -1)),)), ("flip", (("dims", (0,)),)),
    ("narrow", (("dim", 0), ("start", 1), ("length", 2))), ("var", (("dim", 0),)), ("repeat", (("repeats", (2, 1)),)),
    ("permute", (("dims", (1, 0)),)),
)  # fmt: skip
"""Operators with their arguments that a gate calls along the dim before a dim of strided shards."""

BESIDE_STRIDED = ("add", "mul", "sub", "maximum")
"""Operators that a gate calls on strided shards and a replicated tensor."""

OF_DISTINCT = frozenset({"sort", "max", "topk", "cummax", "kthvalue", "var", "logsumexp", "nn.functional.normalize"})
"""Operators that are called on real numbers, because equal elements have several places, or whole numbers round."""

WRITTEN: tuple[Arguments, ...] = (
    (("dim", 0), ("index", 1)), (("dim", 1), ("index", 1)), (("dim", 0), ("start", 1), ("length", 2)),
    (("dim", 1), ("start", 1), ("length", 2)), (("dim0", 0), ("dim1", 1)), (("shape", (2, 2, 4)),),
)  # fmt: skip
"""Views of a tensor of 4 x 4 elements that a gate writes into."""

SPLITS = ((2, 4), (4, 2), (2, 2, 2), (8, 1))
"""Shapes to which a flattened tensor of 2 x 4 elements is viewed."""

FLATTENED: Step = ("flatten", ("x0",), ())
JOINING = frozenset({"cat", "stack"})

NUM_SIGNATURES = 2
"""Number of pairs of neighbouring signatures with which a chain calls the same operator twice."""
PARTS = {2: 2}
"""World size -> number of searches that the chains are divided among."""
TRIES = 8
"""Number of chains that are tried for a pair: a signature may not take the first result, a context may bar a step."""


class _Choices:
    """Picks the given entries, and for every other name an entry that depends on the name and the number alone."""

    def __init__(self, number: int, chosen: Mapping[str, Any]) -> None:
        self._number, self._chosen = number, chosen

    def pick(self, name: str, table: Sequence[T], label: Label = itself) -> T:
        default = table[zlib.crc32(f"{name} {self._number}".encode()) % len(table)]
        picked: T = self._chosen.get(name, default)
        return picked


def chains_of(space: Space, depth: int, part: int) -> list[ChainCase]:
    """Returns the chains of two steps in part `part` of `PARTS`.

    At depth 1 the steps are an ordered pair of `OF_EACH_KIND`, at depth 2 of all operators and steps. At both depths
    each operator also follows itself with another signature, so that a cache that ignores arguments would show, and
    there are the chains of `_of_partial_and_strided`. The chains have the first dtype of the space that is in
    `REAL_DTYPES`. Without such a dtype there are no chains.
    """
    dtypes = tuple(each for each in space.dtypes if each in REAL_DTYPES)[:1]
    names = OF_EACH_KIND if depth == 1 else (*CHAINED, *SPECIALS)
    pairs: list[dict[str, Any]] = [_steps(*pair) for pair in itertools.product(names, repeat=2)]
    pairs += [
        {**_steps(name, name), "signature 0": number, "signature 1": number + 1}
        for name in CHAINED
        for number in range(NUM_SIGNATURES)
    ]
    chosen = list(enumerate(pairs))[part :: PARTS[2]] if dtypes else []
    spaces = [Space((size,), dtypes) for size in space.world_sizes]
    further = [case for each in spaces for dtype in dtypes for case in _of_partial_and_strided(each, dtype)]
    drawn = (_first_with_both_steps(number, steps, each) for each in spaces for number, steps in chosen)
    return [*itertools.chain.from_iterable(drawn), *further[part :: PARTS[2]]]


def _of_partial_and_strided(space: Space, dtype: str) -> list[ChainCase]:
    """Returns chains in which an operator takes a partial result or the view of a shard, or which write into a view.

    If a dim behind another one is sharded, each rank's part of the flattened dim is strided.
    """
    [world_size] = space.world_sizes
    chains: list[tuple[tuple[Shape, ...], str, Steps]] = [
        (((3, 4),), "shard(0)", ((first, ("x0",), (("dim", 0),)), (second, ("y0",), _arguments_of(second))))
        for first in REDUCTIONS
        for second in AFTER_REDUCTIONS
    ]
    chains += [
        (((3, 4),), "shard(0)", ((first, ("x0",), arguments), (second, ("x0", "y0"), ())))
        for first in REDUCTIONS
        for second, arguments in itertools.product(BESIDE_REDUCTIONS, ((), (("dim", 0), ("keepdim", True))))
    ]
    chains += [
        (((2, 4),), shard, (FLATTENED, ("view", ("y0",), (("shape", shape),))))
        for shard in ("shard(0)", "shard(1)")
        for shape in SPLITS
    ]
    chains += [
        (((2, 4),), "shard(1)", (FLATTENED, (name, ("y0",) * (2 if name in JOINING else 1), arguments)))
        for name, arguments in ALONG_STRIDED
    ]
    chains += [
        (((2, 4), (8,)), "shard(1)", (FLATTENED, (name, sources, ())))
        for name in BESIDE_STRIDED
        for sources in (("y0", "x1"), ("x1", "y0"))
    ]
    columns = ("flatten", ("x0",), (("start_dim", 1), ("end_dim", 2)))
    chains += [(((3, 2, 4),), "shard(2)", (columns, (name, ("y0",), arguments))) for name, arguments in BEFORE_STRIDED]
    rows = ("flatten", ("x0",), (("start_dim", 0), ("end_dim", 1)))
    chains += [
        (((2, 4, 3), other), "shard(1)", (rows, ("mm", sources, ())))
        for other, sources in (((3, 2), ("y0", "x1")), ((3, 8), ("x1", "y0")))
    ]
    chains += [
        (((2, 4, 3),), "shard(1)", (rows, (name, ("y0",), arguments)))
        for name, arguments in ((REDISTRIBUTE, (("placements", "shard(0)"),)), ("sum", (("dim", 1),)))
    ]
    chains += [
        (((4, 4),), text, ((WRITE, ("x0",), (*how, ("factor", 2.0))),))
        for text in ("replicate", "shard(0)", "shard(1)", "partial(sum)")
        for how in WRITTEN
    ]
    made = [(shapes, (text, *("replicate",) * (len(shapes) - 1)), steps) for shapes, text, steps in chains]
    flat = (FLATTENED, ("flatten", ("x1",), ()))  # shards of two strides
    made += [(((2, 4), (4, 2)), ("shard(1)",) * 2, (*flat, (name, ("y0", "y1"), ()))) for name in BESIDE_STRIDED]
    return [
        ChainCase(
            world_size=world_size,
            dtype=dtype,
            operands=shapes,
            steps=steps,
            placements=tuple((text,) for text in texts),
            requires_grad=() if WITHOUT_GRADIENT & {step[0] for step in steps} else tuple(range(len(shapes))),
            values=((REAL_MODE if _needs_real(steps) else EXACT_MODE, 1),),
        )
        for shapes, texts, steps in made
    ]


def _needs_real(steps: Sequence[Step]) -> bool:
    """True if equal elements make the results or gradients ambiguous, as in a sort, or if whole numbers round."""
    return bool({step[0] for step in steps} & {NORM, *OF_DISTINCT}) or steps[-1][1] == ("x0", "y0")


def _arguments_of(name: str) -> Arguments:
    """Returns the arguments of the operator's simplest call on one tensor of one dim."""
    return next(each.arguments for each in OPERATORS[name].form((4,)) if len(each.shapes) == 1)


def _first_with_both_steps(number: int, chosen: Mapping[str, Any], space: Space) -> list[ChainCase]:
    wanted = [NAMES[chosen[f"operator {step}"]] for step in range(2)]
    tries = (build_chain(_Choices(number + 1000 * each, chosen), space) for each in range(TRIES))
    return list(itertools.islice((case for case in tries if [step[0] for step in case.steps] == wanted), 1))


def _steps(first: str, second: str) -> dict[str, Any]:
    """Returns the choices of a chain in which the second step takes the result of the first."""
    chosen = {"operator 0": NAMES.index(first), "operator 1": NAMES.index(second)}
    return {**chosen, "again 0": False, "again 1": False, "source 1": 0, "steps": 2}


ENUMERATION = Enumeration(chains_of, PARTS)
"""The chains of `dtensor_operator_chains` on two ranks."""

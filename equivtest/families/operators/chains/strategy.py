"""Draws chains, in which a step takes an earlier step's result, and often repeats the operator of the step before."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from equivtest.base import limits
from equivtest.cases.case import Shape
from equivtest.cases.drawing import Drawing
from equivtest.cases.picks import POISON_TABLE, REPEATS, Draw, pick, pick_members, pick_values
from equivtest.families.operators.case import EXACT_MODE, REAL_DTYPES, REAL_MODE, Placements
from equivtest.families.operators.case_forms import Arguments, Signature
from equivtest.families.operators.case_operator import FLOATS, INDEX
from equivtest.families.operators.case_table import Result, signatures_of
from equivtest.families.operators.chains.case import (
    AUTOCAST,
    CONTEXTS,
    FLATTENED,
    IMPLICIT,
    LOCAL_MAP,
    LOSS_PARALLEL,
    MODULE,
    REDISTRIBUTE,
    SPECIALS,
    THROUGH_LOCAL,
    WRITE,
    ChainCase,
    Step,
    results_of_chain,
)
from equivtest.families.operators.strategy import PICKS, placements_of, sizes_of
from equivtest.layout import Shard, parse_placement
from equivtest.property import Space

CHAINED = (
    "neg", "mul", "add", "sum", "transpose", "mm", "abs", "relu", "sub", "maximum", "clamp", "mean", "softmax",
    "cumsum", "permute", "unsqueeze", "expand", "select", "narrow", "cat", "stack", "tril", "flip", "roll", "sigmoid",
    "tanh", "exp", "mul in place", "add in place", "rsub", "bmm", "triu", "addcmul", "log_softmax",
)  # fmt: skip
"""Operators that can take the result of another operator, and that torch computes right when called alone."""

NAMES = (*CHAINED, *SPECIALS * 3)
DRAWN_CONTEXTS = ("",) * 6 + (*CONTEXTS[1:], AUTOCAST, FLATTENED)
TAKEN_OVER = frozenset({"log_softmax"})
"""Operators that `loss_parallel` replaces with another implementation."""
VALUES = ((EXACT_MODE,), (EXACT_MODE, EXACT_MODE), (REAL_MODE,), (REAL_MODE, EXACT_MODE))
MIN_NUMEL, NUMEL_PER_RANK = 120, 40
"""A result has at most MIN_NUMEL elements, or NUMEL_PER_RANK times the world size if that is larger."""


@dataclass
class _Chain:
    """The fields of a chain that have been drawn so far."""

    dtype: str
    context: str
    max_numel: int
    operands: list[Shape]
    dtypes: list[str]
    steps: list[Step] = field(default_factory=list)
    results: tuple[Result, ...] = ()

    def held(self) -> dict[str, Shape]:
        """Returns the shape of each tensor that the next step may take, the latest result first."""
        given = {f"y{number}": self.results[number].shape for number in reversed(range(len(self.steps)))}
        return given | {f"x{number}": shape for number, shape in enumerate(self.operands)}

    def with_step(self, step: Step, operands: list[Shape], dtypes: list[str]) -> bool:
        """Appends the step and its new operands, and returns True, if the chain stays valid."""
        shapes, named = [*self.operands, *operands], [*self.dtypes, *dtypes]
        try:
            known = tuple(each or self.dtype for each in named)
            results = results_of_chain((*self.steps, step), tuple(shapes), known, self.context)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return False
        last = results[-1]
        if "float" not in last.dtype or math.prod(last.shape) > self.max_numel or len(last.shape) > limits.MAX_DIMS:
            return False
        self.steps.append(step)
        self.operands, self.dtypes, self.results = shapes, named, results
        return True


@st.composite
def chain_cases(draw: DrawFn, space: Space) -> ChainCase:
    return build_chain(Drawing(draw), space)


def build_chain(draw: Draw, space: Space) -> ChainCase:
    world_size = pick(draw, "world_size", space.world_sizes)
    dtypes = tuple(each for each in space.dtypes if each in REAL_DTYPES) or space.dtypes
    dtype = pick(draw, "dtype", dtypes)
    context = pick(draw, "context", DRAWN_CONTEXTS)
    may_split = world_size == 4 and pick(draw, "two axes", (False,) * 4 + (True,))
    mesh = (2, 2) if may_split or (context == FLATTENED and world_size == 4) else ()
    context = _fitting(context, dtype, mesh)
    num_axes = len(mesh) or 1
    members = pick_members(draw, world_size)
    sizes = tuple(size for size in sizes_of(world_size) if 0 < size <= 2 * world_size)
    shape = tuple(
        sizes[pick(draw, f"size {dim}", PICKS) % len(sizes)] for dim in range(pick(draw, "dims", (1, 2, 2, 3)))
    )
    max_numel = max(MIN_NUMEL, NUMEL_PER_RANK * world_size)
    chain = _Chain(dtype, context, max_numel, [shape[:1] + tuple(min(size, 4) for size in shape[1:])], [""])
    for number in range(pick(draw, "steps", (2, 3, 4, 5))):
        _draw_step(draw, chain, number, mesh or (world_size,))
    if not chain.steps:
        chain.with_step(("neg", ("x0",), ()), [], [])
    placements = tuple(
        _pick_placements(draw, f"operand {number}", each, num_axes) for number, each in enumerate(chain.operands)
    )
    requires_grad = tuple(range(len(chain.operands))) if pick(draw, "gradients", (True, True, False)) else ()
    if context == IMPLICIT:
        requires_grad, placements = requires_grad[:1], _whole_behind_the_first(chain, placements)
    return ChainCase(
        world_size=world_size,
        dtype=dtype,
        mesh=mesh,
        context=context,
        operands=tuple(chain.operands),
        steps=tuple(chain.steps),
        placements=placements,
        other_dtypes=tuple(chain.dtypes) if any(chain.dtypes) else (),
        cotangents=_pick_cotangents(draw, chain, num_axes),
        requires_grad=requires_grad,
        values=pick_values(draw, VALUES if dtype in REAL_DTYPES and context != AUTOCAST else VALUES[:2]),
        poison=pick(draw, "poison", POISON_TABLE),
        repeats=pick(draw, "repeats", REPEATS),
        members=() if mesh else members,
    )


def _whole_behind_the_first(chain: _Chain, placements: tuple[Placements, ...]) -> tuple[Placements, ...]:
    """Replicates the operands that no step takes as its first input."""
    first = {sources[0] for _, sources, _ in chain.steps}
    return tuple(
        texts if f"x{number}" in first else ("replicate",) * len(texts) for number, texts in enumerate(placements)
    )


def _fitting(context: str, dtype: str, mesh: Shape) -> str:
    """Returns the context's name, or '' if the context has no effect with this dtype and mesh."""
    is_idle = (context == FLATTENED and not mesh) or (context == AUTOCAST and dtype != "float32")
    return "" if is_idle else context


def _draw_step(draw: Draw, chain: _Chain, number: int, mesh: Shape) -> None:
    names = tuple(each for each in NAMES if chain.context != LOSS_PARALLEL or each not in TAKEN_OVER)
    name = names[pick(draw, f"operator {number}", tuple(range(200))) % len(names)]
    if pick(draw, f"again {number}", (False, True)) and chain.steps and chain.steps[-1][0] not in SPECIALS:
        name = chain.steps[-1][0]
    held = list(chain.held().items())
    source, shape = held[pick(draw, f"source {number}", (0, 0, 0, 1, 2, 3)) % len(held)]
    entry = pick(draw, f"signature {number}", PICKS)
    if name in SPECIALS:
        arguments = _special(draw, number, name, shape, mesh)
        if arguments is not None:
            chain.with_step((name, (source,), arguments), [], [])
        return
    signatures = [each for each in signatures_of(name, shape) if each.shapes[0] == shape and _is_sound(name, each)]
    if not signatures:
        return
    signature = signatures[entry % len(signatures)]
    sources, fresh, dtypes = [source], list[Shape](), list[str]()
    for place, wanted in enumerate(signature.shapes[1:]):
        fitting = [each for each, have in held if have == wanted]
        is_held = pick(draw, f"held {number}.{place}", (True, False))
        if fitting and is_held:
            sources.append(fitting[pick(draw, f"which {number}.{place}", (0, 1, 2)) % len(fitting)])
            continue
        sources.append(f"x{len(chain.operands) + len(fresh)}")
        fresh.append(wanted)
        dtypes.append(pick(draw, f"other dtype {number}.{place}", ("",) * 7 + ("float64",)))
    if chain.dtype not in REAL_DTYPES:
        dtypes = [""] * len(fresh)
    dtypes = ["" if each == chain.dtype else each for each in dtypes]
    chain.with_step((name, tuple(sources), signature.arguments), fresh, dtypes)


def _is_sound(name: str, signature: Signature) -> bool:
    """False if the call counts a dim from the end, and finding 40, 51 or 52 is about the call."""
    dim = dict(signature.arguments).get("dim")
    return name not in ("select", "narrow", "cumsum") or (isinstance(dim, int) and dim >= 0)


def _special(draw: Draw, number: int, name: str, shape: Shape, mesh: Shape) -> Arguments | None:
    if name == THROUGH_LOCAL:
        return ()
    factor = pick(draw, f"factor {number}", (2.0, -3.0, 0.0)) if name != REDISTRIBUTE else 0.0
    if name == WRITE and len(shape) >= 2:
        # findings/64 is about views of one row
        return (("dim0", 0), ("dim1", pick(draw, f"dim {number}", (-1, 1))), ("factor", factor))
    if name == WRITE or (name == MODULE and not shape):
        return None
    table = placements_of(len(shape), INDEX, len(mesh))
    if name == LOCAL_MAP:  # findings/76
        table = tuple(each for each in table if all(_is_even(text, shape, math.prod(mesh)) for text in each))
    found = _without_nested(table[pick(draw, f"placements {number}", PICKS) % len(table)])
    placements = ("placements", " ".join(found))
    return (placements,) if name == REDISTRIBUTE else (placements, ("factor", factor))


def _is_even(text: str, shape: Shape, num_ranks: int) -> bool:
    placement = parse_placement(text)
    return not isinstance(placement, Shard) or shape[placement.dim] % num_ranks == 0


def _pick_placements(draw: Draw, name: str, shape: Shape, num_axes: int) -> tuple[str, ...]:
    table = placements_of(len(shape), FLOATS, num_axes)
    return _without_nested(table[pick(draw, f"{name}: placement", tuple(range(200))) % len(table)])


def _without_nested(placements: tuple[str, ...]) -> tuple[str, ...]:
    """Replicates on the second axis if both axes shard the same dim: findings/55 is about such shards."""
    is_nested = len(placements) == 2 and placements[0] == placements[1] and placements[0].startswith("shard")
    return (placements[0], "replicate") if is_nested else placements


def _pick_cotangents(draw: Draw, chain: _Chain, num_axes: int) -> tuple[tuple[str, ...], ...]:
    if not pick(draw, "cotangents", (False, False, True)):
        return ()
    dims = [pick(draw, f"cotangent {axis}", tuple(range(12))) for axis in range(num_axes)]
    found = []
    for result in chain.results:
        texts = [f"shard({dim % len(result.shape)})" if result.shape else "replicate" for dim in dims]
        found.append((texts[0], *("replicate" if text == texts[0] else text for text in texts[1:])))
    return tuple(found)

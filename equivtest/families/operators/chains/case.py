"""A chain of calls of operators on DTensors, of which each may take what an earlier one gave."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from equivtest.families.operators.case import OperatorCase
from equivtest.families.operators.case_forms import Arguments
from equivtest.families.operators.case_operator import Operator
from equivtest.families.operators.case_table import OPERATORS, Result, described, run
from equivtest.kit.case import Shape, require
from equivtest.kit.rules import OneOf
from equivtest.layout import Partial, Placement, parse_placement

MAX_STEPS = 6

Step = tuple[str, tuple[str, ...], Arguments]
"""(operator, what it takes, arguments): 'x0' is the first operand of the case, 'y0' what the first step gave."""
Special = Callable[[Step, torch.Tensor], torch.Tensor]

REDISTRIBUTE, THROUGH_LOCAL, WRITE = "redistribute", "to_local and back", "write through a view"
SPECIALS = (REDISTRIBUTE, THROUGH_LOCAL, WRITE)
"""Steps that are no operators: other placements; out of DTensors and in again; a view of a copy, multiplied in place,
which is one row, or all with two dims swapped."""

_CHAIN = Operator("chain", lambda *operands: operands)


@dataclass(frozen=True, kw_only=True, repr=False)
class ChainCase(OperatorCase):
    """results = what each step gives, and the gradients of the operands, given cotangents of the results.

    Attributes:
        steps: One to six; of each the first result alone is looked at.
    """

    operator: Annotated[str, OneOf(("chain",))] = "chain"
    steps: tuple[Step, ...] = (("neg", ("x0",), ()),)

    def check_fields(self) -> None:
        require(1 <= len(self.steps) <= MAX_STEPS, f"steps must be 1 to {MAX_STEPS}, got {len(self.steps)}")
        for number, (name, sources, _) in enumerate(self.steps):
            known = (*OPERATORS, *SPECIALS)
            require(name in known, f"a step must name an operator or one of {', '.join(SPECIALS)}, got {name!r}")
            names = {f"x{each}" for each in range(len(self.operands))} | {f"y{each}" for each in range(number)}
            require(set(sources) <= names, f"step {number} may take {', '.join(sorted(names))}, got {sources}")
            is_partial = any(isinstance(each, Partial) for each in placements_named(self.steps[number]))
            require(not is_partial, f"nothing is redistributed to partial shares, got {self.steps[number]}")
        super().check_fields()

    @property
    def definition(self) -> Operator:
        return _CHAIN

    @property
    def results(self) -> tuple[Result, ...]:
        dtypes = self.other_dtypes or ("",) * len(self.operands)
        return results_of_chain(self.steps, self.operands, tuple(name or self.dtype for name in dtypes))

    @property
    def writes_to_divided_rows(self) -> bool:
        """Whether one row of an operand is written to along a dim that is divided."""
        rows = [(sources[0], dict(how)) for name, sources, how in self.steps if name == WRITE and "index" in dict(how)]
        return any(
            source.startswith("x") and f"shard({how['dim']})" in self.placements[int(source[1:])]
            for source, how in rows
        )

    def call(self, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        return run_chain(self.steps, operands, _unsharded)


def placements_named(step: Step) -> tuple[Placement, ...]:
    """Of a step that redistributes: one per mesh axis, in one text."""
    return tuple(map(parse_placement, str(dict(step[2]).get("placements", "")).split()))


def written(step: Step, x: torch.Tensor) -> torch.Tensor:
    """A copy that has been written to through a view."""
    how: dict[str, Any] = dict(step[2])
    factor, copied = how.pop("factor"), x.mul(1)
    (copied.select if "index" in how else copied.transpose)(*how.values()).mul_(factor)
    return copied


def _unsharded(step: Step, x: torch.Tensor) -> torch.Tensor:
    """What a step that is no operator gives of a whole tensor."""
    return written(step, x) if step[0] == WRITE else x


def run_chain(steps: Sequence[Step], operands: Sequence[Any], special: Special) -> tuple[Any, ...]:
    """The first result of each step."""
    held: dict[str, Any] = {f"x{number}": operand for number, operand in enumerate(operands)}
    for number, step in enumerate(steps):
        name, sources, arguments = step
        taken = tuple(held[source] for source in sources)
        held[f"y{number}"] = special(step, taken[0]) if name in SPECIALS else run(name, taken, arguments)[0]
    return tuple(held[f"y{number}"] for number in range(len(steps)))


@functools.lru_cache(maxsize=2**12)
def results_of_chain(steps: tuple[Step, ...], shapes: tuple[Shape, ...], dtypes: tuple[str, ...]) -> tuple[Result, ...]:
    """As the unsharded chain gives them.

    Raises:
        RuntimeError, IndexError, ValueError, TypeError: torch's own, where an operator does not take what it is given.
    """
    operands = tuple(
        torch.full(shape, 0.5, dtype=getattr(torch, dtype), device="cpu").requires_grad_()
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    return described(run_chain(steps, operands, _unsharded), operands)

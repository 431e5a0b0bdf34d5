"""Defines `ChainCase`: calls of several operators on DTensors, which may take results of earlier calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from equivtest.cases.case import Shape, require
from equivtest.cases.rules import OneOf
from equivtest.families.operators.case import EXACT_MODE, MAX_AXES, OperatorCase
from equivtest.families.operators.case_forms import Arguments
from equivtest.families.operators.case_operator import Operator
from equivtest.families.operators.case_table import OPERATORS, Result, described, run
from equivtest.layout import Partial, Placement, parse_placement

MAX_STEPS = 6

Step = tuple[str, tuple[str, ...], Arguments]
"""(operator, inputs, arguments). Input 'x0' is the case's first operand, 'y0' the result of the first step."""
Special = Callable[[Step, torch.Tensor], torch.Tensor]

REDISTRIBUTE, THROUGH_LOCAL, WRITE = "redistribute", "to_local and back", "write through a view"
LOCAL_MAP, MODULE = "local_map", "distribute_module"
SPECIALS = (REDISTRIBUTE, THROUGH_LOCAL, WRITE, LOCAL_MAP, MODULE)
"""Steps that are no operators.

REDISTRIBUTE changes placements, THROUGH_LOCAL calls `to_local` and `from_local`. WRITE multiplies a view of a copy in
place. The view is one row, some rows, the copy in another shape, or the copy with two dims swapped. LOCAL_MAP
multiplies each local tensor by a function, MODULE by a module.
"""

NO_GRAD, INFERENCE, AUTOCAST = "no_grad", "inference_mode", "autocast"
IMPLICIT, LOSS_PARALLEL, FLATTENED = "implicit_replication", "loss_parallel", "flattened mesh"
CONTEXTS = ("", NO_GRAD, INFERENCE, AUTOCAST, IMPLICIT, LOSS_PARALLEL, FLATTENED)
"""Contexts of a chain: none; contexts of torch, autocast to bfloat16; a mesh of two axes that is also flattened."""

_CHAIN = Operator("chain", lambda *operands: operands)


@dataclass(frozen=True, kw_only=True, repr=False)
class ChainCase(OperatorCase):
    """Describes a chain of steps on DTensors. The steps' results and the operands' gradients are judged.

    Attributes:
        steps: One to six steps: see `Step`. Only the first result of each step is judged.
        context: The context of torch in which the chain runs, one of `CONTEXTS`.
    """

    operator: Annotated[str, OneOf(("chain",))] = "chain"
    steps: tuple[Step, ...] = (("neg", ("x0",), ()),)
    context: Annotated[str, OneOf(CONTEXTS)] = ""

    def check_fields(self) -> None:
        require(1 <= len(self.steps) <= MAX_STEPS, f"steps must be 1 to {MAX_STEPS}, got {len(self.steps)}")
        for number, (name, sources, _) in enumerate(self.steps):
            known = (*OPERATORS, *SPECIALS)
            require(name in known, f"a step must name an operator or one of {', '.join(SPECIALS)}, got {name!r}")
            names = {f"x{each}" for each in range(len(self.operands))} | {f"y{each}" for each in range(number)}
            require(
                set(sources) <= names,
                f"the operands of step {number} must be some of {', '.join(sorted(names))}, got {sources}",
            )
            is_partial = any(isinstance(each, Partial) for each in placements_named(self.steps[number]))
            require(not is_partial, f"a step cannot redistribute to partial, got {self.steps[number]}")
        is_split = len(self.mesh) == MAX_AXES and not self.members
        require(self.context != FLATTENED or is_split, f"a {FLATTENED} is made of two axes of all ranks: {self.mesh}")
        are_exact = all(mode == EXACT_MODE for mode, _ in self.values)
        require(self.context != AUTOCAST or are_exact, f"in {AUTOCAST} values must be {EXACT_MODE}, got {self.values}")
        super().check_fields()

    @property
    def definition(self) -> Operator:
        return _CHAIN

    @property
    def results(self) -> tuple[Result, ...]:
        dtypes = self.other_dtypes or ("",) * len(self.operands)
        named = tuple(name or self.dtype for name in dtypes)
        return results_of_chain(self.steps, self.operands, named, self.context)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*super().dtypes, *(("bfloat16",) if self.context == AUTOCAST else ()))))

    @property
    def passed_on(self) -> tuple[str, ...]:
        taken = sorted({source for _, sources, _ in self.steps for source in sources if source.startswith("y")})
        return tuple(f"output.{source[1:]}" for source in taken)

    @property
    def plain(self) -> tuple[int, ...]:
        """Numbers of the operands that are plain tensors. In `implicit_replication` torch takes them as replicated."""
        if self.context != IMPLICIT:
            return ()
        first = {sources[0] for _, sources, _ in self.steps}
        return tuple(
            number
            for number, texts in enumerate(self.placements)
            if f"x{number}" not in first and set(texts) == {"replicate"} and number not in self.requires_grad
        )

    def call(self, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        with unsharded_context(self.context):
            return run_chain(self.steps, operands, _unsharded)


def unsharded_context(name: str) -> AbstractContextManager[Any]:
    if name == AUTOCAST:
        return torch.autocast("cpu", torch.bfloat16)
    return torch.no_grad() if name in (NO_GRAD, INFERENCE) else nullcontext()


def placements_named(step: Step) -> tuple[Placement, ...]:
    return tuple(map(parse_placement, str(dict(step[2]).get("placements", "")).split()))


def written(step: Step, x: torch.Tensor) -> torch.Tensor:
    """Copies x and multiplies a view of the copy in place. Returns the copy."""
    how: dict[str, Any] = dict(step[2])
    factor, copied = how.pop("factor"), x.mul(1)
    views = {"index": copied.select, "length": copied.narrow, "shape": copied.view, "dim1": copied.transpose}
    view: Any = next(views[name] for name in views if name in how)
    view(*how.values()).mul_(factor)
    return copied


def weight_of(step: Step, x: torch.Tensor) -> torch.Tensor:
    """Returns one element per element of x's last dim: the step's factor with alternating signs."""
    signs = 1 - 2 * (torch.arange(x.shape[-1], device="cpu") % 2)
    return (signs * factor_of(step)).to(x.dtype)


def factor_of(step: Step) -> float:
    factor = dict(step[2])["factor"]
    assert isinstance(factor, float)
    return factor


def _unsharded(step: Step, x: torch.Tensor) -> torch.Tensor:
    if step[0] == MODULE:
        return x * weight_of(step, x)
    if step[0] == LOCAL_MAP:
        return x * factor_of(step)
    return written(step, x) if step[0] == WRITE else x.view_as(x)


def run_chain(steps: Sequence[Step], operands: Sequence[Any], special: Special) -> tuple[Any, ...]:
    """Returns the first result of each step. `special` runs the steps of `SPECIALS`, which are not operators."""
    held: dict[str, Any] = {f"x{number}": operand for number, operand in enumerate(operands)}
    for number, step in enumerate(steps):
        name, sources, arguments = step
        taken = tuple(held[source] for source in sources)
        held[f"y{number}"] = special(step, taken[0]) if name in SPECIALS else run(name, taken, arguments)[0]
    return tuple(held[f"y{number}"] for number in range(len(steps)))


@functools.lru_cache(maxsize=2**12)
def results_of_chain(
    steps: tuple[Step, ...], shapes: tuple[Shape, ...], dtypes: tuple[str, ...], context: str = ""
) -> tuple[Result, ...]:
    """Describes the first result of each step of the unsharded chain.

    Raises:
        RuntimeError, IndexError, ValueError, TypeError: an operator does not accept its inputs.
    """
    operands = tuple(
        torch.full(shape, 0.5, dtype=getattr(torch, dtype), device="cpu").requires_grad_()
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    with unsharded_context(context):
        found = run_chain(steps, operands, _unsharded)
    return described(found, operands)

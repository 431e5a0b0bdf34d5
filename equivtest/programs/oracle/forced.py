"""Runs the unsharded module again, and replaces the result of each part, a submodule, by the ranks' value.

Worst-case bounds usually grow from layer to layer. In this run they do not grow, because the bound of a part starts
from the ranks' values of the part's inputs, forward and backward. So each bound covers only the operations of one part,
however deep the module is and however few bits its dtype has. The run takes the ranks' value only if the value's bound
is less than limits.STILL_SHOWS times the values. Otherwise the run continues from its own value, and the bound
continues to grow.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from equivtest.base import limits
from equivtest.layout import Layout, Partial, Shard
from equivtest.oracle.expected import ExpectedTensor, resolution_of, says_nothing
from equivtest.oracle.ranged import Parts, Ranged
from equivtest.oracle.rounding import Bounded
from equivtest.programs.boundaries import BOUNDARY, Boundaries, Choice
from equivtest.programs.case import ModuleCase
from equivtest.programs.oracle.factors import GRADIENT, SCALED, Multiple, Rounded, divided, multiple_of
from equivtest.programs.oracle.held import HeldAt, Whole, is_agreed

if TYPE_CHECKING:
    from equivtest.oracle.running import RunningError


class Forced(Boundaries):
    """Judges the ranks' value at each boundary of a module's parts, and continues the run from that value.

    As in `Boundaries`, a part is a submodule.  `found`, `layouts`, `open`, `wrong`, `factors` and `agreed` use the
    names under which subjects return tensors.

    Attributes:
        found: Right value of each boundary that the ranks recorded, by name, in the order of the run.
        layouts: The ranks' layout at each boundary in `found`.
        open: Boundaries from which the run continues although their bound cannot show an error.
        wrong: Boundaries at which the ranks' value is outside the boundary's bound.
        factors: Factor of each gradient that is a multiple of the right gradient, if factors are divided out.
        agreed: Right value of each boundary at which the ranks' value is within the bound and the run continues from
            the ranks' value.

    Args:
        held: Function that assembles the ranks' value at a boundary.
        past_open: If True, the run continues from the ranks' value even at a boundary with too wide a bound, if the
            layout is known without looking at values (`Whole.is_told`). Then all later boundaries are judged, and only
            this boundary has no conclusion.
        takes_factors: True if a gradient may be the right gradient multiplied by a constant factor. The run then
            divides the ranks' gradient by the factor, and continues from the quotient.
        owes_parts: False if the parts need not return right values, as in a step that runs the module in its own way.
            The run then continues from the ranks' values until one of them is wrong, and after that from its own
            values.
    """

    def __init__(
        self,
        module: nn.Module,
        counted: RunningError,
        held: HeldAt,
        *,
        past_open: bool = False,
        takes_factors: bool = False,
        owes_parts: bool = True,
    ) -> None:
        super().__init__(module)
        self.found: dict[str, Bounded] = {}
        self.layouts: dict[str, Layout] = {}
        self.open: set[str] = set()
        self.wrong: set[str] = set()
        self.factors: dict[str, float] = {}
        self.agreed: dict[str, Bounded] = {}
        self._operands: set[str] = set()
        self._counted = counted
        self._held = held
        self._past_open = past_open
        self._takes_factors = takes_factors
        self._owes_parts = owes_parts
        self._is_astray = False

    def meet(self, name: str, tensor: torch.Tensor) -> None:
        """Judges the ranks' value of the tensor, and writes it to the tensor if the run continues from it."""
        held = self._judged(f"{BOUNDARY}{name}", tensor)
        if held is not None and isinstance(tensor, Ranged):
            with _without_modes():
                for part, new in zip(Parts.of(tensor), held, strict=True):
                    part.copy_(new)

    def meet_gradient(self, name: str, tensor: torch.Tensor) -> None:
        """Makes the backward judge the ranks' gradient of the tensor, and continue from that gradient if possible."""
        tensor.register_hook(functools.partial(self._came_back, f"grad.{BOUNDARY}{name}"))  # type: ignore[no-untyped-call]

    def owe_nothing(self, name: str) -> None:
        """Records that the ranks need not have a right value of the tensor `name`, and need not have the tensor.

        The tensor is an operand or the result of one of `FUNCTIONS`.

        If the ranks' value is right, the run continues from it. Otherwise the run continues from its own value. A wrong
        value is no failure.
        """
        self._operands |= {f"{BOUNDARY}{name}", f"grad.{BOUNDARY}{name}"}

    def apart(self, operand: Any) -> Any:
        """Copies an operand if several of its elements share memory, so that each element can get the ranks' value."""
        is_shared = isinstance(operand, torch.Tensor) and any(
            size > 1 and stride == 0 for size, stride in zip(operand.shape, operand.stride(), strict=True)
        )
        return operand.clone(memory_format=torch.contiguous_format) if is_shared else operand

    def is_apart(self, name: str, tensor: torch.Tensor) -> bool:
        """True if the ranks recorded a tensor under this name. Then the part returned a new tensor on the ranks."""
        with _without_modes():
            parts = Parts.of(tensor)
            return self._held(f"{BOUNDARY}{name}", Bounded(parts.value.double(), parts.error)) is not None

    def choose(self, name: str, operand: torch.Tensor, dim: int, choice: Choice) -> Any:
        """Returns (values, indices) of topk: the ranks' choice if it is right, otherwise the reference's choice.

        The two choices may differ although both are right, because torch.topk (2.13.0) does not specify which of
        several equal values is chosen.
        """
        choices = None
        if isinstance(operand, Ranged) and not bool(operand.error.any()):
            with _without_modes():
                choices = self._chosen(name, operand.value, dim, choice(operand.value))
        return choice(operand) if choices is None else torch.return_types.topk((operand.gather(dim, choices), choices))

    def _chosen(self, name: str, value: torch.Tensor, dim: int, own: Any) -> torch.Tensor | None:
        """Returns the indices that the ranks chose in topk, or None if their choice is wrong.

        The choice is right if no index occurs twice, and if the values at the indices equal the values that the
        reference chose. The order of the values does not matter.

        Args:
            value: The operand of topk.
            own: The reference's choice, (values, indices).
        """
        anything = torch.full(own.indices.shape, float(value.shape[dim]), dtype=torch.float64)
        whole = self._held(f"{BOUNDARY}{name}", Bounded(own.indices.double(), anything))
        if whole is None or whole.value.dtype != own.indices.dtype or whole.spread is not None:
            return None
        places = whole.value.sort(dim).values
        is_legal = bool(((places >= 0) & (places < value.shape[dim])).all()) and bool((places.diff(dim=dim) > 0).all())
        if not is_legal:
            return None
        taken, best = value.gather(dim, whole.value).sort(dim).values, own.values.sort(dim).values
        return whole.value.clone() if taken.equal(best) else None

    def _came_back(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        held = self._judged(name, gradient)
        with _without_modes():
            return None if held is None else held.wrapped()

    def _judged(self, name: str, computed: torch.Tensor) -> Parts | None:
        """Judges the ranks' value of the tensor `name`. Returns it if the run continues from it, otherwise None."""
        with _without_modes():
            parts = Parts.of(computed)
            right = replace(self._counted.bounded(parts.wrapped()), derivation=self._derivation())
            whole = self._held(name, right)
            multiple = None if whole is None else self._multiple(name, whole, right, parts)
            if multiple is not None:
                self.factors[name], right, whole = multiple
            is_right = whole is not None and is_agreed(whole, right)
            is_owed = self._owes_parts and name not in self._operands
            self._is_astray |= not (self._owes_parts or whole is None or is_right or name in self._operands)
            if whole is None or self._is_astray or not (is_right or is_owed):
                return None
            if whole.layout is not None and name not in self.found:
                self.found[name], self.layouts[name] = right, whole.layout
                if not is_right:
                    self.wrong.add(name)
            is_lost = says_nothing(right.value, right.allowed, share=limits.STILL_SHOWS) and not _is_near(whole, right)
            if is_lost and self._past_open and whole.is_told:
                self.open.add(name)
                is_lost = False
            if is_lost:
                return None
            if is_right and multiple is None:
                self.agreed[name] = right
            return self._parts(whole if multiple is None else divided(whole, multiple.factor), computed.dtype)

    def _multiple(self, name: str, whole: Whole, right: Bounded, parts: Parts) -> Multiple | None:
        if not self._takes_factors or not name.startswith(GRADIENT) or is_agreed(whole, right):
            return None
        roundings = self._counted.roundings
        record = roundings.record(parts.value.dtype)
        rounded = Rounded(roundings.own(parts, SCALED), SCALED * record.eta, record.u_o)
        return multiple_of(self._held, name, whole, right, rounded, [*dict.fromkeys(self.factors.values())][::-1])

    def _derivation(self) -> str:
        if self._counted.undecided:
            return self._counted.undecided
        return "running error of this part alone, from the values that the ranks had at its beginning"

    def _parts(self, whole: Whole, dtype: torch.dtype) -> Parts:
        value = whole.value.to(dtype, copy=True)  # gradients may be added up in place
        if whole.magnitude is not None:
            off = (whole.value - value.double()).abs()
            return self._counted.roundings.summed(value, off, whole.magnitude, 0)
        spread = (whole.value.double() - value.double()).abs().nan_to_num(nan=0.0)  # a factor may round
        spread = spread if whole.spread is None else spread + whole.spread
        return Parts(value, spread, value.double().abs() + spread)


@contextmanager
def _without_modes() -> Iterator[None]:
    """Disables all modes, because they follow the operations of the module, and the judge's are no part of it."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _is_near(whole: Whole, right: Bounded) -> bool:
    """True if the ranks' value is so near to the right value that even a narrow bound would accept the ranks' value."""
    resolution = resolution_of(right.value)
    return resolution is not None and bool(((whole.value.double() - right.value).abs() <= resolution).all())


def _certainty(layout: Layout) -> tuple[int, int]:
    """Returns a sort key for the layouts that were inferred for one boundary in several parts of the batch.

    The layout with the largest key is right.  A tensor of zeros agrees with several layouts, so the oracle takes such a
    tensor for replicas. Another part of the batch, in which the tensor is not zero, shows if the tensor is a shard or
    an operand of a sum. The layouts of shards and operands have larger keys than the layout of replicas.
    """
    kinds = [type(placement) for placement in layout.placements]
    return kinds.count(Partial), kinds.count(Shard)


def boundaries(case: ModuleCase, runs: Sequence[Forced]) -> dict[str, ExpectedTensor]:
    """Returns name -> right value of each boundary that the ranks recorded, in the order of the run.

    For a divided batch, the values of all parts of the batch are stacked along a new first dim.  If a part has no
    value, its allowed error is infinite, which no value exceeds.

    The values of the parts cannot be stacked if they differ in shape, as with the tokens of an expert. Then the result
    has the value of only one part, and infinite allowed errors for all other parts. This part is the first part in
    which `Forced` found the ranks' value wrong. If no part has a wrong value, the result leaves the boundary out.
    """
    facts, expected = case.boundaries(), {}
    for name in dict.fromkeys(name for run in runs for name in run.found):
        held = [run for run in runs if name in run.found]
        if len({run.found[name].value.shape for run in held}) > 1:
            held = [run for run in held if name in run.wrong][:1]
        if not held:
            continue
        right = held[0].found[name]
        layout = max((run.layouts[name] for run in held), key=_certainty)
        anything = Bounded(torch.zeros_like(right.value), torch.full_like(right.value, torch.inf))
        stack = [run.found[name] if run in held else anything for run in runs]
        value, allowed = torch.stack([each.value for each in stack]), torch.stack([each.allowed for each in stack])
        expected[name] = ExpectedTensor(
            value=value if case.is_divided else value[0],
            allowed=allowed if case.is_divided else allowed[0],
            layout=layout,
            dtype=facts[name].dtype,
            derivation=right.derivation,
            may_be_none=True,
            is_inner=all(name not in run.open for run in runs),
            is_part=True,
            factor=next((run.factors[name] for run in held if name in run.factors), 1.0),
            resolution=resolution_of(value if case.is_divided else value[0]),
        )
    return expected

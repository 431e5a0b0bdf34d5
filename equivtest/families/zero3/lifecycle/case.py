"""Defines `LifecycleCase`: a sequence of operations on parameters under ZeRO-3.

Letters: w ranks, n parameters, k the number of an operation, i the number of a parameter, p significand bits.

Each operation is 'verb' or 'verb i j ...':

    fetch    makes parameters whole with one collective, and waits for it
    launch   the same without waiting: the parameters are then in flight
    wait     waits until nothing is in flight
    fail     a fetch for which no memory is left
    release  drops whole parameters
    use      forward and backward: each rank multiplies the whole parameter by a different x, with a different
             cotangent; the average of the ranks' gradients is added to the earlier gradients
    step     SGD: partition -= LEARNING_RATE * gradient, for every parameter with a gradient, which is then deleted
    update   writes a new value to a whole parameter and to its partitions
    save     saves a copy of a whole parameter
    load     sets the partitions to the saved values

An operation is refused, and then changes nothing, if a named parameter does not have the status that the operation
needs: not available for fetch, launch, fail and load, and available for release, use, update and save. A step needs
every parameter with a gradient to be not available. A fetch is also refused if it names one parameter twice or names
parameters of two dtypes. A load is also refused if nothing was saved.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from equivtest.cases.case import Case, Shape, replicated, require
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.rules import OneOf
from equivtest.families.zero3.fetch.case import FETCH_COLLECTIVES, PADDINGS
from equivtest.layout import Flat, Layout, Shard

FETCHES = ("fetch", "launch", "fail")
"""Verbs that request whole parameters, all with one collective."""

WITHOUT_NAMES = ("wait", "step")
VERBS = (*FETCHES, "wait", "release", "use", "step", "update", "save", "load")
MAX_OPERATIONS = 16
LEARNING_RATE = 0.5

STATUSES = ("not available", "in flight", "available")
"""Statuses of a parameter; `after{k}.status` holds indices into this tuple."""

REFUSALS = ("none", "status", "dtype", "never saved", "out of memory")
"""Reasons of a refusal; `after{k}.refusal` holds an index into this tuple."""

MEMORY = ("partitions", "wholes", "gradients", "saved", "others")
"""Kinds of memory that `memory.after{k}` lists, in this order."""


@dataclass(frozen=True)
class Operation:
    verb: str
    parameters: tuple[int, ...] = ()


@functools.lru_cache(maxsize=2**10)
def parse_operation(text: str) -> Operation:
    """Parses, for example, 'fetch 0 1'. Raises Misuse if the verb is unknown or does not take these parameters."""
    verb, *names = text.split(" ")
    require(verb in VERBS, f"an operation must be one of {', '.join(VERBS)}, got {text!r}")
    require(
        all(name.isdecimal() for name in names), f"an operation must name its parameters by their numbers, got {text!r}"
    )
    named = tuple(map(int, names))
    require(
        bool(named) is (verb not in WITHOUT_NAMES),
        f"{verb} must name {'no' if named else 'at least one'} parameter, got {text!r}",
    )
    require(
        verb in FETCHES or len(set(named)) == len(named), f"{verb} must name each parameter only once, got {text!r}"
    )
    return Operation(verb, named)


@dataclass(frozen=True, kw_only=True, repr=False)
class LifecycleCase(Case):
    """Describes some parameters and a sequence of operations on them.

    The input `param.i` is the first value of parameter number i. If operation number k is a use, it has the inputs
    `op{k}.x.i` and `op{k}.cotangent.i`, each with one slice per rank. If it is an update, it has the input
    `op{k}.new.i`.

    After every operation the subject returns the reason of a refusal, the status of each parameter, whether each
    parameter has a gradient, all partitions, the available whole parameters, the existing gradients, and the outputs of
    a use. If the case measures memory, the subject returns the memory too.

    Attributes:
        parameters: Shape of each parameter. Parameters may be 0-dim and may have no elements.
        requires_grad: Whether each parameter requires a gradient, in order.
        operations: The operations in order, at most MAX_OPERATIONS.
        mixed_dtypes: Whether every second parameter has another dtype than `dtype`.
        padding: Fill value of padding: 'nan', or 'large' for a large finite number.
        collective: The documented collective of a fetch: 'all_gather' or 'all_reduce'.
        measures: Whether the ranks report the memory that they use.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = ("dense", "index")

    parameters: tuple[Shape, ...] = ((1,),)
    requires_grad: tuple[bool, ...] = (True,)
    operations: tuple[str, ...] = ("fetch 0",)
    mixed_dtypes: bool = False
    padding: Annotated[str, OneOf(PADDINGS)] = "nan"
    collective: Annotated[str, OneOf(FETCH_COLLECTIVES[1:])] = "all_gather"
    measures: bool = False

    def check_fields(self) -> None:
        require(len(self.parameters) >= 1, "parameters must hold at least one shape")
        require(
            len(self.requires_grad) == len(self.parameters),
            f"requires_grad must have one flag per parameter: {len(self.parameters)}, got {len(self.requires_grad)}",
        )
        require(
            1 <= len(self.operations) <= MAX_OPERATIONS,
            f"operations must be 1 to {MAX_OPERATIONS}, got {len(self.operations)}",
        )
        for text in self.operations:
            named = parse_operation(text).parameters
            require(
                max(named, default=0) < len(self.parameters),
                f"{text!r} names an unknown parameter: the parameters are 0 to {len(self.parameters) - 1}",
            )

    @property
    def num_parameters(self) -> int:
        return len(self.parameters)

    def sequence(self) -> list[Operation]:
        return [parse_operation(text) for text in self.operations]

    @property
    def leaves_gradients(self) -> bool:
        """True if some use names only whole parameters, and one of them requires a gradient.

        Until the first such use no parameter has a gradient, so that no earlier step is refused.
        """
        away, in_flight, whole = set(range(self.num_parameters)), set[int](), set[int]()
        for operation in self.sequence():
            named = set(operation.parameters)
            if operation.verb == "wait":
                in_flight, whole = set(), whole | in_flight
            elif operation.verb in ("fetch", "launch") and named <= away and self._can_be_fetched(operation):
                away -= named
                (whole if operation.verb == "fetch" else in_flight).update(named)
            elif operation.verb == "release" and named <= whole:
                away, whole = away | named, whole - named
            elif operation.verb == "use" and named <= whole and any(self.requires_grad[index] for index in named):
                return True
        return False

    def _can_be_fetched(self, operation: Operation) -> bool:
        named = operation.parameters
        return len(set(named)) == len(named) and len({self.dtype_of(index) for index in named}) == 1

    def dtype_of(self, index: int) -> str:
        if not self.mixed_dtypes or index % 2 == 0:
            return self.dtype
        return "float32" if self.dtype == "float64" else "float64"

    def padded_numel(self, index: int) -> int:
        return -(-math.prod(self.parameters[index]) // self.world_size) * self.world_size

    def describe_tensors(self) -> dict[str, CaseTensor]:
        """Describes all inputs, and all answers that may exist. The oracle computes which answers exist."""
        given = {
            f"param.{index}": CaseTensor(shape, replicated(), needs_grad=self.requires_grad[index])
            for index, shape in enumerate(self.parameters)
        }
        answered: dict[str, CaseTensor] = {}
        for number, operation in enumerate(self.sequence()):
            given |= self._taken_by(number, operation)
            answered |= self._left_by(number, operation)
        return given | answered

    def _taken_by(self, number: int, operation: Operation) -> dict[str, CaseTensor]:
        shapes = {index: self.parameters[index] for index in operation.parameters}
        if operation.verb == "update":
            return {f"op{number}.new.{index}": CaseTensor(shape, replicated()) for index, shape in shapes.items()}
        if operation.verb == "use":
            return {
                f"op{number}.{kind}.{index}": CaseTensor((self.world_size, *shape), Layout((Shard(0),)))
                for kind in ("x", "cotangent")
                for index, shape in shapes.items()
            }
        return {}

    def _left_by(self, number: int, operation: Operation) -> dict[str, CaseTensor]:
        here, flags = f"after{number}", CaseTensor((self.num_parameters,), replicated(), "state")
        left = {f"{here}.refusal": CaseTensor((), replicated(), "state")}
        left |= {f"{here}.{kind}": flags for kind in ("status", "has_gradient")}
        used = {
            index for before in self.sequence()[: number + 1] if before.verb == "use" for index in before.parameters
        }
        for index, shape in enumerate(self.parameters):
            flat = Layout((Flat(self.padded_numel(index)),))
            left[f"{here}.param.{index}"] = CaseTensor(shape, replicated(), "state")
            left[f"{here}.partition.{index}"] = CaseTensor(shape, flat, "state")
            if index in used and self.requires_grad[index]:
                left[f"grad.{index}.{here}"] = CaseTensor(shape, flat, "gradient")
        if operation.verb == "use":
            for index in operation.parameters:
                rows = (self.world_size, *self.parameters[index])
                left[f"{here}.output.{index}"] = CaseTensor(rows, Layout((Shard(0),)), "state")
        if self.measures:
            left[f"memory.{here}"] = CaseTensor((len(MEMORY),), replicated(), "memory")
        return left

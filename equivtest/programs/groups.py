"""Groups of arguments of `equivtest.program`, which are `Training`, `World` and `Judge`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from equivtest.base import limits
from equivtest.base.functions import Named, name_of
from equivtest.base.importing import closest
from equivtest.errors import Misuse

if TYPE_CHECKING:
    from equivtest.programs.case import ModuleCase

T = TypeVar("T")

FUNCTIONS = ("optimizer", "step", "set_up", "tear_down", "placed")
"""Fields of groups that hold functions."""

OTHER_WORDS = {
    "x_shapes": "write inputs=[(1, 3), (4, 3)]",
    "x_shape": "write inputs=[(1, 3), (4, 3)]",
    "shapes": "write inputs=[(1, 3), (4, 3)]",
    "nprocs": "write world=World(world_sizes=...)",
    "ranks": "write world=World(world_sizes=...)",
    "timeout": "write world=World(limit_s=...)",
    "tolerance": "no tolerance is set, since bounds are derived",
    "atol": "no tolerance is set, since bounds are derived",
    "rtol": "no tolerance is set, since bounds are derived",
}
"""Argument of another library -> what to write here instead."""


def answers_wrong_names(group: type[T]) -> type[T]:
    """Decorates a class so that the class's constructor raises Misuse for an unknown or a positional argument.

    The message suggests the right name.
    """
    make: Any = group.__init__

    @functools.wraps(make)
    def checked(self: object, *args: Any, **given: Any) -> None:
        if args:
            raise Misuse(f"{group.__name__} takes arguments by name, such as {_example(group)}, got {args[0]!r}")
        refuse_unknown(group.__name__, given, [each.name for each in fields(group)])  # type: ignore[arg-type]
        make(self, **given)

    setattr(group, "__init__", checked)  # noqa: B010  (mypy lets no method be assigned)
    return group


def _example(group: type[Any]) -> str:
    return f"{group.__name__}({fields(group)[0].name}=...)"


def refuse_unknown(what: str, given: Sequence[str] | dict[str, object], known: Sequence[str]) -> None:
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise Misuse(f"{what} has no argument {unknown!r}: {_in_place_of(unknown, known)}")


def _in_place_of(unknown: str, known: Sequence[str]) -> str:
    if unknown in OTHER_WORDS:
        return OTHER_WORDS[unknown]
    elsewhere = {each.name: group.__name__ for group in (Training, World, Judge) for each in fields(group)}
    if near := closest(unknown, known):
        return f"did you mean {near}=?"
    if near := closest(unknown, elsewhere):
        return f"write {elsewhere[near].lower()}={elsewhere[near]}({near}=...)"
    return f"its arguments are {', '.join(known)}"


def refuse_text(**named: object) -> None:
    """Raises Misuse for a string instead of a sequence of names, because each letter would count as a name."""
    for name, value in named.items():
        if isinstance(value, str):
            raise Misuse(f"{name} must hold names, such as {name}=({value!r},), got {value!r}")


@answers_wrong_names
@dataclass(frozen=True, kw_only=True)
class Training:
    """Describes how a program trains. Without a `Training`, a program is one forward and one backward.

        training=Training(optimizer=sgd, steps=3, max_norm=1.0)

    Attributes:
        optimizer: Function (module) -> torch.optim.Optimizer, which is called with the parallel module and with the
            unsharded module. To judge the updates, equivtest runs the optimizer's own code on the ranks' gradients, one
            tensor after the other.
        step: Function (module, mesh, micro_batches, optimizer) -> outputs. Every rank calls the function for each step
            of training, from forward to update. See docs/how-to/training.md.
        steps: Number of steps. Each step has different inputs. If None, there are 2 steps with an optimizer, and 1 step
            without an optimizer.
        micro_batches: Number of micro-batches into which a rank's rows are cut for a step.
        max_norm: The norm to which gradients are clipped before the update. If 0, gradients are not clipped.
        norm_type: The type of the norm: 1, 2 or math.inf.

    Raises:
        Misuse: A function cannot be sent to the ranks, or a number is out of its range.
    """

    optimizer: Named = ""
    step: Named = ""
    steps: int | None = None
    micro_batches: int = 1
    max_norm: float = 0.0
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("micro_batches", 1)):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int) or number < least):
                raise Misuse(f"Training: {name} must be a whole number of at least {least}, got {number!r}")
        if not self.max_norm >= 0:
            raise Misuse(f"Training: max_norm must be at least 0, where 0 clips nothing, got {self.max_norm!r}")
        named_functions(self)


@answers_wrong_names
@dataclass(frozen=True, kw_only=True)
class World:
    """The processes and the mesh on which a program runs.

    Without a `World`, a program runs on any number of ranks, along one axis without a name.

        world=World(axes=("dp", "tp"), world_sizes=(1, 2, 4))

    Attributes:
        axes: Names of the axes of the mesh that `parallelize` takes. Meshes of every shape with these axes are drawn,
            and an axis may have the size 1.
        batch_axis: The axis along which the batch is divided, if it is divided. Along all other axes the ranks have the
            same rows. If '', this is the first axis.
        world_sizes: Numbers of ranks on which the program runs, such as divisors of its number of heads. If empty, the
            program runs on any number of ranks. A run on other numbers of ranks skips the property on these numbers,
            and reports that. To decline cases for other reasons, the program raises `NotSupported`.
        needs_world: True if the program reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR or MASTER_PORT from the
            environment.
        set_up, tear_down: Functions (mesh) -> None that ranks call before and after each draw. If either is passed,
            `needs_world` is True. If only set_up is passed, each case has fresh ranks.
        limit_s: Seconds that one run of one case may take on all ranks. A longer run has timed out. The limit is at
            most 300.

    Raises:
        Misuse: A function cannot be sent to the ranks, or a number is out of its range.
    """

    axes: Sequence[str] = ()
    batch_axis: str = ""
    world_sizes: Sequence[int] = ()
    needs_world: bool = False
    set_up: Named = ""
    tear_down: Named = ""
    limit_s: float = limits.CASE_S

    def __post_init__(self) -> None:
        refuse_text(axes=self.axes)
        sizes = self.world_sizes
        if not isinstance(sizes, Sequence) or not all(isinstance(size, int) and size >= 1 for size in sizes):
            raise Misuse(f"world_sizes must be numbers of ranks, each at least 1, got {sizes!r}")
        named_functions(self)


@answers_wrong_names
@dataclass(frozen=True, kw_only=True)
class Judge:
    """Describes which tensors are judged, and how.

    Without a `Judge`, all outputs, gradients, parameters and buffers are judged.

        judge=Judge(outputs=("logits",), by_parts=True)

    Attributes:
        outputs: Names of the outputs that are judged, such as ('logits',) or ('0', '1.hidden'). If empty, all outputs
            that are not None are judged.
        loss: Name of the output from which backward starts, with the gradient 1. If '', backward starts from the output
            called 'loss', or from the only output, if that output is one number. If there is no such output, backward
            starts from all outputs, each with a different cotangent.
        by_parts: True if each submodule is judged alone, on real numbers and in every dtype, from the ranks' values of
            the submodule's inputs. The bounds are then narrow however deep the module is. If None, submodules are
            judged alone only in dtypes in which the bound of the whole module is too wide, and only if no dtype allows
            to judge the module on integers. In a `step` submodules are not judged, and the ranks' values at their
            boundaries only narrow the bounds of other tensors.
        placed: Function (parallel module, name of a parameter) -> (tensor, indices), which returns the elements of the
            parameter that a rank has. Pass it if the parallel module does not show these elements. See
            `ModuleCase.placed`.
        state: Contract of the buffers that the forward changes, if each rank has different rows. If 'own rows', a
            rank's buffers equal the buffers of the unsharded module after that rank's rows, as in BatchNorm under
            DistributedDataParallel. If 'whole batch', every rank's buffers equal the buffers of the unsharded module
            after the whole batch, as in SyncBatchNorm or in counts that an all_reduce adds up. The rank's outputs are
            then rows of the unsharded module's outputs on the whole batch. The rank's gradients are the unsharded
            module's gradients, divided by the number of ranks if gradients are averaged. If None, no buffer depends on
            the rows, or a `step` leaves the buffers of the whole batch.
        zero_or_none: Patterns of names of parameters and inputs, such as ('experts.*',). The gradient of such a tensor
            may be None on ranks if each element of the unsharded module's gradient is 0, as in an expert that no token
            reaches.
        without_collectives: The reason why the parallel module needs no collective, for a program that calls no
            collective. If '', a program that calls no collective is an error.
        conclusive_dtypes: The dtypes in which a conformance run must reach conclusions. If empty, these are all dtypes
            that the run draws.
        examples: Cases that always run. Paste the code that a message prints for a case.

    Raises:
        Misuse: A function cannot be sent to the ranks, or an argument with names is no sequence of strings.
    """

    outputs: Sequence[str] = ()
    loss: str = ""
    by_parts: bool | None = None
    placed: Named = ""
    state: str | None = None
    zero_or_none: Sequence[str] = ()
    without_collectives: str = ""
    conclusive_dtypes: Sequence[str] = ()
    examples: Sequence[ModuleCase] = ()

    def __post_init__(self) -> None:
        refuse_text(
            outputs=self.outputs, zero_or_none=self.zero_or_none, conclusive_dtypes=self.conclusive_dtypes
        )  # fmt: skip
        named_functions(self)


def named_functions(group: Training | World | Judge) -> dict[str, str]:
    """Returns field -> 'package.module:NAME' of each function in a group, or '' if the function is not set.

    Raises:
        Misuse: A function cannot be sent to the ranks.
    """
    return {name: name_of(getattr(group, name), name) for name in FUNCTIONS if hasattr(group, name)}


def flat(group: Training | World | Judge) -> dict[str, Any]:
    """Returns all fields of the group, with functions as 'package.module:NAME' and sequences as tuples."""
    values = {each.name: getattr(group, each.name) for each in fields(group)} | named_functions(group)
    return {
        name: value if isinstance(value, str) or not isinstance(value, Sequence) else tuple(value)
        for name, value in values.items()
    }


def complete(training: Training | None, world: World | None, judge: Judge | None) -> tuple[Training, World, Judge]:
    """Returns the three groups. A group that is None is replaced by the default group."""
    groups = (training or Training(), world or World(), judge or Judge())
    for group, wanted in zip(groups, (Training, World, Judge), strict=True):
        name = wanted.__name__
        if not isinstance(group, wanted):
            raise Misuse(f"{name.lower()} must be a {name}, such as {name.lower()}={name}(...), got {group!r}")
    return groups


def ungrouped(what: str, given: dict[str, Any], others: Sequence[str]) -> tuple[Training, World, Judge]:
    """Makes the three groups from one dict of their fields. Raises Misuse for an unknown name.

    Args:
        what: Name of the caller, for the message.
        others: Further names that the message may suggest, beside the names of the fields.
    """
    fields_of: list[set[str]] = [{each.name for each in fields(group)} for group in (Training, World, Judge)]
    refuse_unknown(what, given, [*sorted(set().union(*fields_of)), *others])
    training, world, judge = ({name: value for name, value in given.items() if name in own} for own in fields_of)
    return Training(**training), World(**world), Judge(**judge)

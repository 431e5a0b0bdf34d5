"""`equivtest.program`: the property of your program, in one line of a test file.

The module imports little at its top level, because every rank imports this module with your file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never

from equivtest.base.functions import Named, is_rank
from equivtest.errors import Misuse
from equivtest.programs.groups import Judge, Training, World, complete, refuse_unknown, ungrouped

if TYPE_CHECKING:
    from equivtest.cases.case import Shape
    from equivtest.programs.checking import ProgramProperty
    from equivtest.programs.inputs import Input

ARGUMENTS = ("inputs", "sizes", "positional", "batch", "options", "training", "world", "judge")
"""Arguments that are passed by name."""


class InRank:
    """The result of `program` in a rank, which needs only the functions in your file and no property."""

    def __getattr__(self, name: str) -> Any:
        raise Misuse(
            f"a rank imports your file for its functions, and the file uses .{name} of a property at its top level: "
            "put that into a test, or below if __name__ == '__main__':"
        )


def program(
    build: Named,
    parallelize: Named,
    inputs: Mapping[str, Input] | Sequence[Shape] | None = None,
    *,
    sizes: Mapping[str, Sequence[int]] | None = None,
    positional: Sequence[str] = (),
    batch: str | None = None,
    options: Mapping[str, Sequence[Any]] | None = None,
    training: Training | None = None,
    world: World | None = None,
    judge: Judge | None = None,
    **unknown: Never,
) -> ProgramProperty:
    """The property that a parallel program computes what the unsharded module computes, forward and backward.

    Assign the property to a name in a test file. Then pytest collects the property and judges it like the shipped
    properties.

        test_block = equivtest.program(block, tensor_parallel, inputs=[(1, 3), (4, 3)])

    The property's method `check` judges the program at once, like `equivtest.check`.

    The ranks receive a function as file and name, so each function must be at the top level of a file. You can also
    pass a `functools.partial` of a function with plain values, or a name 'package.module:NAME' or 'file.py:NAME'.

    Args:
        build: Function without arguments, or a class, that makes the unsharded module.  All parameters that require a
            gradient are trained.  A module that only adds, multiplies, takes maxima and moves values is judged on
            integers, for equality in every dtype.  Any other module is judged on real numbers. If the bound of the
            whole module is narrow enough in float64 or float32, the whole module is judged within that bound. Otherwise
            each submodule is judged within its own bound.
        parallelize: Function (module, mesh) -> module, which every rank calls.
        inputs: For a module whose only input is a floating-point x, a list of shapes of x, the simplest first. For any
            other module, the inputs by name, made by `real`, `ids`, `mask`, `targets` and `positions`. The shape of
            such an input has numbers and names of sizes. If the batch is divided, each rank has some rows of x, or of
            each input whose first dim is 'batch'. Each rank has all other inputs as a whole.
        sizes: Values of each named size, the simplest first. For a size that is not in `sizes`, the values are 1 to 7
            if the size is 'batch', and otherwise 2, 3 and 5.
        positional: Names of the inputs that are passed by position, in order. All other inputs are passed by name.
        batch: How the ranks divide the batch. If 'whole', the parallel module takes the whole batch and returns the
            whole output on every rank. If 'mean of parts', each rank has different rows, and gradients are averaged
            over the ranks. If 'sum of parts', each rank has different rows, and gradients are added up. If 'parts of
            the whole', the program has a step, and each rank has different rows. The gradients, the updates and the
            numbers that the step reports equal the unsharded module's gradients, updates and numbers on the whole
            batch. If None, the ranks determine the value once, before any case. If `parallelize` applies
            DistributedDataParallel, fully_shard or a similar wrapper, the value is 'mean of parts', or 'parts of the
            whole' with a step. Otherwise the value is 'whole'. If a rank raises, hangs or dies while the ranks
            determine the value, the property raises Misuse.
        options: Values of keyword arguments of `build` and `parallelize`, such as {'bias': (True, False)}. The values
            are plain JSON values, the simplest first. Each value is drawn, and failures shrink to the first value. The
            printed case has the arguments, so that you can run the case again.
        training, world, judge: See `Training`, `World` and `Judge`.

    Raises:
        Misuse: A function cannot be found from a rank, or an argument has an unknown name or an invalid value.
    """
    refuse_unknown("program", list(unknown), ARGUMENTS)
    if is_rank():
        return InRank()  # type: ignore[return-value]
    from equivtest.programs.checking import ProgramProperty
    from equivtest.programs.property import make_property

    groups = complete(training, world, judge)
    return make_property(ProgramProperty, build, parallelize, inputs, sizes, positional, batch, options, *groups)


def module_property(
    build: Named,
    parallelize: Named,
    x_shapes: Sequence[Shape] | None = None,
    *,
    inputs: Mapping[str, Input] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    positional: Sequence[str] = (),
    batch: str | None = None,
    options: Mapping[str, Sequence[Any]] | None = None,
    **grouped: Any,
) -> ProgramProperty:
    """The older form of `program`, in which the fields of `Training`, `World` and `Judge` are arguments.

    Args:
        build, parallelize, inputs, sizes, positional, batch, options: See `program`.
        x_shapes: A list of shapes, which `program` has as its argument `inputs`.
        grouped: Fields of `Training`, `World` and `Judge`.

    Raises:
        Misuse: Same as in `program`.
    """
    groups = ungrouped("module_property", grouped, ARGUMENTS[:5])
    if (x_shapes is None) == (inputs is None):
        raise Misuse(
            "describe the inputs by x_shapes=, if the module takes one floating-point x, or by "
            "inputs={'name': ids(vocab=11, shape=('batch', "
            f"'seq'))}}, got {'neither' if inputs is None else 'both'}"
        )
    if is_rank():
        return InRank()  # type: ignore[return-value]
    from equivtest.programs.checking import ProgramProperty
    from equivtest.programs.property import make_property, require_shapes

    if inputs is None:
        require_shapes(x_shapes, "x_shapes")
    shapes = x_shapes if inputs is None else inputs
    return make_property(ProgramProperty, build, parallelize, shapes, sizes, positional, batch, options, *groups)

"""The parts of a `ModuleCase`, which are `Arguments`, `World`, `Training` and `Judge`.

The code of a case shows the fields of the parts like the case's own fields, as in ModuleCase(world_size=2,
optimizer='my.training:sgd').
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from equivtest.cases.case import Part, Shape, require
from equivtest.cases.rules import OneOf, Within
from equivtest.programs.inputs import BATCH, Written, kind_of, sizes_in
from equivtest.programs.state import STATES


@dataclass(frozen=True, kw_only=True)
class Arguments(Part):
    """The inputs of the unsharded module, and its other arguments.

    Attributes:
        x_shape: Global shape of x, if the module takes one floating-point x. The shape has at least one element.
        largest: Largest magnitude of x and of the parameters, if their values are integers. The number must be odd.
        inputs: (name, kind, shape) of each input: see `equivtest.programs.inputs`. If empty, the only input is x.
        sizes: (name, size) of each name in the shapes of `inputs`.
        positional: Names of the `inputs` that are passed by position, in order. All other inputs are passed by name.
    """

    x_shape: Annotated[Shape, Within(1)] = (1,)
    largest: Annotated[int, Within(1)] = 1
    inputs: Written = ()
    sizes: tuple[tuple[str, int], ...] = ()
    positional: tuple[str, ...] = ()

    def check(self) -> None:
        require(self.largest % 2 == 1, f"largest must be odd, got {self.largest}")
        sizes, names = dict(self.sizes), [name for name, _, _ in self.inputs]
        require(len(set(names)) == len(names), f"all inputs must have different names, got {', '.join(names)}")
        missing = [size for size in sizes_in(self.inputs) if size not in sizes]
        require(not missing, f"sizes must say how large {' and '.join(missing)} are, got {self.sizes}")
        require(all(size >= 1 for size in sizes.values()), f"sizes must be at least 1, got {self.sizes}")
        unknown = [name for name in self.positional if name not in names]
        require(
            not unknown, f"positional must name inputs, got {', '.join(unknown)}; the inputs are {', '.join(names)}"
        )
        for _, kind, _ in self.inputs:
            kind_of(kind)

    @property
    def num_rows(self) -> int:
        if self.inputs:
            return dict(self.sizes).get(BATCH, 1)
        return self.x_shape[0] if self.x_shape else 1


@dataclass(frozen=True, kw_only=True)
class World(Part):
    """The mesh of a program, and the environment of its ranks.

    The docstring of `equivtest.World` describes `axes` and `batch_axis`.

    Attributes:
        mesh: Number of ranks along each of the `axes`. The ranks lie in row-major order. If empty, all ranks lie along
            one axis.
        needs_world: True if the program makes groups itself. Then the program's ranks are the whole world, and the
            environment variables describe this world, as under torchrun.
        set_up, tear_down: 'package.module:NAME' of functions (mesh) -> None, called before and after each draw. If '',
            no function is called. A set-up without a tear-down runs in fresh ranks, which end after the case.
    """

    mesh: Shape = ()
    axes: tuple[str, ...] = ()
    batch_axis: str = ""
    needs_world: bool = False
    set_up: str = ""
    tear_down: str = ""

    def check(self, world_size: int, members: tuple[int, ...]) -> None:
        require(
            self.needs_world or not (self.set_up or self.tear_down),
            f"set_up and tear_down need needs_world=True, got {self.set_up or self.tear_down!r} without it",
        )
        require(
            not (self.needs_world and members),
            f"a program with needs_world=True runs on all processes: leave members out, got {members}",
        )
        require_axes(self.axes, self.batch_axis)
        require(
            len(self.mesh) == len(self.axes) and all(size >= 1 for size in self.mesh),
            f"mesh must say how many ranks lie along each of axes {self.axes}, got {self.mesh}",
        )
        require(
            not self.mesh or math.prod(self.mesh) == world_size,
            f"mesh must have {world_size} ranks, got {self.mesh}",
        )
        require(not (self.axes and members), f"members need a mesh of one axis, got axes {self.axes}")

    @property
    def batch_place(self) -> int:
        return self.axes.index(self.batch_axis) if self.batch_axis else 0


@dataclass(frozen=True, kw_only=True)
class Training(Part):
    """The optimizer, the number of steps, and the function of one step. The default is one forward and backward.

    Attributes:
        optimizer: 'package.module:NAME' of a function (module) -> torch.optim.Optimizer, which is called with the
            parallel module on every rank, and with the unsharded module. If '', parameters stay unchanged.
        step: 'package.module:NAME' of a function (module, mesh, micro_batches, optimizer) -> outputs, which every rank
            calls once in each step. `micro_batches` is a list with the named inputs of each micro-batch. The function
            runs forward and backward on each micro-batch, updates the parameters if there is an optimizer, leaves the
            gradients of that update in `grad`, and returns its outputs. If '', a step is one forward and backward,
            `clip_grad_norm_` if max_norm is not 0, and optimizer.step().
        micro_batches: Number of micro-batches into which the rows of each rank are cut. If a rank has fewer rows, there
            are fewer micro-batches.
        max_norm: The norm to which torch.nn.utils.clip_grad_norm_ clips the gradients before the update. The step then
            reports total_norm, the norm before clipping, as one of its outputs. If 0, gradients are not clipped.
    """

    optimizer: str = ""
    step: str = ""
    steps: Annotated[int, Within(1)] = 1
    micro_batches: Annotated[int, Within(1)] = 1
    max_norm: float = 0.0
    norm_type: Annotated[float, OneOf((1.0, 2.0, math.inf))] = 2.0

    def check(self) -> None:
        require(self.steps == 1 or bool(self.optimizer), f"{self.steps} steps need an optimizer")
        require(
            self.micro_batches == 1 or bool(self.step),
            f"{self.micro_batches} micro_batches need a step, which says what is done with each",
        )
        require(0 <= self.max_norm < math.inf, f"max_norm must be 0 or more, and finite, got {self.max_norm}")
        require(
            not self.max_norm or self.is_stepped,
            "max_norm needs an optimizer or a step: pass one, or leave max_norm out",
        )

    @property
    def is_stepped(self) -> bool:
        return bool(self.optimizer or self.step)


@dataclass(frozen=True, kw_only=True)
class Judge(Part):
    """The tensors that are judged, and the contracts that these tensors must fulfil.

    The docstring of `equivtest.Judge` describes the other fields. Here '' stands for None.

    Attributes:
        outputs: Paths of the outputs that are judged. If empty, all outputs are judged.
        loss: The output from which backward starts, with the gradient 1. If '', this is the output in `Facts.loss`, if
            that is not ''.
        by_parts: True if every submodule is judged alone, from the ranks' values of the submodule's inputs: see
            `equivtest.programs.oracle.forced`. This needs real values, and a divided batch must have the same number of
            rows on every rank. In a step no submodule is judged, and the ranks' values only narrow the bounds of other
            tensors.
        placed: 'package.module:NAME' of a function (parallel module, name of a parameter) -> (tensor, indices), which
            returns this rank's part of the parameter, and for each local element its index in the flattened whole, or
            -1 for an element outside of the whole. The function may return None instead of the pair if the parallel
            module has a parameter of that name which shows its part, such as a DTensor. If '', every parameter shows
            its part.
    """

    outputs: tuple[str, ...] = ()
    loss: str = ""
    by_parts: bool = False
    placed: str = ""
    state: Annotated[str, OneOf(("", *STATES))] = ""
    zero_or_none: tuple[str, ...] = ()


def require_axes(axes: tuple[str, ...], batch_axis: str) -> None:
    are_names = isinstance(axes, tuple) and all(isinstance(name, str) and name.isidentifier() for name in axes)
    require(
        are_names and len(set(axes)) == len(axes),
        f"axes must be different names, such as ('dp', 'tp'), got {axes!r}",
    )
    require(
        not batch_axis or batch_axis in axes,
        f"batch_axis must be one of axes {', '.join(axes) or 'none'}, got {batch_axis!r}",
    )

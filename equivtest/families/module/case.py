"""A module of anybody's own, unsharded and parallelized, each made by a function that is named.

The unsharded one is the reference: it says how many parameters there are, of what shapes, and what comes out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import nn

from equivtest.errors import Misuse
from equivtest.importing import load_named, require_arguments
from equivtest.kit.case import Case, Shape, require
from equivtest.layout import Layout, Replicate, Shard, local_shape

EXACT_MODE, REAL_MODE = "dense", "real"

WHOLE, MEAN_OF_PARTS, SUM_OF_PARTS = BATCHES = ("whole", "mean of parts", "sum of parts")
"""Every rank has the whole batch; or its own rows of it, and gradients are averaged or added up."""

ROWS = Layout((Shard(0),))
"""Of what has the rows of the batch, where each rank has its own."""

LARGEST = {"float32": (1, 3), "float64": (1, 3, 7), "bfloat16": (1,), "float16": (1,)}
"""Magnitudes of which the strategy draws odd integers, by dtype: few bits are full soon."""

REAL_DTYPES = ("float32", "float64")
"""Of real numbers: kernels of 16 bits round what they keep for themselves, of which no module tells."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ModuleCase(Case):
    """y = f(x), and the gradients of x and of every parameter, given a cotangent of y.

    Values are odd integers, on which the reference is exact where f adds and multiplies (the oracle
    refuses data that some operation could round), or real numbers, on which it has a bound.

    Attributes:
        build: 'package.module:NAME' of a function without arguments that makes the unsharded
            module: one floating-point tensor in, one out, all parameters trained.
        parallelize: 'package.module:NAME' of a function (module, mesh) -> module.
        x_shape: Of the input, global; at least one element.
        largest: Largest magnitude of x and of the parameters where they are integers; odd.
        batch: 'whole': every rank is handed the whole x, and gives the whole output.  'mean of parts': every rank is
            handed its own rows, one at least, as torch.chunk divides them; it gives what the unsharded module gives on
            these alone, and a parameter's gradient is the mean over the ranks of what they come to.  'sum of parts':
            it is their sum.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = (EXACT_MODE, REAL_MODE)

    build: str
    parallelize: str
    x_shape: Shape = (1,)
    largest: int = 1
    batch: str = WHOLE

    def __post_init__(self) -> None:
        require(self.batch in BATCHES, f"batch must be one of {', '.join(BATCHES)}, got {self.batch!r}")
        require(all(size >= 1 for size in self.x_shape), f"x_shape must hold sizes of at least 1, got {self.x_shape}")
        require(self.largest >= 1 and self.largest % 2 == 1, f"largest must be odd and at least 1, got {self.largest}")
        require(
            self.dtype in REAL_DTYPES or all(mode == EXACT_MODE for mode, _ in self.values),
            f"real values of a module must be of {' or '.join(REAL_DTYPES)}, got {self.dtype}",
        )
        if self.is_divided and self.world_size >= 1:  # else it is refused below
            require_parts(self.build, self.x_shape, self.world_size)
        super().__post_init__()

    @property
    def is_divided(self) -> bool:
        """Whether each rank has its own rows of the batch."""
        return self.batch != WHOLE

    @property
    def fixes_layouts(self) -> bool:
        return False

    @property
    def shard_kind(self) -> str:
        """That of a batch is no layout of the module's."""
        return "even"

    def parameter_names(self) -> tuple[str, ...]:
        """Of the unsharded module, as `named_parameters` lists them: a tied one once."""
        return tuple(name for name in self._base_shapes() if name not in ("x", "output"))

    def _base_shapes(self) -> dict[str, Shape]:
        """As `shapes_of`; of a divided batch the outputs' rows are those of all ranks."""
        if not self.is_divided:
            return shapes_of(self.build, self.x_shape)
        part = shapes_of(self.build, parts_of(self.x_shape, self.world_size)[0])
        output = output_of_parts(self.build, self.x_shape, self.world_size)
        return {**part, "x": self.x_shape, "output": output}

    def shapes(self) -> dict[str, Shape]:
        base = self._base_shapes()
        base = {**base, "cotangent": base["output"], "grad.x": base["x"]}
        for name in self.parameter_names():
            base[f"param.{name}"] = base[f"grad.{name}"] = base[name]
        return {name: base[name] for name in (*self.given_names(), *self.answer_names())}

    def layouts(self) -> dict[str, Layout]:
        """How the parallel module divides its parameters is its own affair: here they are whole on every rank."""
        rows = ("x", "cotangent", "output", "grad.x") if self.is_divided else ()
        return {name: ROWS if name in rows else Layout((Replicate(),)) for name in self.shapes()}

    def given_names(self) -> tuple[str, ...]:
        return ("x", *self.parameter_names(), "cotangent")

    def answer_names(self) -> tuple[str, ...]:
        names = self.parameter_names()
        return ("output", *(f"param.{name}" for name in names), "grad.x", *(f"grad.{name}" for name in names))

    def given_flags(self) -> dict[str, bool]:
        return {name: name != "cotangent" for name in self.given_names()}


@functools.lru_cache(maxsize=256)
def shapes_of(build: str, x_shape: Shape) -> dict[str, Shape]:
    """Shapes of 'x', 'output' and every parameter of the unsharded module.

    Raises:
        Misuse: it cannot be built, does not take such an x, or does not give one tensor.
    """
    module = call_builder(build)
    parameters = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}  # "meta" unties them
    try:
        with torch.no_grad(), torch.device("meta"):  # where nothing is computed
            output = module.to("meta")(torch.empty(x_shape, device="meta"))
    except Exception as error:
        raise Misuse(f"{build}: the unsharded module does not take an x of shape {x_shape}: {error}") from error
    if not isinstance(output, torch.Tensor):
        raise Misuse(f"{build}: the unsharded module must give one tensor, got {type(output).__name__}")
    reserved = sorted({"x", "output", "cotangent"} & parameters.keys())
    if reserved:
        raise Misuse(f"{build}: a parameter may not be called {reserved[0]}: rename it")
    return {"x": x_shape, "output": tuple(output.shape), **parameters}


def parts_of(x_shape: Shape, world_size: int) -> list[Shape]:
    """Of each rank's rows of x, as torch.chunk divides them; [] where some rank has none, or x has no rows.

    Source: torch.chunk (2.13.0).
    """
    if not x_shape:
        return []
    parts = [local_shape(x_shape, ROWS, (world_size,), rank) for rank in range(world_size)]
    return parts if all(shape[0] for shape in parts) else []


def require_parts(build: str, x_shape: Shape, world_size: int) -> None:
    """Raises Misuse unless each rank has rows of x, and their outputs are one tensor, divided likewise."""
    require(
        bool(parts_of(x_shape, world_size)),
        f"x of shape {x_shape} cannot be divided among {world_size} ranks, as torch.chunk divides, so that each has a "
        f"row: take one of {world_size} rows, such as {(world_size, *x_shape[1:])}, or batch='whole'",
    )
    output_of_parts(build, x_shape, world_size)


@functools.lru_cache(maxsize=256)
def output_of_parts(build: str, x_shape: Shape, world_size: int) -> Shape:
    """Shape of the outputs of all ranks' rows, one below the other, a number as one row.

    Raises:
        Misuse: the module does not take a rank's rows, or no tensor that is divided by rows has such parts.
    """
    parts = [shapes_of(build, part)["output"] or (1,) for part in parts_of(x_shape, world_size)]
    output = (sum(shape[0] for shape in parts), *parts[0][1:])
    divided = [local_shape(output, ROWS, (world_size,), rank) for rank in range(world_size)]
    require(
        parts == divided,
        f"{build}: of x of shape {x_shape}, divided among {world_size} ranks, they give outputs of shapes "
        f"{', '.join(map(str, parts))}, which is no tensor divided by rows: take an x_shape whose rows they share "
        "evenly, or batch='whole'",
    )
    return output


def call_builder(build: str) -> nn.Module:
    """The unsharded module, as its function makes it.

    Raises:
        Misuse: there is no such function, it raises, or it makes no module.
    """
    function = cast("Callable[[], object]", load_named(build, "build"))
    require_arguments(function, f"build {build!r}", ())
    try:
        with torch.random.fork_rng(devices=[]):  # what it draws, such as a buffer, is to be the same on every rank
            torch.manual_seed(0)
            module = function()
    except Exception as error:
        raise Misuse(f"build {build!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise Misuse(f"build {build!r} must give an nn.Module, got {type(module).__name__}")
    return module


def with_parameters(module: nn.Module, given: Mapping[str, torch.Tensor]) -> nn.Module:
    """The module with `given` in place of its parameters, by name, trained; tied ones stay tied."""
    names = dict(module.named_parameters())
    made = {id(names[name]): nn.Parameter(tensor) for name, tensor in given.items()}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, made[id(parameter)])
    return module

"""A property of a module of your own, in one line of a test file."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from equivtest.cases.base import require
from equivtest.cases.module import LARGEST, ModuleCase
from equivtest.check import DEFAULT_CLAIMS
from equivtest.errors import Misuse
from equivtest.oracle.module import prove_exact
from equivtest.property import Property, Space
from equivtest.verdicts.claims import keeps_layout_of_parameter, repeats_itself

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from equivtest.cases.base import Shape

CLAIMS = (*(claim for claim in DEFAULT_CLAIMS if claim is not keeps_layout_of_parameter), repeats_itself)
"""What is claimed of a module; how it divides its parameters is its own affair."""


def module_property(
    build: str,
    parallelize: str,
    x_shapes: Sequence[Shape],
    *,
    examples: Sequence[ModuleCase] = (),
    conclusive_dtypes: Sequence[str] = (),
) -> Property:
    """That a parallelized module computes what the unsharded one computes, forward and backward.

    Assigned to a name of a test module, it is collected by pytest and judged as the shipped properties are.

    Args:
        build: 'package.module:NAME' of a function without arguments that makes the unsharded module: one floating-point
            tensor in, one out, sums, products, ReLU and what moves values in between; all parameters are trained.
        parallelize: 'package.module:NAME' of a function (module, mesh) -> module, which every rank calls.  The result
            takes the whole x and gives the whole output on every rank.
        x_shapes: Of which the input's shape is drawn, the simplest first; in each dtype those whose sums it holds.
        examples: Cases that are always run.
        conclusive_dtypes: In which a conformance run wants conclusions, where some hold no sums; () for all.

    Raises:
        Misuse: x_shapes is no sequence of shapes.
    """
    require(
        isinstance(x_shapes, Sequence) and bool(x_shapes) and all(isinstance(shape, Sequence) for shape in x_shapes),
        f"x_shapes must hold shapes, one at least, such as [(2, 3), (4, 3)], got {x_shapes!r}",
    )
    return Property(
        subject="module",
        statement=f"{parallelize} computes what {build} computes.",
        source=build,
        cases=partial(_cases, build, parallelize, tuple(map(tuple, x_shapes))),
        claims=CLAIMS,
        examples=tuple(examples),
        shards=False,
        conclusive_dtypes=tuple(conclusive_dtypes),
    )


def _cases(build: str, parallelize: str, x_shapes: tuple[Shape, ...], space: Space) -> SearchStrategy[ModuleCase]:
    from equivtest.cases.strategies import module_cases

    layouts = {size: _layouts(build, parallelize, x_shapes, size, space.dtypes) for size in space.world_sizes}
    return module_cases(space, build=build, parallelize=parallelize, layouts=layouts)


@functools.lru_cache(maxsize=64)
def _layouts(
    build: str, parallelize: str, x_shapes: tuple[Shape, ...], world_size: int, dtypes: tuple[str, ...]
) -> dict[str, list[tuple[Shape, int]]]:
    """dtype -> (x_shape, largest magnitude) of every case whose sums are exact.

    Raises:
        Misuse: none is, or a shape does not fit the module.
    """
    fitting: dict[str, list[tuple[Shape, int]]] = {}
    reasons = []
    for dtype in dtypes:
        for x_shape, largest in itertools.product(x_shapes, LARGEST[dtype]):
            case = ModuleCase(
                world_size=world_size, dtype=dtype, build=build, parallelize=parallelize, x_shape=x_shape,
                largest=largest,
            )  # fmt: skip
            try:
                prove_exact(case)
            except Misuse as error:
                reasons.append(error)
            else:
                fitting.setdefault(dtype, []).append((x_shape, largest))
    if not fitting:
        raise reasons[0]
    return fitting

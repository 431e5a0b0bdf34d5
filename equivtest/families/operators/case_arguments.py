"""Builds arguments and signatures from a shape, for operators that split tensors, or that move or pick elements.

A signature has the shapes of all operands and the arguments of one call. Each function returns the simplest arguments
or signature first, like the forms in `equivtest.families.operators.case_forms`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from equivtest.cases.case import Shape
from equivtest.families.operators.case_forms import (
    Arguments,
    Form,
    Signature,
    Signatures,
    dims_of,
    pairs,
    products,
    resized,
)


def reshapes(shape: Shape) -> list[Arguments]:
    """Returns arguments that flatten, merge two neighbouring dims, add a dim of size 1, or split an even dim."""
    found: list[Shape] = [(-1,)]
    for dim in range(len(shape) - 1):
        found.append((*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]))
    for dim, size in enumerate(shape):
        found.append((*shape[:dim], 1, *shape[dim:]))
        if size and size % 2 == 0:
            found += [(*shape[:dim], 2, size // 2, *shape[dim + 1 :]), (*shape[:dim], size // 2, 2, *shape[dim + 1 :])]
    return [(("shape", each),) for each in found]


def permutations(shape: Shape) -> list[Arguments]:
    n = len(shape)
    orders: list[Shape] = [tuple(reversed(range(n)))]
    if n >= 2:
        orders += [(*range(1, n), 0), tuple(range(-1, -n - 1, -1))]
    return [(("dims", order),) for order in orders]


def narrows(shape: Shape) -> list[Arguments]:
    found: list[Arguments] = []
    for dim in dims_of(shape):
        size = shape[dim]
        for start, length in ((0, size), (0, size - 1), (1, size - 1), (-1, 1)):
            if length >= 1:
                found.append((("dim", dim), ("start", start), ("length", length)))
    return found


def per_dim(name: str, *values: int, **arguments: Any) -> Callable[[Shape], list[Arguments]]:
    """For example, `per_dim("k", 1, 2)` gives `dim=DIM, k=1` and `dim=DIM, k=2` for each dim."""

    def make(shape: Shape) -> list[Arguments]:
        return [(("dim", dim), (name, value), *arguments.items()) for dim in dims_of(shape) for value in values]

    return make


def rolls(shape: Shape) -> list[Arguments]:
    found: list[Arguments] = [(("shifts", shift), ("dims", dim)) for dim in dims_of(shape) for shift in (1, -1)]
    both: list[Arguments] = [(("shifts", (1, -1)), ("dims", (0, 1)))] if len(shape) > 1 else []
    return [*found, *both, (("shifts", 1),)]


def flips(shape: Shape) -> list[Arguments]:
    found: list[Arguments] = [(("dims", (dim,)),) for dim in dims_of(shape)]
    return [*found, (("dims", tuple(range(len(shape)))),)]


def swaps(shape: Shape) -> list[Arguments]:
    n = len(shape)
    return [
        (("dim0", a), ("dim1", b)) for a, b in ((0, -1), (-1, 0), (0, 1), (-2, -1)) if max(a, b) < n and min(a, b) >= -n
    ]


def expands(shape: Shape) -> list[Arguments]:
    keep = (-1,) * len(shape)
    return [(("sizes", (2, *keep)),), (("sizes", (1, *shape)),), (("sizes", keep),)]


def repeats(shape: Shape) -> list[Arguments]:
    ones = (1,) * len(shape)
    found: list[Shape] = [(2, *ones), ones]
    found += [resized(ones, dim, 2) for dim in range(len(shape))]
    return [(("repeats", each),) for each in found]


def pads(shape: Shape) -> list[Arguments]:
    found: list[Shape] = [(1, 0), (0, 1), (1, 2), (1, -1), (-1, 1)]
    found += [(0, 0, 1, 0), (1, 0, 0, 2)] if len(shape) >= 2 else []
    constant: list[Arguments] = [(("pad", pad), ("value", value)) for pad in found for value in (0.0, 2.0)]
    return [*constant, (("pad", (1, 1)), ("mode", "circular"))]


def splits(shape: Shape) -> list[Arguments]:
    found: list[Arguments] = [(("sizes", size), ("dim", dim)) for dim in dims_of(shape) for size in (1, 2)]
    return found + [(("sizes", (1, shape[dim] - 1)), ("dim", dim)) for dim in dims_of(shape) if shape[dim] > 1]


def squeezes(shape: Shape) -> list[Arguments]:
    several: list[Arguments] = [(("dim", (0, 1)),)] if len(shape) >= 2 else []
    return [(), *((("dim", dim),) for dim in dims_of(shape)), *several]


def unsqueezes(shape: Shape) -> list[Arguments]:
    return [(("dim", dim),) for dim in range(-len(shape) - 1, len(shape) + 1)]


def selects(shape: Shape) -> list[Arguments]:
    return [(("dim", dim), ("index", index)) for dim in dims_of(shape) for index in (0, -1, shape[dim] // 2)]


def flattens(shape: Shape) -> list[Arguments]:
    found: list[Arguments] = [()]
    return found + [
        (("start_dim", a), ("end_dim", b)) for a, b in ((0, 1), (1, -1), (-2, -1)) if len(shape) > max(a, b)
    ]


def unflattens(shape: Shape) -> list[Arguments]:
    found: list[Arguments] = []
    for dim in dims_of(shape):
        size = shape[dim]
        parts = [(1, size), (size, 1), (-1, size)] + ([(2, size // 2), (size // 2, 2)] if size % 2 == 0 else [])
        found += [(("dim", dim), ("sizes", part)) for part in parts]
    return found


def windows(shape: Shape) -> list[Arguments]:
    found: list[Arguments] = []
    for dim in dims_of(shape):
        found += [(("dimension", dim), ("size", size), ("step", step)) for size, step in ((1, 1), (2, 1), (2, 2))]
    return found


def masks(shape: Shape) -> Signatures:
    others = (shape, shape[1:], (1, *shape[1:]))
    return tuple(Signature((shape, mask), (("value", 2.0),)) for mask in others)


def same_mask(shape: Shape) -> Signatures:
    return masks(shape)[:1]


def smaller_beside(shape: Shape) -> Signatures:
    """Returns signatures in which one operand has the shape, and the other broadcasts to the shape."""
    return pairs()(shape)[: 2 * len(shape) + 1]


def scaled_beside(shape: Shape) -> Signatures:
    """Returns a signature with two operands of the shape, and a factor for the second."""
    return (Signature((shape, shape), (("alpha", -2),)),)


def picked_rows(shape: Shape) -> Signatures:
    return tuple(Signature((shape, index)) for index in ((2,), (1,), (3,), (2, 2)) if shape)


def picked_places(shape: Shape) -> Signatures:
    """Returns signatures with an index of rows and an index of columns, which have equal dims or are broadcast."""
    holds = ("any", f"below {shape[0]}", f"below {shape[1]}")
    pairs: tuple[tuple[Shape, Shape], ...] = (((4, 1), (4,)), ((3,), (3,)), ((2, 3), (3,)), ((1,), (3,)))
    return tuple(Signature((shape, rows, columns), holds=holds) for rows, columns in pairs)


def picked_places_apart(shape: Shape) -> Signatures:
    """Returns signatures with an index of the first dim and an index of the last dim, as `picked_places` does."""
    return tuple(replace(each, shapes=(shape, *each.shapes[1:])) for each in picked_places((shape[0], shape[-1])))


def picked_columns(shape: Shape) -> Signatures:
    return tuple(Signature((shape, (n,)), holds=("any", f"below {shape[1]}")) for n in (2, 1))


def equations(shape: Shape) -> Signatures:
    dims = (("mk", "kn", "mn"), ("bmk", "bkn", "bmn"), ("bmk", "kn", "mbn"), ("mk", "mk", "m"), ("mk", "mk", ""))
    return tuple(
        replace(signature, arguments=(("equation", f"{left},{right}->{out}"),))
        for left, right, out in dims
        for signature in products(left, right)(shape)
    )


def slices(shape: Shape) -> list[Arguments]:
    """Slices each dim, counted from the front: findings/52 is about dims counted from the end."""
    found: list[Arguments] = []
    for dim in range(len(shape)):
        ends = [(0, shape[dim], 2), (1, shape[dim], 1), (0, -1, 1)]
        found += [(("dim", dim), ("start", start), ("end", end), ("step", step)) for start, end, step in ends]
    return found


def uneven_splits(shape: Shape) -> list[Arguments]:
    return [(("sizes", (1, shape[dim] - 1)), ("dim", dim)) for dim in dims_of(shape) if shape[dim] > 1]


def selected_beside(shape: Shape) -> Signatures:
    """Returns signatures of `select_scatter`, which writes the second operand into one row of the first operand."""
    fronts = [(dim, dim % len(shape)) for dim in dims_of(shape)]
    return tuple(
        Signature((shape, (*shape[:front], *shape[front + 1 :])), (("dim", dim), ("index", index)))
        for dim, front in fronts
        for index in (0, -1)
    )


def sliced_beside(shape: Shape) -> Signatures:
    """Returns signatures of `slice_scatter`, which writes the second operand into the first operand.

    It writes from row 1 on, or every second row except the last.
    """
    found = []
    for dim in dims_of(shape):
        for num, where in ((shape[dim] - 1, {"start": 1}), (shape[dim] // 2, {"start": 0, "end": -1, "step": 2})):
            found += [Signature((shape, resized(shape, dim, num)), (("dim", dim), *where.items()))] if num else []
    return tuple(found)


def added_rows(shape: Shape) -> Signatures:
    """Returns signatures with an operand, an index of one or two rows along `dim`, and new values for these rows."""
    rows = [(dim, resized(shape, dim, size)) for dim in dims_of(shape) for size in (1, 2)]
    return tuple(Signature((shape, row, row), (("dim", dim),)) for dim, row in rows)


def indexed_rows(shape: Shape) -> Signatures:
    """Returns signatures with an operand, indices of rows along `dim`, and as many rows.  Every second has a factor.

    The index and the rows have one letter in common, so they are also sharded together beside a whole operand.
    """
    found = []
    for num, dim in enumerate(dims_of(shape)):
        front, size = dim % len(shape), shape[dim] + 1
        own, how = "abcd"[: len(shape)], (("alpha", 2),) if num % 2 else ()
        letters = own, "i", own.upper().replace("ABCD"[front], "i")
        found.append(Signature((shape, (size,), resized(shape, dim, size)), (("dim", dim), *how), letters=letters))
    return tuple(found)


def larger_target(shape: Shape) -> Signatures:
    """Returns signatures with an operand that is larger than the index in each dim, the index, and new values."""
    larger = tuple(size + 1 for size in shape)
    return tuple(Signature((larger, shape, shape), (("dim", dim),)) for dim in dims_of(shape))


def written_rows(shape: Shape) -> Signatures:
    """Returns signatures with an operand, an index of one row along `dim`, and new values.

    In every second signature there are more new values than the index has elements.
    """
    found = []
    for dim in dims_of(shape):
        front = dim % len(shape)
        row = resized(shape, dim, 1)
        larger = tuple(size + (place != front) for place, size in enumerate(shape))
        found += [Signature((shape, row, source), (("dim", dim),)) for source in (row, larger)]
    return tuple(found)


def images(*, transposed: bool = False) -> Form:
    """Returns a form for convolutions: an input (N, C, 3, W) or (N, C, W), a kernel and, in some signatures, a bias.

    N is the number of images and C the number of channels. The kernel makes two channels, or C channels with
    `groups=C`.
    """

    def form(shape: Shape) -> Signatures:
        n, c, w = shape
        images, lines, found = (n, c, 3, w), (n, c, w), []
        ways: list[tuple[Shape, Shape, Arguments]] = [
            (images, (1, 1), ()),
            (images, (3, 3), (("padding", 1),)),
            (images, (2, 2), (("stride", (1, 2)),)),
            (images, (2, 3), (("dilation", (2, 1)), ("padding", (0, 1)))),
            (lines, (1,), ()),
            (lines, (3,), (("padding", 1),)),
            (lines, (2,), (("stride", 2),)),
        ]
        for x, window, how in ways:
            weight = (c, 2, *window) if transposed else (2, c, *window)
            found += [Signature((x, weight), how), Signature((x, weight, (2,)), how)]
            found += [Signature((x, (c, 1, *window)), (*how, ("groups", c)))]
        return tuple(found)

    return form

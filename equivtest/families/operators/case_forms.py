"""Builds forms: functions that turn one shape into the signatures with which an operator is called.

A signature has the shapes of all operands and the arguments of a call. A form returns the simplest signature first.
`equivtest.families.operators.case_table.signatures_of` leaves out signatures that the operator does not accept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from equivtest.cases.case import Shape

Argument = int | float | bool | str | tuple[int, ...] | None
Arguments = tuple[tuple[str, Argument], ...]


@dataclass(frozen=True)
class Signature:
    """Describes one way to call an operator.

    Attributes:
        shapes: Global shape of each operand.
        arguments: All arguments that are not tensors, by name.
        holds: Contents of each operand, if the operator's entry does not name them: see `OperatorCase.holds`.
        letters: One letter per dim of each operand, if the operator multiplies matrices or has indices of rows. Dims
            with the same letter correspond to each other. With 'mk' and 'kn', for example, the product sums over k.
    """

    shapes: tuple[Shape, ...]
    arguments: Arguments = ()
    holds: tuple[str, ...] = ()
    letters: tuple[str, ...] = ()


Signatures = tuple[Signature, ...]
Form = Callable[[Shape], Signatures]


def each(**arguments: Argument) -> Form:
    return lambda shape: (Signature((shape,), tuple(arguments.items())),)


def pairs(**arguments: Argument) -> Form:
    """Returns a form with one operand of the shape, and one that broadcasts to the shape.

    The other operand has the shape too, or one of its dims has size 1, or it lacks some or all of the first dims. In
    the last signature both operands have a dim of size 1, as a column and a row.
    """

    def form(shape: Shape) -> Signatures:
        thin = tuple(resized(shape, dim, 1) for dim in range(len(shape)))
        others = (shape, *thin, *(shape[dim:] for dim in range(1, len(shape) + 1)))
        both = [(shape, other) for other in others]
        both += [(other, shape) for other in others[1:]]
        both += [(thin[-1], thin[0])] if len(thin) > 1 else []
        return tuple(Signature(shapes, tuple(arguments.items())) for shapes in both)

    return form


def alike(**arguments: Argument) -> Form:
    """Returns a form with two operands of the shape."""
    return lambda shape: (Signature((shape, shape), tuple(arguments.items())),)


def triples(**arguments: Argument) -> Form:
    """Returns a form with three operands. All have the shape, or the second or third broadcasts to the shape."""

    def form(shape: Shape) -> Signatures:
        thin = (1, *shape[1:]) if shape else shape
        shapes = ((shape, shape, shape), (shape, thin, shape), (shape, shape, thin), (shape, shape, ()))
        return tuple(Signature(each, tuple(arguments.items())) for each in shapes)

    return form


def numbers(name: str, *values: Argument, **arguments: Argument) -> Form:
    return lambda shape: tuple(Signature((shape,), ((name, value), *arguments.items())) for value in values)


def dims_of(shape: Shape) -> tuple[int, ...]:
    """Returns each dim twice, counted from the front and from the end: `(5, 7) -> (0, -2, 1, -1)`."""
    return tuple(dim for front in range(len(shape)) for dim in (front, front - len(shape)))


def resized(shape: Shape, dim: int, size: int) -> Shape:
    """Returns the shape with another size in one dim, which may be counted from the end."""
    return tuple(size if place == dim % len(shape) else own for place, own in enumerate(shape))


def along(**arguments: Argument) -> Form:
    """Returns a form with the argument `dim` for each dim, counted once from the front and once from the end."""
    return lambda shape: tuple(Signature((shape,), (("dim", dim), *arguments.items())) for dim in dims_of(shape))


def reduced(*, several: bool = True, all_dims: bool = True, keepdim: bool = True, **arguments: Argument) -> Form:
    """Returns a form with signatures that reduce one dim each.

    `several` adds signatures with several dims, `all_dims` ones that reduce all dims, and `keepdim` ones with
    `keepdim=True`.
    """

    def form(shape: Shape) -> Signatures:
        found: list[Arguments] = [()] if all_dims else []
        if all_dims and keepdim:
            found.append((("dim", None), ("keepdim", True)))
        dims: list[Argument] = [*dims_of(shape)]
        if several and len(shape) >= 2:
            dims += [(0, 1), (-1, -2), (0, -1)]
        for dim in dims:
            found.append((("dim", dim),))
            if keepdim:
                found.append((("dim", dim), ("keepdim", True)))
        return tuple(Signature((shape,), (*each, *arguments.items())) for each in found)

    return form


def moved(make: Callable[[Shape], list[Arguments]]) -> Form:
    return lambda shape: tuple(Signature((shape,), arguments) for arguments in make(shape))


def indexed(*, same_dims: bool) -> Form:
    """Returns a form with an operand, the argument `dim`, and an index into this dim.

    If `same_dims` is True, the index has as many dims as the operand, and its size in a dim other than `dim` is at most
    the operand's size. If `same_dims` is False, the index has one dim.
    """

    def form(shape: Shape) -> Signatures:
        found = []
        for dim in dims_of(shape):
            front = dim % len(shape)
            for length in (shape[front], 1, shape[front] + 1):
                index = resized(shape, dim, length) if same_dims else (length,)
                found.append(Signature((shape, index), (("dim", dim),)))
            fewer = tuple(size if place == front else max(size - 1, 1) for place, size in enumerate(shape))
            if same_dims and fewer != shape:
                found.append(Signature((shape, fewer), (("dim", dim),)))
        return tuple(found)

    return form


def joined(*, new_dim: bool) -> Form:
    """Returns a form with operands to join, for each dim along which they can be joined.

    If `new_dim` is True, each signature has two operands of the shape. Otherwise two or three operands have the shape,
    or the second is longer in the joined dim.
    """

    def form(shape: Shape) -> Signatures:
        found = [Signature((shape, shape), (("dim", dim),)) for dim in dims_of((*shape, 1) if new_dim else shape)]
        if not new_dim:
            longer = [(shape, resized(shape, dim, shape[dim] + 1)) for dim in range(len(shape))]
            found += [Signature(shapes, (("dim", dim),)) for dim, shapes in enumerate(longer)]
            found += [Signature((shape, shape, shape), (("dim", dim),)) for dim in range(len(shape))]
        return tuple(found)

    return form


def products(*dims: str) -> Form:
    """Returns a form with one signature per shape, for matrix products whose dims have letters as names.

    For example, `products("mk", "kn")` multiplies (m, k) by (k, n). b is the shape's first size, m its last but one,
    and k its last. n is 2 and o is 3. A shape of fewer than two dims gives no signature.
    """

    def form(shape: Shape) -> Signatures:
        if len(shape) < 2:
            return ()
        sizes = {"k": shape[-1], "m": shape[-2], "b": shape[0] if len(shape) > 2 else 2, "n": 2, "o": 3, "1": 1}
        return (Signature(tuple(tuple(sizes[letter] for letter in letters) for letters in dims), letters=dims),)

    return form


def with_arguments(form: Form, **arguments: Argument) -> Form:
    """Returns the form's signatures with further arguments."""
    return lambda shape: tuple(
        replace(signature, arguments=(*signature.arguments, *arguments.items())) for signature in form(shape)
    )


def either(*forms: Form) -> Form:
    return lambda shape: tuple(signature for form in forms for signature in form(shape))

"""Finds the outputs of an unsharded module that have the rows of its batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

from equivtest.cases.case import Shape, require
from equivtest.errors import Misuse
from equivtest.programs.reference import Program, facts_of

NUM_COMPARED = 2
"""Number of other batches that the module is tried on: one with fewer rows and one with more, if it takes them."""

Sized = tuple[int, Program]
"""(number of rows, the program on a batch with this number of rows)."""


@functools.lru_cache(maxsize=256)
def outputs_have_rows(batch: Sized, others: tuple[Sized, ...], *, is_divided: bool) -> Mapping[str, bool]:
    """Returns output -> True if the output's first dim has the rows of the batch, or False.

    False means that the output has the same shape on every batch.

    The function runs the module on batches of other sizes and compares the shapes.

    Args:
        batch: (number of rows, `Program` on a batch with that number of rows).
        others: The same for other batches, to compare with `batch`. Only the first few batches that the module takes
            are run.
        is_divided: True if ranks have different rows, so that the result matters.

    Raises:
        Misuse: An output's shape depends on the batch in another way, or the module takes no other batch.
    """
    num_rows, program = batch
    shapes = {num_rows: _shapes(program)}
    shapes |= dict(itertools.islice(_taken(others), NUM_COMPARED))
    answers = {}
    for name, shape in shapes[num_rows].items():
        by_size = {size: found[name] for size, found in shapes.items() if name in found}
        is_fixed = set(by_size.values()) == {shape}
        has_rows = all(found[:1] == (size,) for size, found in by_size.items())
        require(
            not (is_fixed and has_rows and is_divided),
            f"{program.build}: {name} has shape {shape}, but whether its first dim is the {num_rows} rows of the batch "
            "is unknown, because the module takes no other number of rows: name other outputs by outputs=, or let it "
            "take other batches",
        )
        require(
            is_fixed or has_rows,
            f"{program.build}: the first dim of {name} must be the batch's rows, or {name} must have the same shape on "
            f"every batch, got {_in_words(by_size)}: name other outputs by outputs=",
        )
        answers[name] = has_rows
    return answers


def other_sizes(num_rows: int, rows: Sequence[int]) -> tuple[int, ...]:
    """Returns other numbers of rows, for batches to compare. The smallest number in `rows` comes first."""
    sizes = (min(rows), num_rows + 1, 2 * num_rows, num_rows - 1, 1)
    return tuple(size for size in dict.fromkeys(sizes) if size not in (0, num_rows))


def _taken(batches: Sequence[Sized]) -> Iterator[tuple[int, dict[str, Shape]]]:
    for size, program in batches:
        try:
            yield size, _shapes(program)
        except Misuse:  # the module does not take this number of rows
            continue


def _shapes(program: Program) -> dict[str, Shape]:
    return {name: fact.shape for name, fact in facts_of(program).outputs.items()}


def _in_words(by_size: Mapping[int, Shape]) -> str:
    return " and ".join(f"{shape} on {size} rows" for size, shape in sorted(by_size.items()))

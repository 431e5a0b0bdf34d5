"""Inputs of a module, by name. Each input has a kind, and a shape of numbers and names of sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from equivtest.cases.case import Shape, require
from equivtest.errors import Misuse

BATCH = "batch"
"""Name of the size that ranks divide, if it is the first dim of an input."""

REAL = "real"
IGNORED = -100
"""The target that torch's losses ignore by default."""

IGNORED_ONE_IN = 4
HIDDEN_ONE_IN = 3

NamedShape = tuple[int | str, ...]
Written = tuple[tuple[str, str, NamedShape], ...]
"""(name, kind, shape) of each input, as a case stores it."""


@dataclass(frozen=True)
class Input:
    """One input of a module. Make it by `real`, `ids`, `mask`, `targets` or `positions`.

    Attributes:
        kind: Kind of the values as text, such as 'real', 'ids(11)', 'mask', 'mask(hides, int64)', 'targets(11, -100)'
            or 'positions(16)'.
        shape: Numbers and names of sizes. Ranks divide the size 'batch'.
    """

    kind: str
    shape: NamedShape


def real(shape: Sequence[int | str]) -> Input:
    """Describes an input of floating-point numbers in the dtype of the case. The input's gradient is judged.

    Args:
        shape: Numbers and names of sizes. Ranks divide the size 'batch'.
    """
    return _input(REAL, shape)


def ids(vocab: int, shape: Sequence[int | str]) -> Input:
    """Describes an input of int64 numbers from 0 to vocab - 1. All these numbers are about equally frequent.

    The ids 0 and vocab - 1 occur in each input that has two elements or more.

    Args:
        vocab: Number of different ids.
        shape: Numbers and names of sizes. Ranks divide the size 'batch'.
    """
    return _input(f"ids({vocab})", shape)


def mask(shape: Sequence[int | str], *, hides: bool = False, dtype: str = "bool") -> Input:
    """Describes a random mask, which never hides the first element along the last dim.

    Args:
        shape: Numbers and names of sizes. Ranks divide the size 'batch'.
        hides: If True, the mask's value True hides an element, as in key_padding_mask of torch's attention. If False,
            the mask's value True keeps an element.
        dtype: The mask's dtype. It is 'bool', or 'int64' for a mask of ones and zeros.
    """
    words = ["hides"] * hides + ["int64"] * (dtype == "int64")
    require(dtype in ("bool", "int64"), f"a mask is of dtype bool or int64, got {dtype!r}")
    return _input(f"mask({', '.join(words)})" if words else "mask", shape)


def targets(classes: int, shape: Sequence[int | str], *, ignored: int = IGNORED) -> Input:
    """Describes an input of ids, of which about one in four is replaced by `ignored`.

    In a case with batch='parts of the whole', only the last id of the batch is never replaced. In any other case, the
    last id of each row is never replaced. If the input then has one dim, one id of each rank is never replaced instead.

    Args:
        classes: Number of different ids.
        shape: Numbers and names of sizes. Ranks divide the size 'batch'.
        ignored: The number that the loss of the module ignores.
    """
    return _input(f"targets({classes}, {ignored})", shape)


def positions(shape: Sequence[int | str], *, below: int | None = None) -> Input:
    """Describes an input of int64 numbers that count up by one along the last dim, such as token positions.

    Args:
        shape: Numbers and names of sizes. Ranks divide the size 'batch'.
        below: If None, each row begins with 0. Otherwise each row begins with a random number, and all numbers are
            smaller than `below`.
    """
    return _input("positions" if below is None else f"positions({below})", shape)


def _input(kind: str, shape: Sequence[int | str]) -> Input:
    is_shape = isinstance(shape, Sequence) and not isinstance(shape, str)
    is_shape = is_shape and all(isinstance(size, int | str) for size in shape)
    require(is_shape, f"the shape of {kind} must hold numbers and names of sizes, such as ('batch', 3), got {shape!r}")
    kind_of(kind)
    require(kind == REAL or len(shape) > 0, f"{kind} must have at least one dim, got the shape ()")
    return Input(kind, tuple(shape))


class Kind(NamedTuple):
    """The parsed text of a kind: `mask(hides, int64)` has the word `mask`, no numbers, and two more words."""

    word: str
    numbers: tuple[int, ...]
    words: tuple[str, ...]


def kind_of(text: str) -> Kind:
    """Parses the text of a kind, such as 'targets(11, -100)'."""
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", text)
    arguments = match[2].split(", ") if match and match[2] else []
    numbers = tuple(int(each) for each in arguments if re.fullmatch(r"-?\d+", each))
    kind = Kind(match[1] if match else "", numbers, tuple(each for each in arguments if not each.lstrip("-").isdigit()))
    known = {REAL: (0,), "ids": (1,), "mask": (0,), "targets": (2,), "positions": (0, 1)}
    is_known = len(numbers) in known.get(kind.word, ()) and {*kind.words} <= {"hides", "int64"}
    if not is_known or (kind.words and kind.word != "mask") or (numbers and numbers[0] < 1):
        raise Misuse(
            f"unknown kind of input {text!r}: write real, ids(NUMBER), mask, mask(hides), mask(int64), "
            "mask(hides, int64), targets(NUMBER, IGNORED), positions or positions(NUMBER), numbers of at least 1"
        )
    return kind


def written(inputs: Mapping[str, Input]) -> Written:
    """Returns (name, kind, shape) of each input, as plain data."""
    require(isinstance(inputs, Mapping) and bool(inputs), f"inputs must name at least one input, got {inputs!r}")
    for name, each in inputs.items():
        require(
            isinstance(each, Input),
            f"input {name} must be made by real, ids, mask, targets or positions of equivtest, got {each!r}",
        )
    return tuple((name, each.kind, each.shape) for name, each in inputs.items())


def sizes_in(inputs: Written) -> tuple[str, ...]:
    return tuple(dict.fromkeys(size for _, _, shape in inputs for size in shape if isinstance(size, str)))


def in_numbers(shape: NamedShape, sizes: Mapping[str, int]) -> Shape:
    return tuple(sizes[size] if isinstance(size, str) else size for size in shape)


def has_rows(shape: NamedShape) -> bool:
    return shape[:1] == (BATCH,)


def make_whole_numbers(
    text: str, shape: Shape, rows_per_rank: int, source: torch.Generator, num_ranks: int = 1
) -> torch.Tensor:
    """Makes an int64 or bool input of any kind except 'real'.

    Ranks get different numbers of targets that are not ignored, and different numbers of elements that a mask keeps.
    Equal numbers would hide a mean of means. The numbers differ if the ranks divide the rows, and also if the ranks
    divide the last dim. If the random draw makes the numbers equal, one element is changed. If no change of one element
    makes the numbers differ, they stay equal.

    Args:
        rows_per_rank: Number of rows of the first dim for each rank. If targets have one dim, some target of each rank
            is not ignored. If 0, all targets of a rank may be ignored, but never all targets of the batch.
    """
    kind = kind_of(text)
    match kind.word:
        case "ids":
            return _ids(kind.numbers[0], shape, source)
        case "targets":
            return _targets(kind, shape, rows_per_rank, source, num_ranks)
        case "positions":
            starts = _starts(kind, shape, source)
            return starts + torch.arange(shape[-1])
    is_hidden = torch.randint(0, HIDDEN_ONE_IN, shape, generator=source) == 0
    may_hide = torch.ones(shape, dtype=torch.bool)
    may_hide[..., 0] = False
    is_hidden = _with_unequal_counts(is_hidden & may_hide, may_hide, num_ranks)
    chosen = is_hidden if "hides" in kind.words else ~is_hidden
    return chosen.long() if "int64" in kind.words else chosen


def _ids(num: int, shape: Shape, source: torch.Generator) -> torch.Tensor:
    numel = math.prod(shape)
    between = 1 + torch.randperm(max(0, num - 2), generator=source)
    order = torch.cat([torch.tensor([num - 1, 0][: max(1, min(num, 2))]), between])[:num]
    if numel == 1:
        return order[torch.randint(0, len(order), (1,), generator=source)].reshape(shape)
    repeated = order.repeat(-(-numel // len(order)))[:numel]
    return repeated[torch.randperm(numel, generator=source)].reshape(shape)


def _targets(kind: Kind, shape: Shape, rows_per_rank: int, source: torch.Generator, num_ranks: int) -> torch.Tensor:
    num, ignored = kind.numbers
    is_ignored = torch.randint(0, IGNORED_ONE_IN, shape, generator=source) == 0
    may_ignore = torch.ones(shape, dtype=torch.bool)
    if not rows_per_rank:
        is_ignored = _unevenly(shape, source)
        may_ignore.view(-1)[-1] = False
    elif len(shape) > 1:
        may_ignore[..., -1] = False
    else:
        may_ignore[::rows_per_rank] = False
    is_ignored = _with_unequal_counts(is_ignored & may_ignore, may_ignore, num_ranks)
    return torch.where(is_ignored, ignored, _ids(num, shape, source))


def _with_unequal_counts(is_hidden: torch.Tensor, may_hide: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Returns `is_hidden`, changed in one element if all ranks have equally many elements that are not hidden.

    After the change, the ranks have different numbers of these elements.  Only an element in `may_hide` may be changed.
    If no such change makes the numbers differ, the result is `is_hidden` unchanged.
    """
    if _counts_differ(is_hidden, num_ranks):
        return is_hidden
    for place in may_hide.nonzero().tolist():
        changed = is_hidden.clone()
        changed[tuple(place)] ^= True
        if _counts_differ(changed, num_ranks):
            return changed
    return is_hidden


def _counts_differ(is_hidden: torch.Tensor, num_ranks: int) -> bool:
    """True if ranks have different numbers of elements that are not hidden, along the first and along the last dim."""
    divided = [is_hidden.chunk(num_ranks, dim) for dim in {0, is_hidden.dim() - 1}]
    counts = [[int((~part).sum()) for part in parts] + [0] * (num_ranks - len(parts)) for parts in divided]
    return num_ranks == 1 or all(len(set(each)) > 1 for each in counts)


def _unevenly(shape: Shape, source: torch.Generator) -> torch.Tensor:
    """Returns a mask that hides, in each row, a random fraction of the elements, from none to all.

    The mask never hides the last element of the last row, so that it does not hide all elements.
    """
    shares = torch.randint(0, IGNORED_ONE_IN + 1, (*shape[:1], *(1,) * (len(shape) - 1)), generator=source)
    is_hidden = torch.randint(0, IGNORED_ONE_IN, shape, generator=source) < shares
    is_hidden.view(-1)[-1] = False
    return is_hidden


def _starts(kind: Kind, shape: Shape, source: torch.Generator) -> torch.Tensor:
    """Draws the first position of each row. The result has the shape (..., 1)."""
    if not kind.numbers:
        return torch.zeros((*shape[:-1], 1), dtype=torch.int64)
    room = kind.numbers[0] - shape[-1]
    require(
        room >= 0,
        f"a row has {shape[-1]} positions, more than positions({kind.numbers[0]}) allows: take a smaller size",
    )
    return torch.randint(0, room + 1, (*shape[:-1], 1), generator=source)

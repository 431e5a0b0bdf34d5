"""Finds which elements of the whole parameters a rank has, by calling `parallelize` on numbers that all differ.

`parallelize` runs twice or more. Each element of each parameter has a different word, which is a list with one number
for each run. In every run the whole parameters have the numbers of that run, and `parallelize` makes a module from
them. If `parallelize` only moves, cuts and joins elements, each element can be recognised by its word, in any tensor.
The numbers are whole and at most 255 in magnitude, so that every dtype represents them exactly. The numbers are
positive in one run and negative in the next. So if an element is the same in all runs, it is not part of a parameter of
the unsharded module. Such an element is padding, or belongs to a parameter that only the parallel module has. Few of
the possible words are used, so that a computed number hardly ever equals another word.

The search does not use the values of the judged run. So a wrong value is never taken for another element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from equivtest.cases.case import Shape
from equivtest.errors import Misuse
from equivtest.programs.reference import seeded

ALPHABET = 255
"""Number of different numbers in a word; up to 256 they are exact in bfloat16: IEEE 754-2019 table 3.5 with 8 bits."""

SPARSENESS = 64
"""Least number of possible words for each word that is used."""

NONE = -1
"""Index of an element that belongs to no parameter of the unsharded module."""


class Place(NamedTuple):
    """The elements of one parameter in one tensor of the parallel module.

    Attributes:
        holder: Name of the tensor in the parallel module.
        indices: For each local element of the tensor, its index in the flattened parameter, or NONE.
    """

    holder: str
    indices: torch.Tensor


Places = Mapping[str, tuple[Place, ...]]
"""The unsharded module's name of a parameter -> all its places on this rank."""

Make = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""(whole parameters by name) -> the local tensors of the parallel module, by name."""


def read_places(shapes: Mapping[str, Shape], make: Make, who: str) -> Places:
    """Returns parameter's name -> its places on this rank.

    There is one `Place` for each tensor of this rank that has elements of the parameter.

    Raises:
        Misuse: `parallelize` computes new numbers from the parameters, or makes different modules in different runs.
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    if not sum(sizes):
        return dict.fromkeys(shapes, ())
    words = code_words(sum(sizes))
    runs = []
    for numbers in words:
        parts = numbers.split(sizes)
        with seeded():  # random numbers are the same in all runs
            marked = make(
                {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
            )
        runs.append({name: tensor.detach().double().cpu() for name, tensor in marked.items()})
    forms = [{name: tensor.shape for name, tensor in run.items()} for run in runs]
    if any(form != forms[0] for form in forms):
        raise Misuse(f"{who} made tensors with other names or shapes when it was called again: {WAY_OUT}")
    numbers_of = {name: _read(words, torch.stack([run[name] for run in runs]), name, who) for name in runs[0]}
    places, start = {}, 0
    for name, size in zip(shapes, sizes, strict=True):
        stop = start + size
        found = {
            holder: torch.where((numbers >= start) & (numbers < stop), numbers - start, NONE)
            for holder, numbers in numbers_of.items()
        }
        places[name] = tuple(Place(holder, each) for holder, each in found.items() if bool((each != NONE).any()))
        start = stop
    return places


def code_words(num: int) -> torch.Tensor:
    """Returns a float64 tensor (runs, num) with a different word for each of `num` elements.

    All numbers of one run have the same sign.

    The words are spread evenly over all N possible words: element i has the word of number i * step modulo N.  The step
    is near N divided by the golden ratio, and shares no factor with N.
    """
    num_runs = 2
    while ALPHABET**num_runs < SPARSENESS * num:
        num_runs += 1
    total = ALPHABET**num_runs
    step = round(total * (math.sqrt(5) - 1) / 2)
    while math.gcd(step, total) != 1:
        step += 1
    keys = (torch.arange(num) * step + total // 3) % total
    digits = [keys // ALPHABET**run % ALPHABET for run in range(num_runs)]
    return torch.stack([(-1) ** run * (1 + digit) for run, digit in enumerate(digits)]).double()


def _read(words: torch.Tensor, held: torch.Tensor, name: str, who: str) -> torch.Tensor:
    """Returns the index of the word of each local element of a tensor.

    The index is NONE if the element belongs to no parameter.

    Args:
        words: The words of all elements, as a tensor (runs, number of elements).
        held: Values of the local tensor in all runs, stacked along dim 0.

    Raises:
        Misuse: some elements belong to no parameter and differ between runs.
    """
    keys, order = _keys(words).sort()
    numbers = order[torch.searchsorted(keys, _keys(held)).clamp(max=len(keys) - 1)]
    is_element = (words[:, numbers] == held).all(0)
    is_same = ((held == held[0]) | (held.isnan() & held[0].isnan())).all(0)
    is_computed = ~is_element & ~is_same
    if bool(is_computed.any()):
        first = tuple(is_computed.nonzero()[0].tolist())
        raise Misuse(
            f"{who}: equivtest cannot find the place of {int(is_computed.sum())} of the {held[0].numel()} local "
            f"elements of {name}, the first at {first}, because they are computed from values or never written: "
            f"{WAY_OUT}"
        )
    return torch.where(is_element, numbers, NONE)


def _keys(numbers: torch.Tensor) -> torch.Tensor:
    """Returns a number for each column, different for different words, and arbitrary for a column that is no word."""
    digits = (numbers.nan_to_num().abs() - 1).clamp(0, ALPHABET - 1).long()
    return torch.stack([digit * ALPHABET**run for run, digit in enumerate(digits)]).sum(0)


WAY_OUT = (
    "say what each rank holds: Judge(placed='package.module:function'), of a function (parallel module, name of a "
    "parameter) -> (tensor, indices)"
)
"""Advice for the message if the elements of a parameter cannot be found."""

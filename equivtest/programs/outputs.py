"""Names the outputs of a module.

A module returns a tensor, or nested tuples, mappings and dataclasses of tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real

import torch

from equivtest.base.importing import closest
from equivtest.errors import Misuse

OUTPUT = "output"


def named_outputs(
    given: object, chosen: Sequence[str], who: str, *, takes_numbers: bool = False
) -> dict[str, torch.Tensor]:
    """Returns name -> tensor for all tensors in a module's output.

    A single tensor has the name 'output'. Any other tensor has the name 'output.' with the path to the tensor. A None
    in the output is left out.

    Args:
        chosen: Paths of the outputs that are judged, or of containers of such outputs. If empty, all outputs are
            judged.
        who: The module, for messages.
        takes_numbers: True if a number of Python or NumPy counts as a tensor.

    Raises:
        Misuse: an output is not a tensor, or a path in `chosen` leads to nothing.
    """
    leaves: dict[str, torch.Tensor] = {}
    for name, leaf in _leaves(OUTPUT, given):
        if not _is_chosen(name, chosen):
            continue
        if takes_numbers and isinstance(leaf, Real):
            leaf = torch.tensor(float(leaf), dtype=torch.float64)
        if not isinstance(leaf, torch.Tensor):
            raise Misuse(
                f"{who}: {name} must be a tensor, got {type(leaf).__name__}: name the outputs to judge, such as "
                f"Judge(outputs=('logits',)), or let the module not return {name}"
            )
        leaves[name] = leaf
    missing = [way for way in chosen if not any(_is_chosen(name, (way,)) for name in leaves)]
    if missing or not leaves:
        names = [name for name, _ in _leaves(OUTPUT, given)]
        way_out = _way_out(missing[0], names) if missing and names else "return a tensor"
        lacks = f", but has no output at {missing[0]}" if missing else ""
        raise Misuse(f"{who} returns {', '.join(names) or 'no tensor'}{lacks}: {way_out}")
    return leaves


def _way_out(missing: str, names: Sequence[str]) -> str:
    if list(names) == [OUTPUT]:
        return "omit outputs, as it returns one tensor"
    ways = [name.removeprefix(f"{OUTPUT}.") for name in names]
    near = closest(missing, ways)
    return f"did you mean outputs=({near!r},)?" if near else f"outputs may hold {', '.join(map(repr, ways))}"


def _leaves(name: str, given: object) -> Iterator[tuple[str, object]]:
    """Yields the leaves of an output. A mapping that is also a dataclass, as in transformers, counts as a mapping."""
    if given is None:
        return
    if isinstance(given, Mapping):
        parts: dict[str, object] = {str(key): value for key, value in given.items()}
    elif dataclasses.is_dataclass(given) and not isinstance(given, type):
        parts = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    elif isinstance(given, tuple) and hasattr(given, "_fields"):
        parts = dict(zip(given._fields, given, strict=True))
    elif isinstance(given, tuple | list):
        parts = {str(place): value for place, value in enumerate(given)}
    else:
        yield name, given
        return
    for key, value in parts.items():
        yield from _leaves(f"{name}.{key}", value)


def _is_chosen(name: str, chosen: Sequence[str]) -> bool:
    ways = [f"{OUTPUT}.{way}" for way in chosen]
    return not ways or any(name == way or name.startswith(f"{way}.") for way in ways)

"""Finds subjects by name, because processes send each other names instead of code."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from equivtest.base.importing import load_named, require_arguments, suggestion
from equivtest.cases.parts import packages
from equivtest.errors import Misuse

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from equivtest.tensors import Placed

Subject = Callable[[Any, "DeviceMesh", Mapping[str, "torch.Tensor"]], "Mapping[str, DTensor | Placed | None]"]

SUBJECTS: dict[str, str] = {
    name: path for package in packages() for name, path in getattr(sys.modules[package], "SUBJECTS", {}).items()
}
"""Short name -> 'package.module:function', of every family.  A package named with --import may add its own subjects."""


def resolve(name: str) -> Subject:
    """Returns the subject with a short name, or 'package.module:function'.  Raises Misuse if there is none."""
    path = SUBJECTS.get(name, name)
    if ":" not in path:
        raise Misuse(f"unknown subject {name!r}: {suggestion(name, sorted(SUBJECTS))} Or 'package.module:function'")
    function = load_named(path, "subject")
    if not callable(function):
        raise Misuse(f"subject {name!r} is not a function: {function!r}")
    return cast(Subject, function)


def require_fit(function: Subject, case: object) -> None:
    """Raises Misuse if the subject takes other arguments than a subject must take, or cases of another class."""
    require_arguments(function, "the subject", ("case", "mesh", "given"))
    wanted = _class_of_cases(function)
    if wanted is not None and not isinstance(case, wanted):
        raise Misuse(f"the subject takes a {wanted.__name__}, got a {type(case).__name__}")


def _class_of_cases(function: Subject) -> type | None:
    """Returns the class in the annotation of the subject's first parameter, or None if there is no such class."""
    function = inspect.unwrap(function)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # not written in Python
        return None
    annotation = parameters[0].annotation if parameters else None
    if isinstance(annotation, str):
        annotation = getattr(function, "__globals__", {}).get(annotation)
    is_case = isinstance(annotation, type) and dataclasses.is_dataclass(annotation)  # like every class of cases
    return annotation if is_case else None

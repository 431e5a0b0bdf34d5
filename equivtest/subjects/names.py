"""Subjects by name: code is named across process borders, never sent."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from equivtest.errors import Misuse
from equivtest.importing import load_named, require_arguments, suggestion

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from equivtest.tensors import Placed

Subject = Callable[[Any, "DeviceMesh", Mapping[str, "torch.Tensor"]], "Mapping[str, DTensor | Placed | None]"]

SUBJECTS: dict[str, str] = {
    "collectives": "equivtest.subjects.collective_calls:collectives",
    "colwise_embedding": "equivtest.subjects.embedding:colwise_embedding",
    "colwise_linear": "equivtest.subjects.tensor_parallel:colwise_linear",
    "ddp_mlp": "equivtest.subjects.data_parallel:ddp_mlp",
    "deepspeed_fetch_all_gather": "equivtest.subjects.deepspeed_fetch:deepspeed_fetch_all_gather",
    "deepspeed_fetch_all_reduce": "equivtest.subjects.deepspeed_fetch:deepspeed_fetch_all_reduce",
    "deepspeed_mlp_all_gather": "equivtest.subjects.deepspeed_training:deepspeed_mlp_all_gather",
    "deepspeed_mlp_all_reduce": "equivtest.subjects.deepspeed_training:deepspeed_mlp_all_reduce",
    "deepspeed_mlp_stages_1_and_2": "equivtest.subjects.deepspeed_stages:deepspeed_mlp_stages_1_and_2",
    "dtensor_cross_entropy": "equivtest.subjects.cross_entropy:dtensor_cross_entropy",
    "embedding_both_ways": "equivtest.subjects.embedding:embedding_both_ways",
    "fsdp2_mixed_mlp": "equivtest.subjects.mixed:fsdp2_mixed_mlp",
    "fsdp2_mlp": "equivtest.subjects.data_parallel:fsdp2_mlp",
    "fsdp2_tp_mlp": "equivtest.subjects.two_axes:fsdp2_tp_mlp",
    "hsdp_mlp": "equivtest.subjects.two_axes:hsdp_mlp",
    "module": "equivtest.subjects.module:module",
    "parallel_cross_entropy": "equivtest.subjects.cross_entropy:parallel_cross_entropy",
    "parallel_dropout": "equivtest.subjects.dropout:parallel_dropout",
    "prepared_module": "equivtest.subjects.prepared:prepared_module",
    "redistribute": "equivtest.subjects.redistribute:redistribute",
    "reduction": "equivtest.subjects.reduction:reduction",
    "rowwise_embedding": "equivtest.subjects.embedding:rowwise_embedding",
    "rowwise_linear": "equivtest.subjects.tensor_parallel:rowwise_linear",
    "sequence_layer_norm": "equivtest.subjects.norm:sequence_layer_norm",
    "sequence_parallel_mlp": "equivtest.subjects.sequence_parallel:sequence_parallel_mlp",
    "sequence_rms_norm": "equivtest.subjects.norm:sequence_rms_norm",
    "zero3_fetch_all_gather": "equivtest.subjects.zero3_fetch:zero3_fetch_all_gather",
    "zero3_fetch_all_reduce": "equivtest.subjects.zero3_fetch:zero3_fetch_all_reduce",
    "zero3_lifecycle_all_gather": "equivtest.subjects.zero3.lifecycle:zero3_lifecycle_all_gather",
    "zero3_lifecycle_all_reduce": "equivtest.subjects.zero3.lifecycle:zero3_lifecycle_all_reduce",
    "zero3_mlp_all_gather": "equivtest.subjects.zero3.training:zero3_mlp_all_gather",
    "zero3_mlp_all_reduce": "equivtest.subjects.zero3.training:zero3_mlp_all_reduce",
}
"""Short name -> 'package.module:function'; a package named with --import may add its own."""


def resolve(name: str) -> Subject:
    """The subject that `name` stands for.

    Args:
        name: A short registered name, or 'package.module:function'.

    Raises:
        Misuse: no such name, module or function.
    """
    path = SUBJECTS.get(name, name)
    if ":" not in path:
        raise Misuse(f"unknown subject {name!r}: {suggestion(name, sorted(SUBJECTS))} Or 'package.module:function'")
    function = load_named(path, "subject")
    if not callable(function):
        raise Misuse(f"subject {name!r} is no function: {function!r}")
    return cast(Subject, function)


def require_fit(function: Subject, case: object) -> None:
    """Raises Misuse where the subject takes other arguments, or says that it takes cases of another class."""
    require_arguments(function, "the subject", ("case", "mesh", "given"))
    wanted = _class_of_cases(function)
    if wanted is not None and not isinstance(case, wanted):
        raise Misuse(f"the subject takes a {wanted.__name__}, got a {type(case).__name__}")


def _class_of_cases(function: Subject) -> type | None:
    """That of its first parameter; None where it does not say, or in words that only a type checker reads."""
    function = inspect.unwrap(function)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of what is not written in Python
        return None
    found = parameters[0].annotation if parameters else None
    if isinstance(found, str):
        found = getattr(function, "__globals__", {}).get(found)
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None  # as every class of cases is

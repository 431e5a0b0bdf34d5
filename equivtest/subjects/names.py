"""Subjects by name: code is named across process borders, never sent."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from equivtest.errors import Misuse

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from equivtest.tensors import Placed

Subject = Callable[[Any, "DeviceMesh", Mapping[str, "torch.Tensor"]], "Mapping[str, DTensor | Placed | None]"]

SUBJECTS: dict[str, str] = {
    "colwise_embedding": "equivtest.subjects.embedding:colwise_embedding",
    "colwise_linear": "equivtest.subjects.tensor_parallel:colwise_linear",
    "ddp_mlp": "equivtest.subjects.data_parallel:ddp_mlp",
    "deepspeed_fetch_all_gather": "equivtest.subjects.deepspeed_fetch:deepspeed_fetch_all_gather",
    "deepspeed_fetch_all_reduce": "equivtest.subjects.deepspeed_fetch:deepspeed_fetch_all_reduce",
    "deepspeed_mlp_all_gather": "equivtest.subjects.deepspeed_training:deepspeed_mlp_all_gather",
    "deepspeed_mlp_all_reduce": "equivtest.subjects.deepspeed_training:deepspeed_mlp_all_reduce",
    "fsdp2_mlp": "equivtest.subjects.data_parallel:fsdp2_mlp",
    "parallel_cross_entropy": "equivtest.subjects.cross_entropy:parallel_cross_entropy",
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
    module_name, colon, function_name = SUBJECTS.get(name, name).partition(":")
    if not colon:
        known = ", ".join(sorted(SUBJECTS))
        raise Misuse(f"unknown subject {name!r}: use one of {known}, or 'package.module:function'")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise Misuse(f"subject {name!r} cannot be imported: {error}") from error
    if not callable(function):
        raise Misuse(f"subject {name!r} is no function: {function!r}")
    return cast(Subject, function)

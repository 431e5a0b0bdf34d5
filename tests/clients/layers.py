"""The column- and row-parallel layers of fairscale and of megatron-core, in the place of two linear layers.

Source: fairscale 0.4.13, nn/model_parallel/layers.py; megatron-core 0.16.1, core/tensor_parallel/layers.py.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

FEATURES, HIDDEN = 4, 12
"""1, 2, 3 and 4 ranks divide the hidden ones; these layers refuse what does not divide."""


def block() -> nn.Module:
    """Two linear layers, whose sums no dtype has to round on small integers."""
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES))


def embedding() -> nn.Module:
    """Builds an embedding of ids, whose vocabulary is divided."""
    return nn.Sequential(nn.Embedding(HIDDEN, FEATURES), nn.Linear(FEATURES, FEATURES))


def fairscale_layers(module: Any, mesh: DeviceMesh) -> nn.Module:
    """Its groups are globals, which `initialize_model_parallel` fills; here with the group of the mesh."""
    from fairscale.nn.model_parallel import initialize
    from fairscale.nn.model_parallel.layers import ColumnParallelLinear, RowParallelLinear

    initialize._MODEL_PARALLEL_GROUP = mesh.get_group()
    dtype = module[0].weight.dtype
    column = ColumnParallelLinear(FEATURES, HIDDEN, gather_output=False).to(dtype)
    row = RowParallelLinear(HIDDEN, FEATURES, input_is_parallel=True).to(dtype)
    _take(column, module[0], mesh, dim=0)
    _take(row, module[2], mesh, dim=1)
    return nn.Sequential(column, nn.ReLU(), row)


def fairscale_embedding(module: Any, mesh: DeviceMesh) -> nn.Module:
    """The vocabulary divided among the ranks."""
    from fairscale.nn.model_parallel import initialize
    from fairscale.nn.model_parallel.layers import VocabParallelEmbedding

    initialize._MODEL_PARALLEL_GROUP = mesh.get_group()
    divided = VocabParallelEmbedding(HIDDEN, FEATURES).to(module[0].weight.dtype)
    _take(divided, module[0], mesh, dim=0)
    return nn.Sequential(divided, module[1])


def megatron_layers(module: Any, mesh: DeviceMesh) -> nn.Module:
    """Uses no sequence parallelism; passes the group explicitly."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    config = ModelParallelConfig(
        tensor_model_parallel_size=mesh.size(),
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=module[0].weight.dtype,
    )
    how: dict[str, Any] = {"config": config, "init_method": nn.init.zeros_, "tp_group": mesh.get_group()}
    column = _first_of(ColumnParallelLinear)(FEATURES, HIDDEN, **how)
    row = _first_of(RowParallelLinear)(HIDDEN, FEATURES, input_is_parallel=True, bias=True, skip_bias_add=False, **how)
    _take(column, module[0], mesh, dim=0)
    _take(row, module[2], mesh, dim=1)
    return nn.Sequential(column, nn.ReLU(), row)


def _first_of(layer: type[nn.Module]) -> type[nn.Module]:
    """The layer, that gives its output alone, and not the bias beside it."""

    class First(layer):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)[0]

    return First


def _take(layer: nn.Module, whole: Any, mesh: DeviceMesh, *, dim: int) -> None:
    """Copies this rank's part of the whole weight into a layer, and of the bias if its rows are divided."""
    with torch.no_grad():
        cast("Any", layer).weight.copy_(whole.weight.chunk(mesh.size(), dim)[mesh.get_local_rank()])
        if getattr(layer, "bias", None) is not None:
            bias = whole.bias.chunk(mesh.size())[mesh.get_local_rank()] if dim == 0 else whole.bias
            cast("Any", layer).bias.copy_(bias)

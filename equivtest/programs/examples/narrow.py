"""A block whose layers compute in bfloat16 and whose residual keeps the dtype of x, with the casts of FSDP2.

Source: MixedPrecisionPolicy in torch/distributed/fsdp/_fully_shard/_fsdp_api.py, and FSDPState._cast_forward_inputs
(2.13.0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

NARROW = torch.bfloat16
RATIO = 2.0**-8
"""The change is this small beside the residual, so the roundings of bfloat16 in the change are small too."""


class NarrowLayer(nn.Module):
    """Computes W (x * gate) + b in bfloat16.

    Attributes:
        casts: Whether the layer casts its inputs. If not, the inputs must be in bfloat16.
    """

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.zeros(num_outputs))
        self.casts = True

    def forward(self, x: torch.Tensor, *, gate: torch.Tensor) -> torch.Tensor:
        if self.casts:
            x, gate = x.to(NARROW), gate.to(NARROW)
        return functional.linear(x * gate, self.weight.to(NARROW), self.bias.to(NARROW))


class NarrowBlock(nn.Module):
    """The block y = x + f(x) / 256. Two layers compute f(x). The first feature of x is the gate of both layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = NarrowLayer(2, 5)
        self.second = NarrowLayer(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = x[..., :1]
        change = self.second(self.first(x, gate=gate), gate=gate)
        output: torch.Tensor = x + change.to(x.dtype) * RATIO
        return output


narrow_block = NarrowBlock


def fully_sharded_with_casts(block: NarrowBlock, mesh: DeviceMesh, *, casts_in_layers: bool) -> nn.Module:
    """Shards each layer and the block by FSDP2, with parameters in bfloat16.

    The block's input keeps its dtype. The block's output has the dtype of the parameters, in which gradients are
    reduced.

    Args:
        casts_in_layers: Whether the layers cast their inputs. Otherwise FSDP2 casts the inputs of each layer.
    """
    dtype = block.first.weight.dtype
    policy: dict[str, Any] = {"param_dtype": NARROW, "reduce_dtype": dtype}
    for layer in (block.first, block.second):
        layer.casts = casts_in_layers
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy, cast_forward_inputs=not casts_in_layers))
    kept = MixedPrecisionPolicy(**policy, output_dtype=dtype, cast_forward_inputs=False)
    sharded: nn.Module = fully_shard(block, mesh=mesh, mp_policy=kept)  # type: ignore[assignment]  # of both classes
    return sharded

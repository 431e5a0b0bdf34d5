"""FSDP2 with switches for the time of a gather, the device of parameters, and the method that is called.

No switch may change a result.

Source: fully_shard, FSDPModule and register_fsdp_forward_method in torch/distributed/fsdp/_fully_shard (2.13.0).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from equivtest.programs.examples.gated import BufferedBlock
from equivtest.programs.examples.narrow import WIDE
from equivtest.programs.examples.plans import average


class ByMethod(nn.Module):
    """Calls a method of its block that is not `forward`: y = x + block.change(x).

    Attributes:
        widens: Whether the module casts the change to float64, which changes no value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block = BufferedBlock(2, 5)
        self.widens = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.block.change(x)
        return x + (change.to(WIDE) if self.widens else change)


by_method = ByMethod


def fully_sharded_by_switches(
    module: ByMethod,
    mesh: DeviceMesh,
    *,
    together: bool = False,
    ignores: str = "",
    offloads: bool = False,
    prefetches: bool = False,
    gathers_early: bool = False,
) -> nn.Module:
    """Shards the layers of the block, and then the block, whose method `change` counts as a forward.

    FSDP2 casts what this method returns to float64.

    Args:
        together: Whether two layers are sharded as one group of parameters. Otherwise each is sharded alone.
        ignores: Name of a layer whose weight each rank has as a whole. A hook averages the gradient of this weight. The
            layer `up` has no other parameter, and `down` has a bias.
        offloads: Whether parameters, gradients and updates are on the CPU.
        prefetches: Whether a layer gathers the parameters of the next layer in the forward, and of the previous layer
            in the backward.
        gathers_early: Whether parameters are gathered before the first forward, and kept until the end of the backward.
    """
    block = module.block
    names = [f"{ignores}.weight"] if ignores else []
    ignored = {block.get_parameter(name) for name in names}
    policy = CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy()
    how: dict[str, Any] = {"mesh": mesh, "offload_policy": policy, "reshard_after_forward": not gathers_early}
    groups: Any = [[block.gate, block.up], [block.down]] if together else [[each] for each in block.children()]
    for group in groups:
        fully_shard(group if len(group) > 1 else group[0], ignored_params=ignored, **how)
    widened, module.widens = MixedPrecisionPolicy(output_dtype=WIDE), False
    sharded: Any = fully_shard(block, ignored_params=ignored, mp_policy=widened, **how)
    register_fsdp_forward_method(sharded, "change")
    for name in names:
        sharded.get_parameter(name).register_post_accumulate_grad_hook(partial(average, mesh))
    first, last = sharded.gate, sharded.down
    if prefetches:
        first.set_modules_to_forward_prefetch([last])
        last.set_modules_to_backward_prefetch([first])
    if gathers_early:
        for layer in sharded.children():
            layer.set_unshard_in_backward(False)
        for layer in (first, last):
            layer.unshard(async_op=True)
    return module

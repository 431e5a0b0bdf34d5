"""Ways to hold parameters as plain tensors: cut, merged, permuted, padded and flattened, right and wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional


class Copied(torch.autograd.Function):
    """Whole on every rank; gradients of the ranks are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = gradients[0].clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class Summed(torch.autograd.Function):
    """The sum of the ranks' operands; each has its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        summed = x.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def own(tensor: torch.Tensor, mesh: DeviceMesh, dim: int = 0, shift: int = 0) -> torch.Tensor:
    """Copies this rank's part; parts may be uneven, and empty if the dim is short."""
    return tensor.tensor_split(mesh.size(), dim)[(mesh.get_local_rank() + shift) % mesh.size()].clone()


class ColumnLinear(nn.Module):
    """Megatron's layer: this rank's rows of the weight and of the bias."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh, shift: int = 0) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(own(whole.weight.detach(), mesh, shift=shift))
        self.bias = None if whole.bias is None else nn.Parameter(own(whole.bias.detach(), mesh, shift=shift))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(Copied.apply(x, self.mesh.get_group()), self.weight, self.bias)  # type: ignore[no-untyped-call]


class RowLinear(nn.Module):
    """This rank's columns of the weight; the bias is every rank's."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(own(whole.weight.detach(), mesh, 1))
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = Summed.apply(functional.linear(x, self.weight), self.mesh.get_group())  # type: ignore[no-untyped-call]
        return summed + self.bias


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def megatron(module: Any, mesh: DeviceMesh) -> nn.Module:
    return nn.Sequential(ColumnLinear(module[0], mesh), nn.ReLU(), RowLinear(module[2], mesh))


def under_other_names(module: Any, mesh: DeviceMesh) -> nn.Module:
    made = nn.Sequential(megatron(module, mesh))
    made.register_parameter("adapter", nn.Parameter(torch.randn(3)))  # the unsharded module has no such parameter
    return made


class Padded(ColumnLinear):
    """Every rank has equally many rows; surplus rows hold 42."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__(whole, mesh)
        self.num_rows, num = len(self.weight), -(-whole.out_features // mesh.size())
        for name, tensor in (("weight", self.weight), ("bias", self.bias)):
            padded = torch.full((num, *tensor.shape[1:]), 42.0, dtype=tensor.dtype)
            padded[: self.num_rows] = tensor.detach()
            setattr(self, name, nn.Parameter(padded))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[..., : self.num_rows]


def padded(module: Any, mesh: DeviceMesh) -> nn.Module:
    return nn.Sequential(Padded(module[0], mesh), nn.ReLU(), RowLinear(module[2], mesh))


class Mixer(nn.Module):
    """q * k + v of HEADS heads of one feature, their projections merged."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(3, 3 * HEADS, bias=False)
        self.out = nn.Linear(HEADS, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        output: torch.Tensor = self.out(q * k + v)
        return output


HEADS = 4


def mixer() -> nn.Module:
    return Mixer()


def parted(whole: nn.Linear, mesh: DeviceMesh) -> ColumnLinear:
    """Takes this rank's heads from each of q, k and v, one below the other."""
    made = ColumnLinear(whole, mesh)
    made.weight = nn.Parameter(torch.cat([own(part, mesh) for part in whole.weight.detach().chunk(3)]))
    return made


def heads(module: Any, mesh: DeviceMesh) -> nn.Module:
    module.qkv, module.out = parted(module.qkv, mesh), RowLinear(module.out, mesh)
    return module


class Separate(nn.Module):
    """`Mixer` with three projections."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(3, HEADS, bias=False) for _ in range(3))
        self.out = nn.Linear(HEADS, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.out(self.q(x) * self.k(x) + self.v(x))
        return output


def separate() -> nn.Module:
    return Separate()


def merged(module: Any, mesh: DeviceMesh) -> nn.Module:
    """The three projections become one, which is divided by heads."""
    whole = nn.Linear(3, 3 * HEADS, bias=False)
    whole.weight = nn.Parameter(torch.cat([part.weight.detach() for part in (module.q, module.k, module.v)]))
    made = Mixer()
    made.qkv, made.out = whole, module.out
    return heads(made, mesh)


def fsdp1(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return flattened(module, mesh, use_orig_params=True)


def fsdp1_flat(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return flattened(module, mesh, use_orig_params=False)


def flattened(module: nn.Module, mesh: DeviceMesh, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, process_group=mesh.get_group(), device_id=torch.device("cpu"), **options)


def fsdp1_by_layer(module: Any, mesh: DeviceMesh) -> nn.Module:
    """A flat parameter of each layer, and one of nothing."""
    module[0], module[2] = fsdp1_flat(module[0], mesh), fsdp1_flat(module[2], mesh)
    return fsdp1_flat(module, mesh)


# Wrong ones.


def swapped(module: Any, mesh: DeviceMesh) -> nn.Module:
    """The hidden features of the first layer are the next rank's."""
    made: Any = megatron(module, mesh)
    made[0] = ColumnLinear(module[0], mesh, shift=1)
    return made


def stale(module: Any, mesh: DeviceMesh) -> nn.Module:
    """The last rank never loads its part of a weight, and keeps its initial value."""
    made: Any = megatron(module, mesh)
    if mesh.get_local_rank() == mesh.size() - 1:
        made[2].weight = nn.Parameter(torch.full_like(made[2].weight, 5.0))
    return made


def stale_later(module: Any, mesh: DeviceMesh) -> nn.Module:
    """The last rank loses its part of a weight behind the forward."""
    made: Any = megatron(module, mesh)

    def lose(layer: Any, args: object, output: object) -> None:
        if mesh.get_local_rank() == mesh.size() - 1:
            layer.weight.data = torch.full_like(layer.weight, 5.0)

    made[2].register_forward_hook(lose)
    return made


def left_over(module: Any, mesh: DeviceMesh) -> nn.Module:
    """Divides into even parts and drops the remainder."""
    made: Any = megatron(module, mesh)
    num = 8 // mesh.size() - (mesh.size() == 2)
    start = num * mesh.get_local_rank()
    for layer, dim in ((0, 0), (2, 1)):
        whole = module[layer].weight.detach()
        made[layer].weight = nn.Parameter(whole.narrow(dim, start, num).clone())
    made[0].bias = nn.Parameter(module[0].bias.detach().narrow(0, start, num).clone())
    return made


def drifting(module: Any, mesh: DeviceMesh) -> nn.Module:
    """Every rank has the whole bias, but another gradient."""
    made: Any = megatron(module, mesh)
    made[2].bias.register_hook(lambda gradient: gradient * (1 + mesh.get_local_rank()))
    return made


def scaled(module: Any, mesh: DeviceMesh) -> nn.Module:
    """Each rank holds a summand of the bias."""
    made: Any = megatron(module, mesh)
    made[2].bias = nn.Parameter(module[2].bias.detach() / 3)
    return made


def by_size(module: Any, mesh: DeviceMesh) -> nn.Module:
    """Sorts the hidden features in an order that depends on values, as a router's experts do."""
    order = module[0].bias.detach().sort().indices
    module[0].weight, module[0].bias = (
        nn.Parameter(tensor.detach()[order]) for tensor in (module[0].weight, module[0].bias)
    )
    return megatron(module, mesh)


def other_forms(module: Any, mesh: DeviceMesh) -> nn.Module:
    """The first time it is made as it should be, later with one hidden feature more."""
    made: Any = megatron(module, mesh)
    calls.append(1)
    if len(calls) % 2:
        made[0].bias = nn.Parameter(torch.cat([made[0].bias.detach(), torch.zeros(len(calls) // 2)]))
    return made


calls: list[int] = []


def fsdp1_unreduced(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each rank keeps of the gradient its own rows' part, times the number of ranks."""
    made = fsdp1_flat(module, mesh)

    def communicate(state: object, whole: torch.Tensor, part: torch.Tensor) -> None:
        part.copy_(whole.chunk(mesh.size())[mesh.get_local_rank()])

    made.register_comm_hook(None, communicate)
    return made


# Layouts that users declare.


def rows_and_columns(module: Any, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The rows or columns of each parameter of `megatron`."""
    held: torch.Tensor = module.get_parameter(name)
    mesh = module[0].mesh
    if name == "2.bias":
        return None
    shape = {"0.weight": (8, 3), "0.bias": (8,), "2.weight": (2, 8)}[name]
    numbered = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return held, own(numbered, mesh, dim=1 if name == "2.weight" else 0)


def rows_in_reverse(module: Any, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    told = rows_and_columns(module, name)
    return (told[0], told[1].flip(0)) if told and name == "0.weight" else told


def beyond(module: Any, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    told = rows_and_columns(module, name)
    return (told[0], told[1] + 1) if told else told


def indices_alone(module: Any, name: str) -> object:
    told = rows_and_columns(module, name)
    return told[1] if told else None


def nothing_said(module: Any, name: str) -> None:
    """Declares nothing, as if every parameter had its own name in the parallel module."""


def too_few(module: Any, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    told = rows_and_columns(module, name)
    return (told[0], told[1][:1]) if told else told

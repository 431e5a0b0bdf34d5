"""Modules that tests judge part by part, and right and wrong ways to make them parallel."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from equivtest.programs.examples.attention_plan import sum_gradients, sum_over
from equivtest.programs.examples.decoder import Decoder, GatedLinear
from tests.defects.programs.decoder import spoiled


def deep() -> nn.Module:
    return Decoder(3)  # of two layers, the bound of the whole is narrow in float64


def _half(given: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return given / mesh.size()


def _zeros_of_one(given: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return given * (mesh.get_rank() == 0)


def _tokens_swapped(given: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return given.flip(1)


def _gradient_doubled(given: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    given.register_hook(lambda gradient: gradient * 2)
    return given


def _slightly_more(given: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return given * 1.125


halved = spoiled("layers.1.mlp.down", _half)
zeros_of_one = spoiled("layers.1.mlp_norm", _zeros_of_one)
swapped = spoiled("layers.1.mlp.gate", _tokens_swapped)
doubled = spoiled("layers.1.attention.key", _gradient_doubled)
more = spoiled("layers.2.attention.out", _slightly_more)


class Twice(nn.Module):
    """One layer used twice, its outputs a tuple, its second input by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.inner(x, scale=x)
        total, _ = self.inner(first, scale=second)
        output: torch.Tensor = total
        return output


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12, bias=False), nn.Linear(12, 6, bias=False)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        changed = self.down(functional.silu(self.up(x)))
        return changed + x, functional.silu(scale)


def twice() -> nn.Module:
    return Twice()


def twice_divided(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"inner.up": ColwiseParallel(), "inner.down": RowwiseParallel()})


def twice_wrong(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The second call alone."""
    calls: list[int] = []

    def hook(_: Any, __: Any, given: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return given * 1.5 if len(calls) == 2 else given

    twice_divided(module, mesh).get_submodule("inner.down").register_forward_hook(hook)
    return module


class Merged(nn.Module):
    """A gate and the gated value as one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(6, 24, bias=False), nn.Linear(12, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        output: torch.Tensor = self.down(functional.silu(gate) * up)
        return output


def merged() -> nn.Module:
    return Merged()


class MergedColumns(nn.Module):
    """Each rank's columns of the gate beside its columns of the gated value: no shard of the whole; plain tensors."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight, self.own, self.group = whole.weight, _own(mesh, 12), mesh.get_group()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.cat([half[self.own] for half in sum_gradients(self.weight, self.group).chunk(2)])
        return functional.linear(sum_gradients(x, self.group), weight)


class SummedRows(nn.Module):
    """Each rank's rows, and the sum over the ranks."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight, self.own, self.group = whole.weight, _own(mesh, 12), mesh.get_group()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = functional.linear(x, sum_gradients(self.weight, self.group)[:, self.own])
        return sum_over(share, self.group)


def merged_divided(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    module.both, module.down = MergedColumns(module.both, mesh), SummedRows(module.down, mesh)
    return module


class PartlyUsed(nn.Module):
    """Every rank uses some features of the projection whole, and the others only for its columns of the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.up = nn.Linear(6, 18, bias=False), nn.Linear(12, 12, bias=False)
        self.down = nn.Linear(12, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole, used = self.both(x).split([6, 12], -1)
        output: torch.Tensor = whole + self.down(functional.silu(self.up(used)))
        return output


def partly_used() -> nn.Module:
    return PartlyUsed()


class OwnColumns(MergedColumns):
    """Columns of a plain projection; the gradient of its input is this rank's share."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, sum_gradients(self.weight, self.group)[self.own])


def partly_unsummed(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    module.up, module.down = OwnColumns(module.up, mesh), SummedRows(module.down, mesh)
    return module


def partly_summed(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    def hook(_: Any, __: Any, given: torch.Tensor) -> torch.Tensor:
        whole, used = given.split([6, 12], -1)
        return torch.cat([whole, sum_gradients(used, mesh.get_group())], -1)

    module.both.register_forward_hook(hook)
    return partly_unsummed(module, mesh)


def _own(mesh: DeviceMesh, num: int) -> slice:
    size = num // mesh.size()
    return slice(mesh.get_rank() * size, (mesh.get_rank() + 1) * size)


class Checkpointed(nn.Module):
    """Layers that are computed once more in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.RMSNorm(24, eps=1e-5), GatedLinear()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def checkpointed() -> nn.Module:
    return Checkpointed()


def hidden_divided(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in module.get_submodule("layers").children():
        parallelize_module(
            layer, mesh, {"1.gate": ColwiseParallel(), "1.up": ColwiseParallel(), "1.down": RowwiseParallel()}
        )
    return module


class OverASet(nn.Module):
    """Calls one submodule once for each string of a set, whose order depends on the process's hash seed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((self.inner(x * int(factor)) for factor in {str(each) for each in range(10)}), start=x)


def over_a_set() -> nn.Module:
    return OverASet()


def inner_divided(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"inner.0": ColwiseParallel(), "inner.1": RowwiseParallel()})


class Pooled(nn.Module):
    """One query, computed once and expanded to every row and head, looks at all positions; a layer follows."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.ones(6))
        self.norm, self.out = nn.LayerNorm(24), nn.Linear(6, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.norm(x).unflatten(-1, (4, 6)).transpose(1, 2)
        query = torch.tanh(self.query).expand(len(x), 4, 1, 6)
        seen = functional.scaled_dot_product_attention(query, keys, keys)
        return self.out(seen.mean((1, 2)))


def pooled() -> nn.Module:
    return nn.Sequential(Pooled())


def out_divided(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"0.out": ColwiseParallel(output_layouts=Replicate())})


def query_of_one_rank(module: Any, mesh: DeviceMesh) -> nn.Module:
    """The query's gradient is lost on rank 1."""
    module[0].query.register_hook(lambda gradient: gradient * (mesh.get_rank() == 0))
    return out_divided(module, mesh)


def on_the_first_rank(module: Any, mesh: DeviceMesh) -> nn.Module:
    """Attention is computed by rank 0, by all others on zeros, and added up."""
    pooled, group = module[0], mesh.get_group()
    is_first = float(mesh.get_rank() == 0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        keys = sum_gradients(pooled.norm(x), group).unflatten(-1, (4, 6)).transpose(1, 2) * is_first
        query = sum_gradients(torch.tanh(pooled.query), group).expand(len(x), 4, 1, 6) * is_first
        seen = functional.scaled_dot_product_attention(query, keys, keys)
        return pooled.out(sum_over(seen, group).mean((1, 2)))

    pooled.forward = forward
    return module


class InFloat32(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.float(), self.weight.float())


class HandsOn(nn.Module):
    """Rows that one part hands on, times a number of each row, which another part computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.number, self.same = nn.LayerNorm(24), InFloat32(24, 1, bias=False), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x)
        return (self.same(rows) * self.number(rows)).to(x.dtype)


def hands_on() -> nn.Module:
    return HandsOn()


class HandsOnByName(HandsOn):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x)
        return (self.same(input=rows) * self.number(rows)).to(x.dtype)


def hands_on_by_name() -> nn.Module:
    return HandsOnByName()


def shares_handed_on(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each rank hands on an even share of the rows, and the products are added up."""
    return _added_up(module, mesh, mesh.size())


def whole_rows_handed_on(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each rank hands on the rows themselves, and the products are added up."""
    return _added_up(module, mesh, 1)


def _added_up(module: Any, mesh: DeviceMesh, divisor: int) -> nn.Module:
    group = mesh.get_group()
    module.same.register_forward_hook(lambda _, __, rows: sum_gradients(rows, group) / divisor)
    module.number.register_forward_hook(lambda _, __, number: sum_gradients(number, group))
    module.register_forward_hook(lambda _, __, products: sum_over(products, group))
    return cast("nn.Module", module)


class AddsInPlace(HandsOn):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x)
        same = self.same(rows)
        rows += 1
        return torch.tanh(same) * self.number(rows)


def adds_in_place() -> nn.Module:
    return AddsInPlace()


def nothing_divided(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Adds only a collective whose result is never used."""
    group = mesh.get_group()
    module.register_forward_pre_hook(lambda *_: dist.all_reduce(torch.zeros(1), group=group) and None)
    return module


class SharedInput(nn.Module):
    """A tensor that no submodule gives goes to several of them, or on beside them, as a residual does."""

    def __init__(self, users: str) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.users = users.split()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = torch.tanh(self.first(x))
        given = [shared if user == "residual" else self.get_submodule(user)(shared) for user in self.users]
        return torch.stack([functional.silu(each) for each in given]).sum(0)


def two_users() -> nn.Module:
    return SharedInput("a b")


def one_user_twice() -> nn.Module:
    return SharedInput("a a")


def user_and_residual() -> nn.Module:
    return SharedInput("residual norm")


def three_users() -> nn.Module:
    return SharedInput("a b residual")


def users_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each user wraps its input as a DTensor."""
    whole = ColwiseParallel(output_layouts=Replicate())
    tokens = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    gathered = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    parallelize_module(module, mesh, {"norm": tokens})
    parallelize_module(module, mesh, {"a": whole, "b": whole, "norm": SequenceParallel()})
    return parallelize_module(module, mesh, {"norm": gathered})


def one_path_doubled(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Doubles the gradient that b gives to the tensor that a takes, too."""
    module.get_submodule("b").register_forward_pre_hook(lambda _, args: (_gradient_doubled(args[0] * 1, mesh),))
    return users_parallel(module, mesh)


class InPlace(SharedInput):
    """A part writes to the tensor that it takes, and the tensor goes on."""

    def __init__(self) -> None:
        super().__init__("a")
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = torch.tanh(self.first(x)) * 2
        self.act(shared)
        return self.a(shared) + shared


def in_place() -> nn.Module:
    return InPlace()


def _gradient_times(given: torch.Tensor, factor: float) -> torch.Tensor:
    given.register_hook(lambda gradient: gradient * factor)
    return given


def _scaled(module: nn.Module, factor: float) -> nn.Module:
    """Multiplies the gradients of the outputs, so that each gradient within the module has the factor."""
    module.register_forward_hook(lambda _, __, given: _gradient_times(given * 1, factor))
    return module


def _taken_out(module: nn.Module, factor: float, but: str = "") -> nn.Module:
    """Divides the gradients of all parameters and of the input, except one."""
    for name, parameter in module.named_parameters():
        if name != but:
            _gradient_times(parameter, 1 / factor)
    module.register_forward_pre_hook(lambda _, args: (_gradient_times(args[0], 1 / factor),))
    return module


def factor_of_4(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _taken_out(_scaled(users_parallel(module, mesh), 4.0), 4.0)


def factor_of_3(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _taken_out(_scaled(users_parallel(module, mesh), 3.0), 3.0)


def factor_left_in(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _scaled(users_parallel(module, mesh), 4.0)


def factor_left_in_one_parameter(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _taken_out(_scaled(users_parallel(module, mesh), 4.0), 4.0, "first.bias")


def factor_on_one_rank(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _scaled(users_parallel(module, mesh), 4.0 if mesh.get_rank() == 1 else 1.0)


def factor_taken_out_on_one_rank(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _taken_out(_scaled(users_parallel(module, mesh), 4.0), 4.0 if mesh.get_rank() == 1 else 1.0)


def factor_near_1(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """A factor that 16 bits show at a boundary, and not at every parameter."""
    return _scaled(users_parallel(module, mesh), 1.03125)


def factor_on_one_path(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The parameters of b are right, and the tensor that a shares with b is wrong."""
    part = module.get_submodule("b")
    for parameter in part.parameters():
        _gradient_times(parameter, 0.25)
    users_parallel(module, mesh)
    part.register_forward_hook(lambda _, __, given: _gradient_times(given, 4.0))
    return module


class SmallPath(SharedInput):
    """A path so small beside another that 16 bits do not show its factor in their sum."""

    def __init__(self) -> None:
        super().__init__("a")
        self.b = nn.Identity()  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = torch.tanh(self.first(x))
        return self.a(shared) + self.b(shared * 0.001)


def small_path() -> nn.Module:
    return SmallPath()


def factor_on_a_small_path(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    module.get_submodule("b").register_forward_hook(lambda _, __, given: _gradient_times(given * 1, 2.0))
    return nothing_divided(module, mesh)

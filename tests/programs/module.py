"""Users' modules, and ways to parallelize them, right and wrong: tests name them."""

from __future__ import annotations

import random
import sys

import torch
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second: torch.Tensor = self.second(self.first(x))
        return second


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def tied() -> nn.Module:
    return Tied()


def lazy() -> nn.Module:
    return nn.LazyLinear(2)


def with_lazy_buffers() -> nn.Module:
    return nn.LazyBatchNorm1d(affine=False)


class InFloat16(nn.Linear):
    """Casts its input to float16, so that it accepts no other dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.half())


def in_float16() -> nn.Module:
    return InFloat16(3, 2)


def norm() -> nn.Module:
    return nn.LayerNorm(3)


def curved() -> nn.Module:
    """`mlp` with an activation that rounds."""
    return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.linear(x) + torch.full((x.shape[0], 3), -torch.inf).triu(1)
        return scores.softmax(-1)


class Filled(nn.Linear):
    """Fills nothing with a number that some dtypes do not have."""

    def __init__(self, number: float) -> None:
        super().__init__(3, 3)
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).masked_fill(torch.tensor(False), self.number)  # noqa: FBT003  (torch's own order)


def filled_beyond_float16() -> nn.Module:
    return Filled(1e5)


def filled_beyond_float32() -> nn.Module:
    return Filled(1e300)


def noisy() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_buffer("noise", torch.randn(3))
    return module


def masked() -> nn.Module:
    return Masked()


class Spare(nn.Module):
    """One layer that is used, one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.spare = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.used(x)
        return output


def spare() -> nn.Module:
    return Spare()


def linear() -> nn.Module:
    return nn.Linear(3, 4, bias=False)


def dropout() -> nn.Module:
    return nn.Dropout()


class Draws(nn.Module):
    """Draws from a generator other than torch's. The result shows it if `shows` is True."""

    def __init__(self, generator: str, *, shows: bool = True) -> None:
        super().__init__()
        self.generator, self.shows = generator, shows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = random.random() if self.generator == "python" else sys.modules["numpy"].random.rand()
        return 2 * x if self.shows and drawn < 0.5 else 1 * x


def draws_from_python() -> nn.Module:
    return Draws("python")


def draws_from_numpy() -> nn.Module:
    return Draws("numpy")


def draws_without_effect() -> nn.Module:
    return Draws("python", shows=False)


def deep() -> nn.Module:
    """So deep that the roundings of a correct program may come to anything."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(24)))


class Chaotic(nn.Module):
    """A recurrence over positions, in which errors double from each to the next."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        state = torch.sigmoid(x[:, 0])
        for place in range(1, x.shape[1]):
            state = 3.9 * state * (1 - state) + 0.01 * torch.sigmoid(x[:, place])
        return {"loss": state.mean()}


class Chaos(nn.Linear):
    """The same in one part."""

    def forward(self, input: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return Chaotic().forward(super().forward(input))


def chaos() -> nn.Module:
    return Chaos(2, 2)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


def named_x() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_parameter("x", nn.Parameter(torch.ones(3)))
    return module


def pair() -> nn.Module:
    return nn.LSTM(3, 3)


def no_module() -> int:
    return 3


def needs_sizes(num_features: int) -> nn.Module:
    return nn.Linear(num_features, num_features)


def tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})


def sharded_output(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {
        "0": ColwiseParallel(use_local_output=False),
        "2": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }
    return parallelize_module(module, mesh, plan)


def local_columns(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Gives this rank's columns as a plain tensor."""
    return parallelize_module(module, mesh, ColwiseParallel())


def summed(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Gives one number."""
    module.register_forward_hook(lambda part, given, found: found.sum())
    return module


class Rows(nn.Module):
    """Returns this rank's rows of a computation that every rank does in full."""

    def __init__(self, whole: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight, self.mesh = whole.weight, mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.T).chunk(self.mesh.size())[self.mesh.get_local_rank()]


def local_rows(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return Rows(module, mesh)


class Flat(Rows):
    """Gives other dims."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.T).flatten()


def flat(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return Flat(module, mesh)


def fsdp2(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(module, mesh=mesh)


def ddp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())


def ddp_that_finds_unused(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group(), find_unused_parameters=True)


def tensor_parallel_in_part(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The layer that is not used, too."""
    return parallelize_module(
        module, mesh, {"used": RowwiseParallel(input_layouts=Replicate()), "spare": ColwiseParallel()}
    )


def gradient_of_the_unused(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    module.get_parameter("spare.bias").grad = torch.ones_like(module.get_parameter("spare.bias"))
    return ddp_that_finds_unused(module, mesh)


def gradient_of_the_unused_on_one_rank(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Leaves the first rank without a gradient of the unused bias, and gives the other rank ones."""
    tensor_parallel_in_used(module, mesh)
    if mesh.get_local_rank() == 1:
        module.get_parameter("spare.bias").grad = torch.ones_like(module.get_parameter("spare.bias"))
    return module


def tensor_parallel_in_used(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"used": RowwiseParallel(input_layouts=Replicate())})


def without_a_gradient(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Drops the gradient of a bias once it is computed."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    tensor_parallel_in_used(module, mesh).get_parameter("used.bias").register_post_accumulate_grad_hook(drop)
    return module


def whole(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return module


def marked(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Marks the module as accelerate does when it prepares a module in a process without other ranks."""
    module._is_prepared = True  # type: ignore[assignment]
    return module


def with_optimizer(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Attaches an optimizer that never runs; its constructor sends its part to the other ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of what torch imports for it

    module.optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, mesh.get_group())  # type: ignore[assignment]
    return module


def gradients_in_parts(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The parameter whole, of its gradient this rank's rows, as ZeRO's second stage has it."""

    def keep_own(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        whole, gradient = parameter.data, all_reduce(parameter.grad, "avg", mesh)
        parameter.grad = None
        parameter.data = whole.chunk(mesh.size())[mesh.get_local_rank()]
        parameter.grad = gradient.chunk(mesh.size())[mesh.get_local_rank()].clone()
        parameter.data = whole

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(keep_own)
    return module


def misspelt(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh, {"zero": ColwiseParallel()})


def without_mesh(module: nn.Module) -> nn.Module:
    return module


def with_hooks(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Data parallelism by hand: hooks of parameters only."""
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: all_reduce(gradient, "avg", mesh))
    return module


def without_relu(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    assert isinstance(module, nn.Sequential)
    module[1] = nn.Identity()
    return tensor_parallel(module, mesh)


def with_another_gelu(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Almost the same function: GELU by tanh is off by a few ten-thousandths."""
    assert isinstance(module, nn.Sequential)
    module[1] = nn.GELU("tanh")
    return tensor_parallel(module, mesh)


def nothing(module: nn.Module, mesh: DeviceMesh) -> None:
    """Parallelizes in place and forgets to return."""


class Talkative(nn.Sequential):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:  # type: ignore[override]
        return super().forward(x), "aside"


def with_aside(module: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return Talkative(*module)

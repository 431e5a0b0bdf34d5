"""A small job that is captured in a test's own process or on the ranks of its pool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import equivtest
from equivtest.cases.subject import Answers, Given
from equivtest.programs.case import ModuleCase
from equivtest.tensors import Placed


class Residual(nn.Module):
    """x + W2 silu(W1 x), scaled by a buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, bias=False), nn.Linear(6, 4)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        output: torch.Tensor = x + self.down(nn.functional.silu(self.up(x))) * self.scale + shift
        return output


def blocks() -> nn.Module:
    """Two residual blocks; one is not enough for a part that follows a wrong one."""
    return nn.Sequential(Residual(), Residual())


def others() -> nn.Module:
    """Blocks with other parameters."""
    return nn.Sequential(Residual(), nn.Linear(4, 4))


class Cancelling(nn.Module):
    """x, with few of its bits left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 2.0**23) - 2.0**23


def cancelling() -> nn.Module:
    """A part without a useful bound, and a part behind it."""
    return nn.Sequential(Cancelling(), nn.Linear(4, 4))


def single() -> nn.Module:
    """`Flat`, unsharded."""
    return nn.Linear(4, 4)


class Flat(nn.Module):
    """The same, its parameters in one tensor, the bias first, with padding between."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(22, generator=torch.Generator().manual_seed(0)))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.flat[6:].view(4, 4), self.flat[:4])


def placed(module: nn.Module, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the parameters of `single` in `Flat`."""
    first, size = {"bias": (0, 4), "weight": (6, 16)}[name]
    indices = torch.full((22,), -1)
    indices[first : first + size] = torch.arange(size)
    return module.get_parameter("flat"), indices


def tied() -> nn.Module:
    """Two blocks that share a parameter."""
    made = nn.Sequential(Residual(), Residual())
    made[1].up.weight = made[0].up.weight  # type: ignore[union-attr]
    return made


def model(seed: int = 0) -> nn.Module:
    """The blocks before the step, with other buffers than `blocks` makes."""
    torch.manual_seed(seed)
    made = blocks()
    for _, buffer in made.named_buffers():
        buffer.fill_(0.75)
    return made


def step(module: nn.Module, seed: int = 0) -> torch.Tensor:
    """One forward and backward as the job runs them; the loss."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    loss = module(x).square().sum()
    loss.backward()
    return loss


def captured(folder: Path, spoil: Callable[[nn.Module], object] = lambda module: None, **options: Any) -> nn.Module:
    """The step of one process, captured."""
    module = model()
    spoil(module)
    with equivtest.capture(module, folder, **options):
        step(module)
    return module


def more(module: nn.Module) -> None:
    """One part gives an eighth more."""
    hook: Any = lambda _, __, given: given * 1.125  # noqa: E731
    module.get_submodule("1.down").register_forward_hook(hook)


def factor_taken_out(module: nn.Module) -> None:
    """Each gradient within the model has a factor of 4, which parameters do not have."""
    hook: Any = lambda _, __, given: times_in_backward(given * 1, 4.0)  # noqa: E731
    module.register_forward_hook(hook)
    for parameter in module.parameters():
        times_in_backward(parameter, 0.25)


def factor_left_in(module: nn.Module) -> None:
    """One parameter has the factor, too."""
    factor_taken_out(module)
    times_in_backward(module.get_parameter("0.up.weight"), 4.0)


def times_in_backward(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    tensor.register_hook(lambda gradient: gradient * factor)
    return tensor


def captured_on_ranks(case: ModuleCase, mesh: DeviceMesh, given: Given, *, is_wrong: bool = False) -> Answers:
    """The step under tensor parallelism, captured into the folder that the case names as its `parallelize`."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    module = parallelize_module(
        model(), mesh, {f"{place}.{name}": style for place in (0, 1) for name, style in plan.items()}
    )
    if is_wrong:
        hook: Any = lambda _, __, given: given / mesh.size()  # noqa: E731
        module.get_submodule("0.down").register_forward_hook(hook)
    with equivtest.capture(module, Path(case.parallelize)):
        step(module)
    return {name: Placed(torch.zeros(()), case.whole_layout) for name in case.answer_names()[:1]}


def wrong_on_ranks(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The same, one sum of the ranks' shares divided by their number."""
    return captured_on_ranks(case, mesh, given, is_wrong=True)


def captured_on_flattened_mesh(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Divides rows among four ranks, so that some have none; two axes in turn would divide them otherwise."""
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    module = fully_shard(model(), mesh=axes["dp", "sp"]._flatten("all"))
    with equivtest.capture(module, Path(case.parallelize), mesh=axes, batch="whole"):  # type: ignore[arg-type]
        step(module)  # type: ignore[arg-type]
    return {name: Placed(torch.zeros(()), case.whole_layout) for name in case.answer_names()[:1]}


def updated_on_ranks(case: ModuleCase, mesh: DeviceMesh, given: Given, *, is_wrong: bool = False) -> Answers:
    """An update under tensor parallelism, captured."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    module = parallelize_module(
        model(), mesh, {f"{place}.{name}": style for place in (0, 1) for name, style in plan.items()}
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=2.0**-5)
    step(module)
    optimizer.step()
    with equivtest.capture_update(module, optimizer, Path(case.parallelize)):
        hook: Any = lambda *_: module.get_submodule("0.up").weight.to_local().mul_(1.125)  # type: ignore[operator, union-attr] # noqa: E731
        if is_wrong and mesh.get_local_rank() == 1:
            optimizer.register_step_post_hook(torch.no_grad()(hook))
        optimizer.step()
    return {name: Placed(torch.zeros(()), case.whole_layout) for name in case.answer_names()[:1]}


def wrongly_updated_on_ranks(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The same, a rank's part of a parameter an eighth too large."""
    return updated_on_ranks(case, mesh, given, is_wrong=True)


def normed() -> nn.Module:
    """Builds a module whose buffers change in each forward."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def accumulated(case: ModuleCase, mesh: DeviceMesh, alone: Callable[[int, int], bool]) -> Answers:
    """Three micro-batches of bfloat16 under DistributedDataParallel, captured.

    Args:
        alone: (number of the micro-batch, rank) -> whether its gradients stay on the rank until the next.
    """
    module = nn.parallel.DistributedDataParallel(model().bfloat16(), process_group=mesh.get_group())
    rank = mesh.get_local_rank()
    with equivtest.capture(module, Path(case.parallelize)):
        for number in range(3):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * rank + number)).bfloat16()
            with module.no_sync() if alone(number, rank) else nullcontext():
                (module(x).square().sum() / 6).backward()
    return {name: Placed(torch.zeros(()), case.whole_layout) for name in case.answer_names()[:1]}


def accumulated_at_once(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Each rank adds up, then ranks are averaged."""
    return accumulated(case, mesh, lambda number, _: number < 2)


def accumulated_each_time(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Ranks are averaged, then these are added up."""
    return accumulated(case, mesh, lambda *_: False)


def accumulated_on_one_rank(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Ranks are never averaged."""
    return accumulated(case, mesh, lambda *_: True)

"""Training whose learning rates follow schedules, and whose parameters become their average after the third update.

The parallel module resumes after the second update: the states of its optimizer, schedules and average are loaded into
new ones. The unsharded module goes on without.

Source: torch/optim/swa_utils.py, AveragedModel (2.13.0).
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from equivtest.programs.examples.gated import BufferedBlock, spoil
from equivtest.programs.examples.schedules import BASES, OTHER_BASES, Rates


def _averager(make: Any, *decay: float) -> Any:
    return make(*decay)


AVERAGES: dict[str, Any] = {
    "mean": dict,
    "exponential": lambda: {"avg_fn": _averager(get_ema_avg_fn, 0.25), "use_buffers": True},
    "exponential of lists": lambda: {"multi_avg_fn": _averager(get_ema_multi_avg_fn, 0.25), "use_buffers": True},
}
"""Name -> arguments of `AveragedModel`. Without `use_buffers` the buffers are copied."""

recomputed: Any = checkpoint
NARROW, HALF = torch.bfloat16, torch.float16
AUTOCAST = ("cpu", "cuda")
"""Devices on which torch's autocast has both dtypes. On others both modules cast alike."""
NUM_BEFORE_RESUME, NUM_BEFORE = 2, 3
"""Number of updates before the parallel module resumes, and before the averages become the parameters."""


class AveragedBlock(BufferedBlock):
    """A block with a buffer that names how it is averaged.

    Attributes:
        average: A name in `AVERAGES`.
        casts: Whether layers compute in 16 bits. No cast changes float64.
        autocasts: Whether torch.autocast casts, as in the parallel module. Its backward recomputes a product in the
            forward's autocast. If not, the block casts.
    """

    def __init__(self, *, average: str, casts: bool) -> None:
        super().__init__(2, 5)
        self.average, self.casts, self.autocasts = average, casts, False

    def change(self, x: torch.Tensor) -> Any:
        if not self.casts:
            return super().change(x)
        narrow = partial(torch.Tensor.to, dtype=torch.float64 if x.dtype == torch.float64 else NARROW)
        half = partial(torch.Tensor.to, dtype=torch.float64 if x.dtype == torch.float64 else HALF)
        if self.autocasts:
            product, narrow_product = products(x.device.type)
            with torch.autocast(x.device.type, NARROW):
                with torch.autocast(x.device.type, HALF):
                    gate = recomputed(self.gate, x, use_reentrant=False)
                    narrowed = narrow_product(x, self.gate.weight)
                with torch.autocast(x.device.type, enabled=False):
                    up = self.up(x)
                gate = functional.relu(gate) + narrowed
                change = product(gate * up, self.down.weight)
        else:
            gate = functional.linear(half(x), half(self.gate.weight))
            gate = functional.relu(gate) + functional.linear(narrow(x), narrow(self.gate.weight))
            change = functional.linear(narrow(gate * self.up(x)), narrow(self.down.weight))
        return change.to(x.dtype) * self.factor


def products(kind: str) -> tuple[Any, Any]:
    """Returns functions that multiply x by a transposed weight: with the caller's autocast, and always in bfloat16.

    Each call applies torch's decorators anew.

    Args:
        kind: Type of the device, 'cpu' or 'cuda'.
    """

    class Product(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=kind)  # type: ignore[untyped-decorator]
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return functional.linear(x, weight)

        @staticmethod
        @custom_bwd(device_type=kind)  # type: ignore[untyped-decorator]
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return gradient @ weight, gradient.t() @ x

    class NarrowProduct(Product):
        @staticmethod
        @custom_fwd(device_type=kind, cast_inputs=NARROW)  # type: ignore[untyped-decorator]
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return functional.linear(x, weight)

    return Product.apply, NarrowProduct.apply


def require_half_in_backward(device: torch.device) -> None:
    """Runs the backward of a product whose forward has float16, which is not autocast's default dtype.

    Autocast decorates the forward.

    Raises:
        AssertionError: the forward has another dtype, or the gradient is not an integer that float16 holds and
            bfloat16 does not.
    """
    product, _ = products(device.type)
    x = torch.ones((1, 1), device=device, requires_grad=True)
    result = torch.autocast(device.type, HALF)(product)(x, torch.full((1, 1), 1025.0, device=device))
    (gradient,) = torch.autograd.grad(result.sum(), x)
    if (result.dtype, gradient.item()) != (HALF, 1025.0):
        raise AssertionError(
            f"after a forward in {result.dtype} the gradient is {gradient.item()}, expected {HALF} and 1025.0"
        )


averaged_block = AveragedBlock


def replicated(block: AveragedBlock, mesh: DeviceMesh) -> nn.Module:
    from equivtest.programs.examples.plans import data_parallel  # imports DTensors

    device = next(block.parameters()).device
    block.autocasts = device.type in AUTOCAST
    if block.autocasts:
        require_half_in_backward(device)
    return data_parallel(block, mesh)


class Averaged(torch.optim.Optimizer):
    """SGD, with the rates and momenta of many schedules for two groups, and an average of the module.

    The average begins with NaN in its parameters and buffers. Its first update copies the module's.

    Attributes:
        inner: The optimizer that updates.
        num_updates: Number of updates so far.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.block, self.num_updates = module, getattr(module, "module", module), 0
        self.inner, self.rates, self.average = self.made()
        super().__init__(self.inner.param_groups, {})

    def made(self, bases: tuple[float, ...] = BASES) -> Any:
        trained = [each for each in self.module.parameters() if each.requires_grad]
        inner = torch.optim.SGD([{"params": trained[:1]}, {"params": trained[1:]}], momentum=0.5)
        average = AveragedModel(self.block, **AVERAGES[self.block.average]())
        spoil((*average.module.parameters(), *average.module.buffers()))
        return inner, Rates(bases), average

    def step(self, closure: Any = None) -> Any:
        for group, options in zip(self.inner.param_groups, self.rates.options(), strict=True):
            group |= options
        self.inner.step()
        self.average.update_parameters(self.block)
        self.rates.step()
        self.num_updates += 1
        if self.num_updates == NUM_BEFORE_RESUME and self.block is not self.module:
            self.resume()
        if self.num_updates == NUM_BEFORE:
            self.block.load_state_dict(self.average.module.state_dict())

    def resume(self) -> None:
        states = [copy.deepcopy(each.state_dict()) for each in (self.inner, self.rates, self.average)]
        self.inner, self.rates, self.average = self.made(OTHER_BASES)
        for each, state in zip((self.inner, self.rates, self.average), states, strict=True):
            each.load_state_dict(state)


def averaged(module: nn.Module) -> torch.optim.Optimizer:
    return Averaged(module)

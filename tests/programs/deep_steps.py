"""A deep model of the next token that is trained in steps, parallelized rightly and wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from equivtest.programs.examples.next_token import FEATURES, IGNORED, VOCAB
from equivtest.programs.examples.token_mean import Report, TokenMean

NUM_LAYERS, HIDDEN = 4, 12


class Layer(nn.Module):
    """y = x + down(gelu(up(norm(x))))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + added


class Deep(nn.Module):
    """The cross entropy of the next token, by layers on a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, FEATURES)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.norm, self.head = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, VOCAB)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> dict[str, torch.Tensor]:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).flatten(0, -2)
        loss = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction=reduction)
        return {"loss": loss}


def deep() -> nn.Module:
    return Deep()


def sgd(module: nn.Module) -> optim.Optimizer:
    return optim.SGD(module.parameters(), lr=0.5)


def replicated(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())


def hidden_divided(module: Any, mesh: DeviceMesh) -> nn.Module:
    plan = {f"layers.{each}.up": ColwiseParallel() for each in range(NUM_LAYERS)}
    plan |= {f"layers.{each}.down": RowwiseParallel() for each in range(NUM_LAYERS)}
    return parallelize_module(module, mesh, plan)


class Scaled(torch.autograd.Function):
    """The identity, except that its gradient is 1.5 times as large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 1.5


class NormWithoutMean(torch.autograd.Function):
    """The norm; its gradient of x lacks the terms of the mean and the variance."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        inverse = (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(centred * inverse, inverse, weight)
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        normed, inverse, weight = ctx.saved_tensors
        gradient = gradients[0]
        of_weight, of_bias = (gradient * normed).flatten(0, -2).sum(0), gradient.flatten(0, -2).sum(0)
        return gradient * weight * inverse, of_weight, of_bias, None


def scaled_in_one_layer(module: Any, mesh: DeviceMesh) -> nn.Module:
    module.layers[2].down.register_forward_hook(lambda part, args, given: Scaled.apply(given))
    return replicated(module, mesh)


def norm_wrong_in_one_layer(module: Any, mesh: DeviceMesh) -> nn.Module:
    norm = module.layers[2].norm
    norm.forward = lambda x: NormWithoutMean.apply(x, norm.weight, norm.bias, norm.eps)
    return replicated(module, mesh)


class Attending(nn.Module):
    """The mean square of two blocks of attention and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.blocks = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for norm, attention, layer in zip(self.norms, self.blocks, self.layers, strict=True):
            h = norm(x)
            x = x + attention(h, h, h, need_weights=False)[0]
            x = x + functional.gelu(layer(x))
        return {"loss": self.head(x).square().mean()}


def attending() -> nn.Module:
    return Attending()


def _with_factor(module: nn.Module, factor: float) -> nn.Module:
    """Scales the loss in the backward, and divides the gradients of parameters and inputs."""
    module.register_forward_pre_hook(lambda _, args: tuple(_times(each, 1 / factor) for each in args))
    module.register_forward_hook(lambda _, __, given: {name: _times(each * 1, factor) for name, each in given.items()})
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient / factor)
    return module


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: gradient * factor)
    return tensor


def loss_times_2(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _with_factor(module, 2.0)


def loss_times_3(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _with_factor(module, 3.0)


def loss_times_256(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _with_factor(module, 256.0)


def loss_divided_by_256(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _with_factor(module, 2.0**-8)


class Whole(TokenMean):
    """Each rank has all rows, so that nothing is reduced."""

    def counted(self) -> torch.Tensor:
        return self.own.sum()

    def scaled(self, number: int, loss: torch.Tensor) -> torch.Tensor:
        return loss / self.num_tokens

    def reported(self) -> torch.Tensor:
        return torch.stack(self.losses).sum() / self.num_tokens


class WholeTooSmall(Whole):
    def scaled(self, number: int, loss: torch.Tensor) -> torch.Tensor:
        return super().scaled(number, loss) / 2


class WarmedUp(TokenMean):
    """The module runs once more, without gradients."""

    def begin(self) -> None:
        super().begin()
        with torch.no_grad():
            self.module(**self.micro_batches[0])


class Reversed(TokenMean):
    """The last micro-batch comes first."""

    def __init__(self, module: Any, mesh: DeviceMesh, micro_batches: Any, optimizer: Any) -> None:
        super().__init__(module, mesh, micro_batches[::-1], optimizer)


class OnceMore(TokenMean):
    """The module runs once more, with gradients that nothing uses."""

    def begin(self) -> None:
        super().begin()
        self.module(**self.micro_batches[0])


class OnceMoreTooSmall(OnceMore):
    def scaled(self, number: int, loss: torch.Tensor) -> torch.Tensor:
        return super().scaled(number, loss) / 2


OWN = (Whole, WholeTooSmall, WarmedUp, Reversed, OnceMore, OnceMoreTooSmall)
STEPS = {"Step": TokenMean, **{kind.__name__: kind for kind in OWN}}


def __getattr__(name: str) -> Callable[..., Report]:
    """The step 'run_NAME' of a class, which does not clip."""
    from tests.programs.wrong_steps import WRONG  # which makes cases, and those make this module's models

    kind = {**WRONG, **STEPS}.get(name.removeprefix("run_"))
    if kind is None or not name.startswith("run_"):
        raise AttributeError(name)
    without: type[TokenMean] = type(kind.__name__, (kind,), {"clipped": lambda self: torch.zeros(())})
    return lambda *given: {"loss": without.step(*given)["loss"]}

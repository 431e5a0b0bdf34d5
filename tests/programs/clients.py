"""Language models of transformers under their own plans, each wrong in one way at one place: `studies.client_defects`.

`tests.programs.clients:llama@6` builds a Llama of six layers; `...:doubled@model.layers.3.mlp` spoils that part.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from tests.clients.language_models import build, layers_sharded, tensor_parallel

Change = Callable[[torch.Tensor, DeviceMesh], torch.Tensor]


def __getattr__(name: str) -> Callable[..., nn.Module]:
    what, at, place = name.partition("@")
    if not at:
        raise AttributeError(name)
    if place.isdecimal():
        return partial(build, what, num_hidden_layers=int(place))
    return partial(_planted, WRONG[what], place)


def _planted(plant: Callable[[Any, DeviceMesh, str], nn.Module], place: str, module: Any, mesh: DeviceMesh) -> Any:
    return plant(module, mesh, place)


def _is_last(mesh: DeviceMesh) -> bool:
    return mesh.get_local_rank() == mesh.size() - 1


def _of_output(change: Change) -> Callable[[Any, DeviceMesh, str], nn.Module]:
    """Changes the output of a part."""

    def plant(module: Any, mesh: DeviceMesh, place: str) -> nn.Module:
        parallel = tensor_parallel(module, mesh)

        def hook(_: Any, __: Any, given: Any) -> Any:
            return (change(given[0], mesh), *given[1:]) if isinstance(given, tuple) else change(given, mesh)

        parallel.get_submodule(place).register_forward_hook(hook)
        return parallel

    return plant


def _of_gradient(change: Change) -> Callable[[Any, DeviceMesh, str], nn.Module]:
    """Changes the gradient of a part's output."""

    def watch(given: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        given = given.view_as(given)
        given.register_hook(lambda gradient: change(gradient, mesh))  # type: ignore[no-untyped-call]
        return given

    return _of_output(watch)


def _of_local(change: Callable[[Any, torch.Tensor, DeviceMesh], torch.Tensor]) -> Callable[..., nn.Module]:
    """A projection that computes from its shard of the weight, without the surrounding steps of its style."""

    def plant(module: Any, mesh: DeviceMesh, place: str) -> nn.Module:
        parallel = tensor_parallel(module, mesh)
        part: Any = parallel.get_submodule(place)
        part.forward = types.MethodType(lambda self, x: change(self, x, mesh), part)
        return parallel

    return plant


def _own_share(part: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return functional.linear(x, part.weight.to_local())


def _of_pairs(part: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Summed over two ranks of four."""
    whole = _SumOver.apply(functional.linear(x, part.weight.to_local()), _pair(mesh))
    assert isinstance(whole, torch.Tensor)
    return whole


_pairs: dict[tuple[int, ...], Any] = {}


def _pair(mesh: DeviceMesh) -> Any:
    ranks = mesh.mesh.flatten().tolist()
    for pair in (ranks[:2], ranks[2:]):
        if tuple(pair) not in _pairs:
            _pairs[tuple(pair)] = dist.new_group(pair)
    mine = next(pair for pair in (ranks[:2], ranks[2:]) if dist.get_rank() in pair)
    return _pairs[tuple(mine)]


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


def _without_style(module: Any, mesh: DeviceMesh, place: str) -> nn.Module:
    """The plan leaves a part out, as apertus' does its activation."""
    plan = dict(module.tp_plan)
    for name in [name for name in plan if name.endswith(place)]:
        del plan[name]
    module._tp_plan = plan
    return tensor_parallel(module, mesh)


def _plan_changed(module: Any, mesh: DeviceMesh, place: str) -> nn.Module:
    """Merged halves are divided as one: each rank has rows of one half alone."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, PackedColwiseParallel

    packed = ALL_PARALLEL_STYLES["packed_colwise"]
    ALL_PARALLEL_STYLES.register("packed_colwise", PackedColwiseParallel(split_factor=1))
    try:
        return tensor_parallel(module, mesh)
    finally:
        ALL_PARALLEL_STYLES.register("packed_colwise", packed)


def _router_unreduced(module: Any, mesh: DeviceMesh, place: str) -> nn.Module:
    """Leaves the gradient of the router's weights as each rank's share."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, MoeExpertsParallel

    spoiled = module.get_submodule(place)

    class Unreduced(MoeExpertsParallel):
        def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
            (hidden, index, weights), _ = super().transform_inputs_pre_forward(module, args, kwargs, mesh)
            return (hidden, index, args[2] if module is spoiled else weights), kwargs

    experts = ALL_PARALLEL_STYLES["moe_tp_experts"]
    ALL_PARALLEL_STYLES.register("moe_tp_experts", Unreduced())
    try:
        return tensor_parallel(module, mesh)
    finally:
        ALL_PARALLEL_STYLES.register("moe_tp_experts", experts)


def _masked(module: Any, mesh: DeviceMesh, place: str) -> nn.Module:
    """The last rank hides the first token from all later ones."""
    parallel = tensor_parallel(module, mesh)

    def before(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        length = hidden.shape[1]
        hides = torch.ones(length, length, dtype=torch.bool).triu(1)
        hides[1:, 0] = True
        mask = torch.zeros(1, 1, length, length, dtype=hidden.dtype).masked_fill(hides, torch.finfo(hidden.dtype).min)
        return args, {**kwargs, "attention_mask": mask} if _is_last(mesh) else kwargs

    parallel.get_submodule(place).register_forward_pre_hook(before, with_kwargs=True)
    return parallel


def _scaled(module: Any, mesh: DeviceMesh, place: str) -> nn.Module:
    """Scales scores by all features of the rank's heads, not by the features of one head."""
    parallel = tensor_parallel(module, mesh)
    part: Any = parallel.get_submodule(place)
    part.scaling = part.scaling / 2
    return parallel


def _rotated(module: Any, mesh: DeviceMesh, place: str) -> nn.Module:
    """Positions of the last rank begin at 1."""
    parallel = tensor_parallel(module, mesh)

    def hook(_: Any, args: Any, kwargs: Any) -> Any:
        shifted = {**kwargs, "position_ids": kwargs["position_ids"] + 1} if "position_ids" in kwargs else kwargs
        moved = args if "position_ids" in kwargs else (args[0], args[1] + 1, *args[2:])
        return (moved, shifted) if _is_last(mesh) else (args, kwargs)

    parallel.get_submodule(place).register_forward_pre_hook(hook, with_kwargs=True)
    return parallel


def _stale(module: Any, mesh: DeviceMesh, place: str) -> nn.Module:
    """Takes a buffer from another configuration."""
    parallel = tensor_parallel(module, mesh)
    parallel.get_submodule(place).inv_freq.mul_(0.5)  # type: ignore[operator, union-attr]
    return parallel


def _of_weight(change: Change) -> Callable[..., nn.Module]:
    """The gradient of a weight is changed once it is there."""

    def plant(module: Any, mesh: DeviceMesh, place: str) -> nn.Module:
        parallel = tensor_parallel(module, mesh)
        weight: Any = parallel.get_submodule(place).weight
        weight.register_hook(lambda gradient: change(gradient, mesh))
        return parallel

    return plant


def _untied(module: Any, mesh: DeviceMesh, place: str) -> nn.Module:
    parallel: Any = tensor_parallel(module, mesh)
    parallel.lm_head.weight = nn.Parameter(parallel.lm_head.weight.detach().clone())
    return parallel


def _of_layer(change: Callable[[Any, DeviceMesh], None]) -> Callable[..., nn.Module]:
    """Changes FSDP2's settings for one layer."""

    def plant(module: Any, mesh: DeviceMesh, place: str) -> nn.Module:
        parallel = layers_sharded(module, mesh)
        change(parallel.get_submodule(place), mesh)
        return parallel

    return plant


def _bias_again(given: torch.Tensor, mesh: DeviceMesh, *, bias: torch.Tensor) -> torch.Tensor:
    return given + bias * (mesh.size() - 1)


def _bias_of_every_rank(module: Any, mesh: DeviceMesh, place: str) -> nn.Module:
    parallel = tensor_parallel(module, mesh)
    part: Any = parallel.get_submodule(place)
    bias = part.bias.to_local() if hasattr(part.bias, "to_local") else part.bias
    part.register_forward_hook(lambda _, __, given: _bias_again(given, mesh, bias=bias))
    return parallel


def _gradient_sum(layer: Any, mesh: DeviceMesh) -> None:
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)


WRONG: dict[str, Callable[[Any, DeviceMesh, str], nn.Module]] = {
    "off by an eighth": _of_output(lambda given, _: given * 1.125),
    "average for sum": _of_output(lambda given, mesh: given / mesh.size()),
    "added up again": _of_output(lambda given, mesh: given * mesh.size()),
    "zeros of one rank": _of_output(lambda given, mesh: given * (not _is_last(mesh))),
    "tokens of one rank swapped": _of_output(lambda given, mesh: given.flip(1) if _is_last(mesh) else given),
    "features of one rank swapped": _of_output(lambda given, mesh: given.flip(-1) if _is_last(mesh) else given),
    "parts in another order": _of_output(lambda given, mesh: given.roll(given.shape[-1] // mesh.size(), -1)),
    "halves swapped": _of_output(lambda given, _: torch.cat(given.chunk(2, -1)[::-1], -1)),
    "all_reduce dropped": _of_local(_own_share),
    "summed over another group": _of_local(_of_pairs),
    "bias of every rank": _bias_of_every_rank,
    "mask of one rank": _masked,
    "positions of one rank": _rotated,
    "scaled by other features": _scaled,
    "stale buffer": _stale,
    "merged weights divided as one": _plan_changed,
    "not reduced backward": _of_local(_own_share),
    "gradient doubled": _of_gradient(lambda gradient, _: gradient * 2),
    "gradient averaged": _of_gradient(lambda gradient, mesh: gradient / mesh.size()),
    "gradient off by an eighth": _of_gradient(lambda gradient, _: gradient * 1.125),
    "gradient of one rank lost": _of_gradient(lambda gradient, mesh: gradient * (not _is_last(mesh))),
    "style left out": _without_style,
    "router's gradient not reduced": _router_unreduced,
    "weight's gradient reduced twice": _of_weight(lambda gradient, mesh: gradient * mesh.size()),
    "weight's gradient of one rank lost": _of_weight(lambda gradient, mesh: gradient * (not _is_last(mesh))),
    "tied halves apart": _untied,
    "layer not reduced": _of_layer(lambda layer, _: layer.set_requires_gradient_sync(False)),
    "layer summed": _of_layer(_gradient_sum),
}
"""Name -> function that makes a module parallel, and wrong at a place."""

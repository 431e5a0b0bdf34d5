"""Sharding by FullyShardedDataParallel, which divides one flat parameter evenly, and pads it.

Source: torch/distributed/fsdp/fully_sharded_data_parallel.py and the docstrings of ShardingStrategy and FlatParamHandle
(2.13.0).
"""

from __future__ import annotations

import math
import operator
from contextlib import nullcontext
from functools import cache, partial
from io import BytesIO
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.distributed._shard.api import load_with_process_group
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from equivtest.programs.examples.gated import RepeatedBlock, spoil
from equivtest.programs.examples.plans import average
from equivtest.programs.examples.token_mean import MAX_NORM, TokenMean

SETTINGS: dict[str, dict[str, Any]] = {
    "early": {"forward_prefetch": True, "limit_all_gathers": False},
    "late": {
        "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
        "mixed_precision": MixedPrecision(reduce_dtype=torch.float64),
    },
    "cast": {"backward_prefetch": None, "mixed_precision": MixedPrecision(param_dtype=torch.float64)},
}
"""Arguments that move the gathers. Two of them also reduce or compute in float64."""
HYBRID = {"FULL_SHARD": ShardingStrategy.HYBRID_SHARD, "SHARD_GRAD_OP": ShardingStrategy._HYBRID_SHARD_ZERO2}
IGNORED = {"ignored layer": "up", "ignored weight": "down.weight", "ignored head": "head"}
STATES = {
    "full state": StateDictType.FULL_STATE_DICT,
    "sharded state": StateDictType.SHARDED_STATE_DICT,
    "local state": StateDictType.LOCAL_STATE_DICT,
}
"""Forms of the state, which the ranks save and load again.

With 'NO_SHARD' torch has the full state alone. It loads no local state into parameters with names, and has none in a
group of some ranks of the world (finding 159).
"""
SCALE = 16.0
ON_ITS_DEVICE = FullOptimStateDictConfig(offload_to_cpu=False)
"""Keeps the full state of an optimizer right on the CPU (finding 158)."""


def partly_frozen_block() -> nn.Module:
    """Makes a block in which two layers run twice, and the gate is frozen."""
    block = RepeatedBlock(2, 5)
    block.gate.weight.requires_grad = False
    return block


def flat_sharded(block: nn.Module, mesh: DeviceMesh, *, strategy: str, by_name: bool, setting: str = "") -> nn.Module:
    """Flattens each layer and the rest of the block, or the whole block, and divides the flat parameters.

    Layers that share a weight belong to the rest of the block.

    Args:
        strategy: Name of a ShardingStrategy. 'NO_SHARD' keeps all parameters on each rank, and averages gradients.
        by_name: Whether the parameters keep their names, and the module gets the mesh. Otherwise each flat parameter is
            one parameter, and the module gets a process group.
        setting: A name in `SETTINGS`, `IGNORED` or `STATES`, or 'in one', 'hybrid' or 'rewritten'. A hook averages the
            gradients that are ignored. If 'in one', the block has one flat parameter, and a second one for frozen
            layers if parameters have no names. If 'hybrid', four ranks shard in pairs. If 'rewritten', the whole
            parameters are read, spoiled and written again.
    """
    how: dict[str, Any] = {
        "auto_wrap_policy": ModuleWrapPolicy({nn.LayerNorm} if has_shared(block) else {nn.Linear, nn.Embedding}),
        "sharding_strategy": ShardingStrategy[strategy],
    }
    how |= {"device_mesh": mesh} if by_name else {"process_group": mesh.get_group()}
    if setting == "in one":
        how["auto_wrap_policy"] = None if by_name else CustomPolicy(is_frozen)
    if setting == "hybrid" and strategy in HYBRID:
        how |= {"sharding_strategy": HYBRID[strategy], "process_group": hybrid_groups(mesh), "device_mesh": None}
    if setting == "cast":
        dtype = next(block.parameters()).dtype
        block.register_forward_hook(lambda block, x, output: output.to(dtype))
    sharded = FullyShardedDataParallel(
        block,
        device_id=torch.device(mesh.device_type),
        use_orig_params=by_name,
        ignored_states=ignored(block, mesh, IGNORED[setting]) if setting in IGNORED else None,
        **how | SETTINGS.get(setting, {}),
    )
    if setting == "rewritten":
        rewrite(sharded)
    if setting == "hook":
        hook_reductions(sharded, mesh, is_sharded=strategy != "NO_SHARD")
    is_world = mesh.size() == distributed.get_world_size()
    sharded.reloads = setting if setting in STATES and is_world else ""  # type: ignore[assignment]
    sharded.by_name = by_name  # type: ignore[assignment]
    if setting in STATES:
        has_form = strategy != "NO_SHARD" and (setting != "local state" or (is_world and not by_name))
        configs = () if has_form and setting != "full state" else (FullStateDictConfig(), ON_ITS_DEVICE)
        FullyShardedDataParallel.set_state_dict_type(sharded, STATES[setting if has_form else "full state"], *configs)
        reload(sharded)
    return sharded


def has_shared(block: nn.Module) -> bool:
    return len(list(block.named_parameters(remove_duplicate=False))) > len(list(block.parameters()))


def is_frozen(layer: nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in layer.parameters())


@cache
def hybrid_groups(mesh: DeviceMesh) -> tuple[distributed.ProcessGroup, ...]:
    """Returns the groups in which this rank shards and replicates. Two or three ranks shard together.
    Each process makes them once.

    A rank that shards alone would reduce no gradients (finding 157).
    """
    ranks, own = mesh.mesh.tolist(), mesh.get_local_rank()
    size = 2 if len(ranks) == 4 else len(ranks)
    first = own - own % size
    groups = (ranks[first : first + size], ranks[own % size :: size])
    return tuple(distributed.new_group(each, use_local_synchronization=True) for each in groups)


def ignored(block: nn.Module, mesh: DeviceMesh, name: str) -> list[Any]:
    """Returns a layer or a parameter in a list. A hook averages its gradients."""
    part: Any = operator.attrgetter(name)(block)
    for parameter in part.parameters() if isinstance(part, nn.Module) else [part]:
        parameter.register_post_accumulate_grad_hook(partial(average, mesh))
    return [part]


def hook_reductions(sharded: FullyShardedDataParallel, mesh: DeviceMesh, *, is_sharded: bool) -> None:
    """Makes a hook of torch reduce the gradients."""
    hook: Any = default_hooks.reduce_scatter_hook if is_sharded else default_hooks.allreduce_hook
    sharded.register_comm_hook(default_hooks.DefaultState(cast("Any", mesh.get_group())), hook)


@torch.no_grad()
def rewrite(sharded: FullyShardedDataParallel) -> None:
    """Copies the whole parameters of the first rank, spoils the shards, and writes the copies into them.

    While the parameters are whole, they are spoiled too, which a shard must not see. A parameter that is not sharded
    would see it.
    """
    summon, group = FullyShardedDataParallel.summon_full_params, sharded.process_group
    is_first = distributed.get_rank(group) == 0
    if sharded.sharding_strategy != ShardingStrategy.NO_SHARD:
        with summon(sharded, writeback=False):
            spoil(sharded.parameters())
    with summon(sharded, writeback=False, rank0_only=True):
        copies = [{name: each.clone() for name, each in sharded.named_parameters()} if is_first else None]
    distributed.broadcast_object_list(copies, group=group, group_src=0)
    (whole,) = cast("Any", copies)
    spoil(sharded.parameters())
    with summon(sharded):
        for name, parameter in sharded.named_parameters():
            parameter.copy_(whole[name])


@torch.no_grad()
def reload(sharded: FullyShardedDataParallel) -> None:
    """Saves the state of the module, spoils the shards, and loads the state."""
    state = through_file(sharded.state_dict(), sharded)
    spoil(sharded.parameters())
    sharded.load_state_dict(state)


def through_file(state: Any, sharded: FullyShardedDataParallel) -> Any:
    """Writes the state into a file of this rank, and reads it."""
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    with load_with_process_group(sharded.process_group):
        return torch.load(file, weights_only=False)


def scaler_after_infinity(device_type: str, group: Any) -> ShardedGradScaler:
    """Returns a scaler with the scale SCALE, which grows after two updates without an infinity.

    It has updated twice, and the last rank had an infinite gradient in the second update.
    """
    scaler = ShardedGradScaler(device_type, init_scale=2 * SCALE, growth_interval=2, process_group=group)
    is_last = distributed.get_rank(group) == distributed.get_world_size(group) - 1
    parameter = nn.Parameter(torch.zeros((), device=device_type))
    optimizer = torch.optim.SGD([parameter])
    for gradient in (1.0, math.inf if is_last else 1.0):
        scaler.scale(parameter)
        parameter.grad = torch.full_like(parameter, gradient)
        scaler.step(optimizer)
        scaler.update()
    return scaler


class FlatTokenMean(TokenMean):
    """Runs the first micro-batch in `no_sync`, and clips by the module's own method.

    Each later micro-batch adds reduced gradients to the earlier ones.

    If the module `reloads`, later steps first load the state of the optimizer again, by the names of the whole
    parameters. If the parameters have these names, the parameters are loaded too. torch saves no such state in a group
    without rank 0 of the world (pytorch 155680).

    A ShardedGradScaler scales the losses. The reported loss is in proportion to the scale at the end of the step.
    """

    norm_type = 2.0

    def begin(self) -> None:
        if self.optimizer.state and self.module.reloads:
            self.reload()
        super().begin()
        self.scaler = scaler_after_infinity(self.mesh.device_type, self.module.process_group)

    def reload(self) -> None:
        if self.module.by_name:
            self.reload_all()
            return
        saved = through_file(FullyShardedDataParallel.optim_state_dict(self.module, self.optimizer), self.module)
        for state in self.optimizer.state.values():
            spoil(state.values())
        loaded = FullyShardedDataParallel.optim_state_dict_to_load(self.module, self.optimizer, saved)
        self.optimizer.load_state_dict(loaded)

    def reload_all(self) -> None:
        """Loads the parameters too, by the functions for every kind of parallelism."""
        options = StateDictOptions(full_state_dict=self.module.reloads == "full state")
        saved = through_file(get_state_dict(self.module, self.optimizer, options=options), self.module)
        spoil(self.module.parameters())
        spoil(each for state in self.optimizer.state.values() for each in state.values())
        parameters, state = saved
        set_state_dict(
            self.module, self.optimizer, model_state_dict=parameters, optim_state_dict=state, options=options
        )

    def accumulate(self, number: int) -> None:
        reduces = number > 0 or self.reduces(number)
        with nullcontext() if reduces else self.module.no_sync():
            self.run_micro_batch(number)

    def reduce(self) -> None:
        """Copies the whole gradients, spoils the shards, and writes the copies into them, if parameters have names."""
        if not self.module.by_name:
            return
        with FullyShardedDataParallel.summon_full_params(self.module, with_grads=True):
            whole = {name: parameter.grad.clone() for name, parameter in self.module.named_parameters()}
        spoil(parameter.grad for parameter in self.module.parameters() if parameter.grad is not None)
        with FullyShardedDataParallel.summon_full_params(self.module, with_grads=True):
            for name, parameter in self.module.named_parameters():
                parameter.grad.copy_(whole[name])

    def backward(self, number: int, loss: torch.Tensor) -> None:
        super().backward(number, self.scaler.scale(loss))

    def clipped(self) -> torch.Tensor:
        self.scaler.unscale_(self.optimizer)
        norm: Any = self.module.clip_grad_norm_(MAX_NORM, self.norm_type)
        return torch.as_tensor(norm)

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def reported(self) -> torch.Tensor:
        return super().reported() * (self.scaler.get_scale() / SCALE)


class FlatTokenMeanByLargest(FlatTokenMean):
    norm_type = math.inf


flat_token_mean = FlatTokenMean.step
flat_token_mean_by_largest = FlatTokenMeanByLargest.step

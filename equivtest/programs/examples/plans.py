"""Ways to make the examples parallel.

Source of the plans for two linear layers: torch/distributed/tensor/parallel/style.py (2.13.0), ColwiseParallel and
RowwiseParallel.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.input_reshard import input_reshard
from torch.nn.parallel import DistributedDataParallel

from equivtest.programs.examples.gated import spoil

POWER_SGD: dict[str, Any] = {
    "matrix_approximation_rank": 1,
    "start_powerSGD_iter": 2,
    "min_compression_rate": 1,
    "warm_start": False,
    "orthogonalization_epsilon": 1e-8,
}
"""Arguments of PowerSGD that compress the weights of a block with two features."""
SENT_TWICE = ((1, True), (0, True), (1, True), (0, True))
POWERS: dict[str, tuple[dict[str, Any], tuple[tuple[int, bool], ...]]] = {
    "wrapped": ({"batch_tensors_with_same_shape": True}, SENT_TWICE),
    "forgets": ({"use_error_feedback": False, "warm_start": True}, ((1, True), (1, True), (1, False), (0, True))),
    "barely": (
        {"use_error_feedback": False, "min_compression_rate": 2},
        ((0, True), (0, True), (1, True), (1, True)),
    ),
    "of rank 2": (
        {"use_error_feedback": False, "matrix_approximation_rank": 2, "min_compression_rate": 0.5},
        ((0, True), (0, True), (1, True), (1, True)),
    ),
}
"""Name -> arguments of PowerSGD beside `POWER_SGD`, and calls of the hook: see `until_all_is_sent`.

'forgets' is exact until the hook compresses, and drops what the compression loses. 'barely' compresses nothing. 'of
rank 2' loses nothing, because the weights have two rows or columns. The hook `batched_powerSGD_hook` cannot compress
(finding 160).
"""


def tensor_parallel(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divides the hidden features of a gated block among the ranks, with one all_reduce in the forward.

    The hidden features stay DTensors between the layers. For plain tensors torch assumes that all ranks have shards of
    equal size.
    """
    divided = ColwiseParallel(use_local_output=False)
    parallelize_module(block, mesh, {"gate": divided, "up": divided})
    with mesh:
        return parallelize_module(block, parallelize_plan={"down": RowwiseParallel()})


def tensor_parallel_along_each_axis(blocks: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Applies `tensor_parallel` to the first of two blocks along the first axis, and to the second along the second."""
    for block, axis in zip(blocks.children(), mesh.mesh_dim_names or (), strict=True):
        tensor_parallel(block, mesh[axis])
    return blocks


def sequence_parallel(block: nn.Module, mesh: DeviceMesh, dim: int = 0) -> nn.Module:
    """Divides the tokens outside of the layers, and the hidden features inside the layers.

    An all_gather runs before the layers, and a reduce_scatter after the layers.

    The block takes all tokens and returns all tokens. Each rank adds the result of `GatedBlock.change` to its own
    tokens of x. A `scale` runs on each rank's tokens.

    Args:
        dim: The dim of x that the tokens are divided along.
    """
    tokens = Shard(dim)
    prepared = PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=tokens,
        use_local_input=False,
        output_layouts=tokens,
        desired_output_layouts=Replicate(),
    )
    divided = ColwiseParallel(input_layouts=tokens, use_local_output=False)
    summed = RowwiseParallel(output_layouts=tokens, use_local_output=False)
    plan: dict[str, ParallelStyle] = {"gate": divided, "up": divided, "down": summed}
    if hasattr(block, "scale"):
        plan["scale"] = SequenceParallel(sequence_dim=dim)
    return parallelize_module(parallelize_module(block, mesh, plan), mesh, prepared)


def sharded_sequence_parallel(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divides tokens and hidden features along the axis 'tp' of the mesh, and shards the result by FSDP2 along 'dp'."""
    return fully_sharded(sequence_parallel(block, mesh["tp"], dim=1), mesh["dp"])


def prepared_pair(
    pair: nn.Module,
    mesh: DeviceMesh,
    *,
    shards_x: bool,
    shards_memory: bool,
    in_one: bool = False,
    gathers_late: bool = False,
) -> nn.Module:
    """Divides the rows of a scale, and computes the rest on plain tensors, of each rank's own rows or of all rows.

    The scale gets a replicated DTensor, and its result is divided. The numbers among the inputs and outputs have no
    layout. The number of ranks must divide the number of rows, because PrepareModuleOutput takes shards for equal in
    size. If each rank computes all rows, it keeps only its own rows for the backward.

    Source: SequenceParallel, PrepareModuleInput and PrepareModuleOutput in torch/distributed/tensor/parallel/style.py;
    input_reshard.py beside it (2.13.0).

    Args:
        shards_x: Whether each rank computes its own rows of the first output. Otherwise it computes all rows.
        shards_memory: The same for the second output.
        in_one: Whether one style prepares inputs and outputs, and not two.
        gathers_late: Whether the second output leaves the style of `each` as rows, and the style of the pair gathers
            them.
    """
    whole, rows = Replicate(), Shard(0)
    outside = (whole, rows if gathers_late else whole)
    x, memory = rows if shards_x else whole, rows if shards_memory else whole
    inputs: dict[str, Any] = {
        "input_layouts": (None, rows),
        "desired_input_layouts": (None, x),
        "input_kwarg_layouts": {"memory": whole},
        "desired_input_kwarg_layouts": {"memory": memory},
    }
    outputs: dict[str, Any] = {
        "output_layouts": (x, None, memory),
        "desired_output_layouts": (outside[0], None, outside[1]),
    }
    plan: dict[str, ParallelStyle] = {
        "": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
        "scale": SequenceParallel(sequence_dim=0),
    }
    if in_one:
        plan["each"] = PrepareModuleInputOutput(**inputs, use_local_input=True, **outputs)
    else:
        plan["each"] = PrepareModuleInput(**inputs, use_local_output=True)
        parallelize_module(pair, mesh, {"each": PrepareModuleOutput(**outputs)})
    if gathers_late:
        parallelize_module(
            pair, mesh, PrepareModuleOutput(output_layouts=outside, desired_output_layouts=(whole, whole))
        )
    parallelize_module(pair, mesh, plan)
    if not (shards_x or shards_memory):  # the tensors of `each` are the same on all ranks
        for part in ("scale", "each"):
            input_reshard(pair.get_submodule(part), mesh, input_reshard_dim=0)
    return pair


def sharded_sequence_parallel_from_state(block: nn.Module, mesh: DeviceMesh, *, whole: bool) -> nn.Module:
    """Evaluates a copy of the block in bfloat16, and loads the state of this copy into the block.

    The state has the dtype of the block, because mixed precision only changes the parameters that FSDP2 gathers. Ranks
    must divide the hidden features evenly: torch does not load a whole state into shards of different sizes.

    Args:
        whole: Whether torch gathers the whole state. Otherwise the ranks write their shards into files, and each rank
            reads the whole state.

    Source: torch/distributed/checkpoint/state_dict.py, get_model_state_dict and set_model_state_dict; the docstring of
    _StridedShard._shard_tensor in torch/distributed/tensor/placement_types.py (2.13.0).
    """
    evaluated: Any = copy.deepcopy(block)
    x = evaluated.gate.weight.new_ones(1, 2, evaluated.gate.in_features)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(sequence_parallel(evaluated, mesh["tp"], dim=1), mesh=mesh["dp"], mp_policy=policy)
    with torch.no_grad():
        evaluated(x)
    options = StateDictOptions(full_state_dict=whole)
    saved = get_model_state_dict(evaluated, options=options)
    if not whole:
        saved = read_whole(saved, mesh)
    return loaded(sharded_sequence_parallel(block, mesh), saved, StateDictOptions(full_state_dict=True))


def read_whole(state: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Writes the shards of a state into files, and reads whole tensors."""
    whole = {
        name: torch.full(shard.shape, torch.nan, dtype=shard.dtype, device=shard.device)
        for name, shard in state.items()
    }
    group = cast("Any", mesh)._flatten("all").get_group()
    with shared_folder(group) as folder:
        save(state, checkpoint_id=folder, process_group=group)
        load(whole, checkpoint_id=folder, process_group=group)
    return whole


@contextmanager
def shared_folder(group: distributed.ProcessGroup) -> Iterator[str]:
    """Makes a temporary folder, which the group's first rank removes when all ranks are done."""
    names = [tempfile.mkdtemp(prefix="resumed-") if distributed.get_rank(group) == 0 else ""]
    distributed.broadcast_object_list(names, group=group, group_src=0)
    try:
        yield names[0]
        distributed.barrier(group)
    finally:
        if distributed.get_rank(group) == 0:
            shutil.rmtree(names[0], ignore_errors=True)


def data_parallel(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Runs the whole block on every rank, on different rows. DistributedDataParallel averages the gradients.

    All ranks except the first have wrong parameters before the block is wrapped, and assign wrong buffers afterwards.
    DistributedDataParallel broadcasts the parameters of the first rank when it is made, and its buffers before each
    forward.
    """
    if mesh.get_local_rank():
        for parameter in block.parameters():
            parameter.data.fill_(torch.nan)
    replicated = DistributedDataParallel(block, process_group=mesh.get_group())
    if mesh.get_local_rank():
        wrong = {name: torch.full_like(buffer, torch.nan) for name, buffer in block.named_buffers()}
        block.load_state_dict(wrong, strict=False, assign=True)
    return replicated


def data_parallel_by_hook(
    block: nn.Module,
    mesh: DeviceMesh,
    *,
    hook: str = "",
    composable: bool = False,
    ignores: bool = False,
    **settings: Any,
) -> nn.Module:
    """Runs the whole block on every rank, on different rows. A communication hook averages the gradients.

    For each dtype the block has a different hook of torch, and each hook gives the average of all ranks.
    `allreduce_hook` computes this average and nothing else. The hooks that compress lose no bits, because they get
    gradients of the dtype to which they compress. In bfloat16 these gradients are larger than any number of float16.
    In float64 PowerSGD compresses, until its error feedback has sent everything. Each of these hooks gets negative
    gradients, and its result is negated, so a hook that is not called leaves wrong gradients. No setting of
    DistributedDataParallel changes a gradient.

    Args:
        hook: If 'local_sgd', the hook of every dtype averages over a subgroup with all ranks, and its other group has
            this rank alone. If 'before_local_sgd', it averages over the group, and the subgroup has this rank alone.
            If 'local_steps', it first averages over the group, and then leaves each rank its own gradients. If
            'builtin', it is the all_reduce in C++. If 'wrapped', the hooks of 16 bits wrap the hook of float32, and
            PowerSGD compresses matrices of one shape together. Other names in `POWERS` change PowerSGD alone.
        composable: Whether the function `replicate` changes the block itself, and DistributedDataParallel does not wrap
            it.
        ignores: Only if `composable` is True. Whether the layer `up` is left out. A hook averages its gradient.

    Source: torch/distributed/algorithms/ddp_comm_hooks (2.13.0): default_hooks.py, powerSGD_hook.py and
    post_localSGD_hook.py; torch/distributed/_composable/replicate.py.
    """
    group, local_sgd = cast("Any", mesh.get_group()), cast("Any", post_localSGD_hook)
    bf16: Any = default_hooks.bf16_compress_hook
    fp16: Any = default_hooks.fp16_compress_hook
    if hook == "wrapped":
        bf16 = default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
        fp16 = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    arguments, calls = POWERS.get(hook, ({}, SENT_TWICE))
    power_sgd = PowerSGDState(cast("Any", Waiting(group)), **POWER_SGD | arguments)
    hooks: dict[torch.dtype, tuple[Any, Any]] = {
        torch.float32: (group, default_hooks.allreduce_hook),
        torch.float16: (group, fp16),
        torch.bfloat16: (group, scaled(bf16, 2.0**40)),
        torch.float64: (power_sgd, until_all_is_sent(powerSGD_hook, calls)),
    }
    dtype, own = next(block.parameters()).dtype, cast("Any", block.up)
    if ignores:
        own.weight.register_post_accumulate_grad_hook(partial(average, mesh))
    if composable:
        ignored = [own] if ignores else None
        replicated: Any = replicate(block, ignored_modules=ignored, process_group=group, **settings)
    else:
        replicated = DistributedDataParallel(block, process_group=group, **settings)
    if hook == "builtin":
        replicated._register_builtin_comm_hook(cast("Any", distributed).BuiltinCommHookType.ALLREDUCE)
    elif hook == "local_steps":
        state = local_sgd.PostLocalSGDState(group, group, start_localSGD_iter=1, post_local_gradient_allreduce=False)
        replicated.register_comm_hook(state, then_own(local_sgd.post_localSGD_hook, group))
    elif hook.endswith("local_sgd"):
        alone = distributed.new_group([distributed.get_rank()], use_local_synchronization=True)
        begins = hook == "local_sgd"
        groups = (alone, group) if begins else (group, alone)
        state = local_sgd.PostLocalSGDState(*groups, start_localSGD_iter=0 if begins else 100)
        replicated.register_comm_hook(state, local_sgd.post_localSGD_hook)
    else:
        state, call = hooks[dtype]
        replicated.register_comm_hook(state, negated(call))
        for parameter in block.parameters():
            if parameter.requires_grad and not (ignores and parameter is own.weight):
                parameter.register_hook(torch.neg)  # type: ignore[no-untyped-call]
    return cast("nn.Module", replicated)


def data_parallel_of_outputs(
    block: nn.Module,
    mesh: DeviceMesh,
    *,
    static_graph: bool,
    batched_grad_copy: bool,
    skip_all_reduce_unused_params: bool,
) -> nn.Module:
    """Looks for the parameters that take part in no output. DistributedDataParallel has the same arguments."""
    return DistributedDataParallel(
        block,
        process_group=mesh.get_group(),
        find_unused_parameters=True,
        static_graph=static_graph,
        batched_grad_copy=batched_grad_copy,
        skip_all_reduce_unused_params=skip_all_reduce_unused_params,
    )


def average(mesh: DeviceMesh, parameter: torch.Tensor) -> None:
    """Averages the gradient of one parameter over the ranks, after the gradient has been added up on this rank."""
    gradient = cast("torch.Tensor", parameter.grad)
    distributed.all_reduce(gradient, group=mesh.get_group())
    gradient /= mesh.size()


def scaled(hook: Any, scale: float) -> Any:
    """Returns a hook that runs `hook` on gradients multiplied by a power of two, and divides the result by it."""

    def scaled_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
        bucket.buffer().mul_(scale)
        return hook(state, bucket).then(lambda future: future.value().div_(scale))

    return scaled_hook


def then_own(hook: Any, group: distributed.ProcessGroup) -> Any:
    """Returns a hook that calls `hook` twice. The first call averages, and the second returns each rank's gradients.

    Every second rank doubles its gradients before the second call and halves them after it, so a mean would be wrong.
    """
    factor = 1 + distributed.get_rank(group) % 2

    def hook_then_own(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
        own = bucket.buffer().clone()
        averaged = hook(state, bucket).wait().clone()
        bucket.buffer().copy_(own * factor)
        later = default_hooks._allreduce_fut(group, hook(state, bucket).wait() / factor)
        return later.then(lambda future: (future.value() + averaged) / 2)

    return hook_then_own


class Waiting:
    """A process group that waits for each all_reduce.

    PowerSGD waits for an all_reduce in a callback of another all_reduce. If a group has one thread, the thread cannot
    run the second all_reduce before the callback returns.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.size = group, group.size

    def allreduce(self, *given: Any) -> Any:
        work = self.group.allreduce(*given)
        work.wait()
        return work


def negated(hook: Any) -> Any:
    def negated_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
        return hook(state, bucket).then(lambda future: future.value().neg_())

    return negated_hook


def until_all_is_sent(hook: Any, calls: Iterable[tuple[int, bool]]) -> Any:
    """Returns a hook that averages integers by PowerSGD of rank 1. It makes the given calls.

    PowerSGD replaces a matrix M by P P^T M, for a unit vector P in the range of M. Error feedback adds the rest
    M - P P^T M, whose rank is lower by 1, to the next gradient. The next gradient is zero here, so two calls together
    send M of rank 2, except for roundings. The vector P is random. The roundings stay far below 1 / 2 unless P is
    nearly orthogonal to a singular vector, and the hook removes them from the integers. The calls before PowerSGD
    begins average M and zeros.

    Args:
        calls: For each call of `hook`, the factor of the gradient that it averages, and whether its result counts.
            Together the results are twice the average.

    Source: Vogels et al., PowerSGD (2019), algorithms 1 and 2; the documentation of `powerSGD_hook` (2.13.0).
    """

    def hook_until_all_is_sent(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
        group, sent = state.process_group, bucket.buffer().clone()
        num_ranks, total = group.size(), torch.zeros_like(sent)
        for factor, counts in calls:
            bucket.buffer()[:] = factor * sent
            averaged = hook(state, bucket).wait()
            state = copy.deepcopy(state)  # as a saved state is loaded, without its process group
            state.process_group = group
            total += averaged if counts else 0
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(total.mul_(num_ranks / 2).round_().div_(num_ranks))
        return future

    return hook_until_all_is_sent


def fully_sharded(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shards the block by FSDP2, which divides parameters on dim 0 and gathers them for the forward and backward."""
    sharded: nn.Module = fully_shard(block, mesh=mesh)  # type: ignore[assignment]  # of both classes
    return sharded


def fully_sharded_by_layers(
    block: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool | int, sets_root: bool = False
) -> nn.Module:
    """Applies FSDP2 to each layer separately, and then to the whole block.

    Args:
        reshard_after_forward: If it is 2, each two ranks together keep the parameters after the forward. torch takes 2
            only if it divides the number of ranks, so it is True for an odd number.
        sets_root: Whether `set_root_alone` changes the block.
    """
    if reshard_after_forward == 2 and mesh.size() % 2:
        reshard_after_forward = True
    for layer in block.children():
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
    sharded = fully_sharded(block, mesh)
    if sets_root:
        set_root_alone(sharded)
    return sharded


def set_root_alone(root: Any) -> None:
    """Makes the root synchronize no gradients, and keep the parameters that it gathers.

    Each parameter belongs to a layer that is sharded alone, so no result may change.
    """
    root.set_requires_gradient_sync(False, recurse=False)
    root.set_requires_all_reduce(False, recurse=False)
    root.set_reshard_after_backward(False, recurse=False)
    root.set_reshard_after_forward(False, recurse=False)
    root.set_separate_reduce_scatter_group(recurse=False)


def fully_sharded_from_rank_0(block: nn.Module, mesh: DeviceMesh, *, meta: bool = False) -> nn.Module:
    """Applies FSDP2, and loads into the shards the whole state that rank 0 alone has.

    Args:
        meta: Whether the parameters have no memory before. torch then assigns new ones.

    Source: set_model_state_dict and StateDictOptions in torch/distributed/checkpoint/state_dict.py (2.13.0).
    """
    whole = {name: tensor.clone() for name, tensor in block.state_dict().items()} if mesh.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    return loaded(fully_sharded(block.to("meta") if meta else block, mesh), whole, options)


def loaded(sharded: nn.Module, state: dict[str, Any], options: StateDictOptions) -> nn.Module:
    """Spoils all parameters and buffers of the module, and loads the state into them."""
    spoil((*sharded.parameters(), *sharded.buffers()))
    set_model_state_dict(sharded, state, options=options)
    return sharded


def divided_by_two(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Applies FSDP2 with a divide factor of 2. A hook turns the result into the average of all ranks.

    On one rank, torch halves the gradients twice. See finding 75.
    """
    sharded: Any = fully_shard(block, mesh=mesh)
    sharded.set_force_sum_reduction_for_comms(True)
    sharded.set_gradient_divide_factor(2.0)
    sharded.set_all_reduce_hook(lambda reduced: reduced.div_(mesh.size() / 2))
    return cast("nn.Module", sharded)

"""Runs your parallel module on a rank, in one forward and backward or in steps of training."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from numbers import Real
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed._composable.contract import _get_registry
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from equivtest.base.importing import load_named, require_arguments
from equivtest.cases.subject import Answers, Given, copied, under_contract
from equivtest.errors import Misuse, NotSupported
from equivtest.layout import UNTOLD
from equivtest.programs.boundaries import Capture
from equivtest.programs.case import WHOLE, ModuleCase
from equivtest.programs.names import by_own_name
from equivtest.programs.outputs import OUTPUT, named_outputs
from equivtest.programs.reference import call, call_builder, in_dtype, with_parameters
from equivtest.programs.run.backward import run_backward
from equivtest.programs.run.forwards import CapturedForwards
from equivtest.programs.run.parameters import held_parameters, places_in, require_whole
from equivtest.programs.run.steps import clipped, num_micro_batches, own_step, run_steps
from equivtest.programs.run.world import world_of
from equivtest.programs.state import require_own_norms
from equivtest.programs.steps import TOTAL_NORM
from equivtest.tensors import Placed

Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module]


def module(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    with world_of(case, mesh):
        return run_module(case, mesh, given, named_in(case))


def contract_of(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Makes the parallel module without running it. Returns 1 if the module reduces its gradients, otherwise 0.

    The returned number has the name of the first tensor that the case declares as a result.
    """
    with world_of(case, mesh):
        reduces = is_data_parallel(make_parallel(case, mesh, given, named_in(case)), mesh.size())
    return {case.answer_names()[0]: Placed(torch.tensor(float(reduces)), case.whole_layout)}


def named_in(case: ModuleCase) -> Parallelize:
    return cast("Parallelize", load_named(case.parallelize, "parallelize"))


def is_data_parallel(parallel: nn.Module, num_ranks: int) -> bool:
    """True if torch reduces gradients of the module, or of a submodule, over all ranks.

    Then each rank has different rows.

    The result is False if torch reduces over fewer ranks. Then the mesh has another axis, for example for tensor
    parallelism, and the ranks along that axis have the same rows.

    Source: torch.nn.parallel, torch.distributed.fsdp and torch.distributed._composable (2.13.0). The last of these
    packages has a registry of the wrappers that were applied to a module.
    """
    return any(num_ranks in _sizes_of_data_parallelism(part, num_ranks) for part in parallel.modules())


def _sizes_of_data_parallelism(part: nn.Module, num_ranks: int) -> list[int]:
    """Lists the numbers of ranks over which torch reduces a part's gradients: all ranks if torch does not show it."""
    if isinstance(part, DistributedDataParallel | FullyShardedDataParallel):
        replicas: Any = getattr(part, "_inter_node_pg", None)  # of a hybrid sharding strategy
        num_replicas = 1 if replicas is None else replicas.size()
        return [num_ranks if part.process_group is None else part.process_group.size() * num_replicas]
    if isinstance(part, FSDPModule):
        state: Any = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        groups = [getattr(state, "_fsdp_param_group", None)] if groups is None else groups
        return [group.mesh_info.mesh.size() for group in groups if group is not None]
    return [num_ranks] if "replicate" in (_get_registry(part) or ()) else []


def run_module(case: ModuleCase, mesh: DeviceMesh, given: Given, parallelize: Parallelize) -> Answers:
    whole = _make_whole(case, mesh, given)
    handed = dict(whole.named_parameters())
    parallel = _parallelized(case, mesh, whole, parallelize)
    require_own_norms(case, parallel)
    places = places_in(case, mesh, parallel, handed, lambda values: make_parallel(case, mesh, values, parallelize))
    held = functools.partial(held_parameters, case, mesh, parallel, places)
    if not case.training.is_stepped:
        return _run_once(case, mesh, parallel, held, given)
    return run_steps(case, parallel, given, functools.partial(_run_once, case, mesh, parallel, held), held)


def _run_once(
    case: ModuleCase,
    mesh: DeviceMesh,
    parallel: nn.Module,
    held: Callable[[], Answers],
    given: Given,
    optimizer: torch.optim.Optimizer | None = None,
) -> Answers:
    capture = _capture_of(case, parallel) if case.judge.by_parts else None
    numbers = _numbers_of_collectives()
    inputs = {
        name: given[name].detach().requires_grad_() if name in case.real_names() else given[name]
        for name in case.kinds()
    }
    with capture or nullcontext():
        if case.training.step:
            outputs = _outputs(case, own_step(case, mesh, parallel, inputs, optimizer))
        else:
            positional = case.arguments.positional if case.arguments.inputs else tuple(inputs)
            outputs = _outputs(case, call(parallel, positional, inputs))
            run_backward(case, mesh, outputs, given)
            outputs |= {TOTAL_NORM: clipped(case, parallel)} if case.training.max_norm else {}
    parameters = held()
    if _must_communicate(case) and numbers and numbers == _numbers_of_collectives():
        raise Misuse(
            f"{case.parallelize}: no collective ran, forward or backward, on {case.world_size} ranks that all have the "
            "whole batch, so the module is not parallel. The plan may name parts that the module does not have. If "
            "each rank has different rows, pass batch='mean of parts'"
        )
    results: dict[str, torch.Tensor | None] = {**outputs}
    results |= {f"grad.{name}": inputs[name].grad for name in case.real_names()}
    results |= _buffers(case, parallel)
    for name in case.stacked_names():
        own = results[name]
        results[name] = None if own is None else own.unsqueeze(0)
    return under_contract(case, _on_mesh(case, results)) | parameters | (_boundaries(case, capture) if capture else {})


def _on_mesh(case: ModuleCase, found: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {
        name: tensor.to_local()
        if isinstance(tensor, DTensor)
        and tensor.device_mesh.ndim != len(case.mesh_shape)
        and all(placement.is_replicate() for placement in tensor.placements)
        else tensor
        for name, tensor in found.items()
    }


def _capture_of(case: ModuleCase, parallel: nn.Module) -> Capture:
    return CapturedForwards(parallel, num_micro_batches(case)) if case.training.step else Capture(parallel, copied)


def _boundaries(case: ModuleCase, capture: Capture) -> Answers:
    names = set(case.answer_names())
    return {name: _told(case, tensor) for name, tensor in capture.named().items() if name in names}


def _told(case: ModuleCase, tensor: torch.Tensor) -> DTensor | Placed:
    """Returns a tensor of the program in the form in which ranks return tensors to the oracle.

    A DTensor on the whole mesh stays unchanged, if the batch is not divided.

    Any other tensor becomes this rank's local tensor without a layout, which the oracle has to infer.
    """
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.ndim == len(case.mesh_shape) and not case.is_divided:
            return tensor
        tensor = tensor.to_local()
    return Placed(tensor.unsqueeze(0) if case.is_divided else tensor, UNTOLD)


def _outputs(case: ModuleCase, given: object) -> dict[str, torch.Tensor]:
    """Returns name -> output of the parallel module. The names must be the names of the unsharded module's outputs."""
    step, outputs = case.training.step, case.judge.outputs
    reports_norm = bool(step and case.training.max_norm)
    expected = [*case.facts.outputs, *([TOTAL_NORM] if reports_norm else [])]
    who = f"{step}: the step" if step else f"{case.parallelize}: the parallel module"
    if expected == [OUTPUT] and not isinstance(given, (torch.Tensor, Real) if step else torch.Tensor):
        raise Misuse(f"{who} must return one tensor, got {type(given).__name__}")
    chosen = (*outputs, "total_norm") if reports_norm and outputs else outputs
    tensors = named_outputs(given, chosen, step or case.parallelize, takes_numbers=bool(step))
    if sorted(tensors) != sorted(expected):
        raise Misuse(f"{who} must return {', '.join(expected)}, as the unsharded module does, got {', '.join(tensors)}")
    if not step:
        return tensors
    shapes = case.shapes()
    return {name: _of_one_element(tensor, shapes[name]) for name, tensor in tensors.items()}


def _of_one_element(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    is_number = tensor.numel() == math.prod(shape) == 1 and not isinstance(tensor, DTensor)
    return tensor.reshape(shape) if is_number else tensor


def _buffers(case: ModuleCase, parallel: nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns the buffers that the unsharded module's forward changes."""
    buffers = by_own_name(parallel, parallel.named_buffers())
    results: dict[str, torch.Tensor | None] = {}
    for name, fact in case.facts.buffers.items():
        if name not in buffers:
            raise Misuse(
                f"{case.parallelize}: the forward of the unsharded module changes buffer {name}, but the parallel "
                f"module has only the buffers {', '.join(buffers) or 'none'}: keep the names of the unsharded module"
            )
        require_whole(case, f"buffer {name}", buffers[name], fact.shape)
        results[f"buffer.{name}"] = buffers[name]
    return results


def make_parallel(case: ModuleCase, mesh: DeviceMesh, given: Given, parallelize: Parallelize) -> nn.Module:
    return _parallelized(case, mesh, _make_whole(case, mesh, given), parallelize)


def _make_whole(case: ModuleCase, mesh: DeviceMesh, given: Given) -> nn.Module:
    whole = in_dtype(call_builder(case.build), case.dtype).to(mesh.device_type)
    values = {name: given[name].detach() for name in case.parameter_names()}
    return with_parameters(whole, {name: value.clone() for name, value in values.items()} if case.trains else values)


def _parallelized(case: ModuleCase, mesh: DeviceMesh, whole: nn.Module, parallelize: Parallelize) -> nn.Module:
    require_arguments(parallelize, f"parallelize {case.parallelize!r}", ("module", "mesh"))
    parallel = parallelize(whole, mesh)
    if not isinstance(parallel, nn.Module):
        raise Misuse(f"{case.parallelize} must return the parallel module, got {type(parallel).__name__}: return it")
    _require_output_dtype(case, parallel)
    return parallel


def _require_output_dtype(case: ModuleCase, parallel: nn.Module) -> None:
    """Declines the case if mixed precision casts the program's outputs to another dtype than the reference has.

    Source: MixedPrecisionPolicy.output_dtype in torch/distributed/fsdp/_fully_shard/_fsdp_api.py (2.13.0).

    Raises:
        NotSupported: the program casts the outputs to such a dtype.
    """
    if not isinstance(parallel, FSDPModule):
        return
    state: Any = parallel._get_fsdp_state()
    output_dtype = state._mp_policy.output_dtype
    expected = {getattr(torch, fact.dtype or case.dtype) for fact in case.facts.outputs.values()}
    if output_dtype is not None and any(each.is_floating_point and each != output_dtype for each in expected):
        raise NotSupported(
            f"{case.parallelize}: its MixedPrecisionPolicy has output_dtype={output_dtype}, but the unsharded module "
            f"in {case.dtype} returns another dtype: judge it with --dtypes {str(output_dtype).removeprefix('torch.')}"
        )


def _must_communicate(case: ModuleCase) -> bool:
    """True if every rank has the whole batch, so that a module without collectives cannot be parallel.

    A mesh axis of one rank needs no communication.  Ranks with different rows need no such check. If such ranks never
    communicate, their values are wrong.
    """
    return min(case.mesh_shape) > 1 and case.batch == WHOLE and bool(case.parameter_names())


def _numbers_of_collectives() -> list[int]:
    """Counts the collectives on each process group of this process. The list is empty if a backend does not count."""
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    try:
        return [group._get_sequence_number_for_group() for group in groups]
    except (RuntimeError, NotImplementedError):
        return []

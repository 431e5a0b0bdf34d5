"""Every setting of torch's wrappers is tested, or a reason stands here: a new setting in a release turns this red."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator

from torch.distributed.fsdp import _fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.wrappers.branches import NAMES
from tests.wrappers.branches_in_steps import BOTH_WAYS, REPLICATED, SHARDED
from tests.wrappers.fsdp2 import TELLS
from tests.wrappers.steps import TOLD_BOTH_WAYS, TOLD_SHARDED

IN_STEPS = {
    "FSDPModule.set_reshard_after_backward(reshard_after_backward)",
    "FSDPModule.set_reshard_after_backward(recurse)",
    "fully_shard(dp_mesh_dims)",
    "DataParallelMeshDims(shard)",
    "DataParallelMeshDims(replicate)",
}
"""Settings of FSDP2 that `told_steps` uses, on one axis or on two."""

NOT_TOLD = {
    "FSDPModule.set_post_optim_event(event)": "an event of an accelerator's streams",
    "FSDPModule.set_all_reduce_hook(stream)": "a stream of an accelerator",
    "FSDPModule.set_symm_mem_for_comm(backend)": "for NCCL alone, as it documents",
}
DDP_NOT_TOLD = {
    "module": "every branch",
    "process_group": "every branch",
    "device_mesh": "another way to say process_group",
    "device_ids": "of accelerators",
    "output_device": "of accelerators",
    "dim": "of scattering to several devices of one process",
    "check_reduction": "documented as deprecated",
    "delay_all_reduce_named_params": "a part of delayed reductions, which have no documentation",
    "param_to_hook_all_reduce": "a part of delayed reductions, which have no documentation",
    "mixed_precision": "documented as experimental, of a private class",
}


def documented() -> Iterator[str]:
    """Yields 'name(argument)' for everything public in FSDP2; 'name' if it takes no argument."""
    for name in _fully_shard.__all__:
        value = getattr(_fully_shard, name)
        if dataclasses.is_dataclass(value):
            yield from (f"{name}({field.name})" for field in dataclasses.fields(value))
        elif inspect.isclass(value):
            for method, function in inspect.getmembers(value, inspect.isfunction):
                if not method.startswith("_"):
                    yield from arguments_of(f"{name}.{method}", function)
        else:
            yield from arguments_of(name, value)


def arguments_of(name: str, function: object) -> list[str]:
    names = [each for each in inspect.signature(function).parameters if each != "self"]  # type: ignore[arg-type]
    return [f"{name}({each})" for each in names] or [name]


def test_fsdp2_is_told_everything_that_it_may_be_told() -> None:
    told = {each for of in TELLS.values() for each in of} | IN_STEPS

    assert set(documented()) == told | set(NOT_TOLD)
    assert not told & set(NOT_TOLD)


def test_distributed_data_parallel_is_given_every_argument() -> None:
    given = {argument for arguments in REPLICATED.values() for argument in arguments}

    assert set(inspect.signature(DistributedDataParallel).parameters) == given | set(DDP_NOT_TOLD)


def test_every_branch_is_told_something() -> None:
    assert tuple(TELLS) == NAMES
    assert (tuple(TOLD_SHARDED), tuple(TOLD_BOTH_WAYS)) == (SHARDED, BOTH_WAYS)

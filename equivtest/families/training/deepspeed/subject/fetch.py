"""Subjects that let DeepSpeed's `zero.Init` partition parameters and fetch them as its hooks do.

DeepSpeed is an optional extra, so a subject imports it only when it runs.

Source: deepspeed/runtime/zero/partition_parameters.py, class Init (0.19.8): `all_gather_coalesced`
is what the coordinator of partitioned parameters calls before a module runs.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from functools import cache
from types import ModuleType

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from equivtest.errors import NotSupported
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.tensors import Placed

FLAG = "stage3_use_all_reduce_for_fetch_params"


def deepspeed_fetch_all_gather(
    case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]
) -> dict[str, Placed]:
    return run_fetch(case, mesh, given, by_all_reduce=False)


def deepspeed_fetch_all_reduce(
    case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]
) -> dict[str, Placed]:
    """DeepSpeed uses all_reduce only if it fetches two or more parameters together."""
    return run_fetch(case, mesh, given, by_all_reduce=True)


def run_fetch(
    case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor], *, by_all_reduce: bool
) -> dict[str, Placed]:
    """Returns the partitions and the fetched parameters, by name.

    Raises:
        NotSupported: zero.Init refuses the dtype. DeepSpeed 0.19.8 accepts float64 only on a CPU without kernels for
            float16, because it does not check the dtype on such a CPU.
    """
    deepspeed = joined_deepspeed(mesh.device_type)
    wholes = [given[name].detach() for name in case.given_names()]
    flagged = zip(wholes, case.requires_grad, strict=True)
    parameters = nn.ParameterList([nn.Parameter(whole, requires_grad=flag) for whole, flag in flagged])
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, FLAG: by_all_reduce}}
    try:
        deepspeed.zero.Init(
            module=parameters, data_parallel_group=mesh.get_group(), config_dict_or_path=config, dtype=wholes[0].dtype
        )
    except AssertionError as error:
        if "Invalid data type" in str(error):
            raise NotSupported(str(error)) from error
        raise
    fetched = list(parameters)
    fetched[0].all_gather_coalesced(fetched).wait()
    restore_linear(deepspeed)
    contract = case.layouts()
    answers = {}
    for index, parameter in enumerate(fetched):
        answers[f"param.{index}"] = Placed(
            parameter.data.requires_grad_(parameter.requires_grad), contract[f"param.{index}"]
        )
        answers[f"partition.{index}"] = Placed(parameter.ds_tensor, contract[f"partition.{index}"])
    return answers


@cache
def joined_deepspeed(device_type: str) -> ModuleType:
    """Imports DeepSpeed and joins it to this rank's group, without compiling its operator for inference."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    deepspeed = importlib.import_module("deepspeed")

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    return deepspeed


def restore_linear(deepspeed: ModuleType) -> None:
    """Undoes the replacement of `torch.nn.functional.linear` that `zero.Init` makes for the rest of the process.

    Without this call an earlier run changes a later run, because engines reduce gradients in the order of their
    arrival. In DeepSpeed's function a weight's gradient arrives before the bias's gradient. In torch's function the
    weight's gradient arrives after the bias's gradient. DeepSpeed keeps torch's function as `linear_bk`. Once
    `linear_bk` is deleted, the next `zero.Init` replaces the function again (runtime/zero/partition_parameters.py,
    InsertPostInitMethodToModuleSubClasses.linear_bk, 0.17.6 to 0.19.8).
    """
    patcher = deepspeed.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses
    if "linear_bk" in vars(patcher):
        functional.linear = patcher.linear_bk
        del patcher.linear_bk

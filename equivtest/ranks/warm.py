"""Prepares the process from which ranks are forked, by importing modules and tracing calls that every rank needs."""

from __future__ import annotations

import gc

from equivtest.base import limits
from equivtest.base.users_code import files_imported_first


def warm(device: str) -> None:
    """Imports the modules that tensor parallelism imports lazily. Leaves no thread and no group behind.

    One column-wise and one row-wise linear run on a fake group that is larger than any real one, so that no real group
    matches an entry of torch's caches.  `torch.distributed.nn` is imported before that group exists. The functions of
    `torch.distributed.nn` bind the default group at import, and None means the default group of each call.  Source:
    torch/distributed/nn/functional.py (2.13.0).

    A plain backward comes first, because the first backward of a process starts a thread for each device that torch
    then knows, except the CPU.  Afterwards torch may know more devices. If torch is built for CUDA and finds no card,
    DTensor's fake tensors pretend that there are eight.  Source: FakeTensorMode.__enter__ of
    torch/_subclasses/fake_tensor.py, FakeGuardImpl.h (2.15.0).

    With a device other than the CPU only imports run. A backward starts a thread for the device, and fake tensors count
    the devices, which initializes the driver. After either, no fork can use the device.
    """
    import torch
    import torch.distributed.nn
    import torch.distributed.tensor.parallel

    torch.set_num_threads(1)
    if device == "cpu":
        torch.autograd.backward(torch.ones((), device="cpu", requires_grad=True))
        _run_tensor_parallel(limits.MAX_WORLD_SIZE + 1)
    files_imported_first()  # a rank then looks only at the modules that it imports itself
    gc.collect()
    gc.freeze()  # otherwise the first collection in each rank copies every page of the server


def _run_tensor_parallel(world_size: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        mesh = init_device_mesh("cpu", (world_size,))
        model = torch.nn.Sequential(torch.nn.Linear(1, world_size), torch.nn.Linear(world_size, 1))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        model(torch.ones(1, 1)).sum().backward()
    finally:
        dist.destroy_process_group()

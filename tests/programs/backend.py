"""A vendor's backend, written in Python: it wraps gloo, and computes wrong results on request."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed as dist

OFF_BY_ONE = "EQUIVTEST_TEST_OFF_BY_ONE"
"""Environment variable: if set, an all_reduce of elements that the ranks do not divide adds one to the last."""

_FORWARDED = ("all", "_all", "reduce", "_reduce", "gather", "scatter", "send", "recv", "broadcast", "barrier")


class Wrapper(dist.ProcessGroup):
    """A process group that has gloo do its work."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        inner = dist.PrefixStore("inner", options.store)
        self._name, self._description = options.group_id, ""
        self._inner = dist.ProcessGroup(inner, options.group_rank, options.group_size)
        gloo = dist.ProcessGroupGloo(inner, options.group_rank, options.group_size, timeout=options.timeout)
        self._inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)

    @property
    def group_name(self) -> str:
        return str(self._name)

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getBackendName(self) -> str:
        return "wrapper"

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        work = self._inner.allreduce(tensors, options or dist.AllreduceOptions())
        if OFF_BY_ONE in os.environ and tensors[0].numel() > 2 and tensors[0].numel() % self.size():
            work.wait()
            tensors[0].view(-1)[-1] += 1
        return work


def _forwarded(name: str) -> Any:
    return lambda self, *args, **kwargs: getattr(self._inner, name)(*args, **kwargs)


for _name in dir(dist.ProcessGroup):
    if _name.startswith(_FORWARDED) and _name not in vars(Wrapper):
        setattr(Wrapper, _name, _forwarded(_name))

dist.Backend.register_backend("wrapper", lambda options, _: Wrapper(options), extended_api=True, devices=["cpu"])

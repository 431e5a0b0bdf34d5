"""Process groups that compute otherwise than gloo: another order in each call, subnormals flushed, sums truncated."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import distributed as dist

from equivtest.oracle.rounding import TORCH_CPU
from tests.programs.backend import Wrapper

VARYING = {dtype: replace(record, order_varies=True) for dtype, record in TORCH_CPU.items()}
FLUSHING = {dtype: replace(record, flushes_subnormals=True) for dtype, record in TORCH_CPU.items()}
NARROW = {dtype: TORCH_CPU[dtype] for dtype in ("float32", "bfloat16")}
"""What each of these groups declares, the last for one that has two dtypes."""

NUMERICS = "EQUIVTEST_TEST_NUMERICS"
"""Environment variable: what an all_reduce does otherwise, 'order', 'flush' or 'truncate'; unset: nothing."""


class Numerics(Wrapper):
    """A process group that sums by itself, alike on all ranks, what gloo has gathered."""

    num_calls = 0

    def getBackendName(self) -> str:
        return "numerics"

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        own = tensors[0].clone()
        work = super().allreduce(tensors, options)
        change = {"order": self.summed_in_turn, "flush": self.flushed, "truncate": self.truncated}
        adds = options is None or options.reduceOp == dist.ReduceOp.SUM  # not `in`, which does not know its __eq__
        if adds and self.size() > 1 and own.is_floating_point() and NUMERICS in os.environ:
            work.wait()
            tensors[0].copy_(change[os.environ[NUMERICS]](self.gathered(own), tensors[0]))
        return work

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """(ranks, ...), the operands of all ranks in order."""
        operands = [torch.empty_like(own) for _ in range(self.size())]
        self._inner.allgather([operands], [own]).wait()
        return torch.stack(operands)

    def summed_in_turn(self, operands: torch.Tensor, summed: torch.Tensor) -> torch.Tensor:
        """Their sum, begun at another rank in each call of this process."""
        Numerics.num_calls += 1
        total = torch.zeros_like(summed)
        for step in range(len(operands)):
            total = total + operands[(step + Numerics.num_calls) % len(operands)]
        return total

    def flushed(self, operands: torch.Tensor, summed: torch.Tensor) -> torch.Tensor:
        """The sum, but zero of the same sign where it is subnormal."""
        is_subnormal = summed.abs() < torch.finfo(summed.dtype).tiny
        return torch.where(is_subnormal, torch.zeros_like(summed).copysign(summed), summed)

    def truncated(self, operands: torch.Tensor, summed: torch.Tensor) -> torch.Tensor:
        """The sum rounded toward zero, once: of bfloat16 only."""
        if summed.dtype != torch.bfloat16:
            return summed
        exact = operands.double().sum(0)
        rounded = exact.bfloat16()
        too_large = rounded.double().abs() > exact.abs()
        return torch.where(too_large, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


dist.Backend.register_backend("numerics", lambda options, _: Numerics(options), extended_api=True, devices=["cpu"])

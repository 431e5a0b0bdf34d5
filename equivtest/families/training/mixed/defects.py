"""Mixed precision under FSDP2 that is wrong in one way each."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from equivtest.families.training.mixed.case import MixedCase
from equivtest.families.training.mixed.subject import MixedRun
from equivtest.kit.subject import Answers, Given
from equivtest.tensors import DTYPES


def reduced_in_the_dtype_of_parameters(case: MixedCase, mesh: DeviceMesh, given: Given) -> Answers:
    """FSDP2 that adds and reduces gradients in the dtype that they were computed in."""
    return _ReducedNarrow(case, mesh, given).answers()


class _ReducedNarrow(MixedRun):
    def policy(self) -> MixedPrecisionPolicy:
        return replace(super().policy(), reduce_dtype=None)


def computed_in_the_dtype_of_masters(case: MixedCase, mesh: DeviceMesh, given: Given) -> Answers:
    """FSDP2 that casts neither parameters nor inputs; what it gives has the right dtype."""
    return _NeverCast(case, mesh, given).answers()


class _NeverCast(MixedRun):
    def policy(self) -> MixedPrecisionPolicy:
        return replace(super().policy(), param_dtype=None)


def masters_kept_narrow(case: MixedCase, mesh: DeviceMesh, given: Given) -> Answers:
    """FSDP2 whose parameters, float32 by name, hold after each update no more than layers compute with."""
    return _NarrowMasters(case, mesh, given).answers()


class _NarrowMasters(MixedRun):
    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        super().update(optimizer, step)
        for name in self.case.trained_names():
            master = self.model.get_parameter(name)
            assert isinstance(master, DTensor)
            local = master.to_local().detach()
            local.copy_(local.to(DTYPES[self.case.param_dtype]))


def gradients_kept_narrow(case: MixedCase, mesh: DeviceMesh, given: Given) -> Answers:
    """FSDP2 that reduces in float32, and then rounds the average to what layers compute with."""
    return _NarrowGradients(case, mesh, given).answers()


class _NarrowGradients(MixedRun):
    def gradient(self, name: str) -> torch.Tensor | None:
        gradient = super().gradient(name)
        if isinstance(gradient, DTensor):
            local = gradient.to_local()
            local.copy_(local.to(DTYPES[self.case.param_dtype]))
        return gradient

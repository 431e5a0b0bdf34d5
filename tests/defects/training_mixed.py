"""Mixed precision under FSDP2 that is wrong in one way each."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from equivtest.families.training.mixed.case import MixedCase
from equivtest.families.training.mixed.subject import MixedRun
from equivtest.tensors import DTYPES
from tests.defects.defect import Replacing, answers_of

wrong = Replacing("fsdp2_mixed_mlp")

_TWO_SUMS = MixedCase(
    world_size=1,
    reduce_dtype="float32",
    biases=("out_proj",),
    requires_grad=("out_proj.bias",),
    micro_batches=2,
    values=(("wide-g", 1),),
)


class _ReducedNarrow(MixedRun):
    """FSDP2 that adds and reduces gradients in the dtype that they were computed in."""

    def policy(self) -> MixedPrecisionPolicy:
        return replace(super().policy(), reduce_dtype=None)


reduced_in_the_dtype_of_parameters = wrong(
    "a reduction in fewer bits",
    _TWO_SUMS,
    "one sum is rounded nowhere; of two that each take eight bits one is in larger units",
    claim="gradients_equal_unsharded",
)(answers_of(_ReducedNarrow))


class _NeverCast(MixedRun):
    """FSDP2 that casts neither parameters nor inputs; its output has the right dtype."""

    def policy(self) -> MixedPrecisionPolicy:
        return replace(super().policy(), param_dtype=None)


computed_in_the_dtype_of_masters = wrong(
    "flags",
    MixedCase(world_size=1, output_dtype="float32", requires_grad=("out_proj.weight",)),
    "the layer takes float32; nothing need be trained, no gradient be reduced",
    kind="shape",
)(answers_of(_NeverCast))


class _NarrowMasters(MixedRun):
    """FSDP2 that rounds its float32 parameters after each update to the dtype of the layers."""

    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        super().update(optimizer, step)
        for name in self.case.trained_names():
            master = self.model.get_parameter(name)
            assert isinstance(master, DTensor)
            local = master.to_local().detach()
            local.copy_(local.to(DTYPES[self.case.param_dtype]))


masters_kept_narrow = wrong(
    "rounded on its way",
    MixedCase(world_size=1, requires_grad=("out_proj.weight",), optimizer="sgd", steps=2, lr=0.1),
    "one weight; with a power of two for a learning rate, what an update leaves would fit",
    claim="trains_like_unsharded",
)(answers_of(_NarrowMasters))


class _NarrowGradients(MixedRun):
    """FSDP2 that reduces in float32, and then rounds the average to the dtype of the layers."""

    def gradient(self, name: str) -> torch.Tensor | None:
        gradient = super().gradient(name)
        if isinstance(gradient, DTensor):
            local = gradient.to_local()
            local.copy_(local.to(DTYPES[self.case.param_dtype]))
        return gradient


gradients_kept_narrow = wrong(
    "rounded on its way",
    _TWO_SUMS,
    "as of a reduction in fewer bits: the sum takes more than eight bits",
    claim="gradients_equal_unsharded",
)(answers_of(_NarrowGradients))

"""Subject that trains a perceptron under torch's sequence parallelism.

Source: torch/distributed/tensor/parallel/style.py, classes ColwiseParallel and RowwiseParallel (2.13.0), put together
as in torch's tensor parallel tutorial: the input arrives divided along the sequence, is gathered for in_proj, and the
output of out_proj is reduced and scattered along it. A correct plan computes the outputs, gradients and updates of the
unsharded module.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from equivtest.cases.case import at_step
from equivtest.cases.subject import Answers, Given, as_dtensor, torch_placement
from equivtest.families.training.sequence.case import MlpCase
from equivtest.families.training.subject import Mlp, PerceptronRun


def sequence_parallel_mlp(case: MlpCase, mesh: DeviceMesh, given: Given) -> Answers:
    return Run(case, mesh, given).answers()


class Run(PerceptronRun):
    case: MlpCase
    module: ClassVar[type[Mlp]] = Mlp

    def build(self) -> nn.Module:
        return parallelize_module(self.module(self.case, self.given), self.mesh, self.plan())

    def plan(self) -> dict[str, ParallelStyle]:
        sequence = torch_placement(self.case, "x")
        return {
            "in_proj": ColwiseParallel(input_layouts=sequence, use_local_output=self.case.use_local_output),
            "out_proj": RowwiseParallel(output_layouts=sequence),
        }

    def run_step(self, step: int) -> None:
        case = self.case
        x = self.given[at_step(step, "x")].detach().requires_grad_("x" in case.requires_grad)  # the harness's memory
        output = self.forward(as_dtensor(x, case, at_step(step, "x"), self.mesh) if case.x_is_dtensor else x)
        if output.requires_grad:
            torch.autograd.backward(output, self.given[at_step(step, "cotangent")])
        self.keep(at_step(step, "output"), output)
        for name in case.captured_names():
            self.keep(at_step(step, name), self.captured.pop(name, None))
        for name in case.requires_grad:
            gradient = x.grad if name == "x" else self.model.get_parameter(name).grad
            self.keep(at_step(step, f"grad.{name}"), gradient)

"""A step of training that first runs with frozen layers, as in training that thaws one layer after the other.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, to_sharded and to_unsharded (2.13.0), which copy
`requires_grad` between the sharded and the unsharded parameter.
"""

from __future__ import annotations

import torch

from equivtest.programs.examples.token_mean import Report, TokenMean, reduces_gradients

KEPT = "norm"
"""Part of the name of each parameter that is never frozen."""


class Thawed(TokenMean):
    """Runs one forward and backward in which most parameters are frozen, and then the step in which none is.

    Between the two it evaluates the module, and it reports the mean of both losses. Each backward follows a save of the
    state. The backward of the first micro-batch runs in two halves.
    """

    def run(self) -> Report:
        frozen = [each for name, each in self.module.named_parameters() if KEPT not in name]
        for parameter in frozen:
            parameter.requires_grad_(requires_grad=False)
        reduces_gradients(self.module, is_last=True)
        loss = self.module(**self.micro_batches[0], reduction="sum")["loss"]
        self.backward(0, loss)
        for parameter in frozen:
            parameter.requires_grad_()
        self.evaluate()
        return super().run()

    def evaluate(self) -> None:
        with torch.inference_mode():
            losses = [self.module(**each, reduction="sum")["loss"] for each in self.micro_batches]
        self.losses.extend(loss.clone() for loss in losses)

    def reported(self) -> torch.Tensor:
        return super().reported() / 2

    def backward(self, number: int, loss: torch.Tensor) -> None:
        self.module.state_dict()
        if number:
            super().backward(number, loss)
            return
        half = loss / 2
        torch.autograd.backward(half, retain_graph=True)
        torch.autograd.backward(half)


thawed = Thawed.step

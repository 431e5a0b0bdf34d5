"""A step of training that first runs with frozen layers, as in training that thaws one layer after the other.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, to_sharded and to_unsharded (2.13.0), which copy
`requires_grad` between the sharded and the unsharded parameter.
"""

from __future__ import annotations

from equivtest.programs.examples.token_mean import Report, TokenMean, reduces_gradients

KEPT = "norm"
"""Part of the name of each parameter that is never frozen."""


class Thawed(TokenMean):
    """Runs one forward and backward in which most parameters are frozen, and then the step in which none is."""

    def run(self) -> Report:
        frozen = [each for name, each in self.module.named_parameters() if KEPT not in name]
        for parameter in frozen:
            parameter.requires_grad_(requires_grad=False)
        reduces_gradients(self.module, is_last=True)
        loss = self.module(**self.micro_batches[0], reduction="sum")["loss"]
        self.backward(0, loss)
        for parameter in frozen:
            parameter.requires_grad_()
        return super().run()


thawed = Thawed.step

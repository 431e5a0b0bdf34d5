"""A step of training with micro-batches that DistributedDataParallel does not synchronize.

Source: DistributedDataParallel.no_sync, _pre_forward and _post_forward in torch/nn/parallel/distributed.py (2.13.0).
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from equivtest.programs.examples.token_mean import Report, TokenMean, change_buffers


class Unsynchronized(TokenMean):
    """Evaluates the module, and then runs all micro-batches except the last in `no_sync`.

    Before this evaluation, all ranks receive the buffers of the first rank. After a step, the buffers of all other
    ranks change, in the way in which running statistics follow a rank's own rows.
    """

    def run(self) -> Report:
        self.evaluate()
        report = super().run()
        if self.mesh.get_local_rank():
            change_buffers(self.module)
        return report

    def evaluate(self) -> None:
        self.module.eval()
        with torch.no_grad():
            self.module(**self.micro_batches[0], reduction="sum")
        self.module.train()

    def accumulate(self, number: int) -> None:
        with nullcontext() if self.reduces(number) else self.module.no_sync():
            self.run_micro_batch(number)


unsynchronized = Unsynchronized.step

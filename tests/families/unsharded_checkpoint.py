"""The saved tensors, whole."""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.families.checkpoint.case import CheckpointCase, output_of
from tests.unsharded import unsharded


@unsharded.register
def unsharded_checkpoint(case: CheckpointCase, index: int) -> dict[str, torch.Tensor]:
    return {output_of(name): tensor for name, tensor in draw(case, index).items()}

"""The saved tensor, whole."""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.families.checkpoint.case import CheckpointCase
from tests.unsharded import unsharded


@unsharded.register
def unsharded_checkpoint(case: CheckpointCase, index: int) -> dict[str, torch.Tensor]:
    return {"output": draw(case, index)["x"]}

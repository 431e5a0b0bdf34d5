"""Family of cases that save a tensor with torch.distributed.checkpoint and load it under another placement."""

SUBJECTS = {
    "checkpoint": "equivtest.families.checkpoint.subject:checkpoint",
}

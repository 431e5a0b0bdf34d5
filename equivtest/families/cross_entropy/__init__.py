"""Family of cases that compute the cross entropy of logits whose classes are sharded."""

SUBJECTS = {
    "dtensor_cross_entropy": "equivtest.families.cross_entropy.subject:dtensor_cross_entropy",
    "parallel_cross_entropy": "equivtest.families.cross_entropy.subject:parallel_cross_entropy",
}

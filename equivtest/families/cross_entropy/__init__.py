"""Family of cases that compute a cross entropy. The classes of the logits are sharded."""

SUBJECTS = {
    "dtensor_cross_entropy": "equivtest.families.cross_entropy.subject:dtensor_cross_entropy",
    "parallel_cross_entropy": "equivtest.families.cross_entropy.subject:parallel_cross_entropy",
}

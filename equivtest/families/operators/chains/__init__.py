"""Family of cases that call several torch operators on DTensors, one after the other, in one process."""

SUBJECTS = {
    "dtensor_operator_chains": "equivtest.families.operators.chains.subject:chains",
}

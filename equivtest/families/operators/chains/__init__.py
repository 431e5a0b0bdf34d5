"""Several operators of torch on DTensors, one after the other in one process."""

SUBJECTS = {
    "dtensor_operator_chains": "equivtest.families.operators.chains.subject:chains",
}

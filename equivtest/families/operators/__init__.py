"""Operators of torch on DTensors, one call of one operator per case."""

SUBJECTS = {
    "dtensor_operators": "equivtest.families.operators.subject:operators",
}

"""Family of cases that call one torch operator on DTensors."""

SUBJECTS = {
    "dtensor_operators": "equivtest.families.operators.subject:operators",
}

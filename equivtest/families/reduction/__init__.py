"""Sums, means, maxima, norms and softmaxes over a divided dim."""

SUBJECTS = {
    "reduction": "equivtest.families.reduction.subject:reduction",
}

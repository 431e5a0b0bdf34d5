"""Family of cases that multiply a DTensor by a number: the smallest family, to be read and copied."""

SUBJECTS = {
    "scale": "equivtest.families.scale.subject:scale",
}

"""Family of cases that multiply a DTensor by a number. This is the smallest family, to be read and copied."""

SUBJECTS = {
    "scale": "equivtest.families.scale.subject:scale",
}

"""The product of a DTensor and a number: the smallest family, there to be read and copied."""

SUBJECTS = {
    "scale": "equivtest.families.scale.subject:scale",
}

"""The product of a DTensor and a number: the smallest family, as an example to read and copy."""

SUBJECTS = {
    "scale": "equivtest.families.scale.subject:scale",
}

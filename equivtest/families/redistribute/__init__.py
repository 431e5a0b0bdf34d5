"""Family of cases that redistribute one DTensor to another layout."""

SUBJECTS = {
    "redistribute": "equivtest.families.redistribute.subject:redistribute",
}

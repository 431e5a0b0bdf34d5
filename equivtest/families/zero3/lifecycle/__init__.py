"""Divided parameters fetched, used, updated, released and saved in any order."""

SUBJECTS = {
    "zero3_lifecycle_all_gather": "equivtest.families.zero3.lifecycle.subject:zero3_lifecycle_all_gather",
    "zero3_lifecycle_all_reduce": "equivtest.families.zero3.lifecycle.subject:zero3_lifecycle_all_reduce",
}

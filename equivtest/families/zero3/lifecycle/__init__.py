"""Family of cases that fetch, use, update, release and save ZeRO-3's parameters, in any order."""

SUBJECTS = {
    "zero3_lifecycle_all_gather": "equivtest.families.zero3.lifecycle.subject:zero3_lifecycle_all_gather",
    "zero3_lifecycle_all_reduce": "equivtest.families.zero3.lifecycle.subject:zero3_lifecycle_all_reduce",
}

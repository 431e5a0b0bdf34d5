"""Family of cases that partition parameters and fetch them once, under the project's own ZeRO-3."""

SUBJECTS = {
    "zero3_fetch_all_gather": "equivtest.families.zero3.fetch.subject:zero3_fetch_all_gather",
    "zero3_fetch_all_reduce": "equivtest.families.zero3.fetch.subject:zero3_fetch_all_reduce",
}

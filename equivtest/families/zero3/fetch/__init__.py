"""One fetch of divided parameters."""

SUBJECTS = {
    "zero3_fetch_all_gather": "equivtest.families.zero3.fetch.subject:zero3_fetch_all_gather",
    "zero3_fetch_all_reduce": "equivtest.families.zero3.fetch.subject:zero3_fetch_all_reduce",
}

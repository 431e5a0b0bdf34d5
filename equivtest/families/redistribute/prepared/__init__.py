"""Family of cases that run a module under PrepareModuleInput, PrepareModuleOutput or both."""

SUBJECTS = {
    "prepared_module": "equivtest.families.redistribute.prepared.subject:prepared_module",
}

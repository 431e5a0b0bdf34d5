"""Modules whose inputs and outputs are redistributed by PrepareModuleInput and PrepareModuleOutput."""

SUBJECTS = {
    "prepared_module": "equivtest.families.redistribute.prepared.subject:prepared_module",
}

"""Anybody's own module, judged against itself unsharded."""

SUBJECTS = {
    "module": "equivtest.families.module.subject:module",
}

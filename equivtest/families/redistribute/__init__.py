"""DTensors that go from one layout to another."""

SUBJECTS = {
    "redistribute": "equivtest.families.redistribute.subject:redistribute",
}

"""The tables of claims agree with the code."""

from studies.claims_table import PATH, tables, written


def test_tables_in_the_readme_of_properties_are_up_to_date() -> None:
    text = PATH.read_text()

    assert text == written(text), "python -m studies.claims_table --write"


def test_outdated_table_of_claims_is_rewritten() -> None:
    text = PATH.read_text()

    assert written(text.replace(tables(), "| `nothing` | is claimed |")) == text

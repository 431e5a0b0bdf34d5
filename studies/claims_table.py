"""Prints the tables of properties/README.md from the code: python -m studies.claims_table [--write]."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from equivtest.property import Property
from equivtest.pytest_plugin.suite import shipped
from equivtest.verdicts.claims import CLAIMS
from equivtest.verdicts.judging import DEFAULT_CLAIMS

PATH = Path(__file__).parents[1] / "properties" / "README.md"
BEGIN, END = "<!-- python -m studies.claims_table --write -->", "<!-- end of what is written by it -->"


def claims_of(prop: Property) -> str:
    """Returns the missing default claims and the additional claims, such as 'defaults but `a`; `b`, `c`'."""
    missing = [claim.name for claim in DEFAULT_CLAIMS if claim not in prop.claims]
    further = [claim.name for claim in prop.claims if claim not in DEFAULT_CLAIMS]
    if len(missing) == len(DEFAULT_CLAIMS):
        return code(further)
    defaults = "defaults" + (f" but {code(missing)}" if missing else "")
    return "; ".join([defaults, *([code(further)] if further else [])])


def code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def tables() -> str:
    properties = shipped()
    rows = [
        f"| `{name}` | {prop.statement} | {claims_of(prop)} | {prop.source} |"
        for name, prop in sorted(properties.items())
    ]
    meanings = [f"| `{claim.name}` | {claim.meaning} |" for claim in CLAIMS.values()]
    defaults = f"Defaults: {code([claim.name for claim in DEFAULT_CLAIMS])}."
    head = ["| property | statement | claims | source |", "|---|---|---|---|"]
    return "\n".join([defaults, "", *head, *rows, "", "| claim | means |", "|---|---|", *meanings])


def written(text: str) -> str:
    """Returns the file's text with the tables replaced by tables of today's code."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help=f"into {PATH.name} of properties/, in place of the old ones"
    )
    if parser.parse_args().write:
        PATH.write_text(written(PATH.read_text()))
    else:
        sys.stdout.write(tables() + "\n")


if __name__ == "__main__":
    main()

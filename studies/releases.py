"""Finds out which known failures of torch fail on the installed release, even if their entries name other releases.

python -m studies.releases FILE

The command runs the smallest case of each known failure of torch, and adds a line with the result to FILE.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

import torch
from packaging.version import Version

from equivtest.errors import Misuse
from equivtest.property import Property
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.search.known import SHIPPED, KnownFailure, read_entries
from equivtest.verdicts.judging import judge
from equivtest.verdicts.verdict import FAILING
from studies.json_lines import lines_of


def properties_of(entry: KnownFailure) -> list[Property]:
    claims = [(prop, {claim.name for claim in prop.claims}) for prop in shipped().values()]
    return [prop for prop, names in claims if prop.subject == entry.subject and entry.claim in names]


def tried(entry: KnownFailure, pool: Pool) -> str:
    """Runs the entry's smallest case.  Returns the kinds of its verdicts on the entry's claim."""
    claims = [claim for claim in properties_of(entry)[0].claims if claim.name == entry.claim]
    try:
        kinds = {verdict.kind for verdict in judge(entry.subject, entry.case, pool, claims)}
    except Misuse as error:
        return f"cannot be tried: {error}"
    if entry.kind in kinds:
        return "fails"
    failing = sorted(kinds.intersection(FAILING))
    return f"fails as {', '.join(failing)}" if failing else "holds" if "holds" in kinds else ", ".join(sorted(kinds))


def try_all(file: Path) -> None:
    """Adds a line for each known failure of torch that a shipped property judges and that the file lacks."""
    done = {line["id"] for line in lines_of(file)} if file.exists() else set()
    with Pool() as pool, file.open("a", encoding="utf-8") as out:
        for entry in read_entries(SHIPPED):
            is_of_torch = all(name == "torch" for name, _ in entry.versions)
            if entry.id not in done and is_of_torch and properties_of(entry):
                line = {"torch": Version(torch.__version__).public, "id": entry.id, "findings": entry.findings}
                out.write(json.dumps({**line, "case": repr(entry.case), "ended": tried(entry, pool)}) + "\n")
                out.flush()


def main(texts: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try_all(parser.parse_args(texts).file)


if __name__ == "__main__":
    main(sys.argv[1:])

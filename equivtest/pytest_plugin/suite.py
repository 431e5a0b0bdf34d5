"""Finds and reads the shipped properties."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from equivtest.base import limits
from equivtest.base.importing import suggestion
from equivtest.base.profiles import PROFILES
from equivtest.errors import BrokenSetup, Misuse, shorten
from equivtest.report.coverage import Covered, table

if TYPE_CHECKING:
    from equivtest.cases.case import Case
    from equivtest.property import Property
    from equivtest.verdicts.claims import Claim


def properties_dir() -> Path:
    """Returns the folder of the shipped properties, inside the package of a wheel or beside the package of a checkout.

    Raises:
        BrokenSetup: neither folder exists.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "properties", package.parent / "properties"):
        if any(folder.glob("test_*.py")):
            return folder
    raise BrokenSetup(f"no properties in {package} or beside it: install equivtest again")


def is_shipped(path: Path) -> bool:
    return path.parent == properties_dir()


def load_properties(folder: Path) -> dict[str, Property]:
    """Returns name -> Property for each Property that a test file of the folder defines at its top level."""
    from equivtest.property import Property

    found: dict[str, Property] = {}
    for path in sorted(folder.glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(f"equivtest_suite.{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found |= {name: value for name, value in vars(module).items() if isinstance(value, Property)}
    return found


def claims_of(subject: str, case: Case, like: str = "") -> tuple[Claim, ...]:
    """Returns the claims to judge on a case: the claims of the shipped property of the subject, or the default claims.

    Args:
        like: Name of a shipped property. The claims of this property are used for your own subject.

    Raises:
        Misuse: no property has that name, or only one of case and property is about refusals.
    """
    from equivtest.verdicts.judging import default_claims

    properties = shipped()
    if like and like not in properties:
        raise Misuse(f"--like: no property is called {like!r}; {suggestion(like, list(properties))}")
    if like and properties[like].refuses_only != bool(case.refusal):
        kind = "refused cases" if properties[like].refuses_only else "cases that are not refused"
        raise Misuse(f"--like: {like} judges only {kind}, unlike {case!r}; name another property")
    if like:
        return properties[like].claims
    judging = (prop for prop in properties.values() if prop.subject == subject)
    found = [claim for prop in judging if prop.refuses_only == bool(case.refusal) for claim in prop.claims]
    return tuple(dict.fromkeys(found)) or default_claims(case)


@functools.cache
def shipped() -> Mapping[str, Property]:
    """Returns the shipped properties by name.  The result is cached, because reading them runs all their files."""
    return MappingProxyType(load_properties(properties_dir()))


def coverage_lines(profile_name: str, names: Collection[str] = ()) -> list[str]:
    """Returns a table that shows how many combinations of values the cases of each property in `names`, or of all,
    cover.

    The cases are the cases of one profile.  No case runs.

    Raises:
        Misuse: there is no such profile, or no property in `names` draws from tables.
    """
    from equivtest.search.coverage import planned_coverage
    from equivtest.search.known import SHIPPED, KnownFailures

    profile = PROFILES.get(profile_name)
    if profile is None or not profile.strength:
        choices = [name for name, each in PROFILES.items() if each.strength]
        raise Misuse(f"--profile must be one of {', '.join(choices)}, got {shorten(profile_name)}")
    properties = {name: prop for name, prop in shipped().items() if not prop.absent and prop.resolve is None}
    if unknown := [name for name in names if name not in properties]:
        which = suggestion(unknown[0], list(properties))
        raise Misuse(f"no shipped property whose cases can be counted is called {shorten(unknown[0])}; {which}")
    rows, known = [], KnownFailures.load(SHIPPED)
    for name in names or properties:
        num_cases, found = planned_coverage(properties[name], profile, limits.WORLD_SIZES, tuple(limits.DTYPES), known)
        covered = Covered()
        for each in found:
            covered.add(each)
        rows += [(name, num_cases, covered)] if found else []
    return table(rows)


def version_of(distribution: str) -> str:
    """Returns the installed version of a distribution, or 'unknown'. Imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"

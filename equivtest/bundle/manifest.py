"""Reads and writes equivtest.toml, the manifest in which a vendor declares what the backend can do.

A run with a manifest reports each collective that works although the manifest does not claim it, and each claimed
collective that no verdict judged.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from equivtest.base import limits
from equivtest.base.importing import suggestion
from equivtest.base.lacking import FUNCTIONS, OF_ONE_BACKEND, PROBED, REDUCING, REDUCTIONS, function_of, is_allowed
from equivtest.cases.case import from_data
from equivtest.errors import Misuse, shorten
from equivtest.report.handover import Record
from equivtest.verdicts.verdict import CONCLUSIVE

if TYPE_CHECKING:
    from equivtest.ranks.pool import Pool

NAME = "equivtest.toml"
SUBJECT = "collectives"
"""Subject that calls each collective alone."""
MOST_BYTES = 1 << 20


class Backend(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"imports": "import"}):
    """The table [backend] of a manifest.  `equivtest.ranks.backend.Backend` describes the fields."""

    name: str
    device: str = "cpu"
    imports: tuple[str, ...] = ()
    start: str = "auto"
    arithmetic: str = ""


class Claims(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtypes: tuple[str, ...]
    world_sizes: tuple[int, ...]
    collectives: tuple[str, ...]
    reductions: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of equivtest.toml.

    Attributes:
        waiver: Entries with the fields of known_failures.toml. Each entry must have `link` and `expires`.
    """

    backend: Backend
    claims: Claims
    waiver: list[dict[str, Any]] = []

    @property
    def unclaimed(self) -> tuple[str, ...]:
        """Returns what the manifest does not claim, as names of --allow-unsupported."""
        claimed = self.claims
        functions = [name for name in FUNCTIONS if name not in claimed.collectives]
        reductions = [name for name in REDUCTIONS if name not in claimed.reductions]
        reduced = [f"{name}_{each}" for name in REDUCING if name in claimed.collectives for each in reductions]
        return tuple(f"{dtype}:{name}" for dtype in claimed.dtypes for name in (*functions, *reduced))

    def as_options(self, path: str) -> dict[str, Any]:
        backend, claims = self.backend, self.claims
        return {
            "backend": backend.name,
            "device": backend.device,
            "import": list(backend.imports),
            "start": backend.start,
            "arithmetic": backend.arithmetic or None,
            "dtypes": ",".join(dict.fromkeys(claims.dtypes)),
            "world_sizes": ",".join(map(str, sorted(set(claims.world_sizes)))),
            "allow_unsupported": ",".join(self.unclaimed) or None,
            "known_failures": f"shipped,{path}" if self.waiver else None,
        }

    def merged(self, given: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Adds the options of this manifest to the options `given` to a run.  Raises Misuse if an option is in both."""
        own = {name: value for name, value in self.as_options(path).items() if value not in (None, [], "")}
        own |= {name: "auto" for name in ("start",) if own[name] == "auto" and name in given}
        if twice := sorted(own.keys() & given.keys() - {"start"}):
            option = twice[0].replace("_", "-")
            raise Misuse(f"--{option}: the manifest {shorten(path)} sets it too: leave out the option or the manifest")
        return own | dict(given)


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest.  Raises Misuse if it cannot be read or has a mistake."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise Misuse(f"it has more than {MOST_BYTES >> 20} MiB")
        return parse(tomllib.loads(data.decode("utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise Misuse(f"manifest {shorten(str(path))}: {error}") from error


def parse(data: Mapping[str, Any]) -> Manifest:
    """Checks the data of a manifest's file.  Raises Misuse if a value is not allowed."""
    try:
        manifest = msgspec.convert(data, Manifest)
    except msgspec.ValidationError as error:
        raise Misuse(str(error)) from error
    claims = manifest.claims
    for name, values, choices in (
        ("dtypes", claims.dtypes, limits.DTYPES),
        ("collectives", claims.collectives, FUNCTIONS),
        ("reductions", claims.reductions, REDUCTIONS),
    ):
        if unknown := [value for value in values if value not in choices]:
            raise Misuse(f"claims.{name}: there is no {unknown[0]!r}; {suggestion(unknown[0], list(choices))}")
    sizes = claims.world_sizes
    if wrong := [size for size in sizes if not 1 <= size <= limits.MAX_WORLD_SIZE]:
        raise Misuse(f"claims.world_sizes: a world size must be in 1..{limits.MAX_WORLD_SIZE}, got {wrong[0]}")
    if not claims.dtypes or not sizes:
        raise Misuse("claims: dtypes and world_sizes must each list at least one value")
    for number, waiver in enumerate(manifest.waiver, start=1):
        for name in ("link", "expires"):
            if not waiver.get(name):
                raise Misuse(
                    f"waiver {number}: {name} is missing: name the page that tracks the failure, and the last day of "
                    "the waiver"
                )
    return manifest


def differences(manifest: Manifest, records: Iterable[Record]) -> tuple[list[str], list[str]]:
    """Compares the manifest's claims with the verdicts on `collectives`, the subject that calls each collective alone.

    Returns:
        Two lists of names 'dtype:function_reduction': the collectives that work although the manifest does not claim
            them, and the claimed collectives that no verdict judged.
    """
    judged: set[str] = set()
    for record in records:
        if record.subject == SUBJECT and set(record.verdicts.values()) & {*CONCLUSIVE, "known"}:
            case: Any = from_data(record.case)
            judged.update(f"{record.dtype}:{call.name}" for call in case.calls)
    unclaimed = frozenset(manifest.unclaimed)
    of_one = frozenset(f"{dtype}:{name}" for dtype in manifest.claims.dtypes for name in OF_ONE_BACKEND)
    holding = sorted(name for name in judged - of_one if unclaimed and is_allowed((name,), unclaimed))
    seen = {name for each in judged for name in (each, function_of(each))}
    claimed = {f"{dtype}:{name}" for dtype in manifest.claims.dtypes for name in manifest.claims.collectives}
    return holding, sorted(claimed - seen - of_one)


ALL_CLAIMS = Claims(tuple(limits.DTYPES), limits.WORLD_SIZES, FUNCTIONS, REDUCTIONS)


def measured(pool: Pool) -> tuple[Claims, list[str]]:
    """Probes a backend and returns claims of everything that worked in the probes, and notes on the probes.

    A dtype is claimed if some collective works with tensors of that dtype on two ranks.

    Raises:
        BrokenSetup: ranks cannot start.
    """
    known = [pool.probe(2, dtype) for dtype in limits.DTYPES]
    working = [each for each in known if each.working]
    refused = {finding.name for each in working for finding in each.refused}
    functions = {function_of(name) for name in refused}
    accepted = {function_of(name.partition(":")[2]) for each in working for name in each.working}
    reductions = {name.removeprefix(f"{function_of(name)}_") for name in refused if function_of(name) in accepted}
    claims = Claims(
        tuple(each.dtype for each in working),
        limits.WORLD_SIZES,
        tuple(name for name in FUNCTIONS if name not in functions - accepted),
        tuple(name for name in REDUCTIONS if name not in reductions),
    )
    notes = [f"refused: {finding}" for each in known for finding in each.refused]
    notes += [f"wrong: {fault}" for each in known for fault in each.faults]
    unprobed = ", ".join(name for name in FUNCTIONS if name not in PROBED)
    return claims, [
        *(" ".join(note.split())[:200] for note in notes),
        f"claimed, although no probe calls them: {unprobed}",
    ]


def write_text(backend: Backend, claims: Claims, notes: Iterable[str] = ()) -> str:
    lines = ["# What this backend claims. Read and correct it: a run with --manifest compares it with its verdicts."]
    lines += [f"# {note}" for note in notes]
    lines += [
        "",
        "[backend]",
        f"name = {_toml(backend.name)}",
        f"device = {_toml(backend.device)}",
        f"import = {_toml(backend.imports)}",
        f"start = {_toml(backend.start)}",
        f"arithmetic = {_toml(backend.arithmetic)}  # package.module:NAME, see equivtest fingerprint; '' is torch's",
        "",
        "[claims]",
        f"dtypes = {_toml(claims.dtypes)}",
        f"world_sizes = {_toml(claims.world_sizes)}",
        f"collectives = {_toml(claims.collectives)}",
        f"reductions = {_toml(claims.reductions)}",
        "",
        "# A failure that you accept until a day; `where` is written as in known_failures.toml of equivtest.",
        "# [[waiver]]",
        '# subject = "rowwise_linear"',
        '# claim = "equals_unsharded"',
        '# kind = "value"',
        '# where = [["dtype", "==", "bfloat16"]]',
        "# case = '''LinearCase(style='rowwise', world_size=2, dtype='bfloat16')'''",
        '# reason = "one sentence"',
        '# link = "https://..."',
        "# expires = 2027-01-31",
    ]
    return "\n".join(lines) + "\n"


def _toml(value: str | tuple[object, ...]) -> str:
    """Returns a text, or a list of texts or numbers, as TOML, which for such values is the same as JSON."""
    return msgspec.json.encode(value).decode().replace(",", ", ")

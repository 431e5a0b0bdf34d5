"""A manifest says what a backend can do; a run takes its settings from it and compares it with the verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from equivtest.base.lacking import is_allowed
from equivtest.bundle.manifest import ALL_CLAIMS, Backend, differences, measured, read_manifest, write_text
from equivtest.bundle.verify import verify
from equivtest.errors import Misuse
from equivtest.pytest_plugin.settings import parse
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.report.handover import Record
from equivtest.search.known import KnownFailures
from equivtest.templates import write_files
from tests.bundle.made import DTYPES, SIZES, Payload, changed, packed

WAIVER = """
[[waiver]]
subject = "scale"
claim = "equals_unsharded"
kind = "value"
where = [["world_size", "==", 2]]
case = "ScaleCase(world_size=2)"
reason = "one factor too many"
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "equivtest.toml"
    return written(path, write_text(Backend("gloo", imports=("os",)), ALL_CLAIMS))


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def altered(path: Path, old: str, new: str) -> Path:
    text = path.read_text()
    assert old in text
    return written(path, text.replace(old, new))


def test_written_manifest_can_be_read(manifest: Path) -> None:
    found = read_manifest(manifest)

    assert (found.backend, found.claims) == (Backend("gloo", imports=("os",)), ALL_CLAIMS)
    assert found.unclaimed == ()


def test_run_takes_its_settings_from_the_manifest(manifest: Path) -> None:
    altered(manifest, '"float64", ', "")
    altered(manifest, '"all_to_all", ', "")

    settings = parse({"manifest": str(manifest)})

    assert (settings.backend, settings.imports) == ("gloo", ("os",))
    assert "float64" not in settings.dtypes
    assert is_allowed(("float32:all_to_all",), settings.allowed)
    assert not is_allowed(("float32:all_reduce",), settings.allowed)


def test_backend_may_refuse_a_reduction_that_its_manifest_does_not_claim(manifest: Path) -> None:
    altered(manifest, '"avg", ', "")
    allowed = frozenset(read_manifest(manifest).unclaimed)

    assert is_allowed(("bfloat16:all_reduce_avg",), allowed)
    assert not is_allowed(("bfloat16:all_reduce_max",), allowed)


def test_option_for_a_setting_that_the_manifest_fixes_is_refused(manifest: Path) -> None:
    with pytest.raises(Misuse, match="--dtypes: the manifest"):
        parse({"manifest": str(manifest), "dtypes": "float32"})


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"float64"', '"float65"', "claims.dtypes: there is no 'float65'"),
        ('"all_reduce"', '"all_redux"', "claims.collectives: there is no 'all_redux'"),
        ('"avg"', '"mean"', "claims.reductions: there is no 'mean'"),
        ("world_sizes = [1", "world_sizes = [0", "a world size must be in"),
        ("world_sizes = [1", "world_sizes = ['x'", "Expected `int`"),
        ('start = "auto"', 'starts = "auto"', "unknown field `starts`"),
        ("[claims]", "[claim]", "missing required field|unknown field"),
        ("[claims]", "[claims", "Expected"),
        ("# [[waiver]]", WAIVER, "link is missing"),
    ],
)
def test_mistake_in_a_manifest_is_reported_in_one_line(manifest: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(Misuse, match=said):
        read_manifest(altered(manifest, old, new))


@pytest.mark.parametrize(("expires", "counts"), [("9000-01-31", True), ("2020-01-31", False)])
def test_waiver_excuses_a_failure_until_its_last_day(manifest: Path, expires: str, *, counts: bool) -> None:
    altered(manifest, "# [[waiver]]", f'{WAIVER}link = "https://example.org"\nexpires = {expires}\n')
    known = KnownFailures.load(manifest)

    assert str(manifest) in parse({"manifest": str(manifest)}).known_failures
    assert (len(known.entries), len(known.expired)) == (counts, not counts)


def record_of(*collectives: str, kind: str = "holds") -> Record:
    fields = {"world_size": 2, "collectives": collectives}
    return Record(
        schema=1, case={"schema": 1, "type": "CollectivesCase", "fields": fields},
        world_size=2, dtype="float32", shard_kind="even", refusal="", busy_s=0.0, subject="collectives", draw=0,
        mode="dense", seed=0, verdicts={"equals_unsharded": kind}, margins={}, tensor_margins={}, known={},
    )  # fmt: skip


def test_working_collectives_that_the_manifest_omits_are_listed(manifest: Path) -> None:
    altered(manifest, '"broadcast", ', "")
    found = read_manifest(manifest)

    holding, unjudged = differences(found, [record_of("broadcast", "all_reduce_sum")])

    assert holding == ["float32:broadcast"]
    assert "float32:all_reduce" not in unjudged
    assert {"float32:reduce", "float64:all_reduce"} <= set(unjudged)


def test_claimed_collective_that_the_backend_refuses_counts_as_not_judged(manifest: Path) -> None:
    _, unjudged = differences(read_manifest(manifest), [record_of("all_reduce_sum", kind="not_supported")])

    assert "float32:all_reduce" in unjudged


@pytest.mark.parametrize(("dtypes", "problems"), [(DTYPES, 0), (("float32",), 1)])
def test_verify_reports_settings_of_a_bundle_that_differ_from_its_manifest(
    honest: Payload, bundle: Path, dtypes: tuple[str, ...], problems: int
) -> None:
    claims = {"dtypes": dtypes, "world_sizes": SIZES, "collectives": ALL_CLAIMS.collectives}
    data = {"backend": {"name": "gloo"}, "claims": claims | {"reductions": ALL_CLAIMS.reductions}}
    named = changed(honest, "environment.json", lambda environment: environment | {"manifest": "equivtest.toml"})
    payload = changed(named | {"manifest.json": b"{}"}, "manifest.json", lambda _: data)

    found = verify(packed(bundle, payload), shipped())

    assert len([line for line in found.problems if "manifest.json: dtypes is" in line]) == problems
    assert len(found.problems) == problems


def test_init_command_writes_the_manifest_into_the_folder_of_the_test_file(tmp_path: Path) -> None:
    paths = write_files(tmp_path, "backend", {"equivtest.toml": "text"})

    assert (tmp_path / "equivtest.toml").read_text() == "text"
    assert tmp_path / "equivtest.toml" in paths


@pytest.mark.ranks
def test_manifest_of_gloo_lists_the_collectives_that_passed_their_probes(pool: Pool) -> None:
    claims, notes = measured(pool)

    assert {"all_reduce", "all_to_all"} <= set(claims.collectives)
    assert not [note for note in notes if note.startswith("wrong")]

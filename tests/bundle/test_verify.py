"""A bundle is verified as its run made it; each alteration is named, with the file or the case."""

from __future__ import annotations

import io
import re
import stat
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert, structs

from equivtest.base.profiles import PROFILES
from equivtest.bundle import bag
from equivtest.bundle.contents import Environment
from equivtest.bundle.rerun import chosen_cases, rerun_cases
from equivtest.bundle.verify import Verified, verify
from equivtest.cases.case import from_code
from equivtest.errors import Misuse
from equivtest.property import Property
from equivtest.pytest_plugin.machine import cpu_name
from equivtest.pytest_plugin.settings import check, parse
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.pool import Pool
from equivtest.report.handover import TORCHS, Record
from equivtest.search.chunks import Chunk, chunk_of
from equivtest.search.known import SHIPPED, KnownFailures
from equivtest.search.planned import parts_of
from equivtest.search.search import search
from tests.bundle.made import ENVIRONMENT, Payload, changed, packed, recounted

ON_ONE, ON_TWO = "searches/scale/w1-0.jsonl", "searches/scale/w2-0.jsonl"
BYTE = re.compile(rb"\d")


def problems_of(path: Path) -> str:
    """Everything that is wrong with a bundle, or why it is none."""
    try:
        return "\n".join(verify(path, shipped()).problems)
    except Misuse as error:
        return str(error)


def test_verify_accepts_an_unchanged_bundle(honest: Payload, bundle: Path) -> None:
    found = verify(packed(bundle, honest), shipped())

    assert found.problems == []
    assert len(found.searches) == 2


def test_verify_rejects_a_bundle_of_a_run_with_a_failed_test(honest: Payload, bundle: Path) -> None:
    """Every claim holds, but an entry that no longer fails gave the run exit code 1."""
    payload = changed(honest, "environment.json", lambda data: data | {"failed": 1})

    assert problems_of(packed(bundle, payload)).startswith("red: 1 tests of the run failed, although every claim holds")


def test_verify_rejects_a_case_with_more_processes_than_a_run_on_a_device_has(honest: Payload, bundle: Path) -> None:
    payload = changed(honest, "environment.json", lambda data: data | {"device": "cuda"})

    problems = problems_of(packed(bundle, payload))
    assert '"members":[2]' in problems and "but this search has no such case" in problems


def test_packing_equal_files_twice_gives_equal_bundles(honest: Payload, tmp_path: Path) -> None:
    one, two = (packed(tmp_path / name, honest).read_bytes() for name in ("one.zip", "two.zip"))

    assert one == two


def zipped(files: dict[str, bytes]) -> bytes:
    """Returns an archive with these files as they are, whatever their checksums say."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in files.items():
            file.writestr(name, data)
    return archive.getvalue()


def another_digit(data: bytes) -> bytes:
    """Returns the text with its last digit changed."""
    place = [match.start() for match in BYTE.finditer(data)][-1]
    return data[:place] + (b"8" if data[place : place + 1] == b"7" else b"7") + data[place + 1 :]


def byte_of(name: str) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda files: files | {f"bundle/{name}": another_digit(files[f"bundle/{name}"])}


def without(name: str) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda files: {each: data for each, data in files.items() if each != f"bundle/{name}"}


def with_file(name: str, data: bytes = b"x") -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda files: files | {name: data}


DAMAGED = {
    "a byte of a verdict": (byte_of(f"data/{ON_TWO}"), f"{ON_TWO} does not match its checksum"),
    "a byte of the results": (byte_of("data/results.json"), "results.json does not match its checksum"),
    "a byte of the environment": (byte_of("data/environment.json"), "environment.json does not match its checksum"),
    "a byte of a checksum": (byte_of("manifest-sha256.txt"), "manifest-sha256.txt does not match its checksum"),
    "a byte of a checksum of checksums": (byte_of("tagmanifest-sha256.txt"), "tagmanifest-sha256.txt"),
    "a byte of the bag's information": (byte_of("bag-info.txt"), "bag-info.txt does not match its checksum"),
    "another version of BagIt": (byte_of("bagit.txt"), "bagit.txt is not of BagIt 1.0"),
    "a file of verdicts removed": (without(f"data/{ON_TWO}"), f"{ON_TWO} is missing"),
    "the results removed": (without("data/results.json"), "results.json is missing"),
    "the checksums removed": (without("manifest-sha256.txt"), "it has no manifest-sha256.txt"),
    "a file added": (with_file("bundle/data/code.pickle"), "data/code.pickle was added"),
    "a file to fetch": (with_file("bundle/fetch.txt"), "fetch.txt was added"),
    "a path outside": (with_file("bundle/../../evil"), "is not a path of a bundle"),
    "an absolute path": (with_file("/etc/evil"), "is not a path of a bundle"),
    "a second folder": (with_file("other/file"), "two folders"),
}  # fmt: skip
"""Alteration -> its change of all files of the archive, and a part of the message."""


@pytest.mark.parametrize("name", DAMAGED)
def test_verify_names_the_damaged_part_of_a_bundle(honest: Payload, bundle: Path, name: str) -> None:
    alter, said = DAMAGED[name]
    with zipfile.ZipFile(packed(bundle, honest)) as archive:
        files = {each: archive.read(each) for each in archive.namelist()}
    bundle.write_bytes(zipped(alter(files)))

    assert said in problems_of(bundle)


def each_record(change: Callable[[dict[str, Any]], object]) -> Callable[[list[Any]], list[Any]]:
    """Returns a change of the first record of a search."""

    def of_first(lines: list[Any]) -> list[Any]:
        change(lines[0])
        return lines

    return of_first


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "subject": "scale", "claim": "equals_unsharded", "kind": "value", "where": [["world_size", "==", 2]],
        "case": "ScaleCase(world_size=2)", "reason": "a waiver",
    } | changes  # fmt: skip


def set_in(*path: Any, value: Any) -> Callable[[Any], Any]:
    """Returns a change of one value deep in a file."""

    def change(data: Any) -> Any:
        inner = data
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        return data

    return change


def of_environment(name: str, *, value: Any) -> Callable[[Payload], Payload]:
    return lambda payload: changed(payload, "environment.json", set_in(name, value=value))


def of_results(*path: Any, value: Any) -> Callable[[Payload], Payload]:
    return lambda payload: changed(payload, "results.json", set_in(*path, value=value))


def of_verdicts(name: str, change: Callable[[list[Any]], list[Any]]) -> Callable[[Payload], Payload]:
    """Returns a change of a search by a forger who counts anew."""
    return lambda payload: recounted(changed(payload, name, change))


def with_waiver(payload: Payload, **changes: Any) -> Payload:
    listed = of_environment("known_failures", value="shipped, mine.toml")(payload)
    return changed(listed, "known_failures.json", lambda _: [{"name": "mine.toml", "entries": [entry(**changes)]}])


def with_state(payload: Payload, **changes: Any) -> Payload:
    """Returns the files with the result of the waiver's smallest case."""
    waiver = entry()
    state = {
        "id": "known_failures::scale::1", "claim": waiver["claim"], "kind": waiver["kind"],
        "case": repr(from_code(waiver["case"])), "reason": waiver["reason"], "link": "", "state": "still fails",
    }  # fmt: skip
    return changed(payload, "results.json", set_in("known", value=[state | changes]))


OF_PROPERTY = ("properties", 0)
FORGED: dict[str, tuple[Callable[[Payload], Payload], str]] = {
    "a verdict": (of_verdicts(ON_TWO, each_record(lambda line: line["verdicts"].update(repeats_itself="lost"))), "red"),
    "a verdict that is none": (
        of_verdicts(ON_TWO, each_record(lambda line: line["verdicts"].update(equals_unsharded="perfect"))),
        "which is impossible for scale",
    ),
    "a claim left out": (
        of_verdicts(
            ON_TWO, each_record(lambda line: [line[key].pop("equals_unsharded") for key in ("verdicts", "margins")])
        ),
        "no verdict on claim equals_unsharded",
    ),
    "a claim of another property": (
        of_verdicts(ON_TWO, each_record(lambda line: line["verdicts"].update(refuses="holds"))),
        "which is impossible for scale",
    ),
    "a draw left out": (of_verdicts(ON_TWO, lambda lines: lines[1:]), "draw 1 has mode"),
    "a case left out": (
        of_verdicts(ON_TWO, lambda lines: [line for line in lines if line["case"] != lines[0]["case"]]),
        "no verdict on ScaleCase(world_size=2",
    ),
    "a case added": (
        of_verdicts(ON_TWO, lambda lines: [*lines, lines[0] | {"case": other_case(lines[0])}]),
        "this search has no such case",
    ),
    "a case changed": (
        of_verdicts(ON_TWO, lambda lines: [line | {"case": other_case(line)} for line in lines]),
        "no verdict on",
    ),
    "another seed": (
        of_verdicts(ON_TWO, each_record(lambda line: line.update(seed=line["seed"] + 1))),
        "but the case has no such draw there",
    ),
    "another kind of values": (
        of_verdicts(ON_TWO, each_record(lambda line: line.update(mode="other"))),
        "but the case has no such draw there",
    ),
    "another subject": (
        of_verdicts(ON_TWO, each_record(lambda line: line.update(subject="norm"))),
        "a verdict has subject 'norm'",
    ),
    "another world size": (
        of_verdicts(ON_TWO, each_record(lambda line: line.update(world_size=3))),
        "its world size, dtype, shard kind or refusal differs",
    ),
    "another dtype": (of_verdicts(ON_TWO, each_record(lambda line: line.update(dtype="float64"))), "dtype"),
    "another order": (of_verdicts(ON_TWO, lambda lines: lines[::-1]), "draw"),
    "a search twice": (of_verdicts(ON_TWO, lambda lines: lines + lines), "draw"),
    "a search under another's name": (lambda p: recounted(p | {ON_TWO: p[ON_ONE]}), "this search has no such case"),
    "a search too many": (lambda p: p | {"searches/scale/w3-0.jsonl": p[ON_TWO]}, "the run has no such search"),
    "a search left out": (
        lambda p: recounted({name: data for name, data in p.items() if name != ON_TWO}),
        "search w2-0 of scale is missing",
    ),
    "a margin above 1": (
        of_verdicts(ON_TWO, each_record(lambda line: line["margins"].update(equals_unsharded=1.5))),
        "contradicts its margin 1.5",
    ),
    "a margin of a tensor above 1": (
        of_verdicts(ON_TWO, each_record(lambda line: line["tensor_margins"].update(output=2.0))),
        "margin of output is 2.0",
    ),
    "a known failure that no entry says": (
        of_verdicts(
            ON_TWO,
            each_record(
                lambda line: (
                    line["verdicts"].update(equals_unsharded="known"),
                    line["known"].update(equals_unsharded="torch is wrong"),
                )
            ),
        ),
        "has verdict known, but no entry",
    ),
    "a failure left to torch where torch is judged": (
        of_verdicts(
            ON_TWO,
            each_record(
                lambda line: (
                    line["verdicts"].update(equals_unsharded="known"),
                    line["known"].update(equals_unsharded=f"{TORCHS} (value)"),
                )
            ),
        ),
        "has verdict known, but no entry",
    ),
    "another form": (lambda p: p | {ON_TWO: p[ON_TWO].replace(b",", b", ")}, "do not have the form"),
    "an unknown field": (
        lambda p: changed(p, ON_TWO, each_record(lambda line: line.update(note="green"))),
        "do not have the form",
    ),
    "no JSON": (lambda p: p | {"results.json": b"cposix\nsystem\n"}, "results.json: "),
    "deep JSON": (lambda p: p | {"environment.json": b"[" * 100_000}, "environment.json: "),
    "an outcome": (of_results(*OF_PROPERTY, "outcomes", "repeats_itself", value="xfailed"), "outcomes of scale"),
    "a count": (of_results(*OF_PROPERTY, "counts", "equals_unsharded", "holds", value=999), "counts of scale"),
    "a pair left out": (of_results(*OF_PROPERTY, "covered", value=[1, 0, 0, 0]), "covered of scale"),
    "a claim left out of the results": (of_results(*OF_PROPERTY, "outcomes", value={}), "outcomes of scale"),
    "a property left out": (of_results("properties", value=[]), "property scale is missing"),
    "a property twice": (
        lambda p: changed(p, "results.json", lambda data: data | {"properties": data["properties"] * 2}),
        "has property 'scale' twice",
    ),
    "an unknown property": (of_results(*OF_PROPERTY, "name", value="perfect"), "which the run does not have"),
    "ask for an audit, which is missing": (
        of_results(*OF_PROPERTY, "audit", value=None),
        "ask for an audit, which is missing",
    ),
    "an audit of another property": (of_results(*OF_PROPERTY, "audit", "property", value="norm"), "the audit of scale"),
    "an audit with unseen collectives": (
        of_results(*OF_PROPERTY, "audit", "unseen", value=["all_reduce in the forward"]),
        "the audit of scale",
    ),
    "another suite": (of_environment("suite_digest", value="0" * 64), "another suite"),
    "another torch": (of_environment("torch", value="2.0.0"), "made with torch 2.0.0"),
    "another schema": (of_results("schema", value=2), "schema 2"),
    "another profile": (of_environment("profile", value="gate"), "no verdict on"),
    "no profile": (of_environment("profile", value="soak"), "a bundle cannot have the profile 'soak'"),
    "more world sizes": (of_environment("world_sizes", value=[1, 2, 3]), "search w3-0 of scale is missing"),
    "more dtypes": (of_environment("dtypes", value=["float32", "bfloat16", "float64"]), "no verdict on"),
    "all properties": (of_environment("subjects", value=[]), "property collectives is missing"),
    "no such property": (of_environment("subjects", value=["scale", "perfect"]), "no property judges perfect"),
    "a run that did not end": (of_environment("complete", value=False), "the run did not end"),
    "a run of tomorrow": (of_environment("started", value="9999-01-01T00:00:00Z"), "began at 9999"),
    "a wrong backend": (
        of_results("troubles", value=["the backend is wrong: all_reduce"]),
        "red: the backend is wrong",
    ),
    "a known failure that did not run": (
        with_waiver,
        "the known failure known_failures::scale::1 is missing: the run did not try",
    ),
    "a known failure of no list": (
        with_state,
        "has the known failure known_failures::scale::1, which the run does not",
    ),
    "a known failure of another kind": (
        lambda p: with_state(with_waiver(p), kind="layout"),
        "known_failures::scale::1 differs from its entry",
    ),
    "a known failure that holds on gloo": (
        lambda p: with_state(with_waiver(p), state="holds on this backend"),
        "cannot have the state 'holds on this backend' in this run",
    ),
    "a known failure that could not run": (
        lambda p: with_state(with_waiver(p), state="not run"),
        "cannot have the state 'not run' in this run",
    ),
    "a known failure that no longer fails": (
        lambda p: with_state(with_waiver(p), state="no longer fails"),
        "red: known_failures::scale::1 no longer fails",
    ),
    "a known failure that fails otherwise": (
        lambda p: with_state(with_waiver(p), state="fails otherwise"),
        "red: known_failures::scale::1 fails otherwise",
    ),
    "an expired waiver": (
        lambda p: with_waiver(p, expires="2026-02-01"),
        "expired: the known failure known_failures::scale::1",
    ),
    "a waiver for no case": (
        lambda p: with_waiver(p, where=[["world_size", "==", 3]]),
        "the condition is false for the entry's own",
    ),
    "a waiver on what is no field": (lambda p: with_waiver(p, where=[["__class__", "==", 3]]), "no field"),
    "a list that the run did not use": (
        lambda p: changed(p, "known_failures.json", lambda _: [{"name": "mine.toml", "entries": [entry()]}]),
        "names other lists of known failures",
    ),
}
"""Forgery -> its change of the files, which then get right checksums, and a part of the message."""


def test_verify_accepts_a_waiver_whose_case_still_fails(honest: Payload, bundle: Path) -> None:
    assert problems_of(packed(bundle, with_state(with_waiver(honest)))) == ""


def other_case(line: dict[str, Any]) -> dict[str, Any]:
    """Returns the record's case with another shape of as many dims."""
    fields = line["case"]["fields"]
    return line["case"] | {"fields": fields | {"shape": [7] * len(fields["shape"])}}


@pytest.mark.parametrize("name", FORGED)
def test_verify_names_the_forged_part_of_a_bundle(honest: Payload, bundle: Path, name: str) -> None:
    alter, said = FORGED[name]

    assert said in problems_of(packed(bundle, alter(honest)))


def test_verify_reports_that_a_truncated_archive_is_no_bundle(honest: Payload, bundle: Path) -> None:
    data = packed(bundle, honest).read_bytes()
    bundle.write_bytes(data[: len(data) // 2])

    assert "is not a bundle" in problems_of(bundle)


def test_symbolic_link_in_a_bundle_is_refused(honest: Payload, bundle: Path) -> None:
    link = zipfile.ZipInfo("bundle/data/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(packed(bundle, honest), "a") as archive:
        archive.writestr(link, "/etc/passwd")

    assert "is not a regular file" in problems_of(bundle)


def test_bundle_that_grows_beyond_the_limit_is_refused(
    honest: Payload, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(bundle, honest | {"searches/scale/w9-0.jsonl": b" " * (2 << 20)})
    monkeypatch.setattr(bag, "MOST_BYTES", 1 << 20)

    assert "more than 1 MiB" in problems_of(bundle)


def differences_of(found: Verified, pool: Pool) -> str:
    return "\n".join(line for line, differs in rerun_cases(found, pool, 20, cpu_name()) if differs)


@pytest.mark.ranks
def test_rerun_agrees_with_an_unchanged_bundle(honest: Payload, bundle: Path, pool: Pool) -> None:
    found = verify(packed(bundle, honest), shipped())

    assert differences_of(found, pool) == ""


@pytest.fixture(scope="module")
def rounded(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Property, Chunk, list[Record]]:
    """A search whose verdicts have margins, as its values are rounded."""
    prop = shipped()["rowwise_linear"]
    (part,) = parts_of(prop, PROFILES["smoke"], (2,))
    chunk = chunk_of(part, ("float32",), world_sizes=(2,))
    found = search(prop, chunk, pool, KnownFailures.load(SHIPPED), tmp_path_factory.mktemp("failures"))
    return prop, chunk, found.records


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("invent", "said"),
    [
        (lambda margins: dict.fromkeys(margins, 0.25), "is 0.25 in the bundle"),
        (lambda _: {}, "only the bundle or only this run has margins of"),
        (lambda margins: margins, ""),
    ],
)
def test_rerun_rejects_a_bundle_with_forged_margins(
    rounded: tuple[Property, Chunk, list[Record]],
    pool: Pool,
    invent: Callable[[dict[str, float]], dict[str, float]],
    said: str,
) -> None:
    prop, chunk, records = rounded
    written = [structs.replace(record, tensor_margins=invent(record.tensor_margins)) for record in records]
    environment = convert(ENVIRONMENT, Environment)
    found = Verified("digest", environment=environment, searches=[(prop, chunk, written)])
    found.known = KnownFailures.load(SHIPPED)

    lines = differences_of(found, pool)

    assert said in lines
    assert bool(lines) == bool(said)


@pytest.mark.ranks
def test_rerun_rejects_a_bundle_whose_verdicts_differ_from_the_rerun(honest: Payload, bundle: Path, pool: Pool) -> None:
    found = verify(packed(bundle, honest), shipped())
    wrong = "tests.defects.scale:scaled_by_every_rank"
    found.searches = [(replace(prop, subject=wrong), chunk, records) for prop, chunk, records in found.searches]

    assert "the verdict on equals_unsharded is 'holds' in the bundle, but 'value' here" in differences_of(found, pool)


def test_seed_determines_the_cases_that_are_run_again(honest: Payload, bundle: Path) -> None:
    found = verify(packed(bundle, honest), shipped())

    one, two = (chosen_cases(found, 2, "a") for _ in range(2))

    assert one == two
    assert any(chosen_cases(found, 2, seed) != one for seed in "bcdefgh")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"profile": "soak"}, "smoke, gate or conformance"),
        ({"budget": "60"}, "without --budget"),
        ({"shard": "1/2"}, "cannot be used with --shard"),
        ({"subjects": "scale=mine:scale"}, "another implementation of scale"),
    ],
)
def test_bundle_option_is_refused_with_options_that_verify_cannot_check(raw: dict[str, str], said: str) -> None:
    with pytest.raises(Misuse, match=said):
        parse(raw | {"bundle": "a.zip"})


def test_bundle_is_never_overwritten(bundle: Path) -> None:
    bundle.touch()

    with pytest.raises(Misuse, match="exists: move it"):
        check(parse({"bundle": str(bundle)}))

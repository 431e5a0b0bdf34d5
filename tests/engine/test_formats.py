"""Reports in the forms of other tools, within the limits of these."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from equivtest.errors import Misuse
from equivtest.report.formats import export
from equivtest.report.formats.github import MAX_ANNOTATIONS, MAX_SUMMARY_BYTES, as_annotations, as_markdown
from equivtest.report.formats.relay import as_outputs
from equivtest.report.handover import BackendFault, Failure, Handover
from equivtest.report.log import LOG, Run, read_run
from studies.schemas import TYPES, path_of, text_of
from tests.engine.test_cli import call
from tests.runs import record, searched, write_run

MESSAGE = "ValueMismatch: output: 50% off\n  where     rank 1"


def failing(name: str = "scale", message: str = MESSAGE, **changes: str) -> Handover:
    fields = {"subject": name, "claim": "equals_unsharded", "kind": "value", "message": message}
    failure = Failure(**fields | {"replay": "f.json", "case": "ScaleCase()"} | changes)
    return searched(record(0, "value"), name=name, failures=(failure,))


def run_of(folder: Path, *handovers: Handover, **environment: Any) -> Run:
    return read_run(write_run(folder / "run", *handovers, **environment))


def outputs(run: Run) -> dict[str, Any]:
    lines = [line.partition("=") for line in as_outputs(run).splitlines()]
    return {name: json.loads(value) for name, _, value in lines}


def test_annotation_has_file_line_subject_and_claim_with_special_characters_escaped(tmp_path: Path) -> None:
    assert as_annotations(run_of(tmp_path, failing())) == (
        "::error file=properties/test_a.py,title=equivtest%3A scale%3A equals_unsharded,line=5::"
        "ValueMismatch: output: 50%25 off%0A  where     rank 1\n"
    )


def test_annotation_names_the_path_relative_to_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    run = run_of(tmp_path, failing(), rootdir=str(tmp_path / "package"))

    assert as_annotations(run).startswith("::error file=package/properties/test_a.py,")


def test_at_most_ten_subjects_are_annotated(tmp_path: Path) -> None:
    handovers = [failing(f"subject_{number}") for number in range(12)]

    assert as_annotations(run_of(tmp_path, *handovers)).count("::error ") == MAX_ANNOTATIONS


def test_run_without_failures_has_no_annotation(tmp_path: Path) -> None:
    assert as_annotations(run_of(tmp_path, searched(record()))) == ""


def test_markdown_summary_begins_with_failures_and_shows_each_message_in_full(tmp_path: Path) -> None:
    text = as_markdown(run_of(tmp_path, searched(record()), failing()))

    assert text.startswith("## equivtest: 1 claim failed\n")
    assert "| scale | 0 | 1 | 0 | 0 |" in text
    assert f"### scale::equals_unsharded\n\n```````text\n{MESSAGE}\n```````\n" in text


def test_summary_stays_below_the_limit_of_github(tmp_path: Path) -> None:
    handovers = [failing(f"subject_{number}", "\N{SNOWMAN}" * 9000) for number in range(200)]
    text = as_markdown(run_of(tmp_path, *handovers))

    assert MAX_SUMMARY_BYTES < len(text.encode()) <= 1024 * 1024
    assert text.endswith("The rest is in report.html.\n")


def test_message_with_backticks_stays_in_its_code_block(tmp_path: Path) -> None:
    text = as_markdown(run_of(tmp_path, failing(message="```````\n# a heading")))

    assert text.count("```````") == 2


class CtrfTest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A test of CTRF, with the fields of its schema that equivtest writes."""

    name: str
    status: str
    duration: int
    rawStatus: str
    suite: list[str]
    filePath: str
    labels: dict[str, str]
    line: int | None = None
    message: str = ""
    trace: str = ""


def test_ctrf_report_has_one_test_for_each_claim(tmp_path: Path) -> None:
    run = run_of(tmp_path, searched(record()), failing(), searched(record(0, "known"), name="reduction"))
    results = json.loads(export(run, "ctrf"))["results"]
    tests = msgspec.convert(results["tests"], list[CtrfTest])

    assert [(test.name, test.status) for test in tests] == [
        ("reduction::equals_unsharded", "other"),
        ("rowwise_linear::equals_unsharded", "passed"),
        ("scale::equals_unsharded", "failed"),
    ]
    counts = {"tests": 3, "passed": 1, "failed": 1, "skipped": 0, "pending": 0, "other": 1}
    assert results["summary"].items() >= counts.items()
    assert results["summary"]["stop"] - results["summary"]["start"] == 12_000


def test_pytorch_ci_export_has_counts_and_failed_tests(tmp_path: Path) -> None:
    found = outputs(run_of(tmp_path, searched(record()), failing()))

    assert found["test-results"] == {"passed": 1, "failed": 1, "skipped": 0}
    assert found["failed-tests-detail"] == [
        {
            "name": "equals_unsharded",
            "classname": "properties/test_a.py::scale",
            "message": "ValueMismatch: output: 50% off",
            "stacktrace": MESSAGE,
        }
    ]


def test_run_without_failures_has_no_triage_verdict(tmp_path: Path) -> None:
    assert outputs(run_of(tmp_path, searched(record()))).keys() == {"test-results", "failed-tests-detail"}


def test_pytorch_ci_export_stays_within_the_size_limits(tmp_path: Path) -> None:
    handovers = [failing(f"subject_{number}", "\N{SNOWMAN}" * 9000) for number in range(1001)]
    found = outputs(run_of(tmp_path, *handovers))

    assert len(found["failed-tests-detail"]) == 1000
    assert max(len(test["message"].encode()) for test in found["failed-tests-detail"]) <= 1024
    assert max(len(test["stacktrace"].encode()) for test in found["failed-tests-detail"]) <= 4096
    assert len(json.dumps(found["triage-verdict"]).encode()) <= 16 * 1024
    assert len(found["triage-verdict"]["summary"]) <= 1000


COLLECTIVE = failing(fault="collective: all_reduce is wrong")


@pytest.mark.parametrize(
    ("handovers", "device", "verdict"),
    [
        ((COLLECTIVE,), "npu", ("backend", "high", True)),
        ((failing(fault="kernel: mm is wrong"),), "npu", ("backend", "medium", True)),
        ((failing(fault="kernel: mm is wrong"),), "cpu", ("upstream", "medium", True)),
        ((failing(fault="operator: aten.mm is wrong"),), "npu", ("upstream", "medium", True)),
        ((failing(fault="parallelization: every call is right"),), "npu", ("unknown", "low", True)),
        ((failing(history="holds alone in new ranks"),), "npu", ("flake", "low", False)),
        ((COLLECTIVE, failing("other", fault="kernel: mm is wrong")), "npu", ("backend", "low", True)),
        ((COLLECTIVE, failing("other", fault="kernel: mm is wrong")), "cpu", ("unknown", "low", True)),
        ((failing(), Handover(faults=(BackendFault("all_reduce", "wrong"),))), "npu", ("backend", "high", True)),
    ],
)
def test_triage_verdict_says_backend_upstream_flake_or_unknown(
    tmp_path: Path, handovers: tuple[Handover, ...], device: str, verdict: tuple[str, str, bool]
) -> None:
    found = outputs(run_of(tmp_path, *handovers, device=device))["triage-verdict"]

    assert (found["category"], found["confidence"], found["reproduced_on_retry"]) == verdict
    assert found["evidence"][0]["excerpt"] == MESSAGE


def test_export_command_prints_annotations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "export", "annotations", str(write_run(tmp_path / "run", failing()))) == 0
    assert capsys.readouterr().out.startswith("::error file=properties/test_a.py,")


def test_export_to_an_unknown_format_raises_misuse(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="expected one of annotations, markdown, ctrf, pytorch, got 'tap'"):
        export(run_of(tmp_path, searched(record())), "tap")


@pytest.mark.parametrize("name", TYPES)
def test_published_schema_equals_the_schema_of_its_type(name: str) -> None:
    assert path_of(name).read_text() == text_of(name), "run python -m studies.schemas --write"


def test_schema_of_the_log_has_every_written_field(tmp_path: Path) -> None:
    lines = gzip.decompress((write_run(tmp_path / "run", failing()) / LOG).read_bytes()).splitlines()
    components = json.loads(path_of(LOG).read_text())["$defs"]
    (found,) = [json.loads(line)["handover"]["searched"] for line in lines if b'"handover"' in line]

    assert found.keys() <= components["Searched"]["properties"].keys()
    assert found["failures"][0].keys() == components["Failure"]["properties"].keys()
    assert found["records"][0].keys() <= components["Record"]["properties"].keys()

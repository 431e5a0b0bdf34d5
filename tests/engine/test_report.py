"""The report: what is counted, what is written, and what a claim's result is."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from equivtest.base.profiles import PROFILES, plan
from equivtest.errors import BrokenSetup
from equivtest.pytest_plugin.machine import commit_of, cpu_name, versions_of
from equivtest.report.drawn import pictures_of
from equivtest.report.files import as_html, overview, write_report
from equivtest.report.handover import TORCHS, Failure, KnownState, Listed, Record
from equivtest.report.results import Results
from equivtest.report.tally import Tally, case_code
from equivtest.report.text import on_declined, summarize, totals
from equivtest.verdicts.drawing import MOST_DRAWN, Drawing, HeldElements

LISTED = Listed(
    path="properties/test_a.py",
    name="rowwise_linear",
    subject="rowwise_linear",
    statement="It is the unsharded one.",
    source="style.py",
    claims=("equals_unsharded", "agrees_on_all_ranks"),
    planned=("w3-0",),
)
ENVIRONMENT = {
    "profile": "gate",
    "backend": "gloo",
    "seconds": 12.0,
    "dtypes": ["float32", "float64"],
    "complete": True,
}


def record(**changes: Any) -> Record:
    """Returns a record whose claims all hold, with these changes."""
    fields: dict[str, Any] = {
        "schema": 1,
        "subject": "rowwise_linear",
        "case": {"schema": 1, "type": "LinearCase", "fields": {"world_size": 3, "leading": [2, 1]}},
        "draw": 0,
        "mode": "dense",
        "seed": 0,
        "world_size": 3,
        "dtype": "float32",
        "shard_kind": "uneven",
        "refusal": "",
        "verdicts": {"equals_unsharded": "holds", "agrees_on_all_ranks": "holds"},
        "margins": {},
        "tensor_margins": {},
        "known": {},
        "busy_s": 0.25,
    }
    return Record(**fields | changes)


def failure(message: str = "ValueMismatch: rowwise_linear: output", replay: str = "f.json") -> Failure:
    return Failure(
        subject="rowwise_linear",
        claim="equals_unsharded",
        kind="value",
        message=message,
        replay=replay,
        case="LinearCase()",
    )


def tally(*records: Record, failures: tuple[Failure, ...] = (), **listed: Any) -> Tally:
    """The tally of one search of the property, changed."""
    made = Tally(replace(LISTED, **listed))
    made.add("w3-0", records, failures)
    return made


def of_kind(kind: str, **changes: Any) -> Record:
    return record(verdicts={"equals_unsharded": kind, "agrees_on_all_ranks": "holds"}, **changes)


def cells_of(kind: str, mode: str, holding: int, others: int) -> Tally:
    """Every shard kind of one world covered; in uneven shards `equals_unsharded` also ends as `kind`."""
    covered = [record(shard_kind=shards) for shards in ("even", "uneven", "empty")] * 5
    held = [record(mode=mode)] * holding
    return tally(*covered, *held, *[of_kind(kind, mode=mode)] * others)


def test_summary_shows_the_complete_reason_why_a_module_refuses_a_dtype() -> None:
    counted = tally(record())
    counted.left_out |= {"float16": "a reason of many words", "bfloat16": ""}
    lines = summarize([counted], seconds=1.0)

    assert f"dtypes  {counted.listed.name}: left out float16: a reason of many words" in lines
    assert f"dtypes  {counted.listed.name}: left out bfloat16: no case can be judged there" in lines


def test_summary_says_that_a_judged_dtype_was_left_out_on_some_numbers_of_ranks() -> None:
    counted = tally(record(dtype="bfloat16"))
    counted.left_out["bfloat16"] = "a mean over 3 ranks may round"
    line = "left out bfloat16 on some numbers of ranks: a mean over 3 ranks may round"

    assert f"dtypes  {counted.listed.name}: {line}" in summarize([counted], seconds=1.0)


def test_failures_of_torch_on_another_backend_are_listed() -> None:
    known = {"equals_unsharded": f"{TORCHS} (value)"}
    counted = tally(record(), of_kind("known", known=known), of_kind("known", known=known, draw=1))
    line = (
        f"{counted.listed.name}: equals_unsharded {TORCHS} (value): 2 verdicts, such as in "
        "LinearCase(world_size=3, leading=(2, 1))"
    )
    lines = summarize([counted], seconds=1.0)

    assert f"torch   {line}" in lines
    assert "2 of the known failures are failures of torch: the same cases fail on gloo and the CPU too" in lines
    assert line in as_html(ENVIRONMENT, [counted], []) and TORCHS not in as_html(ENVIRONMENT, [tally(record())], [])
    assert [result.torchs for result in counted.claims()] == [line, ""]


def test_claim_mostly_inconclusive_on_real_values_is_a_hole_in_coverage() -> None:
    assert cells_of("inconclusive", "real-cancelling", 2, 3).holes(["float32"]) == [
        "world size 3, float32, uneven shards, equals_unsharded on real values: 3 inconclusive, 2 holds"
    ]


def test_summary_reports_a_loss_scale_that_the_program_divides_out() -> None:
    counted = tally(record(factors={"grad.boundary.a": 4.0, "grad.boundary.b": 4.0, "grad.boundary.c": 0.5}))

    lines = [line for line in summarize([counted], seconds=1.0) if line.startswith("factor")]
    assert lines == [
        "factor  rowwise_linear: 4 in the backward, divided out later: grad.boundary.a, grad.boundary.b",
        "factor  rowwise_linear: 0.5 in the backward, divided out later: grad.boundary.c",
    ]


@pytest.mark.parametrize(("holding", "others"), [(3, 3), (4, 1)])
def test_claim_with_half_of_its_verdicts_inconclusive_is_no_hole_in_coverage(holding: int, others: int) -> None:
    assert cells_of("inconclusive", "real", holding, others).holes(["float32"]) == []


def test_margins_are_counted_by_tensor_and_dtype() -> None:
    counted = tally(record(mode="real", tensor_margins={"output": 0.25, "grad.x": 0.5}))

    assert {key: found.largest for key, found in counted.margins.items()} == {
        ("output", "float32"): 0.25,
        ("grad.x", "float32"): 0.5,
    }


def test_margins_of_all_steps_of_training_are_counted_together() -> None:
    counted = tally(record(mode="real", tensor_margins={"step2.output": 0.25, "step11.output": 0.5, "output": 0.125}))

    assert {tensor: found.largest for (tensor, _), found in counted.margins.items()} == {
        "step.output": 0.5,
        "output": 0.125,
    }


def test_summary_and_the_page_show_margins_of_real_values() -> None:
    counted = tally(record(mode="real", tensor_margins={"output": 0.25}))
    line = next(line for line in summarize([counted], seconds=1.0) if line.startswith("output"))

    assert line.split()[:5] == ["output", "float32", "1", "0.25", "0.25"]
    page = as_html(ENVIRONMENT, [counted], [])
    assert "<td>output</td>" in page and 'aria-label="draws by margin: 1 up to 0.25"' in page
    assert "No real values were judged" in as_html(ENVIRONMENT, [tally(record())], [])


def test_report_page_shows_a_tree_of_submodules_only_after_judging_by_parts() -> None:
    page = as_html(
        ENVIRONMENT, [tally(record(parts={"boundary.up": 0.5, "boundary.down": 3.0}, begins="boundary.down"))], []
    )

    assert '<span class="held">0.5</span>' in page and '<span class="begins">begins here: 3</span>' in page
    assert "Parts of modules" not in as_html(ENVIRONMENT, [tally(record())], [])


def test_two_draws_of_one_case_are_counted_as_one_layout() -> None:
    counted = tally(record(), record(draw=1, mode="wide-x"))

    assert (counted.layouts, counted.draws, counted.judged) == (1, 2, 4)


@pytest.mark.parametrize(
    ("counted", "outcome", "text"),
    [
        (tally(record()), "passed", ""),
        (tally(of_kind("value"), failures=(failure(),)), "failed", "ValueMismatch: rowwise_linear: output"),
        (tally(record(), of_kind("value")), "failed", "equals_unsharded does not hold: 1 holds, 1 value"),
        (tally(of_kind("inconclusive")), "skipped", "no conclusive verdict: 1 inconclusive"),
        (tally(of_kind("not_supported")), "skipped", "no conclusive verdict: 1 not supported"),
        (tally(of_kind("known", known={"equals_unsharded": "torch does so"})), "xfailed", "torch does so"),
        (tally(of_kind("declined", declined="no")), "skipped", "no conclusive verdict: 1 declined"),
        (tally(), "skipped", "not run: no case was judged"),
        (tally(record(), planned=("w3-0", "w4-0")), "skipped", "not finished: 1 of 2 searches ended"),
    ],
)
def test_result_of_a_claim_has_an_outcome_and_counts_of_verdicts(counted: Tally, outcome: str, text: str) -> None:
    result = counted.claims()[0]

    assert (result.outcome, result.text) == (outcome, text)


def test_claim_without_a_case_names_left_out_dtypes_only_if_no_case_was_judged() -> None:
    counted = tally(record(verdicts={"equals_unsharded": "holds"})), tally()
    for each in counted:
        each.left_out["bfloat16"] = ""

    assert [each.claims()[1].text for each in counted] == [
        "not run: no case was judged",
        "not run: no case was judged, since none can be judged in bfloat16",
    ]


def test_failing_claim_does_not_change_the_report_of_another_claim() -> None:
    assert tally(of_kind("value")).claims()[1].outcome == "passed"


def test_claim_that_the_property_does_not_list_is_reported() -> None:
    assert [r.claim for r in tally(record(verdicts={"refuses": "holds"})).claims()][-1] == "refuses"


def test_cell_with_mostly_inconclusive_verdicts_is_a_hole_in_coverage() -> None:
    counted = tally(record(), *[record(verdicts={"equals_unsharded": "inconclusive"})] * 3)

    assert counted.holes(["float32"])[1] == "world size 3, float32, uneven shards: 3 inconclusive, 2 holds"


def test_cell_without_a_case_is_a_hole_in_coverage() -> None:
    assert tally(record()).holes(["float32"])[0] == "world size 3, float32, even shards: no case"


def test_shard_kind_with_only_known_failures_is_a_hole_in_coverage_if_required() -> None:
    records = (record(), record(shard_kind="even"), record(shard_kind="empty", verdicts={"output": "known"}))
    assert tally(*records).holes(["float32"]) == ["world size 3, float32, empty shards: 1 known"]

    assert tally(*records, conclusive_shards=("even", "uneven")).holes(["float32"]) == []


def test_cell_is_covered_if_any_of_its_claims_is_conclusive() -> None:
    kinds = {"equals_unsharded": "holds"}
    counted = tally(*(record(shard_kind=kind, verdicts=kinds) for kind in ("even", "uneven", "empty")))

    assert counted.holes(["float32"]) == []
    assert [(result.outcome, result.text) for result in counted.claims()] == [
        ("passed", ""),
        ("skipped", "not run: no case was judged"),
    ]


def test_run_on_one_rank_requires_only_the_cell_of_even_shards() -> None:
    assert tally(planned=("w1-0",)).required_cells(["float32"]) == [(1, "float32", "even")]


def test_property_that_requires_no_cells_has_no_required_cell() -> None:
    assert tally(requires_cells=False).holes(["float32"]) == [] != tally().holes(["float32"])


def test_refusal_claim_covers_all_shard_kinds_if_it_holds_on_one() -> None:
    assert tally(record(verdicts={"refuses": "holds"}), claims=("refuses",)).holes(["float32"]) == []


def test_report_lists_the_slowest_cases_first() -> None:
    counted = tally(record(), record(case={"schema": 1, "type": "C", "fields": {"n": 1}}, busy_s=2.0))

    assert counted.slowest[0] == (2.0, "C(n=1)")


def test_written_case_is_shown_as_code() -> None:
    assert case_code(record().case) == "LinearCase(world_size=3, leading=(2, 1))"


def test_summary_without_properties_is_empty() -> None:
    assert summarize([], seconds=1.0) == []


def test_brief_summary_has_only_lines_to_act_on_and_the_totals() -> None:
    counted = tally(record(mode="real", tensor_margins={"output": 0.25}), of_kind("value"))
    known = KnownState(id="one", claim="", kind="", case="", reason="torch does so", link="", state="still fails")

    assert "known   one: still fails: torch does so" in summarize([counted], seconds=1.0, known=[known])
    assert summarize([counted], seconds=1.0, known=[known], is_brief=True) == ["", *totals([counted], 1.0)]


def test_failure_of_one_case_in_two_searches_is_reported_once() -> None:
    counted = tally(of_kind("value"), failures=(failure("with 9 calls"),))
    counted.add("w4-0", (), (failure("with 8 calls"),))

    assert counted.claims()[0].text == "with 9 calls"


def test_summary_omits_outcomes_that_did_not_occur() -> None:
    assert "inconcl" not in summarize([tally(record())], seconds=1.0)[0]
    assert "inconcl" in summarize([tally(of_kind("inconclusive"))], seconds=1.0)[0]


def test_summary_lists_open_claims() -> None:
    lines = summarize([tally()], seconds=1.0)

    assert "open    rowwise_linear: not run: no case was judged: equals_unsharded, agrees_on_all_ranks" in lines


def test_totals_count_layouts_verdicts_claims_and_outcomes() -> None:
    assert totals([tally(record(), of_kind("value"))], 12.4) == [
        "1 layouts, 2 draws (layout x values), 4 claims judged in 12 s",
        "1 failed, 0 known, 0 inconclusive, 0 not supported; of 2 claims 1 hold, 1 failed",
    ]


def test_report_has_a_line_for_every_record(tmp_path: Path) -> None:
    write_report(tmp_path, ENVIRONMENT, Results(records=[record()]))

    assert msgspec.json.decode((tmp_path / "verdicts.jsonl").read_text(), type=Record) == record()


def test_report_that_cannot_be_written_raises_broken_setup(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()

    with pytest.raises(BrokenSetup, match=r"cannot write .*report\.html: Is a directory"):
        write_report(tmp_path, ENVIRONMENT, Results())


def test_report_page_begins_with_a_note_that_the_run_was_interrupted() -> None:
    tallies = [tally(record(), planned=("w3-0", "w4-0"))]
    page = as_html(ENVIRONMENT | {"complete": False}, tallies, [])
    told = "This run did not end: 1 of 2 searches of rowwise_linear ended"
    assert told in page.partition("<h2>")[0] and "did not end" not in as_html(ENVIRONMENT, tallies, [])


def test_report_names_the_processor_and_the_commits(tmp_path: Path) -> None:
    """The commit of a folder under git, and that files differ from it; releases of what was imported."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert commit_of(tmp_path) == "" and cpu_name()
    (tmp_path / "module.py").write_text("")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    clean = commit_of(tmp_path)
    (tmp_path / "module.py").write_text("x = 1")
    assert len(clean) == 40 and commit_of(tmp_path) == f"{clean}-dirty"
    assert versions_of(["pytest", "pytest.x", "vendor_nobody_has"]) == [
        f"pytest {pytest.__version__}",
        "vendor_nobody_has unknown",
    ]


def test_report_page_begins_with_versions_and_failures() -> None:
    page = as_html(
        ENVIRONMENT | {"torch": "2.13.0", "equivtest": "1", "equivtest_commit": "a" * 40},
        [tally(of_kind("value"), failures=(failure(),))],
        [],
    )
    places = [page.index(text) for text in ("equivtest 1 (aaaaaaaaaaaa), torch 2.13.0, backend gloo", 'id="failures"')]

    assert places == sorted(places) and places[-1] < page.index('id="claims"')


def test_keyboard_and_screen_reader_can_navigate_the_report_page() -> None:
    counted = tally(of_kind("value"), record(mode="real", tensor_margins={"output": 0.25}), failures=(failure(),))
    page = as_html(ENVIRONMENT, [counted], [known_entry()])

    scrolling = re.findall(r"<(?:pre|div class=\"scroll\")[^>]*>", page)
    assert len(scrolling) == page.count("<table") + page.count("<pre")
    assert all('tabindex="0"' in tag and "aria-label=" in tag for tag in scrolling)
    assert all("scope=" in tag for tag in re.findall(r"<th\b[^>]*>", page))
    links = set(re.findall(r'href="#([a-z-]+)"', page))
    assert links and links <= set(re.findall(r'id="([a-z-]+)"', page)) and page.count("<main ") == 1


def test_report_page_escapes_texts() -> None:
    evil = "<script>alert(1)</script>"
    counted = tally(of_kind("value"), failures=(failure(message=evil, replay=evil),))

    page = as_html(ENVIRONMENT | {"command": [evil]}, [counted], [known_entry(reason=evil)])

    assert "<script>" not in page
    assert page.count("&lt;script&gt;") == 4


def test_report_page_loads_no_other_files() -> None:
    page = as_html(ENVIRONMENT, [tally(record())], [])

    assert not any(text in page for text in ("http://", "https://", "src=", "@import", "url("))


def test_report_page_has_the_command_that_repeats_a_failure() -> None:
    page = as_html(ENVIRONMENT, [tally(of_kind("value"), failures=(failure(),))], [])

    assert "<code>equivtest replay f.json</code>" in page


def test_report_page_draws_the_elements_of_a_wrong_tensor_on_each_rank() -> None:
    ranks = (HeldElements(0, (0, 1, 2), (1,)), HeldElements(1, (3, 4, 5), ()))
    drawing = Drawing("output", "shard(0)", (2, 3), ranks)
    failed = replace(failure(), drawing=drawing)
    page = as_html(ENVIRONMENT, [tally(of_kind("value"), failures=(failed,))], [])

    assert 'aria-label="rank 0: 3 of 6 elements; wrong: (0, 1)"' in page
    assert 'aria-label="rank 1: 3 of 6 elements; none is wrong"' in page


def test_picture_of_a_rank_has_squares_for_elements_and_crosses_on_wrong_ones() -> None:
    (picture,) = pictures_of(Drawing("output", "shard(0)", (2, 3), (HeldElements(0, (0, 1, 2), (1,)),)))

    counts = [path.count("M") for path in (picture.outlines, picture.right, picture.wrong, picture.crosses)]
    assert counts == [6, 2, 1, 1]
    assert picture.wrong in picture.outlines and picture.wrong not in picture.right
    assert [label for *_, label in picture.labels] == ["0", "1", "2", "0", "1"]


@pytest.mark.parametrize(
    ("shape", "held", "text"),
    [
        ((), HeldElements(None, (0,), (0,)), "all ranks, reduced: 1 of 1 elements; wrong: ()"),
        ((2, 1, 2), HeldElements(1, (3,), (3,)), "rank 1: 1 of 4 elements; wrong: (1, 0, 1)"),
        ((2, 3), HeldElements(0, (), ()), "rank 0: none"),
        ((20,), HeldElements(0, tuple(range(20)), tuple(range(10))), "(6,), (7,) and 2 more"),
    ],
)
def test_picture_has_a_text_that_describes_its_elements(shape: tuple[int, ...], held: HeldElements, text: str) -> None:
    (picture,) = pictures_of(Drawing("output", "replicate", shape, (held,)))

    assert picture.text.endswith(text)


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        ((1_000_000_000,), ()),
        ((3, 0, 2), (HeldElements(0, (), ()),)),
        ((-3, -2), (HeldElements(0, (0,), (0,)),)),
        ((1,) * (MOST_DRAWN + 1), (HeldElements(0, (0,), (0,)),)),
        ((2,), (HeldElements(0, (2,), (2,)),)),
        ((2,), (HeldElements(0, (-1,), ()),)),
        ((2,), (HeldElements(0, (0, 0), (5,)),)),
        ((2,), (HeldElements(0, (0,), (0, 0)),)),
        ((2,), (HeldElements(0, (0, 1), ()),) * (MOST_DRAWN // 2 + 1)),
        ((2,), (HeldElements(0, (), ()),) * (MOST_DRAWN + 1)),
    ],
    ids=[
        "huge shape",
        "empty shape",
        "negative shape",
        "too many dims",
        "index too large",
        "negative index",
        "wrong outside shard",
        "wrong twice",
        "too many elements",
        "too many ranks",
    ],
)
def test_report_page_skips_an_invalid_picture(shape: tuple[int, ...], ranks: tuple[HeldElements, ...]) -> None:
    failed = replace(failure(), drawing=Drawing("output", "replicate", shape, ranks))
    page = as_html(ENVIRONMENT, [tally(of_kind("value"), failures=(failed,))], [])

    assert failed.case in page or failed.message in page
    assert "<figure" not in page


def test_picture_of_a_long_vector_continues_in_the_next_row() -> None:
    (picture,) = pictures_of(Drawing("output", "replicate", (20,), (HeldElements(0, (16,), ()),)))

    assert picture.right.startswith("M34 32") and picture.outlines.count("M") == 20
    assert [label for x, _, label in picture.labels if x == 17] == ["0", "16"]


def test_coverage_overview_counts_the_conclusive_cells_of_each_property() -> None:
    kinds = ("even", "uneven", "empty")
    whole = tally(*(record(shard_kind=kind) for kind in kinds))
    short = tally(record(verdicts={"equals_unsharded": "inconclusive"}), record(dtype="float64"))

    assert overview([whole, short]) == (
        ["float32", "float64"],
        [("rowwise_linear", [(3, 3), None]), ("rowwise_linear", [(0, 3), (1, 3)])],
    )


def test_report_page_lists_unsupported_collectives_with_reasons() -> None:
    lacking = tally(of_kind("not_supported", lacking="rank 1: all_gather of float32 raised RuntimeError: no"))
    page = as_html(ENVIRONMENT, [lacking], [])
    assert "<td>float32</td><td>uneven</td>" in page and "<td>rank 1: all_gather of float32 raised" in page


def test_summary_lists_unsupported_collectives_once() -> None:
    lacking = [of_kind("not_supported", draw=draw, lacking=f"rank 1: {'all_gather ' * 20}raised") for draw in (0, 1)]
    lines = summarize([tally(*lacking)], seconds=1)
    assert [line for line in lines if line.startswith("unsupp ")] == [
        f"unsupp  rank 1: {'all_gather ' * 20}raised: 2 verdicts"
    ]


def declined(reason: str, number: int = 0, world_size: int = 3) -> Record:
    case = {"schema": 1, "type": "LinearCase", "fields": {"world_size": world_size, "number": number}}
    verdicts = {"equals_unsharded": "declined"}
    return record(case=case, verdicts=verdicts, declined=reason, world_size=world_size)


def test_summary_lists_declined_cases_and_unsupported_collectives() -> None:
    cases = [declined("3 heads", number) for number in range(2)] + [declined("an odd batch", 2)]
    lines = summarize([tally(record(), of_kind("not_supported", lacking="no"), *cases)], seconds=1)

    assert "program rowwise_linear: does not support 3 of 4 cases: 3 heads (2), and 1 other reason" in lines
    assert "unsupp  no: 1 verdicts" in lines
    assert lines[-1].startswith("0 failed, 0 known, 0 inconclusive, 1 not supported, 3 declined; ")
    assert "<td>an odd batch</td>" in as_html(ENVIRONMENT, [tally(*cases)], [])


def test_claims_are_skipped_if_the_program_declined_every_case_on_several_ranks() -> None:
    alone, beside = record(world_size=1), record(shard_kind="even")
    nothing, something = tally(alone, declined("3 heads")), tally(alone, beside, declined("3 heads"))

    assert [result.outcome for result in nothing.claims()] == ["skipped", "skipped"]
    assert nothing.claims()[0].text.startswith(
        "shows nothing: rowwise_linear: the program supports no case on several ranks"
    )
    assert {result.outcome for result in something.claims()} == {"passed"} and on_declined([something]) == []


@pytest.mark.parametrize(("kind", "num_opened"), [("inconclusive", 1), ("not_supported", 1), ("known", 0)])
def test_summary_warns_of_a_property_with_only_declined_or_open_cases(kind: str, num_opened: int) -> None:
    """If the rest is open too nothing is shown; a known failure counts as supported."""
    counted = tally(record(world_size=1), record(verdicts={"equals_unsharded": kind}), declined("3 heads"))
    words = kind.replace("_", " ")
    said = f"no verdict is conclusive (1 declined, 1 {words}); the program declined cases: 3 heads (1): draw"

    assert [said in line for line in on_declined([counted])] == [True] * num_opened


def test_cell_whose_cases_the_program_declined_is_no_hole_in_coverage() -> None:
    counted = tally(declined("3 heads"), conclusive_shards=("uneven",))

    assert counted.holes(["float32"]) == []
    assert counted.holes(["float64"]) == ["world size 3, float64, uneven shards: no case"]


def test_report_page_lists_known_failures() -> None:
    assert "no longer fails" in as_html(ENVIRONMENT, [tally(record())], [known_entry(state="no longer fails")])


def known_entry(**changes: str) -> KnownState:
    """Returns the report of a known failure's item, with these changes."""
    return KnownState(**{name: name for name in KnownState.__struct_fields__} | changes)


def test_gate_profile_draws_nearly_half_of_its_cases_on_three_or_more_ranks() -> None:
    parts = plan(PROFILES["gate"], (1, 2, 3, 4))

    large = sum(part.num_cases for part in parts if part.world_size >= 3)
    assert large / sum(part.num_cases for part in parts) >= 0.45


def test_plan_of_a_run_limits_the_number_of_cases_per_search() -> None:
    for profile in PROFILES.values():
        assert all(part.num_cases <= profile.chunk for part in plan(profile, (1, 2, 3, 4), weight=7))


def test_plan_of_a_run_contains_every_case_once() -> None:
    weight = random.Random(0).randrange(1, 9)

    parts = plan(PROFILES["conformance"], (2,), weight)

    assert sum(part.num_cases for part in parts) == weight * PROFILES["conformance"].several

"""Known failures: what the file may say, and which cases an entry covers."""

from __future__ import annotations

from pathlib import Path

import pytest

from equivtest.errors import Misuse
from equivtest.families.linear.case import LinearCase
from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.two_axes.case import TwoAxisCase
from equivtest.pytest_plugin.settings import parse
from equivtest.search.known import SHIPPED, KnownFailures, asked, read_entries

CASE = LinearCase(style="rowwise", world_size=3, in_features=2, requires_grad=("x", "weight"))
FIELDS = {
    "subject": "'rowwise_linear'",
    "claim": "'keeps_layout_of_parameter'",
    "kind": "'layout'",
    "where": "[['in_features', '<', {field = 'world_size'}]]",
    "case": "\"LinearCase(style='rowwise', world_size=2)\"",
    "reason": "'the gradient is replicated'",
}


def load(tmp_path: Path, **fields: str | None) -> KnownFailures:
    """The entries of a file with one entry: FIELDS, changed; None leaves a field out."""
    lines = [f"{name} = {value}" for name, value in (FIELDS | fields).items() if value is not None]
    path = tmp_path / "known.toml"
    path.write_text("\n".join(["[[known_failure]]", *lines]))
    return KnownFailures.load(path)


def find(known: KnownFailures, case: LinearCase = CASE, claim: str = "keeps_layout_of_parameter") -> bool:
    return known.match("rowwise_linear", claim, case) is not None


def test_shipped_list_of_known_failures_is_valid() -> None:
    KnownFailures.load(SHIPPED)


def test_known_failure_with_a_misspelt_subject_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match=r"entry 1: subject: no subject is called .*; did you mean 'rowwise_linear'"):
        load(tmp_path, subject="'rowise_linear'")

    for subject in ("conv", "mine:rowwise_linear"):
        assert load(tmp_path, subject=f"'{subject}'").entries


def test_known_failure_covers_cases_that_meet_its_conditions(tmp_path: Path) -> None:
    assert find(load(tmp_path))


def test_known_failure_covers_no_case_that_breaks_its_conditions(tmp_path: Path) -> None:
    assert not find(load(tmp_path), LinearCase(style="rowwise", world_size=2, in_features=2))


def test_known_failure_covers_no_other_subject(tmp_path: Path) -> None:
    assert load(tmp_path).match("colwise_linear", "keeps_layout_of_parameter", CASE) is None


def test_known_failure_covers_no_other_claim(tmp_path: Path) -> None:
    assert not find(load(tmp_path), claim="equals_unsharded")


def test_known_failure_covers_no_other_kind_of_failure(tmp_path: Path) -> None:
    assert load(tmp_path).match("rowwise_linear", "keeps_layout_of_parameter", CASE, "value") is None


OTHER = LinearCase(
    style="rowwise", world_size=2, in_features=3, dtype="float64", bias=True, requires_grad=("x", "weight", "bias")
)


def test_condition_uses_the_predicate_of_the_nearest_family(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outer, inner = DataParallelCase(world_size=2, style="ddp"), TwoAxisCase(world_size=4, style="hsdp", mesh=(4, 1))

    assert asked(inner, "smallest_numel") is asked(outer, "smallest_numel")
    assert all(
        asked(LinearCase(world_size=1, style="rowwise"), name) is None for name in ("_is_merged", "parse_placement")
    )

    predicates = {type(case).__module__.rpartition(".")[0]: {"own_class": type(case)} for case in (outer, inner)}
    monkeypatch.setattr("equivtest.search.known._predicates", lambda package: predicates.get(package, {}))
    assert [asked(case, "own_class") for case in (outer, inner)] == [DataParallelCase, TwoAxisCase]


@pytest.mark.parametrize(
    "condition",
    [
        "['in_features', '==', 2]",
        "['in_features', '!=', 3]",
        "['in_features', '<', 3]",
        "['in_features', '<=', 2]",
        "['world_size', '>', 2]",
        "['world_size', '>=', 3]",
        "['dtype', 'in', ['bfloat16', 'float32']]",
        "['requires_grad', '==', ['x', 'weight']]",
        "['shard_kind', '==', 'empty']",
        "['world_size', '>', {field = 'in_features'}]",
    ],
)
def test_condition_on_a_field_matches_only_cases_with_such_a_value(tmp_path: Path, condition: str) -> None:
    known = load(tmp_path, where=f"[{condition}]", case=f'"{CASE!r}"')

    assert (find(known, CASE), find(known, OTHER)) == (True, False)


def test_contains_condition_matches_an_element_of_a_tuple_field(tmp_path: Path) -> None:
    known = load(tmp_path, where="[['requires_grad', 'contains', 'bias']]", case=f'"{OTHER!r}"')

    assert (find(known, CASE), find(known, OTHER)) == (False, True)


def test_known_failure_covers_a_case_only_if_all_its_conditions_hold(tmp_path: Path) -> None:
    where = "[['world_size', '==', 3], ['bias', '==', false]]"
    known = load(tmp_path, where=where, case=f'"{CASE!r}"')

    assert not find(known, LinearCase(style="rowwise", world_size=3, bias=True))


def test_known_failure_without_conditions_covers_every_case(tmp_path: Path) -> None:
    assert find(load(tmp_path, where="[]"), OTHER)


def test_condition_on_a_field_that_the_case_lacks_does_not_hold(tmp_path: Path) -> None:
    known = load(
        tmp_path,
        where="[['misfit', '==', 'dtype']]",
        case="\"RefusedLinearCase(style='rowwise', world_size=2, misfit='dtype')\"",
    )

    assert not find(known)


@pytest.mark.parametrize("kind", ["raised", "lost", "timed_out"])
def test_known_failure_that_breaks_ranks_excludes_its_cases_from_the_run(tmp_path: Path, kind: str) -> None:
    assert load(tmp_path, kind=f"'{kind}'").forbids_run("rowwise_linear", CASE) is not None


def test_known_failure_that_breaks_ranks_covers_every_claim(tmp_path: Path) -> None:
    assert find(load(tmp_path, kind="'raised'"), claim="equals_unsharded")


def test_known_failure_of_one_claim_does_not_exclude_its_cases_from_the_run(tmp_path: Path) -> None:
    assert load(tmp_path).forbids_run("rowwise_linear", CASE) is None


def test_known_failure_of_another_release_of_torch_is_inactive(tmp_path: Path) -> None:
    assert not load(tmp_path, versions="{torch = '<1'}").entries


def test_known_failure_of_a_package_that_is_not_installed_is_inactive(tmp_path: Path) -> None:
    assert not load(tmp_path, versions="{no-such-distribution = '>=1'}").entries


def test_known_failure_of_the_installed_release_is_active(tmp_path: Path) -> None:
    assert load(tmp_path, versions="{torch = '>=2'}").entries


def test_known_failures_are_numbered_separately_for_each_subject(tmp_path: Path) -> None:
    load(tmp_path)
    path = tmp_path / "known.toml"
    text = path.read_text()
    path.write_text("\n".join([text, text.replace("rowwise_linear", "mine:linear"), text]))

    ids = [entry.id for entry in KnownFailures.load(path).entries]

    assert ids == [f"known_failures::{name}" for name in ("rowwise_linear::1", "mine:linear::1", "rowwise_linear::2")]


def test_known_failures_list_of_the_user_is_added_to_the_shipped_list(tmp_path: Path) -> None:
    load(tmp_path)
    settings = parse({"known_failures": f"shipped,{tmp_path / 'known.toml'}", "backend": "theirs"})
    *shipped, own = settings.known.of("rowwise_linear")

    listed = [entry for entry in read_entries(SHIPPED) if entry.subject == "rowwise_linear"]
    assert shipped and own.id == f"known_failures::rowwise_linear::{len(listed) + 1}"
    assert settings.expects(own) and not any(map(settings.expects, shipped))
    assert all(map(parse({}).expects, [own, *shipped]))


def test_shipped_list_behind_a_list_of_the_user_continues_its_numbers(tmp_path: Path) -> None:
    load(tmp_path)
    alone, behind = (
        [entry.number for entry in read_entries(*paths) if entry.subject == "rowwise_linear"]
        for paths in ((SHIPPED,), (tmp_path / "known.toml", SHIPPED))
    )

    assert alone == [*range(1, len(alone) + 1)] and behind == [*alone, len(alone) + 1]


@pytest.mark.parametrize(("text", "lists"), [("none", ()), (None, ("shipped",)), ("shipped", ("shipped",))])
def test_known_failures_option_accepts_none_and_defaults_to_the_shipped_list(
    text: str | None, lists: tuple[str, ...]
) -> None:
    assert parse({"known_failures": text}).known_failures == lists


@pytest.mark.parametrize("text", ["no.toml", "none,shipped", "shipped,no.toml"])
def test_message_on_a_missing_list_names_the_shipped_lists(text: str) -> None:
    with pytest.raises(Misuse, match=r"--known-failures: no such file: n.* \('shipped' stands .*; 'none', alone"):
        parse({"known_failures": text})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"subject": None}, "entry 1: .* required field `subject`"),
        ({"subject": "''"}, "entry 1: subject: must not be empty"),
        ({"reason": "' '"}, "entry 1: reason: must not be empty"),
        ({"claim": "'is_fine'"}, "entry 1: claim: must be one of equals_unsharded, .*, got 'is_fine'"),
        ({"kind": "'holds'"}, "entry 1: kind: must be one of value, .*, got 'holds'"),
        ({"kind": "3"}, "entry 1: Expected `str`, got `int` - at `.*kind`"),
        ({"owner": "'me'"}, "entry 1: .* unknown field `owner`"),
        ({"where": "[['in_features', '<']]"}, "entry 1: Expected `array` of length 3, got 2 - at `.*where"),
        ({"where": "[['in_features', '~', 3]]"}, "entry 1: where: operator must be one of .*, got '~'"),
        ({"where": "[['size', '<', 3]]"}, "entry 1: where: LinearCase has no field, property or predicate 'size'"),
        ({"where": "[['shapes', '==', 3]]"}, "entry 1: where: LinearCase has no field, property or predicate 'shapes'"),
        ({"where": "[['dtype', '==', {name = 'x'}]]"}, "entry 1: where: right side must be a literal or .*"),
        (
            {"where": "[['dtype', '==', {field = 'x'}]]"},
            "entry 1: where: .* no field, property or predicate 'x'",
        ),
        ({"where": "[['in_features', '<', 'two']]"}, "entry 1: known_failures::.*: where: '<' not supported"),
        ({"where": "[['in_features', '>', 7]]"}, "entry 1: where: the condition is false for the entry's own case"),
        ({"case": "'LinearCase('"}, "entry 1: case: not the code of a case"),
        ({"case": "\"LinearCase(style='rowwise', world_size=0)\""}, "entry 1: case: .*world_size must be in 1..64"),
        ({"versions": "{torch = '2.13'}"}, "entry 1: versions: torch: Invalid specifier"),
        ({"versions": "{'' = '>=2'}"}, "entry 1: versions: the name of a package must not be empty"),
    ],
)
def test_error_for_a_mistake_in_a_known_failure_names_its_number_and_field(
    tmp_path: Path, fields: dict[str, str | None], message: str
) -> None:
    with pytest.raises(Misuse, match=message):
        load(tmp_path, **fields)


@pytest.mark.parametrize("text", ["known_failure = 3", "[[known_failures]]", "not toml"])
def test_file_without_entries_of_known_failures_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "known.toml"
    path.write_text(text)

    with pytest.raises(Misuse, match=r"known failures: .*known\.toml"):
        KnownFailures.load(path)


def test_loading_a_missing_list_of_known_failures_raises_misuse(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="cannot read"):
        KnownFailures.load(tmp_path / "no.toml")

"""The gate rejects a planted defect of each kind, and a search shrinks a defect of each family.

A property that lets a defect pass proves nothing. `python -m studies.kills` judges all defects by the gate.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from equivtest.base import limits
from equivtest.base.profiles import PROFILES
from equivtest.cases.case import Case, defaults_of, fields_of, from_code
from equivtest.cases.names import require_fit, resolve
from equivtest.errors import Misuse
from equivtest.families.collectives.case import CollectivesCase
from equivtest.families.cross_entropy.case import CrossEntropyCase
from equivtest.families.differentiable.case import DifferentiableCase
from equivtest.families.dropout.case import DropoutCase
from equivtest.families.embedding.case import EmbeddingCase
from equivtest.families.linear.case import LinearCase
from equivtest.families.norm.case import NormCase
from equivtest.families.operators.case import OperatorCase
from equivtest.families.operators.chains.case import ChainCase
from equivtest.families.operators.strategy import operator_cases
from equivtest.families.redistribute.case import RedistributeCase
from equivtest.families.training.case import PerceptronCase
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.lifecycle.case import LifecycleCase
from equivtest.programs.case import ModuleCase
from equivtest.property import Property
from equivtest.ranks.pool import Pool
from equivtest.search.chunks import Chunk
from equivtest.search.search import search
from equivtest.verdicts.judging import judge
from tests import gate
from tests.defects.defect import Defect, defects

FAMILIES = {
    "a cache keyed too coarsely",
    "a collective not waited for",
    "a copy left behind",
    "a limit of size",
    "a partial value taken for the whole",
    "a reduction in fewer bits",
    "a reduction missing",
    "a reduction missing in the backward",
    "a term added on every rank",
    "a step left out",
    "a stride ignored",
    "a term missing",
    "one element off by one ulp",
    "operands in fewer bits",
    "a special path for one rank",
    "another dim",
    "another reduction",
    "another root",
    "chance that is none",
    "eps at another place",
    "flags",
    "ids at the edge of a shard",
    "inputs modified",
    "layout of gradients",
    "memory given back too soon",
    "mean of means",
    "memory kept",
    "misfits accepted",
    "other collectives than documented",
    "ranks that diverge",
    "replicas that differ",
    "rounded on its way",
    "shard order",
    "size not a multiple of the world size",
    "special values replaced",
    "state across calls",
    "state across steps",
    "state after a failure",
    "state after a release",
    "uninitialised memory reaches a value",
    "wrong divisor or wrong group",
}
"""The kinds of real bug that the suite is known to find."""


def folder_of(defect: Defect) -> str:
    """The family, or variant of one, in which the defect is written: 'embedding' or 'redistribute_prepared'."""
    return defect.subject.partition(":")[0].split(".")[2]


def each_of(chosen: list[Defect]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("defect", chosen, ids=lambda defect: f"{folder_of(defect)}-{defect.name}")


each_defect = each_of(list(defects()))


def property_of(defect: Defect) -> Property:
    """The shipped property that must reject the defect, about the defect in place of its subject."""
    prop = dataclasses.replace(gate.property_of(defect), subject=defect.subject)
    if type(defect.smallest) is OperatorCase:  # a search would hardly draw this one among some hundred operators
        one = (defect.smallest.operator,)
        return dataclasses.replace(prop, cases=lambda space: operator_cases(space, operators=one))
    return prop


def one_of_each_family() -> list[Defect]:
    """The first defect of each class of cases."""
    return list({type(defect.smallest): defect for defect in reversed(defects())}.values())


def one_of_each_kind() -> list[Defect]:
    """The first defect of each kind of bug, and the first in each folder."""
    kinds = {defect.family: defect for defect in reversed(defects())}
    folders = {folder_of(defect): defect for defect in reversed(defects())}
    return list({defect.name: defect for defect in (*kinds.values(), *folders.values())}.values())


INDICES = range(12)
"""Numbers of searches, each with other draws."""

ASKED_FIRST = {
    "replicas_counted_in_the_norm": 1,
    "smoothing_over_own_classes": 1,
    "bias_of_every_share": 2,
    "parameters_left_out_of_the_recomputation": 2,
    "plain_targets_taken": 2,
    "dim_from_the_end_overlooked": 3,
    "first_two_swapped": 3,
    "stale_whole_after_update": 3,
}
"""Defect -> the search that finds the smallest case soonest; the others run if it does not."""


def audit(defect: Defect, pool: Pool, directory: Path) -> tuple[list[str], dict[str, Any] | None]:
    """Returns other failures in the worlds before, and the failure in the first world that rejects the defect.

    Drawn cases alone must find it, without the property's examples.  For a claim that is judged on few visits,
    each possible case is marked.  The first world is that of the
    case derived by hand.  Shrinking also tries smaller ones, and ends once a case is as small as that one.  If it
    ends in a larger one, from which no single step leads on, searches with other draws run.
    """

    def is_enough(case: Case) -> bool:
        return is_near(case, defect)

    prop, known = marked(property_of(defect), defect.claim), gate.known_of(defect)
    target = (defect.claim, defect.kind)
    others: list[str] = []
    indices = sorted(INDICES, key=lambda index: index != ASKED_FIRST.get(defect.name, 0))
    for world_size, index in itertools.product((defect.smallest.world_size, defect.smallest.world_size + 1), indices):
        chunk = Chunk(world_size, limits.DTYPES, index, 25)
        findings = search(prop, chunk, pool, known, directory, only=target, is_enough=is_enough)
        if findings.failures and (index == indices[-1] or is_near(from_code(findings.failures[0].case), defect)):
            return others, findings.failures[0]
        assert not findings.misuse, f"{folder_of(defect)}: {findings.misuse}"
        others += [f"{claim} {kind}" for record in findings.records for claim, kind in record.verdicts.items()]
    return [text for text in dict.fromkeys(others) if not text.endswith(("holds", "known"))], None


def marked(prop: Property, claim_name: str) -> Property:
    """The property without its examples, each of its cases recorded, repeated or measured as the claim needs it."""
    [flag] = {claim.flag for claim in prop.claims if claim.name == claim_name}

    def mark(case: Case) -> Case:
        fields: dict[str, Any] = {flag: True}
        try:
            return dataclasses.replace(case, **fields)
        except Misuse:  # collectives are documented of some cases alone
            return case

    cases = prop.cases
    return dataclasses.replace(prop, examples=(), cases=lambda space: cases(space).map(mark) if flag else cases(space))


def sizes(case: Case) -> list[int]:
    """Returns the sizes that shrinking reduces."""
    if isinstance(case, LinearCase):
        return [case.world_size, math.prod(case.leading), case.in_features, case.out_features]
    if isinstance(case, PerceptronCase):
        features = [case.in_features, case.hidden_features, case.out_features]
        num_tokens = math.prod(case.batch) // case.num_averaged
        return [case.world_size, num_tokens, *features, case.steps]
    if isinstance(case, EmbeddingCase):
        return [case.world_size, math.prod(case.leading), case.num_embeddings, case.embedding_dim]
    if isinstance(case, NormCase):
        return [case.world_size, math.prod(case.leading), case.features]
    if isinstance(case, ModuleCase):
        return [case.world_size, math.prod(case.arguments.x_shape), case.arguments.largest]
    if isinstance(case, CrossEntropyCase):
        return [case.world_size, case.num_positions, case.num_classes]
    if isinstance(case, DropoutCase | RedistributeCase):
        return [case.world_size, math.prod(case.shape)]
    if isinstance(case, ChainCase):
        return [case.world_size, len(case.steps), *map(math.prod, case.operands)]
    if isinstance(case, OperatorCase):
        return [case.world_size, *map(math.prod, case.operands)]
    if isinstance(case, CollectivesCase):
        return [case.world_size, sum(case.numels), len(case.numels), len(case.collectives)]
    if isinstance(case, DifferentiableCase):
        return [case.world_size, case.numel, len(case.collectives)]
    if isinstance(case, LifecycleCase):
        num_operations, num_parameters = len(case.operations), len(case.parameters)
        return [case.world_size, num_operations, num_parameters, *(math.prod(shape) for shape in case.parameters)]
    if isinstance(case, FetchCase):
        return [case.world_size, len(case.parameters), *(math.prod(shape) for shape in case.parameters)]
    shapes = case.shapes()
    return [case.world_size, *(math.prod(shapes[name]) for name in case.given_names())]


def is_near(case: Case, defect: Defect) -> bool:
    """True if no size of the case differs by more than one from the case derived by hand."""
    return all(abs(a - e) <= 1 for a, e in zip(sizes(case), sizes(defect.smallest), strict=False))


NUM_NEAREST = 3
"""Number of cases of each world size that run before all others: a defect of one world size shows in the others too."""


def nearest_first(cases: list[Case], defect: Defect) -> tuple[list[Case], list[Case]]:
    """Splits the cases: the few that a claim will most likely reject, and all others, also the most likely first.

    A claim will most likely reject a case that has the claim's flag and differs in few fields from the case derived by
    hand. Only the fields that were chosen for the case derived by hand count.
    """
    smallest, defaults = fields_of(defect.smallest), defaults_of(type(defect.smallest))
    [flag] = {claim.flag for claim in gate.property_of(defect).claims if claim.name == defect.claim}

    def distance(case: Case) -> tuple[bool, int]:
        fields = fields_of(case)
        differ = (fields.get(name) != value for name, value in smallest.items() if value != defaults[name])
        return bool(flag) and not fields[flag], sum(differ)

    ordered = sorted(cases, key=distance)
    nearest = [case for case in ordered[:NUM_NEAREST] if not distance(case)[0]]
    return nearest, ordered[len(nearest) :]


@pytest.mark.ranks
@each_of(one_of_each_kind())
def test_gate_rejects_a_defect_of_each_kind(defect: Defect, pool: Pool) -> None:
    sizes = sorted(limits.WORLD_SIZES, key=lambda size: size != defect.smallest.world_size)
    for part, world_size in itertools.product((0, 1), sizes):
        cases = gate.cases_for(defect, PROFILES["gate"], pool, (world_size,))
        if gate.first_rejection(defect, nearest_first(cases, defect)[part], pool):
            return

    pytest.fail(f"{folder_of(defect)}: no claim fails in a case of the gate")


@pytest.mark.ranks
@each_of(one_of_each_family())
def test_search_rejects_a_defect_of_each_family_and_shrinks_it_to_a_smallest_case(
    defect: Defect, pool: Pool, tmp_path: Path
) -> None:
    others, failure = audit(defect, pool, tmp_path)

    assert failure is not None, f"{folder_of(defect)}: found only {others}"
    assert is_near(from_code(failure.case), defect), f"{folder_of(defect)}: {failure.case}: {defect.why}"


@pytest.mark.ranks
@each_defect
def test_recorded_claim_of_each_defect_fails_in_the_case_derived_by_hand(defect: Defect, pool: Pool) -> None:
    verdicts = judge(defect.subject, defect.smallest, pool, property_of(defect).claims)

    failed = {(verdict.claim, verdict.kind) for verdict in verdicts}
    assert (defect.claim, defect.kind) in failed, folder_of(defect)


@pytest.mark.ranks
@each_defect
def test_real_subject_is_right_in_the_case_derived_by_hand(defect: Defect, pool: Pool) -> None:
    """Every claim holds there, except for torch's known failures."""
    verdicts = judge(defect.replaces, defect.smallest, pool, property_of(defect).claims)

    wrong = [v for v in verdicts if v.kind != "holds" and not gate.KNOWN.match(v.subject, v.claim, v.case, v.kind)]
    assert not wrong, folder_of(defect)
    assert any(v.claim == defect.claim and v.kind == "holds" for v in verdicts), folder_of(defect)


def test_every_family_of_bugs_has_a_planted_defect() -> None:
    assert {defect.family for defect in defects()} == FAMILIES


@each_defect
def test_each_defect_is_a_subject_with_a_docstring(defect: Defect) -> None:
    subject = resolve(defect.subject)

    assert subject.__doc__, folder_of(defect)
    require_fit(subject, defect.smallest)
    with pytest.raises(Misuse, match="the subject takes a"):
        require_fit(subject, next(other for other in OTHERS if not isinstance(defect.smallest, type(other))))


OTHERS = (LinearCase(world_size=1, style="rowwise"), FetchCase(world_size=1, parameters=((1,),)))


def test_names_of_defects_are_unique() -> None:
    assert len({defect.name for defect in defects()}) == len(defects())


def test_defects_that_the_test_of_defects_searches_first_exist() -> None:
    assert ASKED_FIRST.keys() <= {defect.name for defect in defects()}
    assert set(ASKED_FIRST.values()) <= set(INDICES)

"""Defines the items that pytest runs: searches, audits, known failures, and reports of items that cannot run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from equivtest.base.profiles import AUDIT_LABEL, Part
from equivtest.errors import BrokenSetup, Misuse
from equivtest.pytest_plugin.costs import weight_in_budget
from equivtest.pytest_plugin.options import settings_of, soak_seed
from equivtest.pytest_plugin.pools import gloo_of, pool_of, take_faults
from equivtest.pytest_plugin.resume import BUDGET_OVER, earlier_endings, ending_of, imported_code
from equivtest.pytest_plugin.settings import Settings
from equivtest.report.folder import FAILURES
from equivtest.report.handover import (
    HOLDS_HERE,
    NO_LONGER,
    NOT_RUN,
    NOT_SUPPORTED,
    OPEN,
    OTHERWISE,
    STILL_FAILS,
    Failure,
    Handover,
    Listed,
    Record,
    Searched,
    listed_of,
)
from equivtest.search.known import KnownFailure, known_state
from equivtest.verdicts.verdict import CONCLUSIVE, FAILING, WHOLE_RUN, Verdict

if TYPE_CHECKING:
    from equivtest.property import Property
    from equivtest.search.search import Findings

_started_key = pytest.StashKey[float]()

FAILURES_DIR = Path(".equivtest") / FAILURES
"""Folder of replay files, relative to the folder in which pytest was started, for a run without --report."""


class PlainFailure(Exception):
    """A failure that pytest shows as its text alone, without a traceback."""


class EquivtestItem(pytest.Item):
    """An item that sends the data in `handover` to the controller with the report of the item's call."""

    ends_session = False
    """True if a Misuse in this item concerns every item, so that the session must end."""

    line: int | None = None
    """Line of the property in its file, counted from 0 like pytest's."""

    def __init__(self, *, name: str, parent: pytest.Collector, nodeid: str = "", **kwargs: Any) -> None:
        # As text, which pytest 9.2 divides into name and parameters; --lf compares that with the id of the report.
        super().__init__(name=name, parent=parent, nodeid=nodeid or f"{parent.nodeid}::{name}", **kwargs)
        self.handover = Handover()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any, **kwargs: Any) -> Any:
        if isinstance(excinfo.value, PlainFailure | pytest.xfail.Exception):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *args, **kwargs)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, self.line, self.name

    def hand_over(self, **fields: Any) -> None:
        self.handover = msgspec.structs.replace(self.handover, **fields)

    def runtest(self) -> None:
        """Performs the item, which also fails if a probe of the backend found a wrong collective in the meantime."""
        try:
            self._perform_or_explain()
        except (PlainFailure, pytest.skip.Exception, pytest.xfail.Exception, pytest.fail.Exception) as ended:
            self._fail_on_faults(str(ended))
            raise
        self._fail_on_faults("")

    def _fail_on_faults(self, also: str) -> None:
        if faults := take_faults(self.config):
            self.hand_over(faults=faults)
            raise PlainFailure("\n".join([*(fault.text for fault in faults), also]).rstrip()) from None

    def _perform_or_explain(self) -> None:
        """Performs the item, and reports a Misuse or a BrokenSetup as one line.

        The session ends at a BrokenSetup, and at a Misuse that concerns every item.
        """
        from equivtest.verdicts.judging import one_thread

        try:
            with one_thread():
                self.perform()
        except (Misuse, BrokenSetup) as error:
            message = f"{type(error).__name__}: {error}"
            if isinstance(error, BrokenSetup) or self.ends_session:
                self.handover = Handover(fatal=message)
            else:
                self.hand_over(misuse=message)
            raise PlainFailure(message) from None

    @property
    def time_left_s(self) -> float:
        """Seconds of the time budget that are left, or infinity.  The budget begins with this process's first item."""
        budget_s = settings_of(self.config).budget_s
        started_s = self.config.stash.setdefault(_started_key, time.monotonic())
        return budget_s - (time.monotonic() - started_s) if budget_s else math.inf

    def perform(self) -> None:
        """Does the work of this kind of item, and adds the results to `handover`."""
        raise NotImplementedError


class PropertyItem(EquivtestItem):
    """An item about one property.  The report lists only properties that have such an item."""

    label: str
    """Text in brackets in the item's node id, such as 'audit'."""

    def __init__(self, *, prop: Property, property_name: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.prop, self.property_name = prop, property_name
        self.extra_keyword_matches.update(claim.name for claim in prop.claims)

    @property
    def property_id(self) -> tuple[str, str]:
        """(path of the property's file, name of the property)."""
        return self.nodeid.partition("::")[0], self.property_name

    @property
    def listed(self) -> Listed:
        """Description of the property, with the labels of all its items in the session."""
        items = [item for item in self.session.items if isinstance(item, PropertyItem)]
        path, name = self.property_id
        return listed_of(
            self.prop,
            path=path,
            name=name,
            planned=tuple(item.label for item in items if item.property_id == self.property_id),
            has_audit=settings_of(self.config).audits_property(self.prop),
            line=self.line,
        )

    def hand_over_findings(self, **found: Any) -> Searched:
        start = pool_of(self.config).start
        searched = Searched(listed=self.listed, label=self.label, start=start, **found)
        self.hand_over(searched=searched, code=self._code())
        return searched

    def _code(self) -> dict[str, str]:
        has_report = settings_of(self.config).report_dir is not None
        return imported_code(self.config, self.prop.subject) if has_report else {}

    def perform(self) -> None:
        """Judges the property, then passes, fails or skips according to the verdicts.

        If an interrupted run is resumed and has the verdicts of this item, nothing is judged again.
        """
        self._code()  # before the search, during which a file may change
        ending = earlier_endings(self.config).get(self.nodeid) or ending_of(self.judge())
        if ending.outcome == "failed":
            raise PlainFailure(ending.text)
        if ending.outcome == "skipped":
            pytest.skip(ending.text)

    def judge(self) -> Searched:
        """Judges the property, adds the results to `handover`, and returns them."""
        raise NotImplementedError


class SearchItem(PropertyItem):
    """One search: some of a property's cases, all on one world size."""

    def __init__(self, *, part: Part, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.part, self.label = part, part.label

    def judge(self) -> Searched:
        if self.time_left_s <= 0:
            return self.hand_over_findings(unbegun=True)
        records: list[Record] = []
        failures: list[Failure] = []
        cut = 0
        for findings in self._searches(settings_of(self.config)):
            records += findings.records
            failures += findings.failures
            cut += findings.cut
            searched = self.hand_over_findings(
                records=tuple(records),
                failures=tuple(failures),
                left_out=dict(findings.left_out),
                coverage=findings.coverage,
                cut=cut,
            )
            if findings.misuse:
                raise Misuse(findings.misuse)
        return searched

    def _searches(self, settings: Settings) -> Iterator[Findings]:
        """Yields the findings of this search.  A soak repeats the search with fresh seeds until its time is over."""
        from equivtest.search.chunks import chunk_of
        from equivtest.search.search import search

        part, world_sizes = self.part, self.prop.among(settings.world_sizes)
        until_s = time.monotonic() + settings.max_time_s * _workers(self.config) * self._share()
        for seed in seeds(self.config, settings):
            chunk = chunk_of(part, settings.dtypes, seed, world_sizes, is_limited=settings.is_limited)
            yield search(
                self.prop,
                chunk,
                pool_of(self.config),
                settings.known,
                failures_dir(self.config),
                until_s=self._until_s(),
                gloo=gloo_of(self.config),
            )
            if not settings.profile.repeats or time.monotonic() > until_s:
                return

    def _until_s(self) -> float:
        """Time, as time.monotonic() gives it, after which the search begins no further case, or infinity.

        The search has a share of the time that is left, by its weight among the searches that come after it.
        """
        left_s = self.time_left_s
        if left_s == math.inf:
            return math.inf
        searches = [item for item in self.session.items if isinstance(item, SearchItem)]
        weights = [weight_in_budget(item.nodeid, item.part.world_size) for item in searches[searches.index(self) :]]
        return time.monotonic() + left_s * min(1.0, _workers(self.config) * weights[0] / sum(weights))

    def _share(self) -> float:
        """Returns this item's fraction of a soak's time, so that a soak keeps the proportions of other profiles."""
        searches = [item.part for item in self.session.items if isinstance(item, SearchItem)]
        return self.part.cost / sum(part.cost for part in searches)


class AuditItem(PropertyItem):
    """An audit of a property.  It fails if the property's claims hold no matter which collective the audit spoils."""

    label = AUDIT_LABEL

    def judge(self) -> Searched:
        from equivtest.search.audit import audit

        settings = settings_of(self.config)
        if self.time_left_s <= 0:
            self.hand_over_findings()
            pytest.skip(BUDGET_OVER)
        found = audit(
            self.prop,
            pool_of(self.config),
            settings.known,
            self.prop.among(settings.world_sizes),
            settings.dtypes,
            is_first_look=settings.profile.is_first_look,
            is_thorough=settings.profile.audits_alone,
        )
        searched = self.hand_over_findings(audit=found.as_data(self.property_name))
        if found.problem or (found.waits and settings.profile.audits_alone):
            raise Misuse(found.problem or found.waits)
        return searched


class KnownFailureItem(EquivtestItem):
    """Runs the smallest case of a known failure, which must still fail as its entry says.

    On other backends than gloo and the CPU the case of a shipped entry may also hold.
    """

    def __init__(self, *, prop: Property, entry: KnownFailure, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.prop, self.entry = prop, entry

    def perform(self) -> None:
        entry = self.entry
        if self.time_left_s <= 0:
            pytest.skip(BUDGET_OVER)
        state, ended = self._try()
        self.hand_over(known=known_state(entry, state))
        if ended is not None:
            raise ended

    def _try(self) -> tuple[str, BaseException | None]:
        """Runs the entry's case.  Returns its state as text, and the exception to raise if the item does not pass."""
        from equivtest.search.planned import has_case
        from equivtest.verdicts.judging import judge

        entry = self.entry
        settings = settings_of(self.config)
        if not has_case(settings.world_sizes, settings.dtypes, entry.case, is_limited=settings.is_limited):
            return NOT_RUN, pytest.skip.Exception(f"{entry.case!r} is outside --world-sizes or --dtypes")
        claims = [claim for claim in self.prop.claims if claim.name == entry.claim]
        found = judge(
            entry.subject,
            entry.case,
            pool_of(self.config),
            claims,
            limit_s=self.prop.limit_s,
            may_raise=entry.kind == "raised",
        )
        kinds = {verdict.kind for verdict in found}
        difference = self._difference_from_gloo(found) if entry.kind in kinds else ""
        if entry.kind in kinds and not difference:
            return STILL_FAILS, pytest.xfail.Exception(f"{entry.reason} {entry.link}".strip())
        if kinds == {"not_supported"}:
            return NOT_SUPPORTED, pytest.skip.Exception("not supported by this backend")
        if not kinds.intersection(CONCLUSIVE):
            reason = f"no conclusive verdict: {', '.join(sorted(kinds)) or 'none at all'}"
            return OPEN, pytest.skip.Exception(reason)
        if failing := sorted(kinds.intersection(FAILING)):
            known = settings.known if settings.expects(entry) else settings.known.own
            others = [known.match(entry.subject, entry.claim, entry.case, kind) for kind in failing]
            if others[0] is not None and all(others):  # an entry says how it fails on this backend
                return OTHERWISE, pytest.xfail.Exception(others[0].reason)
            way_out = (
                f"correct the entry {entry.id}"
                if settings.expects(entry)
                else f"{entry.id} describes gloo on the CPU: add an entry for this failure to a list of your own, "
                "--known-failures shipped,FILE"
            )
            unlike = difference or f"not with {entry.kind!r}"
            reason = f"fails with {', '.join(map(repr, failing))}, {unlike}: {way_out}"
            return OTHERWISE, PlainFailure(reason)
        if not settings.expects(entry):
            return HOLDS_HERE, None
        return NO_LONGER, PlainFailure(
            f"no longer fails: remove the entry {entry.id}, or make it stricter\n"
            f"  claim     {entry.claim} ({entry.kind})\n  case      {entry.case!r}\n  reason    {entry.reason}"
        )

    def _difference_from_gloo(self, found: Sequence[Verdict]) -> str:
        """Returns how the failure of a shipped entry's case differs from the failure on gloo and the CPU, or ''.

        If ranks are silent or lost, the result is '', because then there is no wrong tensor to compare.
        """
        from equivtest.search.differential import compare_with_gloo

        gloo = gloo_of(self.config)
        if gloo is None or not self.entry.is_shipped or self.entry.kind in WHOLE_RUN:
            return ""
        try:
            compared = compare_with_gloo(found, self.prop.claims, gloo())
        except (Misuse, BrokenSetup) as error:
            return f"and gloo on the CPU cannot run the case to compare ({error})"
        return "but in another place than gloo on the CPU" if any(each.failed for each in compared) else ""


class AbsentItem(EquivtestItem):
    """Replaces all items of a property that is incomplete or whose subject is not installed."""

    def __init__(self, *, reason: str, incomplete: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reason, self.incomplete = reason, incomplete

    def perform(self) -> None:
        self.hand_over(absent=self.reason, incomplete=self.incomplete)
        pytest.skip(f"not run: {self.reason}")


class MisuseItem(EquivtestItem):
    """The only item of an xdist worker whose options have a mistake. The item reports the mistake."""

    ends_session = True

    def __init__(self, *, message: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.message = message

    def perform(self) -> None:
        raise Misuse(self.message)


def failures_dir(config: pytest.Config) -> Path:
    report_dir = settings_of(config).report_dir
    return report_dir / FAILURES if report_dir else config.invocation_params.dir / FAILURES_DIR


def seeds(config: pytest.Config, settings: Settings) -> Iterator[str]:
    """Yields the seeds of one item's searches: endless fresh seeds in a soak, only 'gate' in any other run."""
    if not settings.profile.repeats:
        yield "gate"
        return
    count = 0
    while True:
        yield f"{soak_seed(config)}-{count}"
        count += 1


def _workers(config: pytest.Config) -> int:
    return int(getattr(config, "workerinput", {}).get("workercount", 1))

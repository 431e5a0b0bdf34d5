"""What pytest runs: a search of a property, a known failure, or what stands for items that cannot be run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from equivtest.errors import BrokenSetup, Misuse
from equivtest.known import KnownFailure
from equivtest.options import settings_of, soak_seed
from equivtest.pools import pool_of, take_faults
from equivtest.profiles import AUDIT_LABEL, Part
from equivtest.report.folder import FAILURES
from equivtest.report.tally import CONCLUSIVE, FAILING
from equivtest.settings import Settings

if TYPE_CHECKING:
    from equivtest.property import Property
    from equivtest.search import Findings

FAILURES_DIR = Path(".equivtest") / FAILURES
"""Where replay files go, below the folder that pytest was started in, or below --report."""


class Short(Exception):
    """A failure whose text is all there is to show."""


class EquivtestItem(pytest.Item):
    """An item that reports plain data: `payload` travels with the report of its call."""

    payload: dict[str, Any]
    ends_session = False
    """Whether a Misuse concerns every item."""

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any, **kwargs: Any) -> Any:
        if isinstance(excinfo.value, Short):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *args, **kwargs)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name

    def runtest(self) -> None:
        """Runs the item; it fails, too, where a probe on its way has found the backend wrong."""
        try:
            self._judge_or_explain()
        except (Short, pytest.skip.Exception, pytest.xfail.Exception, pytest.fail.Exception) as ended:
            self._fail_on_faults(str(ended))
            raise
        self._fail_on_faults("")

    def _fail_on_faults(self, also: str) -> None:
        if faults := take_faults(self.config):
            self.payload |= {"faults": faults}
            raise Short("\n".join([*(fault["text"] for fault in faults), also]).rstrip()) from None

    def _judge_or_explain(self) -> None:
        """Judges; what makes every further item pointless ends the session, a mistake in a property does not."""
        try:
            self.judge()
        except (Misuse, BrokenSetup) as error:
            message = f"{type(error).__name__}: {error}"
            ends = isinstance(error, BrokenSetup) or self.ends_session
            self.payload = {"fatal": message} if ends else self.payload | {"misuse": message}  # what was found is kept
            raise Short(message) from None

    def judge(self) -> None:
        """Does what the item is for, and sets `payload`."""
        raise NotImplementedError


class PropertyItem(EquivtestItem):
    """An item about one property, without which nothing is said of its claims."""

    label: str
    """What stands in brackets in its name."""

    def __init__(self, *, prop: Property, property_name: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.prop, self.property_name = prop, property_name
        self.payload = {}

    @property
    def meta(self) -> dict[str, Any]:
        """What the controller has to know of the property, as plain data."""
        return {
            "path": self.nodeid.partition("::")[0],
            "name": self.property_name,
            "subject": self.prop.subject,
            "statement": self.prop.statement,
            "source": self.prop.source,
            "claims": [claim.name for claim in self.prop.claims],
            "of_any_dtype": [claim.name for claim in self.prop.claims if not claim.by_dtype],
            "conclusive_dtypes": list(self.prop.conclusive_dtypes),
            "conclusive_shards": list(self.prop.conclusive_shards),
            "shards": self.prop.shards,
            "has_audit": settings_of(self.config).audits_property(self.prop),
        }


class SearchItem(PropertyItem):
    """One search of a property: a part of its cases, on one world size."""

    def __init__(self, *, part: Part, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.part, self.label = part, part.label

    def judge(self) -> None:
        settings = settings_of(self.config)
        records: list[dict[str, Any]] = []
        failures: list[dict[str, Any]] = []
        for findings in self._searches(settings):
            records += findings.records
            failures += findings.failures
            left_out = list(findings.left_out)
            self.payload = {
                "property": self.meta,
                "part": dataclasses.asdict(self.part) | {"label": self.part.label},
                "records": records,
                "failures": failures,
                "left_out": left_out,
                "start": pool_of(self.config).start,
            }
            if findings.misuse:
                raise Misuse(findings.misuse)
        kinds = {kind for record in records for kind in record["verdicts"].values()}
        if failures or kinds & FAILING:
            found = dict.fromkeys(f"{failure['claim']}: {failure['kind']}" for failure in failures)
            raise Short("\n".join(found) or "a claim does not hold")
        if not records:
            where = f", none can be in {', '.join(left_out)}" if left_out else ""
            pytest.skip(f"not run: no case was judged{where}")
        if not kinds & CONCLUSIVE:
            pytest.skip(f"no conclusive verdict: {', '.join(sorted(kinds))}")

    def _searches(self, settings: Settings) -> Iterator[Findings]:
        """One search; in a soak, searches with fresh seeds for this item's share of the time."""
        from equivtest.chunks import Chunk
        from equivtest.search import search

        part = self.part
        until_s = time.monotonic() + settings.max_time_s * _workers(self.config) * self._share()
        for seed in seeds(self.config, settings):
            chunk = Chunk(
                part.world_size, settings.dtypes, part.index, part.num_cases, seed, part.per_cell, settings.world_sizes
            )
            yield search(self.prop, chunk, pool_of(self.config), settings.known, failures_dir(self.config))
            if not settings.profile.repeats or time.monotonic() > until_s:
                return

    def _share(self) -> float:
        """The part of a soak's time that is this item's: as much as its cases cost once, beside all others'.

        So a soak keeps the proportions of the other profiles, however long it lasts.
        """
        searches = [item.part for item in self.session.items if isinstance(item, SearchItem)]
        return self.part.cost / sum(part.cost for part in searches)


class AuditItem(PropertyItem):
    """Whether the property's claims see its collectives: without it a green might be one that nothing turns red."""

    label = AUDIT_LABEL

    def judge(self) -> None:
        from equivtest.audit import audit

        settings = settings_of(self.config)
        found = audit(
            self.prop,
            pool_of(self.config),
            settings.known,
            settings.world_sizes,
            settings.dtypes,
            is_thorough=settings.profile.audits_alone,
        )
        self.payload = {
            "property": self.meta,
            "part": {"label": self.label},
            "start": pool_of(self.config).start,
            "records": [],
            "failures": [],
            "audit": found.as_data(),
        }
        if found.problem:
            raise Misuse(found.problem)
        if not found.cases:
            pytest.skip("not audited: the property held in no case on several ranks that was tried")


class KnownFailureItem(EquivtestItem):
    """The smallest case of a known failure: it must still fail as the entry says, where that was seen."""

    def __init__(self, *, prop: Property, entry: KnownFailure, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.prop, self.entry = prop, entry
        self.payload = {}

    def judge(self) -> None:
        from equivtest.check import judge

        entry = self.entry
        settings = settings_of(self.config)
        if entry.case.world_size not in settings.world_sizes or not entry.case.is_within(settings.dtypes):
            self._end("not run", pytest.skip, f"{entry.case!r} is outside --world-sizes or --dtypes")
        claims = [claim for claim in self.prop.claims if claim.name == entry.claim]
        verdicts = judge(entry.subject, entry.case, pool_of(self.config), claims)
        kinds = {verdict.kind for verdict in verdicts}
        if entry.kind in kinds:
            self._end("still fails", pytest.xfail, f"{entry.reason} {entry.link}".strip())
        if kinds == {"not_supported"}:
            self._end("not supported", pytest.skip, "not supported by this backend")
        if not kinds & CONCLUSIVE:
            self._end("open", pytest.skip, f"no conclusive verdict: {', '.join(sorted(kinds)) or 'none at all'}")
        if kinds & FAILING:
            found = ", ".join(sorted(kinds & FAILING))
            self._end("fails otherwise", _fail, f"fails as {found}, not as {entry.kind}: correct the entry {entry.id}")
        if not settings.expects(entry):
            self._tell("holds on this backend")
            return
        self._end(
            "no longer fails",
            _fail,
            f"no longer fails: remove the entry {entry.id}, or make it stricter\n"
            f"  claim     {entry.claim} ({entry.kind})\n  case      {entry.case!r}\n  reason    {entry.reason}",
        )

    def _end(self, state: str, end: Callable[[str], Any], reason: str) -> NoReturn:
        self._tell(state)
        end(reason)
        raise AssertionError(f"{end} must raise")

    def _tell(self, state: str) -> None:
        entry = self.entry
        self.payload = {
            "known": {
                "id": entry.id, "subject": entry.subject, "claim": entry.claim, "kind": entry.kind,
                "case": repr(entry.case), "reason": entry.reason, "link": entry.link, "state": state,
            }
        }  # fmt: skip


class AbsentItem(EquivtestItem):
    """Stands for every item of a property whose subject needs what is not installed."""

    def __init__(self, *, reason: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reason = reason
        self.payload = {}

    def judge(self) -> None:
        self.payload = {"absent": self.reason}
        pytest.skip(f"not run: {self.reason}")


class MisuseItem(EquivtestItem):
    """Stands for every item where an xdist worker finds that the options make no sense."""

    ends_session = True

    def __init__(self, *, message: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.message = message
        self.payload = {}

    def judge(self) -> None:
        raise Misuse(self.message)


def failures_dir(config: pytest.Config) -> Path:
    """Where this run's replay files go."""
    report_dir = settings_of(config).report_dir
    return report_dir / FAILURES if report_dir else config.invocation_params.dir / FAILURES_DIR


def seeds(config: pytest.Config, settings: Settings) -> Iterator[str]:
    """The seed texts of one item's searches: one fixed, or in a soak as many as asked."""
    if not settings.profile.repeats:
        yield "gate"
        return
    count = 0
    while True:
        yield f"{soak_seed(config)}-{count}"
        count += 1


def _workers(config: pytest.Config) -> int:
    return int(getattr(config, "workerinput", {}).get("workercount", 1))


def _fail(message: str) -> NoReturn:
    raise Short(message)

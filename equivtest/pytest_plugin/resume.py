"""Copies the verdicts of an interrupted run if this run has the same code, settings and versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import pytest
from msgspec.structs import replace

from equivtest.base.users_code import digest_of, imported_files, is_users
from equivtest.errors import Misuse, shorten
from equivtest.pytest_plugin.pools import code_of_ranks
from equivtest.report.audits import WAITS
from equivtest.report.handover import Handover, Searched
from equivtest.report.log import read_begun
from equivtest.verdicts.verdict import CONCLUSIVE, FAILING

SAME = (
    "equivtest", "equivtest_commit", "folder_commit", "torch", "hypothesis", "python", "platform", "cpu",
    "accelerators", "poison", "backend", "device", "imports", "releases_of_imports", "arithmetic", "declared",
    "allow_unsupported", "profile", "seeds", "world_sizes", "dtypes", "subjects", "known_failures", "audit", "shard",
    "own_lists", "suite_digest", "rootdir", "folder", "python_path",
)  # fmt: skip
"""Fields of environment.json that must be equal in the interrupted run and in this run."""
BUDGET_OVER = "left out: the budget is over"


class Ending(NamedTuple):
    outcome: Literal["passed", "failed", "skipped"]
    text: str = ""


endings_key = pytest.StashKey[Mapping[str, Ending]]()
"""Node id of a search or an audit -> how it ended in the interrupted run."""
code_key = pytest.StashKey[dict[str, str]]()


def key_of(searched: Searched) -> str:
    return f"{searched.listed.id}[{searched.label}]"


def take(directory: Path, environment: Mapping[str, Any]) -> tuple[Handover, ...]:
    """Returns the results of the searches and audits of an interrupted run that need not run again.

    A search with a failure runs again, because its replay file belongs to the new report.

    Raises:
        Misuse: the folder has no log, or code, settings or versions differ.
    """
    run = read_begun(directory)
    current = msgspec.json.decode(msgspec.json.encode(environment))
    for name in SAME:
        if run.environment.get(name) != current.get(name):
            before, now = (shorten(str(each.get(name, "nothing"))) for each in (run.environment, current))
            raise Misuse(_refusal(directory, f"was judged with {name} {before}, but this run has {now}"))
    found = tuple(each for each in run.handovers if _is_done(each))
    for file, digest in dict.fromkeys(item for each in found for item in each.code.items()):
        if digest_of(file) != digest:
            raise Misuse(_refusal(directory, f"was judged before {file} changed"))
    return tuple(_without_plan(each) for each in found)


def _without_plan(handover: Handover) -> Handover:
    """Removes the list of planned searches from an item's data, since this run may select other searches."""
    found = handover.searched
    assert found is not None
    return replace(handover, searched=replace(found, listed=replace(found.listed, planned=())))


def _refusal(directory: Path, why: str) -> str:
    return f"--resume: {shorten(str(directory))} {why}: run without --resume"


def _is_done(handover: Handover) -> bool:
    found = handover.searched
    if found is None or handover.misuse or handover.faults:
        return False
    return not (found.failures or found.cut or found.unbegun)


def endings_of(handovers: Iterable[Handover]) -> dict[str, Ending]:
    return {key_of(each.searched): ending_of(each.searched) for each in handovers if each.searched is not None}


def earlier_endings(config: pytest.Config) -> Mapping[str, Ending]:
    """Returns, by node id, how each item ended in the interrupted run that this run resumes.

    In this run the same items end in the same way without a search.  Under xdist the controller sends the endings to
    each worker.
    """
    if endings_key not in config.stash:
        sent = getattr(config, "workerinput", {}).get("equivtest_endings", "{}")
        config.stash[endings_key] = msgspec.json.decode(sent, type=dict[str, Ending])
    return config.stash[endings_key]


def ending_of(found: Searched) -> Ending:
    if found.audit is not None:
        if found.audit.waits:
            return Ending("skipped", WAITS)
        why = "not audited: the property held in no case on several ranks that was tried"
        return Ending("passed") if found.audit.cases else Ending("skipped", why)
    kinds = {kind for record in found.records for kind in record.verdicts.values()}
    if found.failures or kinds.intersection(FAILING):
        claims = dict.fromkeys(f"{failure.claim}: {failure.kind}" for failure in found.failures)
        return Ending("failed", "\n".join(claims) or "a claim does not hold")
    if not found.records and (found.cut or found.unbegun):
        return Ending("skipped", BUDGET_OVER)
    if not found.records:
        where = f", since none can be judged in {', '.join(found.left_out)}" if found.left_out else ""
        return Ending("skipped", f"not run: no case was judged{where}")
    if not kinds.intersection(CONCLUSIVE):
        return Ending("skipped", f"no conclusive verdict: {', '.join(sorted(kinds))}")
    return Ending("passed")


def imported_code(config: pytest.Config, subject: str) -> dict[str, str]:
    """Returns path -> digest of the subject's file and of your files that this process or its ranks imported.

    Each digest is from the first call in the session, because imported code stays the same even if its file changes
    later.
    """
    found = config.stash.setdefault(code_key, {})
    found |= {file: digest for file, digest in code_of_ranks(config).items() if file not in found}
    files = (*imported_files(), *filter(is_users, [_file_of(subject)]))
    found |= {file: digest_of(file) for file in files if file not in found}
    return dict(found)


def _file_of(subject: str) -> str:
    """Returns the file of a subject 'package.module:function', which only the ranks import, or ''."""
    module, colon, _ = subject.partition(":")
    try:
        spec = find_spec(module) if colon else None
    except (ImportError, ValueError):  # the ranks say so
        return ""
    return (spec.origin or "") if spec is not None else ""

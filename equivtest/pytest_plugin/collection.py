"""Collects pytest items for every property of a test file, and orders the items of a session."""

from __future__ import annotations

import ast
import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from equivtest.errors import Misuse
from equivtest.pytest_plugin.costs import order_in_budget
from equivtest.pytest_plugin.items import (
    AbsentItem,
    AuditItem,
    EquivtestItem,
    KnownFailureItem,
    MisuseItem,
    PropertyItem,
    SearchItem,
)
from equivtest.pytest_plugin.options import settings_of
from equivtest.pytest_plugin.settings import check_subjects
from equivtest.pytest_plugin.shards import selection_key
from equivtest.pytest_plugin.suite import is_shipped
from equivtest.report.handover import Manifest

if TYPE_CHECKING:
    from equivtest.property import Property

properties_key = pytest.StashKey[dict[str, tuple[str, str]]]()
"""Node id -> (name, subject) of every property in the collected files, judged or not."""


def collect_property(collector: pytest.Module, name: str, prop: Property) -> list[pytest.Item]:
    items = _items_of(collector, name, prop)
    for item in items:
        if isinstance(item, EquivtestItem):
            item.line = _lines_of(collector.path).get(name)
    return items


@functools.lru_cache(maxsize=1)
def _lines_of(path: Path) -> dict[str, int]:
    """Returns name -> line, counted from 0, of each assignment at the top level of a file."""
    statements = ast.parse(path.read_bytes()).body
    found: dict[str, int] = {}
    for each in statements:
        targets = (
            each.targets if isinstance(each, ast.Assign) else [each.target] if isinstance(each, ast.AnnAssign) else []
        )
        found |= {target.id: each.lineno - 1 for target in targets if isinstance(target, ast.Name)}
    return found


def _items_of(collector: pytest.Module, name: str, prop: Property) -> list[pytest.Item]:
    """Returns the items of a property, or [] if --subjects leaves the property out."""
    from equivtest.search.planned import parts_of, profile_for

    settings = settings_of(collector.config)
    seen = collector.config.stash.setdefault(properties_key, {})
    seen[f"{collector.nodeid}::{name}"] = (name, prop.subject)
    subject = settings.judged_subject(name, prop)
    if subject is None:
        return []
    if prop.absent:
        return [AbsentItem.from_parent(collector, name=f"{name}[absent]", reason=prop.absent)]
    if prop.incomplete and settings.profile.repeats and not settings.subjects:
        reason = f"{name} is left out: {prop.incomplete}; --subjects {name} runs it"
        return [AbsentItem.from_parent(collector, name=f"{name}[left out]", reason=reason, incomplete=True)]
    prop = dataclasses.replace(prop, subject=subject)
    world_sizes = prop.among(settings.world_sizes)
    items: list[pytest.Item] = []
    if others := [size for size in settings.world_sizes if size not in world_sizes]:
        on, off = (", ".join(map(str, sizes)) for sizes in (prop.world_sizes, others))
        reason = f"{name} runs only on {on} ranks, so not on {off}"
        item_name = f"{name}[left out on {off}]"
        items.append(AbsentItem.from_parent(collector, name=item_name, reason=reason, incomplete=True))
    profile = profile_for(prop, settings.profile, settings.subjects)
    items += [
        SearchItem.from_parent(collector, name=f"{name}[{part.label}]", prop=prop, property_name=name, part=part)
        for part in parts_of(prop, profile, world_sizes, settings.pinned_sizes(prop))
    ]
    if settings.audits_property(prop):
        items.append(AuditItem.from_parent(collector, name=f"{name}[audit]", prop=prop, property_name=name))
    if settings.profile.audits_alone:
        return items
    claims = {claim.name for claim in prop.claims}
    shipped = is_shipped(collector.path)
    for entry in settings.known.of(subject):
        if entry.claim in claims and (shipped or not entry.is_shipped):
            item_name = f"{name}[known-{entry.number}]"
            items.append(
                KnownFailureItem.from_parent(collector, name=item_name, nodeid=entry.id, prop=prop, entry=entry)
            )
    return items


def arrange(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Sorts equivtest's items by world size, behind all other items, so that each process keeps few ranks alive.

    If there is a time budget, searches come before all other items, in the order of `order_in_budget`.

    Raises:
        UsageError: --subjects names no property. Under xdist an item reports this mistake, because only reports
            of items reach the controller.
    """
    seen = session.config.stash.get(properties_key, {})
    if not seen:
        return
    try:
        check_subjects(settings_of(session.config), seen.values())
    except Misuse as error:
        if not hasattr(session.config, "workerinput"):
            raise pytest.UsageError(f"equivtest: {error}") from None
        items[:] = [MisuseItem.from_parent(session, name="options", message=str(error))]
        return
    others = [item for item in items if not isinstance(item, KnownFailureItem | PropertyItem)]
    known = {item.nodeid: item for item in items if isinstance(item, KnownFailureItem)}
    of_properties = [item for item in items if isinstance(item, PropertyItem)]
    ordered = sorted([*known.values(), *of_properties], key=_world_size)
    if settings_of(session.config).budget_s:
        searches = [item for item in ordered if isinstance(item, SearchItem)]
        searches.sort(key=lambda item: order_in_budget(item.nodeid, item.part.world_size))
        ordered = [*searches, *(item for item in ordered if not isinstance(item, SearchItem))]
    items[:] = [*others, *ordered]


def manifest(session: pytest.Session) -> Manifest:
    firsts: dict[tuple[str, str], PropertyItem] = {}
    for item in session.items:
        if isinstance(item, PropertyItem):
            firsts.setdefault(item.property_id, item)
    properties = tuple(item.listed for item in firsts.values())
    return Manifest(properties=properties, selection=session.config.stash.get(selection_key, ""))


def _world_size(item: pytest.Item) -> int:
    if isinstance(item, AuditItem):
        return 2  # the world size of the first cases of an audit
    if isinstance(item, SearchItem):
        return item.part.world_size
    assert isinstance(item, KnownFailureItem)
    return item.entry.case.world_size

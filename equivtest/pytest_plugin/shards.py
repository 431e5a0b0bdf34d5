"""Selects the properties of the shard that --shard names.  Tests that are no properties belong to the first shard.

All items of a property stay together, so that a shard judges each of its properties completely.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import pytest

from equivtest.errors import Misuse
from equivtest.pytest_plugin.costs import cost_of
from equivtest.pytest_plugin.items import EquivtestItem, MisuseItem, PropertyItem
from equivtest.pytest_plugin.options import settings_of

selection_key = pytest.StashKey[str]()
"""Digest of all tests of the session before the selection.  All shards of one run have the same digest."""


def keep_shard(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Removes all items that do not belong to the shard that --shard names.

    Raises:
        UsageError: there are more shards than properties. Under xdist an item reports this mistake.
    """
    shard = settings_of(session.config).shard
    if shard is None or any(isinstance(item, MisuseItem) for item in items):
        return
    properties = {_property_of(item) for item in items if isinstance(item, PropertyItem)}
    try:
        shards = divide(properties, shard[1])
    except Misuse as error:
        if not hasattr(session.config, "workerinput"):
            raise pytest.UsageError(f"equivtest: {error}") from None
        items[:] = [MisuseItem.from_parent(session, name="options", message=str(error))]
        return
    ids = sorted(item.nodeid for item in items)
    session.config.stash[selection_key] = hashlib.sha256("\n".join(ids).encode()).hexdigest()
    shard_of = {name: number for number, names in enumerate(shards, 1) for name in names}
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        (kept if shard_of.get(_property_of(item), 1) == shard[0] else left).append(item)
    session.config.hook.pytest_deselected(items=left)
    items[:] = kept


def divide(properties: Collection[str], num_shards: int) -> list[frozenset[str]]:
    """Divides properties into shards of about equal cost.

    Each property, the costliest first, is added to the shard with the lowest cost so far.

    Raises:
        Misuse: a shard would be empty.
    """
    if len(properties) < num_shards:
        raise Misuse(
            f"--shard: {num_shards} shards of {len(properties)} properties leave one empty: use {len(properties)} "
            "at most"
        )
    shards: list[set[str]] = [set() for _ in range(num_shards)]
    loads = [0] * num_shards
    for name in sorted(properties, key=lambda name: (-cost_of(name), name)):
        place = loads.index(min(loads))
        shards[place].add(name)
        loads[place] += cost_of(name)
    return [frozenset(shard) for shard in shards]


def _property_of(item: pytest.Item) -> str:
    """Returns the id of the item's property, or '' for a test of another plugin."""
    if not isinstance(item, EquivtestItem) or item.parent is None:
        return ""
    return f"{item.parent.nodeid}::{item.name.partition('[')[0]}"

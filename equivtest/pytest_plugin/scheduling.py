"""Gives all items of a property to one xdist worker, because a worker computes once what these items share.

The items of a property share its covering array, the candidates of its program, and parts of its oracle.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from equivtest.base.profiles import AUDIT_LABEL, CALLS
from equivtest.pytest_plugin.costs import cost_of, enumerates_calls

_LABEL = re.compile(rf"\[(w\d+-({CALLS})?\d+|{AUDIT_LABEL})\]$")
"""Label of a search (`Part.label`) or of an audit, at the end of a node id."""
PROPERTIES_PER_WORKER = 4
"""If a run has fewer properties, each item is scheduled alone, so that no worker waits long for another worker."""


class PropertyScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Schedules the costliest property first. Searches that enumerate calls are long, so each may have another worker.

    With a time budget, items are scheduled one by one, in the session's order.
    """

    def __init__(self, config: pytest.Config, log: Any, *, has_budget: bool = False) -> None:
        config.option.loadscopereorder = False
        self._has_budget = has_budget
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        is_apart = self._has_budget or enumerates_calls(nodeid)
        return property_of(nodeid) if self._has_many_properties and not is_apart else nodeid

    @cached_property
    def _has_many_properties(self) -> bool:
        assert self.collection is not None
        num_properties = len(set(map(property_of, self.collection)))
        return bool(num_properties >= PROPERTIES_PER_WORKER * self.numnodes)

    def _assign_work_unit(self, node: Any) -> None:
        if not self._has_budget:
            self.workqueue.move_to_end(max(self.workqueue, key=cost_of), last=False)
        super()._assign_work_unit(node)


def property_of(nodeid: str) -> str:
    """Returns the node id of the item's property, or 'known_failures::SUBJECT' for a known failure.

    For an item that is no search or audit of a property, such as a test of your own, the result is `nodeid`.
    """
    if nodeid.startswith("known_failures::"):
        return nodeid.rpartition("::")[0]
    return _LABEL.sub("", nodeid)

"""The device written in Python is one: its values are the CPU's, its memory is its own."""

from __future__ import annotations

import pytest

from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.ranks.pool import Pool


@pytest.mark.ranks
def test_python_device_computes_the_values_of_the_cpu_in_separate_memory(pool: Pool) -> None:
    case = FetchCase(world_size=2, parameters=((5,),), requires_grad=(True,), collective="all_gather")
    replies = pool.run("tests.programs.device:on_the_device", case)
    pool.renew(2)  # a device is registered once per process, for good

    assert [(reply.outcome, reply.error_text) for reply in replies] == [("answered", "")] * 2, replies[0].detail

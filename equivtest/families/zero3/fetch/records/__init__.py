"""What is written down of the defects."""

from __future__ import annotations

from equivtest.families.zero3.fetch.records.collectives import DEFECTS as COLLECTIVES
from equivtest.families.zero3.fetch.records.memory import DEFECTS as MEMORY
from equivtest.families.zero3.fetch.records.partitions import DEFECTS as PARTITIONS

DEFECTS = (*COLLECTIVES, *MEMORY, *PARTITIONS)

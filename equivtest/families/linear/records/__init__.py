"""What is written down of the defects."""

from __future__ import annotations

from equivtest.families.linear.records.arithmetic import DEFECTS as ARITHMETIC
from equivtest.families.linear.records.collectives import DEFECTS as COLLECTIVES
from equivtest.families.linear.records.layers import DEFECTS as LAYERS

DEFECTS = (*ARITHMETIC, *COLLECTIVES, *LAYERS)

"""What is written down of the defects."""

from __future__ import annotations

from equivtest.families.training.data_parallel.records.checkpointed import DEFECTS as CHECKPOINTED
from equivtest.families.training.data_parallel.records.clipping import DEFECTS as CLIPPING
from equivtest.families.training.data_parallel.records.reductions import DEFECTS as REDUCTIONS
from equivtest.families.training.data_parallel.records.tied import DEFECTS as TIED

DEFECTS = (*CHECKPOINTED, *CLIPPING, *REDUCTIONS, *TIED)

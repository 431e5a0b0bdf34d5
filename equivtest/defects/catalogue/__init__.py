"""Every defect: what it replaces, what must reject it, and the smallest case, derived by hand."""

from __future__ import annotations

from equivtest.defects.catalogue.checkpointed import DEFECTS as CHECKPOINTED
from equivtest.defects.catalogue.clipping import DEFECTS as CLIPPING
from equivtest.defects.catalogue.collective_calls import DEFECTS as COLLECTIVE_CALLS
from equivtest.defects.catalogue.collectives import DEFECTS as COLLECTIVES
from equivtest.defects.catalogue.cross_entropy import DEFECTS as CROSS_ENTROPY
from equivtest.defects.catalogue.data_parallel import DEFECTS as DATA_PARALLEL
from equivtest.defects.catalogue.dropout import DEFECTS as DROPOUT
from equivtest.defects.catalogue.embedding import DEFECTS as EMBEDDING
from equivtest.defects.catalogue.embedding_ways import DEFECTS as EMBEDDING_WAYS
from equivtest.defects.catalogue.gathered_cross_entropy import DEFECTS as GATHERED_CROSS_ENTROPY
from equivtest.defects.catalogue.linear_arithmetic import DEFECTS as LINEAR_ARITHMETIC
from equivtest.defects.catalogue.mixed import DEFECTS as MIXED
from equivtest.defects.catalogue.module import DEFECTS as MODULE
from equivtest.defects.catalogue.norm import DEFECTS as NORM
from equivtest.defects.catalogue.prepared import DEFECTS as PREPARED
from equivtest.defects.catalogue.record import Defect
from equivtest.defects.catalogue.redistribute import DEFECTS as REDISTRIBUTE
from equivtest.defects.catalogue.reduction import DEFECTS as REDUCTION
from equivtest.defects.catalogue.sequence_parallel import DEFECTS as SEQUENCE_PARALLEL
from equivtest.defects.catalogue.tensor_parallel import DEFECTS as TENSOR_PARALLEL
from equivtest.defects.catalogue.tied import DEFECTS as TIED
from equivtest.defects.catalogue.two_axes import DEFECTS as TWO_AXES
from equivtest.defects.catalogue.zero3_fetch import DEFECTS as ZERO3_FETCH
from equivtest.defects.catalogue.zero3_lifecycle import DEFECTS as ZERO3_LIFECYCLE
from equivtest.defects.catalogue.zero3_memory import DEFECTS as ZERO3_MEMORY

__all__ = ["DEFECTS", "Defect"]

DEFECTS: tuple[Defect, ...] = (
    *ZERO3_FETCH,
    *ZERO3_MEMORY,
    *ZERO3_LIFECYCLE,
    *TENSOR_PARALLEL,
    *SEQUENCE_PARALLEL,
    *DATA_PARALLEL,
    *TIED,
    *CHECKPOINTED,
    *MIXED,
    *TWO_AXES,
    *CLIPPING,
    *LINEAR_ARITHMETIC,
    *COLLECTIVES,
    *COLLECTIVE_CALLS,
    *EMBEDDING,
    *MODULE,
    *EMBEDDING_WAYS,
    *NORM,
    *REDISTRIBUTE,
    *CROSS_ENTROPY,
    *REDUCTION,
    *PREPARED,
    *DROPOUT,
    *GATHERED_CROSS_ENTROPY,
)
"""All defects; the audit in tests/test_defects.py runs each one."""

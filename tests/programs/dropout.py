"""A dropout of our own that is right."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers, Given
from equivtest.families.dropout.case import DropoutCase
from tests.defects.dropout import OwnDropout


def own_dropout(case: DropoutCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Each rank draws by the seed that it was given, into which its part is folded."""
    return OwnDropout(case, mesh, given).answers()

"""Draws tensors of one to four dims, sharded on any dim, to be multiplied."""

from __future__ import annotations

from equivtest.cases.picks import cases_of
from equivtest.families.scale.case import ScaleCase

scale_cases = cases_of(ScaleCase, without=("records",), dangerous=("shape: edge", "dim", "requires_grad"))

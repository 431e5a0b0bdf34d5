"""Draws tensors of one to three dims, with any pair of placements and any way to save and to load."""

from __future__ import annotations

from equivtest.cases.picks import cases_of
from equivtest.families.checkpoint.case import CheckpointCase

checkpoint_cases = cases_of(CheckpointCase, without=("records",), dangerous=("shape: edge", "saved", "loaded"))

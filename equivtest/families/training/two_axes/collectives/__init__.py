"""Derives the collectives of a perceptron on a mesh of two axes."""

from __future__ import annotations

from equivtest.families.training.two_axes.case import TwoAxisCase
from equivtest.families.training.two_axes.collectives.fsdp2_tp import fsdp2_tp_collectives
from equivtest.families.training.two_axes.collectives.hsdp import hsdp_collectives
from equivtest.oracle.collectives import Collectives, expected_collectives


@expected_collectives.register
def two_axes_collectives(case: TwoAxisCase, rank: int) -> Collectives:
    return hsdp_collectives(case, rank) if case.style == "hsdp" else fsdp2_tp_collectives(case, rank)

"""The collectives of a perceptron on a mesh of two axes."""

from __future__ import annotations

from equivtest.families.training.two_axes.case import TwoAxisCase
from equivtest.families.training.two_axes.collectives.fsdp2_tp import document_fsdp2_tp
from equivtest.families.training.two_axes.collectives.hsdp import document_hsdp
from equivtest.kit.oracle.collectives import Collectives, document


@document.register
def document_two_axes(case: TwoAxisCase, rank: int) -> Collectives:
    """Those of the case's style."""
    return document_hsdp(case, rank) if case.style == "hsdp" else document_fsdp2_tp(case, rank)

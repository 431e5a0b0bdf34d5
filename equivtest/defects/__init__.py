"""Subjects that are wrong in one way each.  A property counts only once it has rejected them."""

from __future__ import annotations

from equivtest.defects.catalogue import DEFECTS as OLDER_DEFECTS
from equivtest.defects.catalogue import Defect
from equivtest.defects.catalogue_redistribute import REDISTRIBUTE_DEFECTS

__all__ = ["DEFECTS", "Defect"]

DEFECTS = (*OLDER_DEFECTS, *REDISTRIBUTE_DEFECTS)
"""All defects; the audit in tests/test_defects.py runs each one."""

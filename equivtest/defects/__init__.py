"""Subjects that are wrong in one way each.  A property counts only once it has rejected them."""

from __future__ import annotations

from equivtest.defects.catalogue import DEFECTS, Defect

__all__ = ["DEFECTS", "Defect"]

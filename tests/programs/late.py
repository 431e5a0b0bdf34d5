"""Imported by ranks alone, within a subject."""

from __future__ import annotations

FACTOR = 1.0

"""Declared arithmetic of some of the planted process groups."""

from __future__ import annotations

from dataclasses import replace

from equivtest.oracle.rounding import TORCH_CPU

VARYING = {dtype: replace(record, order_varies=True) for dtype, record in TORCH_CPU.items()}
FLUSHING = {dtype: replace(record, flushes_subnormals=True) for dtype, record in TORCH_CPU.items()}

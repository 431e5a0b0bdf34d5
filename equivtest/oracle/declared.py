"""Whose arithmetic real values are judged by: torch's on the CPU with gloo, or what a backend declares.

A backend whose kernels or collectives round to fewer bits declares so in a record of its own:

    # mypackage/arithmetic.py
    from equivtest.oracle.rounding import TORCH_CPU, Arithmetic

    MINE = TORCH_CPU | {"bfloat16": Arithmetic("bfloat16", accumulate="bfloat16", reduce="bfloat16")}

and is judged by it with --arithmetic mypackage.arithmetic:MINE.  Exact values need no record.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from equivtest import limits
from equivtest.errors import Misuse
from equivtest.importing import load_named
from equivtest.oracle.rounding import TORCH_CPU, Arithmetic

Arithmetics = Mapping[str, Arithmetic]
"""Name of a dtype -> how the backend computes with it."""

_judged_by: ContextVar[Arithmetics] = ContextVar("arithmetics", default=TORCH_CPU)


def arithmetic_of(dtype: str) -> Arithmetic:
    """What the backend that is judged declares of a dtype."""
    return _judged_by.get()[dtype]


@contextmanager
def declared(arithmetics: Arithmetics) -> Iterator[None]:
    """Bounds are those of `arithmetics`, as long as it lasts."""
    token = _judged_by.set(arithmetics)
    try:
        yield
    finally:
        _judged_by.reset(token)


@functools.cache
def load_arithmetics(name: str) -> Arithmetics:
    """The records that 'package.module:NAME' holds; '' stands for torch's on the CPU.

    Raises:
        Misuse: there is no such name, or it is no mapping with a record of every dtype.
    """
    if not name:
        return TORCH_CPU
    found = load_named(name, "--arithmetic")
    records = found if isinstance(found, Mapping) else {}
    for dtype in limits.DTYPES:
        record = records.get(dtype)
        if not isinstance(record, Arithmetic) or record.dtype != dtype:
            raise Misuse(
                f"--arithmetic: {name!r} holds no Arithmetic of {dtype}, got {record!r}: give a mapping with one of "
                f"each of {', '.join(limits.DTYPES)}, such as TORCH_CPU | {{...}} of equivtest.oracle.rounding"
            )
    return records

"""Chooses the arithmetic that bounds real values: torch's arithmetic on the CPU with gloo, or that of a backend.

A backend with another arithmetic declares it in a record for each of its dtypes:

    # mypackage/arithmetic.py
    from equivtest.oracle.rounding import Arithmetic

    MINE = {
        "float32": Arithmetic("float32", accumulate="float32", reduce="float32", flushes_subnormals=True),
        "bfloat16": Arithmetic("bfloat16", accumulate="float32", reduce="bfloat16", order_varies=True),
    }

and --arithmetic mypackage.arithmetic:MINE --dtypes float32,bfloat16 makes runs use it.
`equivtest.oracle.rounding.Arithmetic` has all fields of a record:

    accumulate, reduce     the dtypes in which kernels compute and collectives add: fewer bits give wider bounds for
                           real values.  If `accumulate` has more bits than the dtype, equivtest assumes that kernels
                           store each result once, and the intermediate results that torch's CPU kernels store too
                           (`running_kernels`); for a kernel that stores more often, declare the dtype itself
    rounds_to_nearest      if False, errors may lean to one side
    flushes_subnormals     results below the smallest normal number become zero, also if zeros are added to exact
                           values; copied values keep their bits
    order_varies           collectives add in another order in each call, but in the same order on all ranks. Then
                           rounded real numbers of a repeated run may differ, within their bounds
    adds_rows_in_order     a kernel adds the rows of an embedding's gradient one after the other, in their order

If a backend declares records, a run is refused if it draws a dtype without a record. `TORCH_CPU | {...}` declares that
all other dtypes have torch's arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from equivtest.base import limits
from equivtest.base.importing import load_named
from equivtest.errors import Misuse
from equivtest.oracle.rounding import TORCH_CPU, Arithmetic
from equivtest.tensors import DTYPES

Arithmetics = Mapping[str, Arithmetic]
"""Name of a dtype -> arithmetic of the backend; without the dtypes that the backend lacks."""

_judged_by: ContextVar[Arithmetics] = ContextVar("arithmetics", default=TORCH_CPU)


def arithmetic_of(dtype: str) -> Arithmetic:
    """Returns the arithmetic that the backend under test declares for a dtype.

    Raises:
        Misuse: the backend declares no arithmetic for the dtype.
    """
    records = _judged_by.get()
    if dtype not in records:
        raise Misuse(f"--arithmetic: {_undeclared([dtype], records)}")
    return records[dtype]


def declared_of(dtype: str) -> Arithmetic | None:
    """Returns the arithmetic that the backend under test declares for a dtype, or None if it declares none."""
    return _judged_by.get().get(dtype)


def order_varies(dtypes: Iterable[str]) -> bool:
    return any(arithmetic_of(dtype).order_varies for dtype in dtypes)


def smallest_kept(dtype: str) -> float:
    """Returns the magnitude below which a number may become zero when zeros are added to it, or 0."""
    return float(torch.finfo(DTYPES[dtype]).tiny) if arithmetic_of(dtype).flushes_subnormals else 0.0


@contextmanager
def declared(arithmetics: Arithmetics) -> Iterator[None]:
    """Makes the oracle derive all bounds from `arithmetics` while the context lasts."""
    token = _judged_by.set(arithmetics)
    try:
        yield
    finally:
        _judged_by.reset(token)


@functools.cache
def load_arithmetics(name: str) -> Arithmetics:
    """Imports the records of 'package.module:NAME'.

    If the name is '', returns the records of torch's arithmetic on the CPU.

    Raises:
        Misuse: the name does not exist, or its value is not a mapping from dtypes to records.
    """
    if not name:
        return TORCH_CPU
    declaration = load_named(name, "--arithmetic")
    records = declaration if isinstance(declaration, Mapping) else {}
    for dtype, record in records.items():
        if dtype not in limits.DTYPES or not isinstance(record, Arithmetic) or record.dtype != dtype:
            raise Misuse(
                f"--arithmetic: {name!r} has no Arithmetic of {dtype}, got {record!r}: give one for each dtype that "
                f"the backend has, of {', '.join(limits.DTYPES)}"
            )
    if not records:
        raise Misuse(
            f"--arithmetic: {name!r} is no mapping of dtypes to their Arithmetic, got {declaration!r}: pass one such "
            "as {'float32': Arithmetic('float32', accumulate='float32', reduce='float32')}"
        )
    return records


def require_declared(name: str, dtypes: Iterable[str]) -> None:
    """Checks that 'package.module:NAME' has a record for each of `dtypes`.

    Raises:
        Misuse: a record is missing, or `load_arithmetics` cannot import the records.
    """
    records = load_arithmetics(name)
    missing = [dtype for dtype in dtypes if dtype not in records]
    if missing:
        raise Misuse(f"--arithmetic: {name!r}: {_undeclared(missing, records)}")


def _undeclared(missing: Iterable[str], records: Arithmetics) -> str:
    return (
        f"it declares {', '.join(records)}, but not {', '.join(missing)}: add a record for each, or leave "
        f"them out with --dtypes {','.join(records)}, and with -k the properties that always need them"
    )

"""Whose arithmetic real values are judged by: torch's on the CPU with gloo, or what a backend declares.

A backend that computes otherwise declares so in a record for each of its dtypes:

    # mypackage/arithmetic.py
    from equivtest.oracle.rounding import Arithmetic

    MINE = {
        "float32": Arithmetic("float32", accumulate="float32", reduce="float32", flushes_subnormals=True),
        "bfloat16": Arithmetic("bfloat16", accumulate="float32", reduce="bfloat16", order_varies=True),
    }

and is judged by these with --arithmetic mypackage.arithmetic:MINE --dtypes float32,bfloat16.  What a
record can say stands in `equivtest.oracle.rounding.Arithmetic`:

    accumulate, reduce     kernels and collectives that round to fewer bits: wider bounds for real values.  Where
                           `accumulate` has more bits than the dtype, kernels are taken to compute in it and to store
                           once, and to store in between what torch's own on the CPU do (`running_kernels`); a kernel
                           that stores more often needs `accumulate` to be the dtype itself
    rounds_to_nearest      False: errors may lean to one side
    flushes_subnormals     results below the smallest normal number become zero, where zeros are added to exact values
                           too; what is only copied keeps its bits
    order_varies           collectives add in another order in each call, alike on all ranks: of a run that is
                           repeated, what real numbers were rounded to may be another, within its bound
    adds_rows_in_order     a kernel adds the rows of an embedding's gradient in the order given

No dtype is judged by a record of torch's that the backend did not declare: a run that draws one is
refused.  `TORCH_CPU | {...}` declares the others to be as torch's.
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
"""Name of a dtype -> how the backend computes with it; those that it has not are left out."""

_judged_by: ContextVar[Arithmetics] = ContextVar("arithmetics", default=TORCH_CPU)


def arithmetic_of(dtype: str) -> Arithmetic:
    """What the backend that is judged declares of a dtype.

    Raises:
        Misuse: nothing.
    """
    records = _judged_by.get()
    if dtype not in records:
        raise Misuse(f"--arithmetic: {_undeclared([dtype], records)}")
    return records[dtype]


def declared_of(dtype: str) -> Arithmetic | None:
    """As `arithmetic_of`; None where the backend declares nothing of the dtype."""
    return _judged_by.get().get(dtype)


def order_varies(dtypes: Iterable[str]) -> bool:
    """Whether the backend declares of one of these dtypes that sums may be added in another order in each call."""
    return any(arithmetic_of(dtype).order_varies for dtype in dtypes)


def smallest_kept(dtype: str) -> float:
    """Magnitude below which a number may become zero where zeros are added to it; 0 where all are kept."""
    return float(torch.finfo(DTYPES[dtype]).tiny) if arithmetic_of(dtype).flushes_subnormals else 0.0


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
        Misuse: there is no such name, or it is no mapping of dtypes to records of theirs.
    """
    if not name:
        return TORCH_CPU
    found = load_named(name, "--arithmetic")
    records = found if isinstance(found, Mapping) else {}
    for dtype, record in records.items():
        if dtype not in limits.DTYPES or not isinstance(record, Arithmetic) or record.dtype != dtype:
            raise Misuse(
                f"--arithmetic: {name!r} holds no Arithmetic of {dtype}, got {record!r}: give one of each dtype that "
                f"the backend has, of {', '.join(limits.DTYPES)}"
            )
    if not records:
        raise Misuse(
            f"--arithmetic: {name!r} is no mapping of dtypes to their Arithmetic, got {found!r}: give one such as "
            "{'float32': Arithmetic('float32', accumulate='float32', reduce='float32')}"
        )
    return records


def require_declared(name: str, dtypes: Iterable[str]) -> None:
    """Checks that 'package.module:NAME' has a record of each of `dtypes`.

    Raises:
        Misuse: of some it has none, or as of `load_arithmetics`.
    """
    records = load_arithmetics(name)
    missing = [dtype for dtype in dtypes if dtype not in records]
    if missing:
        raise Misuse(f"--arithmetic: {name!r}: {_undeclared(missing, records)}")


def _undeclared(missing: Iterable[str], records: Arithmetics) -> str:
    return (
        f"declared are {', '.join(records)}, and not {', '.join(missing)}: add a record of each, or leave "
        f"them out with --dtypes {','.join(records)}, and with -k a property that needs them all the same"
    )

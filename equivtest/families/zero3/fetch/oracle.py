"""Computes the right answers of a fetch, which are exact copies of the parameters that were partitioned."""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.oracle import expect
from equivtest.oracle.declared import smallest_kept
from equivtest.oracle.expected import COPIED, Expected, ExpectedTensor


@expect.register
def expect_fetch(case: FetchCase, index: int) -> Expected:
    """Returns `param.i`, the fetched parameter i, and `partition.i`, this rank's part of it, equal to the last bit.

    `bits` has the exact bits, because in float64 a NaN may lose its payload. If the documented collective is not
    all_gather, a fetch may add zeros, and a backend may flush subnormals when it adds. Then `param.i` may have zeros
    instead of subnormals.
    """
    given = draw(case, index)
    flags = case.given_flags()
    layouts = case.layouts()
    flushed_below = smallest_kept(case.dtype) if case.collective != "all_gather" else 0.0
    tensors = {}
    for name in case.answer_names():
        parameter = f"param.{name.rpartition('.')[2]}"
        tensors[name] = ExpectedTensor(
            value=given[parameter].to(torch.float64),
            allowed=None,
            layout=layouts[name],
            dtype=case.dtype,
            derivation=COPIED,
            requires_grad=flags.get(name),
            bits=given[parameter],
            flushed_below=flushed_below if name == parameter else 0.0,
        )
    return Expected(tensors, {})

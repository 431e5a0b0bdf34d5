"""Computes what a fetch must answer: copies of the parameters that were partitioned, equal to the last bit."""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.oracle import expect
from equivtest.oracle.declared import smallest_kept
from equivtest.oracle.expected import COPIED, Expected, ExpectedTensor


@expect.register
def expect_fetch(case: FetchCase, index: int) -> Expected:
    """Returns `param.i` and `partition.i`, which both have parameter i as their global value.

    The requires_grad of `param.i` is given by the case; a partition may have any. In float64 a NaN may lose its
    payload, so `bits` holds every bit. A fetch that is not documented to gather may add zeros, and a backend may flush
    subnormals when it adds.
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

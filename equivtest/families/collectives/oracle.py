"""Computes the results of collectives on each rank from the operands of all ranks.

Copied values keep every bit. `equivtest.oracle.operands` computes the reductions.

Source: torch.distributed, the docstrings of the collectives (2.13.0).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from equivtest.cases.values import draw
from equivtest.families.collectives.case import BITWISE, FACTOR, CollectivesCase
from equivtest.oracle import expect
from equivtest.oracle.exact import InexactData
from equivtest.oracle.expected import COPIED, Expected, ExpectedTensor
from equivtest.oracle.operands import Reduced, join_bits, reduce_exactly
from equivtest.tensors import SIGNIFICAND_BITS


@expect.register
def expect_collectives(case: CollectivesCase, index: int) -> Expected:
    """Returns the result of every collective.

    All results are exact, except averages if 1 / (number of ranks) is rounded.

    Raises:
        InexactData: the drawn values break the conditions of exactness.
    """
    given = draw(case, index)
    found = {
        (op, kind): _before(case, op, given[kind])
        for op, kind in dict.fromkeys((call.op, call.operand) for call in case.calls)
    }
    layouts = case.layouts()
    tensors = {}
    for call in case.calls:
        before = found[call.op, call.operand]
        value, bits, allowed = (
            None if whole is None else arrange(case, call.result, whole)
            for whole in (before.value, before.bits, before.allowed)
        )
        assert value is not None
        tensors[call.name] = ExpectedTensor(
            value=value,
            allowed=allowed,
            layout=layouts[call.name],
            dtype=case.dtype,
            derivation=before.derivation,
            bits=bits,
            is_sum=call.op in ("sum", "avg", "premul"),
        )
    return Expected(tensors, {op: before.bits_used for (op, _), before in found.items() if before.bits_used})


def _before(case: CollectivesCase, op: str, operands: torch.Tensor) -> Reduced:
    """Returns the operands, reduced over the ranks by `op`. If `op` is '', returns the operands unchanged.

    `op` is '' if the collective copies. `operands` has one row per rank. A reduced tensor has no dim of ranks.
    """
    if not op:
        return Reduced(operands.double(), operands, None, COPIED)
    if op in BITWISE:
        return _combined(op, operands)
    if op in ("sum", "premul"):
        return _added(case, operands, FACTOR if op == "premul" else 1.0)
    return reduce_exactly(op, operands, op, (case.world_size,))


def _added(case: CollectivesCase, operands: torch.Tensor, factor: float) -> Reduced:
    """Returns the exact sum of the operands over the ranks, multiplied by `factor`, which is a power of two.

    Columns with values at the limits of the dtype are added by `add_at_limits`.
    """
    is_at_limit = operands.abs().amax(0) > 2.0 ** SIGNIFICAND_BITS[case.dtype]
    found = reduce_exactly("operands", torch.where(is_at_limit, 0, operands) * factor, "sum", (case.world_size,))
    if not bool(is_at_limit.any()):
        return found
    value = found.value.clone()
    value[is_at_limit] = add_at_limits(operands[:, is_at_limit], factor)
    return replace(
        found,
        value=value,
        bits=value.to(operands.dtype),
        derivation=f"{found.derivation}; at the limits of {case.dtype} infinite or exact in any order",
    )


def add_at_limits(operands: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns the sum of the operands over dim 0, times `factor`, in float64.

    The result is exact, or certainly infinite.

    The operands are infinite or near the largest number of their dtype; `factor` is a power of two.

    Derived here. Let t be the largest power of two of the dtype, and eps its torch.finfo(dtype).eps; let all terms of a
    column have one sign. If the terms are multiples of eps * t, every partial sum below 2 t is a value of the dtype, in
    any order. The first partial sum of 2 t or more is the sum of two such values, so it is rounded to infinity, and
    later sums stay infinite. If the terms are multiples of eps * t / 2, every partial sum up to t is a value of the
    dtype, in any order. The sum of a column with infinities of one sign is infinite if the sum of all its finite terms
    is below t.

    Raises:
        InexactData: a column has none of these properties.

    Source: IEEE 754-2019 section 7.4: to nearest, values of 2 t or more are rounded to infinity; section 6.1.
    """
    info = torch.finfo(operands.dtype)
    top = 2.0 ** (math.frexp(info.max)[1] - 1)
    terms = operands.double() / top * factor
    total, finite = terms.sum(0), torch.where(terms.isinf(), 0.0, terms).abs().sum(0)
    has_one_sign = (terms >= 0).all(0) | (terms <= 0).all(0)
    is_exact = _are_multiples(terms, info.eps) | _are_multiples(terms, info.eps / 2) & (total.abs() <= 1)
    is_infinite = total.isinf() & (finite < 1)
    if not bool((has_one_sign & is_exact | is_infinite).all()):
        raise InexactData("a sum at the limits of the dtype depends on its order")
    return torch.where(total.abs() >= 2, total.sign() * math.inf, total * top)


def _are_multiples(terms: torch.Tensor, unit: float) -> torch.Tensor:
    return ((terms / unit).frac() == 0).all(0)


def _combined(op: str, operands: torch.Tensor) -> Reduced:
    """Combines the rows of integers bit by bit, with an operation such as 'band'. Each row is from one rank.

    The result has no more bits than the operands, so the result is exact.
    """
    value = join_bits(op, operands.to(torch.int64))
    return Reduced(value.double(), value.to(operands.dtype), None, f"equal: the {op} of {len(operands)} integers")


def arrange(case: CollectivesCase, result: str, whole: torch.Tensor) -> torch.Tensor:
    """Returns the expected answer for all sizes, joined along the last dim.

    Args:
        result: Kind of the answer, one of RESULTS.
        whole: The reduced elements of all sizes, or one row of elements per rank if the collective copies.
    """
    sizes = zip(case.numels, case.bounds, strict=True)
    return torch.cat([_of_size(case, result, whole[..., slice(*bounds)], numel) for numel, bounds in sizes], dim=-1)


def _of_size(case: CollectivesCase, result: str, whole: torch.Tensor, numel: int) -> torch.Tensor:
    """Returns the expected answer of kind `result` for the size `numel`.

    `whole` has the reduced elements of that size, or one row of elements per rank if the collective copies.
    """
    ranks = case.world_size
    match result:
        case "parts":
            return whole.reshape(ranks, numel)
        case "exchanged":
            return whole.reshape(ranks, ranks, numel).transpose(0, 1)
        case "uneven":
            return torch.stack([_sent_to(case, whole.reshape(ranks, ranks, numel), rank) for rank in range(ranks)])
    return whole[..., :numel]


def _sent_to(case: CollectivesCase, parts: torch.Tensor, rank: int) -> torch.Tensor:
    """Returns the elements that `rank` receives in a collective with uneven splits.

    The elements have the order of the sending ranks. Zeros follow, up to the number of elements that a rank has for all
    ranks. `parts` has the elements of rank `source` for rank `target` at [source, target].
    """
    ranks, _, numel = parts.shape
    sent = torch.cat([parts[source, rank, : case.split(numel, source, rank)] for source in range(ranks)])
    return torch.cat([sent, sent.new_zeros(ranks * numel - len(sent))])

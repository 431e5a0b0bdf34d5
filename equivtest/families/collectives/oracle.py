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
    """Returns the results. All are exact, except averages if 1 / (number of ranks) is rounded."""
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
    """Returns the operands reduced over dim 0, the ranks, or unchanged if `op` is '', which stands for a copy."""
    if not op:
        return Reduced(operands.double(), operands, None, COPIED)
    if op in BITWISE:
        return _combined(op, operands)
    if op in ("sum", "premul"):
        return _added(case, operands, FACTOR if op == "premul" else 1.0)
    return reduce_exactly(op, operands, op, (case.world_size,))


def _added(case: CollectivesCase, operands: torch.Tensor, factor: float) -> Reduced:
    """Returns the exact sum over the ranks, times `factor`, which is a power of two."""
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
    value = join_bits(op, operands.to(torch.int64))
    return Reduced(value.double(), value.to(operands.dtype), None, f"equal: the {op} of {len(operands)} integers")


def arrange(case: CollectivesCase, result: str, whole: torch.Tensor) -> torch.Tensor:
    """Joins the answers for all sizes on the last dim. `whole` has one row per rank if the collective copies."""
    sizes = zip(case.numels, case.bounds, strict=True)
    return torch.cat([_of_size(case, result, whole[..., slice(*bounds)], numel) for numel, bounds in sizes], dim=-1)


def _of_size(case: CollectivesCase, result: str, whole: torch.Tensor, numel: int) -> torch.Tensor:
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
    """Returns what `rank` receives with uneven splits, padded with zeros. `parts` is indexed [source, target]."""
    ranks, _, numel = parts.shape
    sent = torch.cat([parts[source, rank, : case.split(numel, source, rank)] for source in range(ranks)])
    return torch.cat([sent, sent.new_zeros(ranks * numel - len(sent))])

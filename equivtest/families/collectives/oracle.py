"""What collectives leave on the ranks, from the operands of all ranks at once.

Letters: w ranks, n elements of one size.

What is copied keeps every bit.  Reductions: `equivtest.kit.oracle.operands`.

Source: torch.distributed, the docstrings of the collectives (2.13.0).
"""

from __future__ import annotations

import torch

from equivtest.families.collectives.case import BITWISE, FACTOR, OPERANDS, CollectivesCase
from equivtest.kit.oracle import expect
from equivtest.kit.oracle.expected import COPIED, Expected, ExpectedTensor
from equivtest.kit.oracle.operands import Reduced, join_bits, reduce_exactly
from equivtest.kit.values import draw


@expect.register
def expect_collectives(case: CollectivesCase, index: int) -> Expected:
    """Every collective's result, exact but for an average whose reciprocal is too far off.

    Raises:
        InexactData: the drawn values break the conditions of exactness.
    """
    given = draw(case, index)
    found = {op: _before(case, op, given[OPERANDS[op]]) for op in dict.fromkeys(call.op for call in case.calls)}
    layouts = case.layouts()
    tensors = {}
    for call in case.calls:
        before = found[call.op]
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
    return Expected(tensors, {op: before.bits_used for op, before in found.items() if before.bits_used})


def _before(case: CollectivesCase, op: str, operands: torch.Tensor) -> Reduced:
    """Reduces operands (w, w * L) to (w * L,); returns them as they are where nothing is reduced."""
    if not op:
        return Reduced(operands.double(), operands, None, COPIED)
    if op in BITWISE:
        return _combined(op, operands)
    if op == "premul":  # by a power of two, which rounds no whole number
        return reduce_exactly(OPERANDS[op], operands * FACTOR, "sum", (case.world_size,))
    return reduce_exactly(OPERANDS[op], operands, op, (case.world_size,))


def _combined(op: str, operands: torch.Tensor) -> Reduced:
    """Combines all bits of integers (w, w * L), rank after rank; what comes out has no more bits than they have."""
    value = join_bits(op, operands.to(torch.int64))
    return Reduced(value.double(), value.to(operands.dtype), None, f"equal: the {op} of {len(operands)} integers")


def arrange(case: CollectivesCase, result: str, whole: torch.Tensor) -> torch.Tensor:
    """The global answer, from (w * L,) of what is reduced or (w, w * L) of what is copied; any dtype."""
    sizes = zip(case.numels, case.bounds, strict=True)
    return torch.cat([_of_size(case, result, whole[..., slice(*bounds)], numel) for numel, bounds in sizes], dim=-1)


def _of_size(case: CollectivesCase, result: str, whole: torch.Tensor, numel: int) -> torch.Tensor:
    """The same of one size, from (w * n,) or (w, w * n)."""
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
    """(w * n,): what each rank sends to one, of parts (source, target, n), in order, then zeros."""
    ranks, _, numel = parts.shape
    sent = torch.cat([parts[source, rank, : case.split(numel, source, rank)] for source in range(ranks)])
    return torch.cat([sent, sent.new_zeros(ranks * numel - len(sent))])

"""Computes an operator's results on whole operands, and the error that each right answer may have.

For each result and each gradient the oracle uses the first rule that applies:

1. equality, if the operator only copies or chooses exactly known values, or returns no floating-point numbers;
2. equality, if a proof for these values, operation by operation, shows that nothing rounds (the certificate);
3. a bound by running error analysis, which adds up the roundings of each operation;
4. an infinite allowed error, so that nothing is concluded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from equivtest.cases.values import draw
from equivtest.families.operators.case import EXACT_MODE, REAL_DTYPES, OperatorCase
from equivtest.families.operators.case_operator import DISTINCT
from equivtest.families.operators.case_samples import way_of
from equivtest.families.operators.case_table import LISTS
from equivtest.layout import Layout
from equivtest.oracle import expect, expect_held
from equivtest.oracle.certificate import Certificate
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.exact import InexactData
from equivtest.oracle.expected import Expected, ExpectedTensor
from equivtest.oracle.held import Held
from equivtest.oracle.operands import reduce_exactly
from equivtest.oracle.operations import Found
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS

if TYPE_CHECKING:
    from equivtest.oracle.running import RunningError

CHOSEN = "equal: the operator only chooses, among values that are known exactly"
PROVED = "equal: no operation of the unsharded operator can round these values"
UNKNOWN = "nothing is concluded: "

FINEST = 2.0**-40
"""Smallest unit that divisibility is checked in. A number that needs a finer unit counts as a multiple of nothing."""

Tensors = dict[str, torch.Tensor]
Founds = Mapping[str, Found]


@expect.register
def expect_operators(case: OperatorCase, index: int) -> Expected:
    """Returns every result and gradient as replicated. `expect_held_operators` sets the ranks' placements."""
    layouts, dtypes, flags = case.layouts(), _dtypes_of(case), _flags_of(case)
    tensors = {
        name: ExpectedTensor(
            value=found.value,
            allowed=found.allowed,
            layout=layouts[name],
            dtype=dtypes[name],
            derivation=found.derivation,
            requires_grad=flags.get(name),
            may_be_none=name.startswith("grad.") and not bool(found.value.any()),
        )
        for name, found in judged_how(case, index).items()
    }
    return Expected(tensors, {})


@expect_held.register
def expect_held_operators(case: OperatorCase, index: int, held: Held) -> Expected:
    """Returns the expected answers, under the layouts that the first rank returned.

    If every rank refused the operator with the same text, only that text is expected. If every rank refused the
    backward with the same text, the results and that text are expected, and no gradients.
    """
    first = held[0]
    for refused, prefix in (("refused", ""), ("grad.refused", "grad.")):
        texts = [tensors.get(refused) for tensors in held.values()]
        told = [text.local for text in texts if text is not None]
        if told and len(told) == len(texts) and all(torch.equal(told[0], text) for text in told):
            expected = expect_operators(case, index).tensors if prefix else {}
            kept = {name: tensor for name, tensor in expected.items() if not name.startswith(prefix)}
            return _under_layouts(kept | {refused: _refusal(told[0], case)}, first)
    return _under_layouts(expect_operators(case, index).tensors, first)


def text_of(refusal: torch.Tensor) -> str:
    return bytes(refusal.tolist()).decode(errors="replace")


def _refusal(told: torch.Tensor, case: OperatorCase) -> ExpectedTensor:
    value = told.double()
    layout = next(iter(case.layouts().values()))
    derivation = f"{UNKNOWN}refused on every rank alike: {text_of(told)}"
    return ExpectedTensor(value, torch.full_like(value, torch.inf), layout, "uint8", derivation)


def _under_layouts(tensors: Mapping[str, ExpectedTensor], first: Mapping[str, object]) -> Expected:
    """Gives each tensor the layout that the first rank returned. All other ranks must return the same layout."""
    layouts: dict[str, Layout] = {name: placed.layout for name, placed in first.items()}  # type: ignore[attr-defined]
    found = {name: replace(tensor, layout=layouts.get(name, tensor.layout)) for name, tensor in tensors.items()}
    return Expected(found, {})


def _dtypes_of(case: OperatorCase) -> dict[str, str]:
    dtypes = {f"output.{number}": result.dtype for number, result in enumerate(case.results)}
    return dtypes | {f"grad.operand.{number}": case.dtype_of(number) for number in case.graded()}


def _flags_of(case: OperatorCase) -> dict[str, bool]:
    """Returns whether each result must require a gradient.

    Every result of a list requires one if some tensor of the list does, unless the list is written in place, as in
    torch (2.13.0). Leaves out results for which torch sets requires_grad although the results have no gradient: the
    sign of `slogdet`, mean and rstd of `native_group_norm`, and norms of order 0. A wrong flag of these results is not
    noticed.
    """
    is_new_list = case.operator in LISTS and not way_of(case.operator)
    any_has_one = is_new_list and any(map(case.has_gradient, case.results))
    return {
        f"output.{number}": any_has_one or case.has_gradient(result)
        for number, result in enumerate(case.results)
        if result.operands or not result.requires_grad
    }


def judged_how(case: OperatorCase, index: int) -> Founds:
    """Returns the right value of each answer, with its allowed error, which is infinite if no bound is known."""
    return _judged_how(_undivided(case), index)


def _undivided(case: OperatorCase) -> OperatorCase:
    """Replicates what is sharded, because shards do not change the right results. What is partial stays partial."""
    placements, cotangents = (
        tuple(tuple(text if text.startswith("partial") else "replicate" for text in texts) for texts in each)
        for each in (case.placements, case.cotangents)
    )
    cotangents = cotangents if any(text != "replicate" for texts in cotangents for text in texts) else ()
    return replace(case, placements=placements, cotangents=cotangents, strided=(), repeats=False)


@functools.lru_cache(maxsize=64)
def _judged_how(case: OperatorCase, index: int) -> Founds:
    given = draw(case, index)
    plain = _plainly(case, given)
    known = _knows_operands(case, index)
    chosen = {name for name, value in plain.items() if known and _only_moves(case, index, name, value)}
    found, reasons = _best(case, given, index) if len(chosen) < len(plain) else ({}, "")
    if reasons and case.requires_grad:  # the results may be judged though the backward cannot be followed
        found, _ = _best(replace(case, requires_grad=()), given, index)
    judged = {}
    for name, value in plain.items():
        if name in chosen:
            judged[name] = Found(value.double(), None, CHOSEN)
        elif name in found:
            judged[name] = found[name]
        else:
            judged[name] = Found(value.double(), torch.full(value.shape, torch.inf, dtype=torch.float64), reasons)
    return judged


def _only_moves(case: OperatorCase, index: int, name: str, value: torch.Tensor) -> bool:
    """True if the answer `name` is exact without a proof: it is not floating-point, or the operator only chooses.

    A gradient of such an operator may be a sum of cotangents. Then even the sum of all cotangents must be exact.
    """
    if not value.is_floating_point():
        return True
    return case.definition.is_exact and (name.startswith("output.") or _adds_exactly(case, index))


def _adds_exactly(case: OperatorCase, index: int) -> bool:
    """True if gradients only add up cotangents, and even the sum of all cotangents' magnitudes is exact."""
    if not case.definition.adds_cotangents or case.values[index][0] != EXACT_MODE:
        return False
    total = sum(float(each.double().abs().sum()) for each in _cotangents(draw(case, index)).values())
    fewest = min(SIGNIFICAND_BITS[name] for name in case.dtypes)
    return bool(case.definition.cotangent_parts * case.world_size * total <= 2**fewest)


def _knows_operands(case: OperatorCase, index: int) -> bool:
    """True if each partial operand has the same value in every order of its reduction."""
    names = _operands(case)
    if case.values[index][0] != EXACT_MODE:
        return not any(case.reduction(name)[0] in ("sum", "avg") for name in names)
    try:
        sizes = [_magnitude(case, draw(case, index), name) for name in names]
    except InexactData:
        return False
    fewest = min(SIGNIFICAND_BITS[name] for name in case.dtypes)
    return case.definition.domain != DISTINCT or all(size.numel() <= 2**fewest for size in sizes)


def _best(case: OperatorCase, given: Tensors, index: int) -> tuple[Founds, str]:
    """Returns (results, ''), or ({}, reasons) if the results are neither proved exact nor bounded."""
    mode, reasons = case.values[index][0], list[str]()
    if mode == EXACT_MODE:
        found = _followed(lambda: _proved(case, given))
        if not isinstance(found, str):
            return found, ""
        reasons.append(found)
    if set(case.dtypes) <= set(REAL_DTYPES):
        from equivtest.oracle.running import RunningError  # torch's decompositions take a second to import

        fewest = min(case.dtypes, key=SIGNIFICAND_BITS.__getitem__)
        counted = RunningError(arithmetic_of(fewest), case.world_size)
        found = _followed(lambda: _bounded(case, given, mode, counted))
        if not isinstance(found, str):
            return found, ""
        reasons.append(found)
    return {}, UNKNOWN + "; ".join(reasons)


def _followed(way: Callable[[], Founds]) -> Founds | str:
    """Returns the results of `way`, which proves results exact or bounds them, or the reason why it cannot."""
    try:
        return way()
    except InexactData as error:
        return str(error)
    except (
        RuntimeError,
        NotImplementedError,
        TypeError,
        AssertionError,
        AttributeError,
        LookupError,
        ArithmeticError,
    ) as error:
        return f"cannot be followed operation by operation: {type(error).__name__}: {error}"[:300]


def _run(case: OperatorCase, operands: Sequence[torch.Tensor], given: Mapping[str, torch.Tensor]) -> Tensors:
    leaves = [operand.requires_grad_(number in case.graded()) for number, operand in enumerate(operands)]
    results = case.call(tuple(leaves))
    found = {f"output.{number}": result.detach() for number, result in enumerate(results)}
    pairs = [
        (result, given[f"cotangent.{number}"])
        for number, result in enumerate(results)
        if f"cotangent.{number}" in given and result.requires_grad
    ]
    if pairs:
        torch.autograd.backward(*map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]
    for number in case.graded():
        grad = leaves[number].grad
        found[f"grad.operand.{number}"] = torch.zeros_like(leaves[number].detach()) if grad is None else grad
    return found


def _operands(case: OperatorCase) -> list[str]:
    return [f"operand.{number}" for number in range(len(case.operands))]


def _cotangents(given: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor for name, tensor in given.items() if name.startswith("cotangent.")}


def _plainly(case: OperatorCase, given: Tensors) -> Tensors:
    """Returns the results and gradients of the unsharded call, in the case's dtypes and without bounds."""
    operands = [_reduced(case, given, name) for name in _operands(case)]
    return _run(case, operands, {name: _reduced(case, given, name) for name in _cotangents(given)})


def _reduced(case: OperatorCase, given: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Returns the whole value of an operand or a cotangent in its dtype, rounded at most once."""
    tensor, (op, num) = given[name], case.reduction(name)
    if not op:
        return tensor.clone()
    stack = tensor.double().reshape((num, *case.whole_shape(name)))
    if op in ("max", "min"):
        whole = stack.amax(0) if op == "max" else stack.amin(0)
    else:
        whole = stack.sum(0) / (num if op == "avg" else 1)
    return whole.to(tensor.dtype)


def _proved(case: OperatorCase, given: Tensors) -> Founds:
    """Returns results and gradients that the certificate proves exact in the dtype with the fewest bits.

    DTensor may divide a replicated tensor by the number of ranks before it adds that tensor to a partial tensor
    (2.13.0). The proof leaves bits for this division.

    Raises:
        InexactData: an operation may round.
    """
    fewest = min(case.dtypes, key=SIGNIFICAND_BITS.__getitem__)
    certificate = Certificate(DTYPES[fewest])
    sizes = [_magnitude(case, given, name) for name in _operands(case)]
    cotangents = {name: _magnitude(case, given, name) for name in _cotangents(given)}
    with certificate:
        _run(case, sizes, cotangents)
    spare = (case.world_size & -case.world_size).bit_length() - 1  # dividing by a power of two takes a finer unit
    if certificate.bits_used + spare > SIGNIFICAND_BITS[fewest]:
        raise InexactData(
            f"sums need {certificate.bits_used} bits, and {spare} more if divided by the number of ranks, but {fewest} "
            f"has {SIGNIFICAND_BITS[fewest]}"
        )
    whole = [_whole(case, given, name) for name in _operands(case)]
    found = _run(case, whole, {name: _whole(case, given, name) for name in _cotangents(given)})
    odd = case.world_size // (case.world_size & -case.world_size)
    for name in case.passed_on if odd > 1 else ():
        if bool(torch.fmod(found[name].double(), odd * FINEST).any()):
            raise InexactData(f"{name} is not a multiple of {odd}, and the operator may divide {name} by {odd}")
    return {name: Found(value.double(), None, PROVED) for name, value in found.items()}


def _whole(case: OperatorCase, given: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    value = _reduced(case, given, name)
    return value.double() if value.is_floating_point() else value


def _magnitude(case: OperatorCase, given: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Returns the sum of the absolute values of the terms of a tensor, or the tensor if it has no floats."""
    tensor, (op, num) = given[name], case.reduction(name)
    if not tensor.is_floating_point():
        return tensor.clone()
    if not op:
        return tensor.double().abs()
    stack = tensor.double().reshape((num, *case.whole_shape(name)))
    reduce_exactly(name, stack, op, [num])
    return stack.abs().sum(0)


def _bounded(case: OperatorCase, given: Tensors, mode: str, counted: RunningError) -> Founds:
    """Returns results and gradients with their bounds, by running error analysis.

    Raises:
        InexactData: no bound is known for some operation.
    """
    names = [*_operands(case), *_cotangents(given)]
    if mode == EXACT_MODE:  # partial tensors of exact draws are reduced exactly
        whole = {name: _exactly_reduced(case, given, name) for name in names}
    ranged = {name: counted.exactly(tensor) if tensor.is_floating_point() else tensor for name, tensor in given.items()}
    with counted:
        if mode != EXACT_MODE:
            whole = {name: _summed(case, ranged[name], name) for name in names}
        found = _run(case, [whole[name] for name in _operands(case)], _cotangents(whole))
    return {name: Found.within(counted.bounded(tensor)) for name, tensor in found.items() if tensor.is_floating_point()}


def _exactly_reduced(case: OperatorCase, given: Tensors, name: str) -> torch.Tensor:
    """Returns a tensor with an error of 0. Its magnitude is the sum of the magnitudes of its terms."""
    from equivtest.oracle.ranged import Parts

    whole = _reduced(case, given, name)
    if not whole.is_floating_point():
        return whole
    magnitude = _magnitude(case, given, name)
    return Parts(whole, torch.zeros_like(whole, dtype=torch.float64), magnitude).wrapped()


def _summed(case: OperatorCase, stack: torch.Tensor, name: str) -> torch.Tensor:
    """Reduces `stack` with a bound for any order of the additions. Must run within the running error mode."""
    op, num = case.reduction(name)
    if not op:
        return stack.detach()
    stack = stack.reshape((num, *case.whole_shape(name)))
    if op in ("max", "min"):
        return stack.amax(0).detach() if op == "max" else (-(-stack).amax(0)).detach()
    total = stack.sum(0)
    return (total / num if op == "avg" else total).detach()

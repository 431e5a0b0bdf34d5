"""Runs the unsharded module on integers, and proves that no operation of the module can round them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from equivtest.cases.values import draw
from equivtest.errors import Misuse, NotSupported, ReferenceRefuses
from equivtest.oracle.averages import Averages, reciprocal_is_near
from equivtest.oracle.certificate import Certificate
from equivtest.oracle.exact import InexactData
from equivtest.oracle.operations import Found, Operations
from equivtest.oracle.places import Places
from equivtest.programs.case import EXACT_MODE, MEAN_OF_PARTS, ModuleCase
from equivtest.programs.inputs import REAL
from equivtest.programs.oracle.unsharded import Tensors, make_unsharded, run_parts, split, sum_of
from equivtest.programs.values import VARIANTS, bounds_of
from equivtest.tensors import DTYPES

EXACT = "equal: the unsharded module in float64, and none of its operations can round these values"


def exactly(case: ModuleCase, given: Tensors) -> dict[str, Found]:
    """Returns results on integers. Gradients of the batch's parts are added up or averaged, as the case declares."""
    parts = split(case, given)
    rows, stacks = run_parts(case, [make_unsharded(case, part) for part in parts], parts)
    exact = {name: Found(tensor.detach().double(), None, EXACT) for name, tensor in rows.items()}
    if case.batch != MEAN_OF_PARTS:
        return exact | {name: Found(sum_of(stack), None, EXACT) for name, stack in stacks.items()}
    averages = Averages(Operations(case.dtype, case.world_size, must_be_exact=True), case.num_parts, micro_batches=1)
    return exact | {name: _averaged(averages, stack) for name, stack in stacks.items()}


def _averaged(averages: Averages, stack: torch.Tensor) -> Found:
    found, shape = averages.total(stack.reshape(len(stack), -1)), stack.shape[1:]
    allowed = None if found.allowed is None else found.allowed.reshape(shape)
    return replace(found, value=found.value.reshape(shape), allowed=allowed)


def prove_exact(case: ModuleCase) -> int:
    """Returns the largest number of bits that a sum of the case needs, whatever the seeds are.

    Raises:
        Misuse: an operation of the module could round the values of this case.
    """
    return _prove_exact(
        replace(case, values=((EXACT_MODE, 0),), poison="none", repeats=False, records=False, members=())
    )


@functools.lru_cache(maxsize=1024)
def _prove_exact(case: ModuleCase) -> int:
    """Proves exactness for each variant of ids, masks and similar inputs."""
    whole_numbers = [name for name, kind in case.kinds().items() if kind != REAL]
    variants = range(VARIANTS if whole_numbers else 1)
    return max(_bits_of(case, variant, whole_numbers) for variant in variants)


def _bits_of(case: ModuleCase, variant: int, whole_numbers: Sequence[str]) -> int:
    if case.facts.loss and case.batch == MEAN_OF_PARTS:
        raise Misuse(f"{case.build}: the mean of the {case.num_parts} ranks' losses may round, so it is not exact")
    if not case.is_divided and case.batch == MEAN_OF_PARTS and not reciprocal_is_near(case.num_parts, case.dtype):
        raise Misuse(f"{case.build}: a mean over {case.num_parts} ranks may round in {case.dtype}, so it is not exact")
    places = Places()
    certificate = Certificate(DTYPES[case.dtype], places)
    drawn = draw(replace(case, values=((EXACT_MODE, variant),)), 0) if whole_numbers else {}
    magnitudes = {
        name: drawn[name]
        if name in whole_numbers
        else torch.full(case.shapes()[name], float(math.prod(bounds_of(case, name))), dtype=torch.float64)
        for name in case.given_names()
    }
    parts = split(case, magnitudes)
    modules = [make_unsharded(case, part) for part in parts]
    for module in modules:
        places.watch(module)
    try:
        with certificate:
            for stack in run_parts(case, modules, parts)[1].values():
                sum_of(stack)
    except NotSupported as error:
        raise ReferenceRefuses(
            f"{case.build}: the unsharded module, in {case.dtype}, with {case.takes},", error
        ) from error
    except (InexactData, RuntimeError) as error:  # torch raises RuntimeError if the module casts x to a fixed dtype
        raise Misuse(
            f"{case.build}: with {case.takes}, on integers up to {case.arguments.largest} in {case.dtype}, on "
            f"{case.world_size} rank{'s' * (case.world_size > 1)}, results may be rounded: {error}{places.refused}: "
            "take smaller sizes or leave this dtype out; a module that rounds is judged on real values, ('real', 0)"
        ) from error
    return certificate.bits_used

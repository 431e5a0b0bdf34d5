"""Measures how a backend and its device compute, and returns records of `Arithmetic` for a person to read and sign.

Error bounds for runs follow from such a record.  The returned record has the narrowest bounds that contain every
measurement.  The record need not be right for other runs: an order of summation that never varied here may vary there.

Letters: w is the number of ranks, u the unit roundoff.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.fingerprint.case import FUNCTIONS, WIDTHS, FingerprintCase
from equivtest.oracle.contractions import product
from equivtest.oracle.declared import declared
from equivtest.oracle.operands import bound_reduction
from equivtest.oracle.rounding import Arithmetic, Bounded, unit_roundoff
from equivtest.ranks.backend import Backend
from equivtest.ranks.first_cause import first_cause
from equivtest.ranks.pool import Pool
from equivtest.tensors import DTYPES, same_bits

SUBJECT = "equivtest.fingerprint.subject:fingerprint"

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Reading:
    """The values that all ranks computed for one case of the fingerprint.

    Attributes:
        given: The operands, unsharded.
        by_rank: Name -> value, for each rank.
    """

    case: FingerprintCase
    given: Tensors
    by_rank: tuple[Tensors, ...]


@dataclass(frozen=True)
class Fingerprint:
    """The measurements in one dtype.

    Attributes:
        record: The record that can be declared. None if no record allows the measurements, or if nothing was measured.
        told: The reasons for the record, one line each.
        problems: Measurements that no declaration allows.
        lacking: The message with which the backend refused the dtype, so that nothing was measured, or ''.
    """

    dtype: str
    record: Arithmetic | None = None
    told: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    lacking: str = ""


def measure(pool: Pool, dtype: str, world_sizes: Sequence[int]) -> Fingerprint:
    readings, problems = [], []
    for world_size in world_sizes:
        case = FingerprintCase(world_size=world_size, dtype=dtype)
        replies = pool.run(SUBJECT, case)
        refused = next((reply for reply in replies if reply.outcome == "not_supported"), None)
        if refused is not None:
            return Fingerprint(dtype, lacking=refused.error_text)
        cause = first_cause(replies)
        if cause is not None:
            problems.append(f"{case.name_rank(cause.rank)} {cause.outcome}: {cause.error_type} {cause.error_text}")
            continue
        answers = [{name: each.local for name, each in reply.answers[0].tensors.items()} for reply in replies]
        readings.append(Reading(case, draw(case, 0), tuple(answers)))
    found = conclude(dtype, readings) if readings else Fingerprint(dtype)
    return replace(found, record=None if problems else found.record, problems=(*problems, *found.problems))


def conclude(dtype: str, readings: Sequence[Reading]) -> Fingerprint:
    """Returns the fingerprint of one dtype, with the narrowest record that allows all readings.

    If no record allows all readings, the fingerprint's `problems` name the measurements.
    """
    problems = tuple(problem for reading in readings for problem in _problems(reading))
    reduce, sums = _finest(
        _no_finer_than(dtype, dtype),
        lambda name: max(_sums_beside(each, Arithmetic(dtype, dtype, name)) for each in readings),
    )
    accumulate, products = _finest(  # kernels of 16 bits may compute in float32
        _no_finer_than("float32" if DTYPES[dtype].itemsize == 2 else dtype, dtype),
        lambda name: max(_product_beside(each, Arithmetic(dtype, name, dtype)) for each in readings),
    )
    told: tuple[str, ...] = (
        f"reduce={reduce!r}: the largest error of a sum over the ranks is {sums:.2g} of its bound",
        f"accumulate={accumulate!r}: the largest error of a product of matrices is {products:.2g} of its bound",
    )
    if not (reduce and accumulate):
        problems = (*problems, "the errors of sums or products are larger than any declaration allows")
    if problems:
        return Fingerprint(dtype, None, told, problems)
    ulp, function = max(_ulps(each, accumulate) for each in readings)
    record = Arithmetic(
        dtype,
        accumulate,
        reduce,
        libm_ulp=float(max(Arithmetic.libm_ulp, math.ceil(ulp))),
        rounds_to_nearest=all(_rounds_to_nearest(each, reduce) for each in readings),
        flushes_subnormals=any(map(_flushes, readings)),
        adds_rows_in_order=all(map(_adds_rows_in_order, readings)),
        order_varies=any(map(_varies, readings)),
    )
    told = (*told, *_told(record, ulp, function, readings[0].case.num_calls))
    return Fingerprint(dtype, record, told)


def _told(record: Arithmetic, ulp: float, function: str, num_calls: int) -> Iterator[str]:
    """Yields one line for each field of the record, with the measurement from which its value follows.

    Args:
        ulp, function: The largest error of any function, in units in the last place, and that function's name, or ''.
        num_calls: Number of sums of the same operands that were compared.
    """
    if function:
        yield (
            f"libm_ulp={record.libm_ulp}: {function} has the largest error of all functions, {ulp:.3g} units "
            "in the last place"
        )
    else:
        yield f"libm_ulp={record.libm_ulp}: not measured, because no finer dtype exists to compare float64 with"
    are = "are all" if record.rounds_to_nearest else "are not all"
    yield f"rounds_to_nearest={record.rounds_to_nearest}: sums and products of two numbers {are} the nearest number"
    become = "become zeros" if record.flushes_subnormals else "are kept"
    yield f"flushes_subnormals={record.flushes_subnormals}: subnormal numbers {become}"
    bits = "different bits" if record.order_varies else "the same bits"
    yield f"order_varies={record.order_varies}: {num_calls} sums over the ranks of the same operands had {bits}"
    are = "are" if record.adds_rows_in_order else "are not always"
    yield f"adds_rows_in_order={record.adds_rows_in_order}: rows of an embedding's gradient {are} added in order"


def _problems(reading: Reading) -> Iterator[str]:
    case, first = reading.case, reading.by_rank[0]
    for rank, answers in enumerate(reading.by_rank):
        if not same_bits(answers["sums"], first["sums"]):
            yield f"{case.name_rank(rank)}: all_reduce gave other bits here than on rank 0"
        for name in ("tiny_sum", "tiny_product"):
            tiny = reading.given["tiny"][0 if name == "tiny_sum" else rank]
            if not bool(((answers[name] == tiny) | (answers[name] == 0)).all()):
                yield f"{case.name_rank(rank)}: {name} of {tiny.tolist()} is {answers[name].tolist()}"
        for name in FUNCTIONS:
            if not bool(answers[name].isfinite().all()):
                yield f"{case.name_rank(rank)}: {name} of numbers from 1/64 to 8 is not finite"


def _no_finer_than(finest: str, dtype: str) -> list[str]:
    """Returns the dtypes that are no finer than `finest`, in order of unit roundoff, `finest` first.

    For a 16-bit dtype the result has only `finest` and the dtype itself.
    """
    least = unit_roundoff(finest)
    found = sorted((name for name in DTYPES if unit_roundoff(name) >= least), key=unit_roundoff)
    return [name for name in found if name in (finest, dtype)] if DTYPES[dtype].itemsize == 2 else found


def _finest(names: Iterable[str], beside: Callable[[str], float]) -> tuple[str, float]:
    """Returns the first dtype for which `beside` returns at most 1, or '', and the last number that `beside` returned.

    `beside` returns the largest error as a fraction of its bound.
    """
    ratio = math.inf
    for name in names:
        ratio = beside(name)
        if ratio <= 1:
            return name, ratio
    return "", ratio


def _sums_beside(reading: Reading, record: Arithmetic) -> float:
    """Returns the largest error of a sum over the ranks, as a fraction of the error that the record allows."""
    with declared({record.dtype: record}):
        found = bound_reduction(reading.given["terms"], "sum", 1)
    assert found.allowed is not None
    right = Bounded(found.value, found.allowed)
    return max(_ratio(total, right) for answers in reading.by_rank for total in answers["sums"])


def _product_beside(reading: Reading, record: Arithmetic) -> float:
    right = product(reading.given["left"], reading.given["right"], record)
    return max(_ratio(answers["product"], right) for answers in reading.by_rank)


def _ratio(found: torch.Tensor, right: Bounded) -> float:
    off = (found.double() - right.value).abs()
    if not bool(off.isfinite().all()):
        return math.inf
    return float(torch.where(off == 0, 0.0, off / right.allowed).max())


def _ulps(reading: Reading, accumulate: str) -> tuple[float, str]:
    """Returns the largest error of any function, in units in the last place of `accumulate`, and the function's name.

    The rounding of the stored result does not count.  The result is (0, '') for float64, because no dtype is finer.
    """
    if reading.case.dtype == "float64":
        return 0.0, ""
    points, stored = reading.given["points"].double(), unit_roundoff(reading.case.dtype)
    found = []
    for name in FUNCTIONS:
        right = getattr(torch, name)(points)
        for answers in reading.by_rank:
            off = (answers[name].double() - right).abs() - stored * right.abs()
            units = off / (2 * unit_roundoff(accumulate) * right.abs())
            found.append((max(0.0, float(units[right != 0].max())), name))
    return max(found)


def _rounds_to_nearest(reading: Reading, reduce: str) -> bool:
    """True if each sum and product of two numbers is the nearest number, on the device and in sums over two ranks.

    Args:
        reduce: Dtype in which the backend adds.
    """
    points, dtype = reading.given["points"], DTYPES[reading.case.dtype]
    pairs = points.double(), points.roll(1).double()
    right = torch.stack((pairs[0] + pairs[1], pairs[0] * pairs[1])).to(dtype)
    is_so = all(torch.equal(answers["elements"], right) for answers in reading.by_rank)
    if reading.case.world_size != 2:
        return is_so
    total = reading.given["terms"].double().sum(0).to(DTYPES[reduce]).to(dtype)
    return is_so and all(torch.equal(answers["sums"][0], total) for answers in reading.by_rank)


def _flushes(reading: Reading) -> bool:
    return any(
        bool((answers[name] == 0).any())
        for rank, answers in enumerate(reading.by_rank)
        for name in ("tiny_sum", "tiny_product")
        if rank == 0 or name == "tiny_sum"
    )


def _varies(reading: Reading) -> bool:
    return not all(same_bits(total, answers["sums"][0]) for answers in reading.by_rank for total in answers["sums"])


def _adds_rows_in_order(reading: Reading) -> bool:
    ids = reading.given["ids"].tolist()
    for width in WIDTHS:
        rows = reading.given[f"rows.{width}"]
        table = torch.zeros_like(reading.by_rank[0][f"table.{width}"])
        for row, index in enumerate(ids):
            table[index] += rows[row]
        if not all(same_bits(answers[f"table.{width}"], table) for answers in reading.by_rank):
            return False
    return True


def describe(found: Fingerprint) -> str:
    if found.lacking:
        return f"{found.dtype}: not supported: {found.lacking}"
    head = f"{found.dtype}:" if found.record else f"{found.dtype}: nothing can be declared"
    return "\n  ".join((head, *found.told, *(f"problem: {problem}" for problem in found.problems)))


def write(found: Sequence[Fingerprint], backend: Backend, world_sizes: Sequence[int], path: Path) -> None:
    """Writes a Python module whose MEASURED contains all records.  Raises Misuse if it exists or cannot be written."""
    kept = [each for each in found if each.record]
    ranks = " and ".join(map(str, world_sizes))
    lines = [
        f'"""What {backend.name} on {backend.device} computes, as measured on {ranks} ranks; nothing of it is proved.',
        "",
        "Read it, correct it by the documentation of the device, and sign.",
        "",
        "Signed:",
        '"""',
        "",
        "from equivtest.oracle.rounding import Arithmetic",
        "",
        "MEASURED = {",
        *(line for each in kept for line in _entry(each)),
        "}",
        "",
    ]
    try:
        with path.open("x") as file:
            file.write("\n".join(lines))
    except OSError as error:
        raise Misuse(f"--output: {path} cannot be written: {error.strerror}; name a new file") from error


def _entry(found: Fingerprint) -> Iterator[str]:
    assert found.record is not None
    written = {field.name: getattr(found.record, field.name) for field in fields(Arithmetic)}
    yield from (f"    # {line}" for line in found.told)
    yield f'    "{found.dtype}": Arithmetic('
    yield from (f"        {name}={value!r}," for name, value in written.items())
    yield "    ),"

"""Writes the forms in which the enumeration calls operators, from the sample inputs of torch's own list.

    python -m studies.operator_forms [--undecided]

One line of JSON per form goes to `equivtest/families/operators/forms.jsonl`: the operator, the way ('', 'in place' or
'out'), the text of the call, the shape of each tensor and the tensor's contents.  An operator without a form has a line
with the reason.  With --undecided, forms stay as they are, and each operator whose results the oracle cannot judge in
any form gets a line with the operator, the way and the reason.

Source: torch.testing._internal.common_methods_invocations.op_db (2.13.0), OpInfo.sample_inputs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from equivtest.families.operators.case import MAX_DIMS, MAX_RESULTS, REAL_MODE, OperatorCase
from equivtest.families.operators.case_operator import FLOATS
from equivtest.families.operators.case_samples import FILE, IN_PLACE, OUT, WAYS, function_of, name_of, run_form
from equivtest.families.operators.case_table import HAND_WRITTEN, OPERATORS, plain_operand
from equivtest.families.operators.oracle import judged_how

MAX_FORMS = {"": 5, IN_PLACE: 2, OUT: 1}
MAX_NUMEL, MAX_OPERANDS, MAX_RESULT = 250, 6, 1000
MAX_SAMPLES = 400


UNDEFINED = {"byte": "what it makes of a negative number is undefined"}
"""Operator that is left out -> the reason."""


class LeftOutError(Exception):
    """Raised if a sample cannot become a form.  The message is the reason."""


class Form(NamedTuple):
    """One way to call an operator, as a line of the file describes it."""

    call: str
    shapes: tuple[tuple[int, ...], ...]
    holds: tuple[str, ...]

    @property
    def features(self) -> frozenset[str]:
        """Traits in which forms differ: each argument, and the number of dims and the contents of each tensor."""
        return frozenset((*self.call.split(", "), *map(str, map(len, self.shapes)), str(self.holds), str(self.is_even)))

    @property
    def is_even(self) -> bool:
        return not self.shapes[0] or self.shapes[0][0] % 2 == 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--undecided", action="store_true")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if parser.parse_args().undecided:
        mark_undecided()
    else:
        write_forms()


def write_forms() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    lines: list[list[Any]] = []
    infos: dict[str, list[Any]] = {}
    for info in op_db:
        infos.setdefault(info.name, []).append(info)
    for name, variants in infos.items():
        for way in WAYS:
            if (not way and name in HAND_WRITTEN) or name_of(name, way) in HAND_WRITTEN or not has(way, variants):
                continue
            forms, why = ([], UNDEFINED[name]) if name in UNDEFINED else forms_of(name, way, variants)
            lines += [[name, way, *form] for form in forms]
            if not forms and not way:
                lines.append([name, why])
    FILE.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def mark_undecided() -> None:
    """Replaces the lines of operators whose results the oracle cannot judge."""
    lines = [line for line in map(json.loads, FILE.read_text("utf-8").splitlines()) if len(line) != 3]
    for name, way in {name_of(line[0], line[1]): line[1] for line in lines if len(line) > 2}.items():
        if reason := undecided(name):
            lines.append([name.removesuffix(f" {way}") if way else name, way, reason])
    FILE.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def undecided(name: str) -> str:
    """Returns why the oracle cannot judge any result of any form of an operator, or ''."""
    reason = ""
    for form in OPERATORS[name].form(()):
        whole = (("replicate",),) * len(form.shapes)
        case = OperatorCase(world_size=2, operator=name, operands=form.shapes, arguments=form.arguments,
                            holds=form.holds, placements=whole, values=((REAL_MODE, 1),))  # fmt: skip
        case = replace(case, requires_grad=tuple(n for n in range(len(whole)) if case.kind_of(n) == FLOATS))
        try:
            found = judged_how(case, 0)
        except RuntimeError as error:  # the shape of the result depends on values
            reason = str(error)[:160]
            continue
        results = [each for answer, each in found.items() if answer.startswith("output.")]
        if any(each.allowed is None or bool(each.allowed.isfinite().any()) for each in results):
            return ""
        reason = results[0].derivation[:160]
    return reason


def has(way: str, variants: Iterable[Any]) -> bool:
    """True if an operator can be called in this way: '', in place or with out=."""
    if way == IN_PLACE:
        return any(info.inplace_variant for info in variants)
    return way != OUT or any(info.supports_out for info in variants)


def forms_of(name: str, way: str, variants: Iterable[Any]) -> tuple[list[Form], str]:
    """Returns the forms of an operator that together have the most traits, and the reason if there is none."""
    found, why = dict[Form, None](), "torch's list has no sample of it"
    for info in variants:
        for sample in samples_of(info):
            try:
                found[form_of(name, way, sample)] = None
            except LeftOutError as error:
                why = str(error)
    return chosen(list(found), MAX_FORMS[way]), why


def samples_of(info: Any) -> Iterator[Any]:
    """Yields torch's samples of an operator in float64, or in another dtype if it does not take float64."""
    dtype = torch.float64 if torch.float64 in info.dtypes else next(iter(sorted(info.dtypes, key=str)), torch.float32)
    torch.manual_seed(0)
    try:
        yield from itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=False), MAX_SAMPLES)
    except (RuntimeError, IndexError):  # such as of a kernel that the CPU does not have
        return


def chosen(forms: list[Form], num: int) -> list[Form]:
    """Selects at most `num` forms: each time the form with the most new traits, the smallest first.

    A form comes last if two ranks cannot divide its first tensor.
    """
    seen, kept = set[str](), list[Form]()
    left = sorted(forms, key=lambda form: (max(form.shapes[0], default=1) < 2, sum(map(numel, form.shapes))))
    while left and len(kept) < num:
        best = max(left, key=lambda form: len(form.features - seen))
        left.remove(best)
        if best.features <= seen:
            break
        seen |= best.features
        kept.append(best)
    return kept


def numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def form_of(name: str, way: str, sample: Any) -> Form:
    """Converts a sample to a form.  Raises LeftOutError if the enumeration cannot make or judge such a call."""
    tensors: list[torch.Tensor] = []
    positional = [text_of(each, tensors) for each in (sample.input, *sample.args)]
    named = [f"{key}={text_of(each, tensors)}" for key, each in sample.kwargs.items()]
    if not tensors:
        raise LeftOutError("takes no tensor")
    if not function_of(name):
        raise LeftOutError("torch has no function of that name")
    shapes = tuple(tuple(each.shape) for each in tensors)
    holds = tuple("squares" if is_inverted(name, each) else holding(each) for each in tensors)
    if not all(map(numel, shapes)):
        raise LeftOutError("its samples have no element")
    swapped = [*reversed(positional[:2]), *positional[2:]]  # torch's list calls some with its first two swapped
    why = LeftOutError("its samples are large")
    for order in (positional, swapped)[: 1 + (not way)]:
        for sized in dict.fromkeys((shapes, tuple(map(small, shapes)))):
            form = Form(", ".join((*order, *named)), sized, holds)
            try:
                require_small(form)
                require_judgeable(name_of(name, way), form)
            except LeftOutError as error:
                why = error
            else:
                return form
    raise why


SMALLER = {20: 5, 16: 4, 15: 6, 12: 4, 10: 4, 9: 4, 8: 4, 7: 3}
"""Large size in a sample -> smaller size that is tried in its place."""


def small(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(SMALLER.get(size, size if size < 7 else 5) for size in shape)


def require_small(form: Form) -> None:
    if len(form.shapes) > MAX_OPERANDS or max(map(len, form.shapes)) > MAX_DIMS:
        raise LeftOutError("its samples have many tensors or dims")
    if max(map(numel, form.shapes)) > MAX_NUMEL:
        raise LeftOutError("its samples are large")


def text_of(value: Any, tensors: list[torch.Tensor]) -> str:
    """Returns an argument as code, and appends its tensors to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return f"x{len(tensors) - 1}"
    if isinstance(value, list | tuple):
        inner = ", ".join(text_of(each, tensors) for each in value)
        return f"[{inner}]" if isinstance(value, list) or len(value) != 1 else f"({inner},)"
    if isinstance(value, torch.memory_format):
        return repr(value)
    if isinstance(value, torch.dtype) or value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise LeftOutError(f"takes a {type(value).__name__}")


def is_inverted(name: str, tensor: torch.Tensor) -> bool:
    """True if an operator may compute the inverse of the tensor."""
    takes_inverse = name.startswith("linalg.") or name in ("logdet", "pinverse", "lu")
    return takes_inverse and tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2]


def holding(tensor: torch.Tensor) -> str:
    """Returns the word for the contents of a tensor, such as 'bools'."""
    if tensor.layout != torch.strided or tensor.is_complex():
        raise LeftOutError("takes tensors that are sparse or complex")
    if tensor.dtype == torch.bool:
        return "bools"
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        raise LeftOutError("takes tensors of 8 bits")
    if not tensor.is_floating_point():
        if tensor.numel() and int(tensor.min()) < 0:
            return "whole"
        return f"below {int(tensor.max()) + 1 if tensor.numel() else 1}"
    if tensor.dim() >= 2 and 1 < tensor.shape[-1] == tensor.shape[-2] and torch.equal(tensor, tensor.mT):
        return "squares"
    values = tensor.flatten()
    if values.numel() > 1 and bool(((values == 0) | (values == 1)).all()):
        return "bits"
    if bool((values > 0).all()):
        return "fraction" if bool((values < 1).all()) else "positive"
    return "unit" if bool((values.abs() < 1).all()) else "any"


def require_judgeable(name: str, form: Form) -> None:
    """Raises LeftOutError if the operator gives different results each time, or if values determine shapes."""
    seeds, found = (0, 0, 1), []
    for seed in seeds:
        try:
            torch.manual_seed(seed + len(found))
            operands = plain_operands(form, seed)
            found.append(run_form(name, form.call, operands))
            run_form(name, form.call, [single(each) for each in plain_operands(form, seed)])
            run_form(name, form.call, constant_operands(form))
        except Exception as error:
            raise LeftOutError(f"cannot be called again: {type(error).__name__}: {error}"[:120]) from error
        if not all(map(torch.equal, operands, plain_operands(form, seed))):
            raise LeftOutError("writes to its operands")
    if not all(isinstance(each, torch.Tensor) for each in found[0]):
        raise LeftOutError("gives no tensors alone")
    if any(each.is_complex() or each.layout != torch.strided for each in found[0]):
        raise LeftOutError("gives tensors that are sparse or complex")
    if not 1 <= len(found[0]) <= MAX_RESULTS:
        raise LeftOutError(f"gives {len(found[0])} tensors")
    if any(a.shape != b.shape for a, b in zip(found[0], found[2], strict=False)) or len(found[0]) != len(found[2]):
        raise LeftOutError("the shape of its result depends on values")
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found[0], found[1], strict=True)):
        raise LeftOutError("draws at random")
    if any(each.numel() > MAX_RESULT for each in found[0]):
        raise LeftOutError("its results are large")


def constant_operands(form: Form) -> list[torch.Tensor]:
    kinds = [content.partition(" ")[0] for content in form.holds]
    kinds = [{"below": "whole"}.get(kind, kind) for kind in kinds]
    return [plain_operand(*row, "float32") for row in zip(kinds, form.holds, form.shapes, strict=True)]


def single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def plain_operands(form: Form, seed: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [plain(shape, holds, source) for shape, holds in zip(form.shapes, form.holds, strict=True)]


def plain(shape: tuple[int, ...], holds: str, source: torch.Generator) -> torch.Tensor:
    if holds == "bools":
        return torch.rand(shape, generator=source) > 0.4
    if holds == "whole" or holds.startswith("below"):
        return torch.randint(int(holds.partition(" ")[2] or 8), shape, generator=source)
    if holds == "squares":
        return torch.eye(shape[-1], dtype=torch.float64).expand(shape).clone()
    value = torch.rand(shape, generator=source, dtype=torch.float64) / 2 + 0.25
    return (
        value
        if holds in ("fraction", "positive", "bits")
        else value * (1 - 2 * torch.randint(2, shape, generator=source))
    )


if __name__ == "__main__":
    main()

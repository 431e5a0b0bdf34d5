"""Modules that compute with complex numbers: judged within, and refused if their outputs are complex."""

from __future__ import annotations

import pytest

from equivtest.diagnose.blame import with_fault
from equivtest.errors import Misuse
from equivtest.programs.case import ModuleCase
from equivtest.programs.reference import call_builder, in_dtype
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import check, judge
from equivtest.verdicts.verdict import Verdict

HERE = "tests.programs.complex:"


def case_of(build: str, parallelize: str = "divided", **fields: object) -> ModuleCase:
    made = {"world_size": 2, "x_shape": (2, 3, 4), "values": (("real", 0),), "by_parts": True, **fields}
    return ModuleCase(build=HERE + build, parallelize=HERE + parallelize, **made)  # type: ignore[arg-type]


@pytest.mark.ranks
@pytest.mark.parametrize("build", ["by_table", "by_layer"])
@pytest.mark.parametrize("fields", [{"by_parts": True}, {"by_parts": False}], ids=["by parts", "whole"])
def test_right_program_with_a_submodule_that_returns_complex_numbers_passes(
    pool: Pool, build: str, fields: dict[str, bool]
) -> None:
    verdicts = check("module", case_of(build, **fields), pool)

    assert {verdict.kind for verdict in verdicts} == {"holds"}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_complex_buffer_keeps_its_value_if_the_module_is_cast(dtype: str) -> None:
    """`nn.Module.to` would have dropped the imaginary parts."""
    module = in_dtype(call_builder(HERE + "by_table"), dtype)

    assert module.get_buffer("turns.table").equal(call_builder(HERE + "by_table").get_buffer("turns.table"))
    assert {str(each.dtype) for each in module.parameters()} == {f"torch.{dtype}"}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("given", "given: output is of complex64, .*: use torch.view_as_real of output, or name the outputs"),
        ("held", "held: parameter weight is of complex64"),
        ("counting", "counting: buffer turns, which the forward changes, is of complex64"),
    ],
)
def test_complex_outputs_parameters_and_changed_buffers_are_refused(build: str, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        case_of(build)


def failed(case: ModuleCase, pool: Pool) -> list[Verdict]:
    return [with_fault(verdict, pool) for verdict in judge("module", case, pool) if verdict.failed]


@pytest.mark.ranks
def test_failure_in_a_program_with_complex_operations_has_a_fault_line(pool: Pool) -> None:
    verdict, *_ = failed(case_of("by_layer", "conjugated_on_one"), pool)

    assert verdict.judgement.mismatches[0].tensor == "output"
    assert verdict.fault.startswith("parallelization: every call is right for its operands")


@pytest.mark.ranks
def test_torch_does_not_conjugate_the_gradient_of_an_asynchronous_result(pool: Pool) -> None:
    """Finding 111, in torch: the bit that stands for the conjugate is lost."""
    verdict, *_ = failed(case_of("by_layer", "on_its_way"), pool)

    assert verdict.judgement.mismatches[0].tensor == "grad.boundary.turns.linear"
    assert verdict.fault.startswith("kernel: aten.mul.Tensor of complex64")

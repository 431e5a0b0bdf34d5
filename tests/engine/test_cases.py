"""Cases: what is valid, and how they are written down and read back."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import sys
from typing import Any

import pytest

from equivtest.cases.case import CASE_TYPES, SCHEMA_VERSION, Case, from_code, from_data, import_cases, to_data
from equivtest.errors import Misuse
from equivtest.families.linear.case import LinearCase
from equivtest.families.zero3.fetch.case import FetchCase, RefusedFetchCase
from equivtest.layout import Flat, Layout, Replicate, Shard
from tests.families.refusing import refuses

LINEAR = LinearCase(
    world_size=3,
    style="rowwise",
    dtype="bfloat16",
    values=(("dense", 5), ("wide-w", 6)),
    leading=(2, 3),
    in_features=4,
    out_features=5,
    bias=True,
    input_layout="shard(2)",
    output_layout="shard(1)",
    x_is_dtensor=True,
    requires_grad=("x", "bias"),
    x_contiguous=False,
)
FETCH = FetchCase(world_size=2, parameters=((2, 3), (), (0,), (5,)), requires_grad=(True, False, True, True))


def written(case: Case, **changes: Any) -> dict[str, Any]:
    data = to_data(case)
    return {**data, "fields": {**data["fields"], **changes}}


def test_every_case_class_is_registered_by_name() -> None:
    import_cases()

    assert {"LinearCase", "RefusedLinearCase", "FetchCase", "RefusedFetchCase"} <= CASE_TYPES.keys()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "needs the keys"),
        ([], "needs the keys"),
        ({"schema": SCHEMA_VERSION, "type": "LinearCase"}, "needs the keys"),
        (
            {**to_data(LINEAR), "schema": SCHEMA_VERSION + 1},
            f"has schema {SCHEMA_VERSION + 1}, .* use the version that",
        ),
        ({**to_data(LINEAR), "type": "ConvolutionCase"}, "unknown case class 'ConvolutionCase', known: .*LinearCase"),
        (
            {**to_data(LINEAR), "type": "ReductionCase"},
            "ReductionCase was deleted, and OperatorCase of .* judges reductions instead: see CHANGELOG.md",
        ),
        ({**to_data(LINEAR), "fields": 7}, "has the fields .*, got 7"),
        (written(LINEAR, colour="red"), "has the fields .*'colour': 'red'"),
        (written(LINEAR, world_size="3"), "not a valid LinearCase: .*world_size"),
        (written(LINEAR, leading=[1.5]), "not a valid LinearCase: .*leading"),
        (written(LINEAR, in_features=0), r"in_features must be in 1\.\.4096, got 0"),
        ({**to_data(LINEAR), "fields": {"style": "rowwise"}}, "not a valid LinearCase: .*world_size"),
    ],
)
def test_error_for_an_invalid_written_case_names_the_invalid_part(data: object, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        from_data(data)


NO_CODE = (
    "",
    "LinearCase",
    "LinearCase(",
    "cases.LinearCase(world_size=1)",
    "LinearCase(1)",
    "LinearCase(world_size=__import__('os').getpid())",
    "LinearCase(world_size={[]: 1})",
    "[LinearCase(world_size=1)]",
)


@pytest.mark.parametrize("text", NO_CODE)
def test_code_of_a_case_may_contain_only_a_call_with_literals(text: str) -> None:
    with pytest.raises(Misuse, match=re.escape(f"not the code of a case: {text!r}")):
        from_code(text)


def test_invalid_code_of_a_case_is_refused_also_if_python_ignores_asserts() -> None:
    code = """
import sys
from equivtest.cases.case import from_code
from equivtest.errors import Misuse
assert False, "this one does not run"
for text in sys.argv[1:]:
    try:
        from_code(text)
    except Misuse as error:
        print(str(error).partition("; paste the text behind 'case' in a message, such as ")[0])
"""
    ran = subprocess.run(
        [sys.executable, "-O", "-c", code, *NO_CODE], capture_output=True, text=True, check=False, timeout=60
    )

    assert ran.stderr == ""
    assert all(map(str.startswith, ran.stdout.splitlines(), (f"not the code of a case: {text!r}" for text in NO_CODE)))
    assert ran.stdout.count("\n") == len(NO_CODE)


@pytest.mark.parametrize(
    "text", ["print(world_size=1)", "Case(**{})", "LinearCase(world_size=1, **{'style': 'rowwise'})"]
)
def test_code_of_a_case_with_an_unknown_class_or_field_is_refused(text: str) -> None:
    with pytest.raises(Misuse, match=r"unknown case class|has the fields"):
        from_code(text)


test_error_for_an_invalid_linear_case_names_the_invalid_field = refuses(
    functools.partial(dataclasses.replace, LINEAR),
    ({"world_size": 0}, r"world_size must be in 1\.\.64, got 0"),
    ({"world_size": 65}, r"world_size must be in 1\.\.64, got 65"),
    ({"dtype": "int8"}, "dtype must be one of float32, .*, got 'int8'"),
    ({"values": ()}, "values must hold at least one"),
    (
        {"values": (("wide", 0),)},
        "mode must be one of dense, wide-x, wide-w, wide-g, real, real-cancelling, got 'wide'",
    ),
    ({"values": (("dense", -1),)}, "a seed must be at least 0, got -1"),
    ({"style": "diagonal"}, "style must be one of colwise, rowwise, got 'diagonal'"),
    ({"leading": (1, 1, 1, 1)}, r"leading must have at most 3 dims of at least 1, got \(1, 1, 1, 1\)"),
    ({"leading": (2, 0)}, r"leading must have .* of at least 1, got \(2, 0\)"),
    ({"leading": (2**13, 2**12)}, "x must have at most 16777216 elements, got 134217728"),
    ({"in_features": 0}, r"in_features must be in 1\.\.4096, got 0"),
    ({"out_features": 4097}, r"out_features must be in 1\.\.4096, got 4097"),
    ({"requires_grad": ("weight", "x")}, r"requires_grad must list some of .*, got \('weight', 'x'\)"),
    ({"requires_grad": ("bias",), "bias": False}, r"set bias=True, got requires_grad \('bias',\)"),
    ({"input_layout": "partial(sum)"}, r"input_layout must be replicate or shard\(DIM\), got partial\(sum\)"),
    ({"output_layout": "flat(4)"}, r"output_layout must be replicate or shard\(DIM\), got flat\(4\)"),
    ({"output_layout": "sharded"}, "unknown placement 'sharded'"),
    ({"input_layout": "shard(3)"}, r"x: shard\(3\) names no dim of a tensor of shape \(2, 3, 4\)"),
    ({"x_is_dtensor": False}, r"x of shape \(2, 3, 4\) has uneven shards .* on 3 ranks: set x_is_dtensor=True"),
)


test_error_for_an_invalid_fetch_case_names_the_invalid_field = refuses(
    functools.partial(dataclasses.replace, FETCH),
    ({"parameters": (), "requires_grad": ()}, "parameters must hold at least one shape"),
    ({"requires_grad": (True,)}, "requires_grad must have one flag per parameter: 4, got 1"),
    ({"parameters": ((2,), (), (0,), (-1,))}, r"sizes must be at least 0, got .*\(-1,\)"),
    (
        {"values": (("wide-x", 0),)},
        "mode must be one of dense, index, wide, special, every-bit-pattern, got 'wide-x'",
    ),
    (
        {"dtype": "float32", "values": (("every-bit-pattern", 0),)},
        "mode every-bit-pattern is for float16 and bfloat16, got dtype 'float32': use mode special",
    ),
)


def test_fetch_case_with_mismatched_dtypes_requires_two_parameters() -> None:
    with pytest.raises(Misuse, match="misfit dtype needs at least two parameters"):
        RefusedFetchCase(world_size=1, misfit="dtype")


@pytest.mark.parametrize(
    ("style", "weight", "bias"), [("colwise", Shard(0), Shard(0)), ("rowwise", Shard(1), Replicate())]
)
def test_gradient_has_the_layout_of_its_parameter(style: str, weight: Shard, bias: Shard | Replicate) -> None:
    layouts = LinearCase(world_size=2, style=style, bias=True, requires_grad=("x", "weight", "bias")).layouts()

    assert layouts["grad.weight"] == layouts["param.weight"] == Layout((weight,))
    assert layouts["grad.bias"] == layouts["param.bias"] == Layout((bias,))
    assert layouts["grad.x"] == layouts["x"]


def test_linear_case_has_an_answer_for_each_required_gradient() -> None:
    assert LINEAR.given_names() == ("x", "weight", "bias", "cotangent")
    assert LINEAR.answer_names() == ("output", "param.weight", "param.bias", "grad.x", "grad.bias")
    assert LINEAR.given_flags() == {"x": True, "weight": False, "bias": True, "cotangent": False}
    assert tuple(LINEAR.tensors[name].is_contiguous for name in ("x", "cotangent")) == (False, True)


def test_partition_is_padded_to_a_multiple_of_the_world_size() -> None:
    layouts = FetchCase(world_size=4, parameters=((3, 3), (), (0,)), requires_grad=(True,) * 3).layouts()

    assert [layouts[f"partition.{index}"] for index in range(3)] == [Layout((Flat(n),)) for n in (12, 4, 0)]
    assert layouts["param.0"] == Layout((Replicate(),))


def test_fetch_case_requires_answers_for_parameters_and_partitions() -> None:
    case = FetchCase(world_size=2, parameters=((3,),), contiguous=False, requires_grad=(False,))

    assert case.answer_names() == ("param.0", "partition.0")
    assert case.given_flags() == {"param.0": False}
    assert not case.tensors["param.0"].is_contiguous


def test_most_uneven_tensor_determines_the_shard_kind_of_a_case() -> None:
    def kind(in_features: int, out_features: int) -> str:
        sizes = {"in_features": in_features, "out_features": out_features}
        return LinearCase(world_size=3, style="rowwise", output_layout="shard(1)", **sizes).shard_kind

    assert [kind(6, 6), kind(6, 5), kind(5, 6), kind(5, 4)] == ["even", "uneven", "uneven", "empty"]


def test_case_class_that_describes_no_tensors_raises() -> None:
    with pytest.raises(NotImplementedError):
        Case(world_size=1)

"""`equivtest.program`: groups of arguments, options, and messages for wrong names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import equivtest
from equivtest import Judge, Training, World, module_property, program
from equivtest.errors import Misuse
from equivtest.programs.case import ModuleCase
from equivtest.programs.program import InRank
from equivtest.property import Property, Space
from equivtest.search.chunks import Chunk, chunk_cases

SHAPES = [(2, 3), (4, 3)]
HERE = "tests/program/test_program.py:"


def block(*, bias: bool = True, width: int = 4) -> nn.Module:
    return nn.Linear(3, width, bias=bias)


def replicated(module: nn.Module, mesh: Any, *, wraps: bool = True) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group()) if wraps else module


def sgd(module: nn.Module) -> Any:
    raise NotImplementedError


def cases_of(prop: Property) -> list[ModuleCase]:
    cases: Any = chunk_cases(prop, Chunk(2, ("float32",), 0, 1))
    return list(cases)


def test_case_names_functions_of_a_test_file_by_file_and_name() -> None:
    case = cases_of(program(block, replicated, SHAPES, batch="mean of parts"))[0]

    assert (case.build, case.parallelize) == (HERE + "block", HERE + "replicated")


def test_grouped_arguments_make_the_property_that_flat_arguments_make() -> None:
    grouped = program(
        block,
        replicated,
        SHAPES,
        batch="whole",
        training=Training(optimizer=sgd, steps=3),
        world=World(axes=("dp",), world_sizes=(1, 2), limit_s=30.0),
        judge=Judge(loss="loss", by_parts=False, without_collectives="it has none"),
    )
    flat = module_property(
        block, replicated, SHAPES, batch="whole", optimizer=HERE + "sgd", steps=3, axes=("dp",), world_sizes=(1, 2),
        limit_s=30.0, loss="loss", by_parts=False, without_collectives="it has none",
    )  # fmt: skip

    assert grouped.cases is flat.cases
    assert (grouped.claims, grouped.world_sizes, grouped.limit_s) == (flat.claims, (1, 2), 30.0)
    assert grouped.without_collectives == flat.without_collectives == "it has none"


@pytest.mark.parametrize(
    ("group", "wrong", "said"),
    [
        (Training, {"optimiser": sgd}, "Training has no argument 'optimiser': did you mean optimizer=?"),
        (Training, {"axes": ("dp",)}, "Training has no argument 'axes': write world=World(axes=...)"),
        (World, {"sizes": (1, 2)}, "World has no argument 'sizes': did you mean world_sizes=?"),
        (World, {"nprocs": 2}, "World has no argument 'nprocs': write world=World(world_sizes=...)"),
        (Judge, {"rtol": 1e-3}, "Judge has no argument 'rtol': no tolerance is set, since bounds are derived"),
        (Judge, {"outputs": "logits"}, "outputs must hold names, such as outputs=('logits',), got 'logits'"),
        (World, {"axes": "dp"}, "axes must hold names, such as axes=('dp',), got 'dp'"),
        (World, {"world_sizes": (0, 2)}, "world_sizes must be numbers of ranks, each at least 1, got (0, 2)"),
        (World, {"world_sizes": 4}, "world_sizes must be numbers of ranks, each at least 1, got 4"),
        (Training, {"steps": 0}, "Training: steps must be a whole number of at least 1, got 0"),
        (Training, {"micro_batches": 1.5}, "Training: micro_batches must be a whole number of at least 1, got 1.5"),
        (Training, {"max_norm": -1.0}, "Training: max_norm must be at least 0, where 0 clips nothing, got -1.0"),
        (Training, {"optimizer": lambda module: None}, "optimizer is a lambda, which has no name to send to the ranks"),
    ],
)
def test_error_for_a_misspelt_argument_of_a_group_suggests_the_right_name(group: Any, wrong: Any, said: str) -> None:
    with pytest.raises(Misuse) as raised:
        group(**wrong)

    assert str(raised.value).startswith(said)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"optimizer": sgd}, "program has no argument 'optimizer': write training=Training(optimizer=...)"),
        ({"x_shapes": SHAPES}, "program has no argument 'x_shapes': write inputs=[(1, 3), (4, 3)]"),
        (
            {"inputs": (2, 3)},
            "inputs must hold at least one shape, such as [(2, 3), (4, 3)], got (2, 3): write [(2, 3)]",
        ),
        ({"inputs": None}, "inputs must hold at least one shape"),
        ({"input": SHAPES}, "program has no argument 'input': did you mean inputs=?"),
        ({"training": sgd}, "training must be a Training, such as training=Training(...), got <function sgd"),
        ({"options": {"biass": (1, 2)}}, "options: neither build nor parallelize takes 'biass': did you mean 'bias'?"),
        (
            {"options": {"bias": True}},
            "options must hold the values of each option, such as {'bias': (1, 2)}, got True of bias",
        ),
        ({"options": {"bias": (nn.ReLU(),)}}, "option bias must be a plain value, such as a number"),
        ({"options": {"width": tuple(range(1, 66))}}, "options have 65 combinations, but the limit is 64"),
    ],
)
def test_error_for_a_misspelt_argument_of_a_program_suggests_the_right_name(wrong: Any, said: str) -> None:
    with pytest.raises(Misuse) as raised:
        program(**({"build": block, "parallelize": replicated, "inputs": SHAPES} | wrong))

    assert str(raised.value).startswith(said)


def test_group_of_arguments_refuses_positional_arguments() -> None:
    with pytest.raises(Misuse, match=r"Training takes arguments by name, such as Training\(optimizer=...\), got "):
        Training(sgd)  # type: ignore[misc]


def test_every_value_of_every_option_is_drawn() -> None:
    options = {"bias": (True, False), "width": (2, 4), "wraps": (True, False)}
    prop = program(block, replicated, SHAPES, batch="mean of parts", options=options)

    found = {aspect for case in cases_of(prop) for aspect in case.options}

    assert found == {f"{name}={value}" for name, values in options.items() for value in values}


def test_option_is_passed_to_the_function_that_has_its_name_as_argument() -> None:
    options = {"wraps": (True,), "bias": (False,)}

    case = cases_of(program(block, replicated, SHAPES, batch="mean of parts", options=options))[0]

    assert case.build == HERE + "block(bias=False)"
    assert case.parallelize == HERE + "replicated(wraps=True)"
    assert list(case.facts.parameters) == ["weight"]


def test_case_with_options_can_be_written_and_read() -> None:
    options = {"bias": (False,), "width": (2,)}
    case = cases_of(program(block, replicated, SHAPES, batch="mean of parts", options=options))[0]

    from equivtest.cases.case import from_code, from_data, to_data

    assert from_code(repr(case)) == from_data(to_data(case)) == case


def test_simplest_case_has_the_first_value_of_each_option() -> None:
    import hypothesis

    options = {"bias": (True, False), "wraps": (True, False)}
    prop = program(block, replicated, SHAPES, batch="mean of parts", options=options)

    smallest = hypothesis.find(prop.cases(Space((2,), ("float32",))), lambda case: True)

    assert smallest.options == ("bias=True", "wraps=True")


def test_calling_check_of_a_property_within_a_rank_raises_misuse() -> None:
    with pytest.raises(Misuse, match=r"uses .check of a property at its top level: put that into a test"):
        InRank().check  # noqa: B018


def test_rank_that_imports_a_test_file_imports_no_oracle(tmp_path: Path) -> None:
    (tmp_path / "test_models.py").write_text(
        "import equivtest as eq\ndef block(): ...\ndef parallelized(module, mesh): ...\n"
        "test_block = eq.program(block, parallelized, inputs=[(1, 3)], training=eq.Training(steps=1))\n"
    )
    code = (
        "import sys; from equivtest.base.functions import be_rank, load_file; be_rank(); load_file('test_models.py'); "
        "print([name for name in sys.modules if 'oracle' in name])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_equivtest_exports_the_function_program() -> None:
    assert equivtest.program is program
